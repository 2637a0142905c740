"""Numbers on several pages agree, and code on a page prints the table beside it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table on a page whose first line begins so."""
    table = text[text.index(f"\n| {heading}") :].strip().split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def number(cell: str) -> float:
    """The first number of a cell."""
    return float(re.search(r"[\d,]+(\.\d+)?", cell)[0].replace(",", ""))


def test_an_update_of_the_trainers_table_is_its_tokens_at_its_pace():
    for cells in rows(page("slurm/TRAINER.md"), "random weights"):
        pace, tokens, milliseconds = map(number, cells[1:4])
        assert milliseconds == pytest.approx(1000 * tokens / pace, abs=0.6)


def test_an_update_beside_trl_is_its_tokens_at_its_pace():
    tokens = None
    for cells in rows(page("slurm/TRAINER.md"), "model, tokens of an update"):
        if "B, " in cells[0]:
            tokens = number(cells[0].split("B, ")[1])
        pace, milliseconds = map(number, cells[2:4])
        assert milliseconds == pytest.approx(1000 * tokens / pace, abs=0.8)


def test_the_page_on_costs_has_the_measured_rates_of_their_own_pages():
    """Tokens a second, and the memory that stands beside them in one row of another page."""
    rows_elsewhere = []
    for name in ("slurm/TRAINER.md", "patches/README.md", "kernel/RESULTS.md"):
        for line in page(name).splitlines():
            if line.startswith("|"):
                rows_elsewhere.append(set(re.findall(r"[\d,]*\d(?:\.\d+)?", line)))
    measured = rows(page("docs/cost.md"), "model | by |")
    assert len(measured) == 7
    for *_, pace, memory in measured:
        figures = {pace.split()[0], memory.split()[0]}
        assert any(figures <= row for row in rows_elsewhere), figures


def test_the_workspace_of_llama_3_8b_is_that_of_the_page():
    bytes_of_workspace = 4096 * 128_256 * 2  # tokens at a time, the vocabulary, bf16
    assert f"a workspace of {bytes_of_workspace:,} bytes" in page("docs/cost.md")
    assert f"The {bytes_of_workspace / 1e9:.2f} GB that `explain` prints" in page("docs/cost.md")


def test_the_loss_at_llama_3_8b_costs_what_the_kernels_page_says():
    """In the columns of one H200: milliseconds, and MB beyond inputs and gradients."""
    names = {
        "smoothce": "**ours**",
        "smoothce, `workspace=0`": "ours, `workspace=0`",
        'smoothce, `filter_eps="auto"`': "ours, filtered",
        "`torch.compile`": "torch.compile",
        "torch `F.cross_entropy`": "torch, F.cross_entropy",
    }
    of_kernels = {}
    for cells in rows(page("kernel/RESULTS.md"), "| Gemma 2 2B: V"):
        milliseconds, memory = cells[2].split(" (")[0], cells[2].split("), ")[-1]
        of_kernels[cells[0]] = [milliseconds, memory]
    checked = 0
    for name, _, milliseconds, memory in rows(page("docs/cost.md"), "Llama 3 8B's last layer"):
        if milliseconds != "not run":
            stated = [milliseconds.removesuffix(" ms"), memory.removesuffix(" MB")]
            assert stated == of_kernels[names[name]]
            checked += 1
    assert checked == len(names)


def test_the_estimate_of_table_1_is_what_its_code_prints():
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", page("docs/cost.md"), flags=re.DOTALL)
        if "GPU hours" in block
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    hours = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) GPU", printed.getvalue())]
    table = rows(page("docs/cost.md"), "| at the sweeps' trainer's speed")
    for column, expected in ((1, hours[:3]), (2, hours[3:])):
        stated = [int(number(cells[column])) for cells in table]
        assert stated == [*expected, sum(expected)]
    least, most = (int(number(cell)) for cell in table[-1][1:])
    for name in ("docs/cost.md", "reproduce.md"):
        assert f"{round(least, -2):,} to {round(most, -2):,} " in page(name)

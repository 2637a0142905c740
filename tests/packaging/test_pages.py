"""Numbers on several pages agree, and code on a page prints the table beside it."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

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


def python_block(name: str, marker: str) -> str:
    """The one block of Python on a page that has these characters."""
    blocks = re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)
    (block,) = (block for block in blocks if marker in block)
    return block


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


def costs_of_methods(heading: str) -> dict[str, list[str]]:
    """What kernel/RESULTS.md measured of each method: time, memory and the larger error."""
    text = page("kernel/RESULTS.md")
    table = rows(text[text.index(heading) :], "method | forward ms")
    costs = {}
    for cells in table:
        name = cells[0].strip("*").split(", β = 0")[0]
        errors = re.findall(r"[\d.]+e-\d+", cells[5])
        larger = max(errors, key=float, default="")
        costs[name] = [f"{cells[2].strip('*')} ms", f"{cells[4]} MB", larger]
    return costs


def test_the_readmes_costs_are_those_that_were_measured():
    names = {  # README's: without a softcap, and with one, in RESULTS.md
        "**smoothce**": ("ours", "ours"),
        "smoothce, `workspace=0`": ("ours, `workspace=0`", "ours, `workspace=0`"),
        'smoothce, `filter_eps="auto"`': ("ours, filtered", "ours, filtered"),
        "torch `F.cross_entropy`": ("torch", "torch, F.cross_entropy"),
        "`torch.compile` of it": ("torch.compile", "torch.compile"),
        "Unsloth 2026.10.9": ("Unsloth 2026.10.9", "Unsloth 2026.10.9"),
        "Liger 0.8.5": ("Liger 0.8.5", "Liger 0.8.5"),
        "TRL 1.16, chunked": ("TRL 1.16.0, chunked", "TRL, chunked 1.16.0"),
        "cut-cross-entropy 25.1.1": ("cut-cross-entropy 25.1.1", "cut-cross-entropy 25.1.1"),
    }
    plain = costs_of_methods("# Kernels, measured")
    capped = costs_of_methods("## Gemma 2 2B with its softcap of 30")
    stated = {cells[0]: cells[2:] for cells in rows(page("README.md"), "| smooths | time")}
    assert stated.keys() == names.keys()
    for name, (without_softcap, with_softcap) in names.items():
        cells = [cell.removesuffix(", biased") for cell in stated[name]]
        assert cells == plain[without_softcap] + capped[with_softcap], name


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


def test_the_loop_on_the_kernels_page_makes_dense_smoothings_gradient():
    """With padding and prompts, over micro-batches that hold unequal numbers of labels."""
    transformers = pytest.importorskip("transformers")
    loop = python_block("kernel/README.md", "decoder = model.model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=128, **sizes, **heads)
    )
    micro_batches = []
    for lengths in ((9, 5), (3, 7)):
        ids = torch.randint(3, 128, (2, 9))
        is_text = torch.arange(9) < torch.tensor(lengths)[:, None]
        is_answer = is_text & (torch.arange(9) >= 2)
        labels = ids.masked_fill(~is_answer, -100)
        batch = {"input_ids": ids, "attention_mask": is_text.long(), "labels": labels}
        micro_batches.append(batch)

    losses, tokens = [], 0
    for batch in micro_batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        losses.append(F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum"))
        tokens += int((labels >= 0).sum())
    parameters = dict(model.named_parameters())
    dense = torch.autograd.grad(sum(losses) / tokens, list(parameters.values()))

    made = {}

    class Optimizer:
        def step(self) -> None:
            made.update({name: each.grad.clone() for name, each in parameters.items()})

        def zero_grad(self) -> None:
            model.zero_grad()

    exec(loop, {"model": model, "micro_batches": micro_batches, "optimizer": Optimizer()})
    for name, expected in zip(parameters, dense, strict=True):
        torch.testing.assert_close(made[name], expected, rtol=1e-3, atol=1e-6)


@pytest.fixture
def chats(tmp_path):
    """A folder with a tiny model that has Qwen 2.5's chat template, and a file of chats."""
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    import tiny_world

    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    if not template.is_file():
        pytest.skip("this TRL brings no chat template of Qwen 2.5")
    tiny_world.main(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def local_script(folder: Path) -> str:
    """The page's script on the folder's model and chats, for two updates on CPUs."""
    script = python_block("kernel/README.md", "# train_chats.py")
    output = f'output_dir="{folder / "out"}", max_steps=2, use_cpu=True, report_to="none"'
    changes = {
        '"chats.jsonl"': f'"{folder / "train.jsonl"}"',
        '"Qwen/Qwen2.5-0.5B-Instruct"': f'"{folder / "model"}"',
        'output_dir="out"': output,
    }
    for printed, local in changes.items():
        assert script.count(printed) == 1
        script = script.replace(printed, local)
    return script


@pytest.mark.slow
def test_the_script_for_chats_learns_the_answers_alone_and_smooths(chats):
    names: dict = {}
    exec(compile(local_script(chats), "kernel/README.md", "exec"), names)
    trainer = names["trainer"]
    batch = next(iter(trainer.get_train_dataloader()))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text = trainer.processing_class.decode(ids)
        learned = trainer.processing_class.decode(ids[labels != -100])
        assert learned.strip() == text.split("<|im_start|>assistant\n")[1].split("\n")[0]
        assert learned.strip().endswith("<|im_end|>")
    assert (chats / "out" / "model.safetensors").is_file()

    model = trainer.model.train()
    smoothed = model(**batch).loss
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
    labels = batch["labels"][:, 1:].flatten()
    dense = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(dense.item(), rel=1e-3)


@pytest.mark.slow
def test_the_script_for_chats_trains_under_torchrun(chats):
    script = chats / "train_chats.py"
    script.write_text(local_script(chats))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (chats / "out" / "model.safetensors").is_file()

"""From an index to tables and diagrams."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from made_records import write_records

from calibeval import figures, plots, tables
from calibeval.__main__ import main
from calibeval.collect import collect
from calibeval.results import cache_path, result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base model and two β, two seeds each, with their metrics; tests work on copies."""
    folder, lines = tmp_path_factory.mktemp("runs"), []
    for beta, sharpness in ((None, 1.5), (0.0, 3.0), (0.1, 1.0)):
        for seed in (0,) if beta is None else (0, 1):
            name = f"r{beta}-{seed}.jsonl"
            write_records(folder / name, 500, sharpness, seed)
            line = {"records": name, "dataset": "toy", "model": "m_1", "label_smoothing": beta}
            line |= {"learning_rate": None if beta is None else 2e-5, "seed": seed}
            lines.append(json.dumps(line))
            result(folder / name)
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def index(runs, tmp_path):
    """The index of a copy of `runs`."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    return tmp_path / "index.jsonl"


def read_csv(path) -> list[dict]:
    """Rows of a CSV with a header."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_tables(index, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["collect", str(index), "--out", str(out)]) == 0
    text = (out / "table.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    head, _, *body = [line for line in text.splitlines() if line.startswith("|")]
    assert "| Acc ↑ | ECE ↓ | RMS ↓ |" in head and "learning_rate" not in head
    assert [line.split("|")[3].strip() for line in body] == ["base", "0", "0.1"]
    assert [line.split("|")[4].strip() for line in body] == ["1", "2", "2"]
    assert "**" in body[2].split("|")[6] and "**" not in body[1].split("|")[6]
    rows = read_csv(out / "table.csv")
    runs = [result(tmp_path / f"r0.1-{seed}.jsonl") for seed in (0, 1)]
    mean = np.mean([run["metrics"]["choices"]["ece"]["value"] for run in runs])
    assert float(rows[2]["ece_choices"]) == pytest.approx(mean)
    assert float(rows[0]["letter_mass"]) == pytest.approx(0.95)
    latex = (out / "table.tex").read_text()
    assert r"m\_1" in latex and latex.count(r"\mathbf") == sum(
        line.count("**") // 2 for line in body
    )
    assert latex.count(r"\\") == 4 and r"\begin{tabular}{lllrrrrrr}" in latex


def test_diagrams(index, tmp_path):
    out = tmp_path / "out"
    assert main(["collect", str(index), "--out", str(out)]) == 0
    for confidence in ("choices", "vocabulary"):
        stem = out / f"reliability_toy_m-1_{confidence}"
        svg = stem.with_name(stem.name + ".svg").read_text()
        tree.fromstring(svg)
        assert "β = 0.1" in svg and "base" in svg and "questions" in svg
        assert stem.with_name(stem.name + ".png").read_bytes()[:4] == b"\x89PNG"


def test_report_opens_without_a_network(index, tmp_path):
    out = tmp_path / "out"
    assert main(["collect", str(index), "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4 and page.count("<tr") == 4 and "<b>" in page
    outside = re.findall(r'(?:src|href|url)\s*[=(]\s*"?(?!#)([^"\s>]+)', page)
    assert not [link for link in outside if not link.startswith("#")], outside
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_figures_over_runs(tmp_path):
    lines = []
    for model, parameters in (("small", 1e9), ("large", 7e9)):
        for beta in (0.0, 0.1, 0.2):
            name = f"{model}-{beta}.jsonl"
            write_records(tmp_path / name, 300, 2 - 5 * beta, 3)
            line = {"records": name, "dataset": "toy", "model": model, "label_smoothing": beta}
            lines.append(line | {"parameters": parameters})
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = collect(tmp_path / "index.jsonl", tmp_path / "out")
    lines = figures.prepare_against_beta(rows, "choices")
    assert [(s.name, s.x.tolist()) for s in lines] == [
        ("large", [0, 0.1, 0.2]),
        ("small", [0, 0.1, 0.2]),
    ]
    ece = result(tmp_path / "large-0.1.jsonl")["metrics"]["choices"]["ece"]
    assert lines[0].y[1] == ece["value"]
    assert lines[0].half[1] == pytest.approx((ece["high"] - ece["low"]) / 2)
    sizes = figures.prepare_against_size(rows, "choices")
    assert [(s.name, s.x.tolist()) for s in sizes] == [
        (f"β = {b}", [1e9, 7e9]) for b in ("0", "0.1", "0.2")
    ]
    bars = figures.prepare_bars(rows, "accuracy")
    assert [s.x.tolist() for s in bars] == [[0, 1]] * 3
    for name in ("bars_toy", "ece_against_beta_toy", "ece_against_size_toy"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
        tree.fromstring((tmp_path / "out" / f"{name}.svg").read_text())


def test_dimensions(index, tmp_path):
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines:
        line["records"] = str(tmp_path / line["records"])
        if line["seed"] == 1:
            line["learning_rate"] = 1e-5
    extra = tmp_path / "extra.jsonl"
    write_records(extra, 500, 1.0, 9)
    lines.append(lines[1] | {"records": str(extra), "calibrator": "temperature"})
    other = tmp_path / "elsewhere" / "index.jsonl"
    other.parent.mkdir()
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["collect", str(other), "--out", str(tmp_path / "out")]) == 0
    rows = read_csv(tmp_path / "out" / "table.csv")
    found = [(r["label_smoothing"], r["learning_rate"], r["calibrator"]) for r in rows]
    assert found == [
        ("", "", ""),
        ("0.0", "1e-05", ""),
        ("0.0", "2e-05", ""),
        ("0.0", "2e-05", "temperature"),
        ("0.1", "1e-05", ""),
        ("0.1", "2e-05", ""),
    ]


def test_interval_over_seeds():
    runs = [{"value": v, "low": 0, "high": 0, "sd": 0.01} for v in (0.1, 0.2, 0.3)]
    cell = tables.aggregate(runs)
    assert cell.mean == pytest.approx(0.2)
    assert cell.half == pytest.approx(math.hypot(1.959964 * 0.01, 4.302653 * 0.1 / math.sqrt(3)))


def test_answers_that_are_all_right(tmp_path):
    """No pair of a right and a wrong answer: AUROC is undefined, and everything else is there."""
    row = {"subject": "s", "label": 0, "logprobs": [-0.1, -3.0], "letter_mass": 0.95, "model": "m"}
    rows = [json.dumps(row | {"id": str(i)}) for i in range(9)]
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    line = {"records": "r.jsonl", "dataset": "d", "model": "m", "label_smoothing": None}
    (tmp_path / "index.jsonl").write_text(json.dumps(line))
    assert main(["collect", str(tmp_path / "index.jsonl"), "--out", str(tmp_path / "out")]) == 0
    (found,) = read_csv(tmp_path / "out" / "table.csv")
    assert found["auroc_choices"] == "nan" and found["accuracy_choices"] == "1.0"
    assert main(["metrics", str(tmp_path / "r.jsonl")]) == 0
    assert main(["compare", *[str(tmp_path / "r.jsonl")] * 2]) == 0


def test_metrics_are_kept_and_forgotten_with_the_records(tmp_path):
    path = tmp_path / "r.jsonl"
    write_records(path, 200, 1.0, 0)
    first = result(path)
    kept = cache_path(path)
    stored = json.loads(kept.read_text())
    stored["result"]["letter_mass"] = 0.123
    kept.write_text(json.dumps(stored))
    assert result(path)["letter_mass"] == 0.123
    write_records(path, 200, 2.0, 0)
    assert result(path) != first and result(path)["letter_mass"] == pytest.approx(0.95)
    kept.write_text("{half")
    assert result(path)["letter_mass"] == pytest.approx(0.95)


def test_wilson():
    low, high = plots.wilson(np.array([0.5, 1.0]), np.array([100, 10]))
    assert low.tolist() == pytest.approx([0.40383, 0.72247], abs=1e-4)
    assert high.tolist() == pytest.approx([0.59617, 1.0], abs=1e-4)


def test_metrics_and_collect_need_no_model_library(index, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from calibeval.__main__ import main\n"
        f"assert main(['collect', {str(index)!r}, '--out', {str(tmp_path / 'o')!r}]) == 0\n"
        f"assert main(['metrics', '--json', {str(tmp_path / 'r0.0-0.jsonl')!r}]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["questions"] == 500
    assert set(found["metrics"]["choices"]) >= {"accuracy", "ece", "rms", "rms_hendrycks", "nll"}
    ece = found["metrics"]["choices"]["ece"]
    assert ece["low"] <= ece["high"] and ece["value"] > 0.05

"""A sweep that measures its models' entropy: scored with the tasks, collected beside them."""

import csv
import json
import shutil

import pytest

from sweeps import launch, questions, results, score, status
from sweeps.cli import main
from sweeps.rundir import RunDir

ASKED = {"limit": 6, "max_new_tokens": 5, "temperatures": [1, 0.8]}


@pytest.fixture
def made(sweep_file, tiny):
    """make(**entropy keys) → the plan of a sweep of one run."""

    def make(**keys):
        task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 0}
        entropy = {"data": str(tiny / "chat.jsonl")} | ASKED | keys
        asked = {"base": False, "tasks": [task], "entropy": entropy}
        top = {"train": {"max_train_steps": 1}, "keep": "scores", "score": asked}
        return launch.plan(sweep_file(grid={}, **top), [])

    return make


def test_entropy_is_a_task(made, capsys):
    planned = made()
    sweep, (cell,) = planned.sweep, planned.cells
    subject, run = score.of_cell(cell), RunDir(cell.folder)
    run.create(cell.config)
    assert main(["train", str(run.path)]) == 0
    score.run(subject, sweep.score.model_copy(update={"entropy": None}))
    score.discard(cell, sweep)
    assert [task.key for task in score.missing(subject, sweep.score)] == ["entropy"]
    assert run.model.exists()
    assert [found.scored for found in status.of_sweep(sweep, planned.cells)[0]] == ["1/2"]
    gaps = results.collect(sweep, planned.cells)
    assert [(gap.task, gap.reason) for gap in gaps] == [("entropy", "not scored")]
    tables = planned.folder / "results"
    assert not (tables / "entropy.md").exists()
    score.run(subject, sweep.score)
    score.discard(cell, sweep)
    assert not run.model.exists()
    assert results.collect(sweep, planned.cells) == []
    indexed = json.loads((planned.folder / "index.jsonl").read_text())
    assert (planned.folder / indexed["entropy"]).samefile(cell.folder / "scores" / "entropy.jsonl")
    seed = str(cell.config.train["seed"])
    rows = list(csv.DictReader((tables / "entropy.csv").read_text().splitlines()))
    assert [(row["seed"], row["temperature"]) for row in rows] == [(seed, "1.0"), (seed, "0.8")]
    heading, _, hot, *_ = (tables / "entropy.md").read_text().splitlines()
    cells = ([cell.strip() for cell in line.split("|")] for line in (heading, hot))
    seen = dict(zip(*cells, strict=True))
    assert seen["temperature"] == "1" and seen["seeds"] == "1"
    assert seen["log loss"] == f"{float(rows[0]['log loss']):.3f}"
    low, high = (float(rows[0][f"EntCE a token {end}"]) for end in ("low", "high"))
    assert seen["EntCE a token"].endswith(f"[{low:+.3f}, {high:+.3f}]")
    page = (planned.folder / "report.html").read_text()
    assert "Entropy calibration</h2><figure>" in page
    assert "mmlu" in (tables / "table.csv").read_text()
    # other temperatures are another request; another batch size is not
    assert not score.missing(subject, made(batch_size=3).sweep.score)
    assert score.missing(subject, made(temperatures=[0.7]).sweep.score)


def test_what_cannot_be_measured_is_named_before_training(made, tiny, tmp_path, capsys):
    assert questions.problem(made().sweep.score.entropy) is None
    bad = str(shutil.copy(tiny / "chat.jsonl", tmp_path / "bad.jsonl"))
    with open(bad, "a", encoding="utf-8") as file:
        file.write('{"prompt": "a question"}\n')
    assert "line 65: expected" in questions.problem(made(data=bad, skip=60).sweep.score.entropy)
    assert "no row behind" in questions.problem(made(skip=64).sweep.score.entropy)
    made(data=str(tmp_path / "absent.jsonl"))
    assert main(["preflight", str(tmp_path / "tiny.yaml")]) != 0
    assert "score.entropy: " in capsys.readouterr().err

"""The tables of a sweep's folder, and a learning rate that is chosen on validation."""

import csv
import math
import os
import subprocess
from pathlib import Path

import pytest
from real import command, launch

import calibeval.report
from calibeval import records
from sweeps import collect, score
from sweeps.plan import Plan, plan


def answer(cell, task, right: int, confidence: float = 0.7) -> None:
    """Records of ten questions, the first `right` of them answered rightly."""
    other, rows = math.log((1 - confidence) / 3), []
    for number in range(10):
        logprobs = [other] * 4
        logprobs[0 if number < right else 1] = math.log(confidence)
        rows.append({"id": f"q{number}", "subject": "s", "label": 0, "logprobs": logprobs,
                     "letter_mass": 1.0, "shots": 0, "model": "m"})  # fmt: skip
    settings = score.request(task, cell.config.score)
    records.write(score.records(cell.run, task), rows, {"settings": settings})


def scored(path: Path, right, *overrides: str, confidence=lambda values: 0.7) -> Plan:
    """A sweep of trained runs, of which each answers `right(values, task)` questions rightly."""
    planned = plan(path, list(overrides))
    planned.create()
    for cell in planned.cells:
        cell.run.model.mkdir(exist_ok=True)
        cell.run.metrics.write_text('{"step": 1, "steps": 1, "loss": 1.0}\n')
        for task in cell.config.score.tasks:
            if (count := right(cell.values, task.key)) is not None:
                answer(cell, task, count, confidence(cell.values))
    return planned


@pytest.fixture
def graded(toy_file, tmp_path):
    def make(**grid) -> Path:
        tasks = [{"task": "mmlu", "data": "x"}]
        tasks.append({"task": "mmlu", "name": "val", "data": "x", "split": "val"})
        grid = {"learning_rate": [1e-5, 1e-4, 1e-3], "label_smoothing": [0.0, 0.1]} | grid
        return toy_file(grid=grid, score={"tasks": tasks, "select_on": "val", "base": False})

    return make


def best(planned: Plan) -> list[dict]:
    return collect.best_learning_rates(planned, collect.found(planned))[0]


def read(path: Path) -> list[dict]:
    with open(path, newline="") as lines:
        return list(csv.DictReader(lines))


def test_validation_chooses_and_the_test_does_not(graded, monkeypatch):
    """On the test set the largest rate wins everywhere; on validation another one for each β."""
    val = {0.0: {1e-5: 5, 1e-4: 8, 1e-3: 2}, 0.1: {1e-5: 9, 1e-4: 8, 1e-3: 2}}
    test = {1e-5: 1, 1e-4: 2, 1e-3: 10}

    def right(values, task):
        rate = values["learning_rate"]
        return test[rate] if task == "mmlu" else val[values["label_smoothing"]][rate]

    planned = scored(graded(), right)
    rows = best(planned)
    found = [(row["label_smoothing"], row["best_learning_rate"]) for row in rows]
    assert found == [(0.0, 1e-4), (0.1, 1e-5)]
    assert [r["accuracy on val"] for r in rows] == [0.8, 0.9]
    assert all(r["of"] == 3 and r["seeds"] == 1 for r in rows)
    monkeypatch.setattr(calibeval.report.figures, "draw", lambda *_: [])  # most of the time
    assert collect.collect(planned) == []  # best.md has these two rows, and the test set alone
    lines = (planned.folder / "results" / "best.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert [row[1:3] for row in cells[2:]] == [["0", "0.0001"], ["0.1", "1e-05"]]
    assert "val" not in " ".join(cells[0])
    assert [row[4].strip("*")[:5] for row in cells[2:]] == ["0.200", "0.100"]


def test_seeds_are_averaged_and_ties_go_to_the_lower_nll(graded):
    """1e-5 has the best single seed; 1e-4 and 1e-3 tie in the mean; 1e-3 is less sure."""
    seeds = {1e-5: {1: 10, 2: 2}, 1e-4: {1: 7, 2: 7}, 1e-3: {1: 8, 2: 6}}
    planned = scored(
        graded(label_smoothing=[0.0], seed=[1, 2]),
        lambda values, task: seeds[values["learning_rate"]][values["seed"]],
        confidence=lambda values: 0.7 if values["learning_rate"] == 1e-3 else 0.9,
    )
    (row,) = best(planned)
    assert (row["best_learning_rate"], row["seeds"]) == (1e-3, 2)


def test_a_rate_is_chosen_for_each_adapter(sweep_file):
    score = {"tasks": [{"task": "mmlu", "data": "x"}], "select_on": "held_out_loss", "base": False}
    grid = {"lora": [{"r": 4}, {"r": 8}], "learning_rate": [1e-4, 1e-3]}
    planned = plan(sweep_file(grid=grid, train={"held_out": 5}, score=score), [])
    planned.create()
    for loss, cell in enumerate(planned.cells, 1):
        cell.run.model.mkdir()
        cell.run.metrics.write_text(f'{{"step": 1, "held_out_loss": {loss}}}\n')
    assert [row["held_out_loss"] for row in best(planned)] == [1, 3]


def test_every_run_of_the_folder_is_in_the_table_and_gaps_are_of_the_last_launch(graded, tmp_path):
    path = graded(learning_rate=[1e-4], label_smoothing=[0.0])
    done = command("collect", path)
    assert done.returncode == 1 and "nothing to collect: no run of" in done.stdout
    assert not (tmp_path / "out").exists()
    scored(path, lambda values, task: 5)
    without_val = {"mmlu": 6}.get
    planned = scored(path, lambda _, task: without_val(task), "grid.label_smoothing=[0.2]")
    (planned.folder / "broken-run").mkdir()
    (planned.folder / "broken-run" / "config.yaml").write_text("[]")
    done = command("collect", planned.folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("gap: ") == 1 and "val: not scored" in done.stdout
    assert "left out: " in done.stdout and "broken-run" in done.stdout
    rows = read(planned.folder / "results" / "table.csv")
    assert {row["label_smoothing"] for row in rows} == {"0.0", "0.2"}
    report = (planned.folder / "results" / "report.html").read_text()
    assert "val: not scored" in report and 'src="http' not in report
    # A folder that is moved is the same sweep, and what is of old does not pass for new.
    (planned.folder / "results" / "reliability_old.svg").write_text("old")
    moved = planned.folder.rename(tmp_path / "moved")
    assert command("collect", moved).returncode == 1
    assert not (moved / "results" / "reliability_old.svg").exists()
    assert read(moved / "results" / "table.csv") == rows


@pytest.fixture
def disk(tmp_path):
    """A disk of three megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_same_command_continues(sweep_file, disk):
    train = {"checkpointing_steps": 4, "keep_last_n_checkpoints": 9}
    path = sweep_file(grid={}, train=train)
    done = command("launch", path, "--executor", "local", f"output_root={disk}")
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2)  # 2 where the tables had no room either
    assert "Traceback" not in said and str(disk) in said
    assert "No space left" in said or "is full" in said, said
    subprocess.run(["mount", "-o", "remount,size=50M", disk], check=True)
    launch(path, "--executor", "local", f"output_root={disk}")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    said = launch(path, "--executor", "local", f"output_root={disk}", "grid.seed=[9]", code=2)
    assert "Read-only file system" in said and "Traceback" not in said

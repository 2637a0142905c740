"""The tables of a sweep's folder: which rate, which runs; figures are test_golden_records.py's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_tools import command, launch
from test_golden_records import GOLDEN, lay_out, read_csv

from calibeval.io import sha256
from sweeps.results import collect
from sweeps.results.selection import best_learning_rates
from sweeps.results.settings import settings
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

AXIS = GOLDEN / "axis.yaml"


def finish_training(run: Run, held_out_loss: float) -> None:
    """Leave what a finished training leaves."""
    run.create()
    run.note_beginning("train")
    run.model.mkdir()
    run.metrics.write_text(f'{{"step": 1, "held_out_loss": {held_out_loss}}}\n')


def test_a_rate_is_chosen_for_each_number_of_epochs_and_content_of_a_file(sweep_file, tmp_path):
    """Runs on a data file before and after it was edited are not averaged."""
    file = tmp_path / "chat.jsonl"
    path = sweep_file(
        grid={"learning_rate": [1e-4, 1e-3]},
        train={"held_out": 5, "train_file": str(file)},
        score={
            "tasks": [{"task": "mmlu", "data": "x"}],
            "select_on": "held_out_loss",
            "base": False,
        },
    )
    one_epoch = plan_sweep(path, ["train.num_train_epochs=1"])
    two_epochs = plan_sweep(path, ["train.num_train_epochs=2"])
    first, *others = [*one_epoch.runs, *two_epochs.runs]
    file.write_text("old")
    finish_training(first, held_out_loss=1)
    file.write_text("new")
    for loss, run in enumerate(others, 2):
        finish_training(run, held_out_loss=loss)
    choices = best_learning_rates("held_out_loss", collect.runs_in_folder(one_epoch))
    # 1 is of the old file, 2 of the new one; of the two rates at two epochs, 3 is the better.
    assert sorted(choice.figures["held_out_loss"] for choice in choices) == [1, 2, 3]


@pytest.fixture
def two_launches(tmp_path) -> SweepPlan:
    """The second of two launches into one folder, of which one task's records are missing.

    An earlier launch asked for no scores, and there is a folder whose config cannot be read.
    """
    lines = [json.loads(line) for line in (GOLDEN / "axis.jsonl").read_text().splitlines()]
    for reduction, lacking in (("mean", None), ("sum", "arc-dev")):
        overrides = [
            f"output_root={tmp_path}/out",
            f"grid.reduce_loss=[{reduction}]",
            "grid.learning_rate=[2.0e-5]",
        ]
        plan_sweep(AXIS, [*overrides, "score=null", "train.seed=7"]).create()
        plan = lay_out(AXIS, [line for line in lines if line["task"] != lacking], *overrides)
    (plan.folder / "broken-run").mkdir()
    (plan.folder / "broken-run" / "config.yaml").write_text("[]")
    return plan


def test_every_run_of_the_folder_is_in_the_table_and_gaps_are_of_the_last_launch(two_launches):
    done = command("collect", two_launches.folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("gap: ") == 1 and "arc-dev: not scored" in done.stdout
    assert "left out: " in done.stdout and "broken-run" in done.stdout
    assert "Also in this folder: " in command("status", two_launches.folder).stdout
    results = two_launches.folder / "results"
    assert {row["reduce_loss"] for row in read_csv(results / "table.csv")} == {"mean", "sum"}
    report = (results / "report.html").read_text()
    assert "arc-dev: not scored" in report and 'src="http' not in report


def test_a_folder_that_is_moved_is_the_same_sweep_and_old_results_go(two_launches, tmp_path):
    """They are made anew, also where nobody reads on what is printed."""
    command("collect", two_launches.folder)
    before = read_csv(two_launches.folder / "results" / "table.csv")
    (two_launches.folder / "results" / "reliability_old.svg").write_text("old")
    moved = two_launches.folder.rename(tmp_path / "moved")
    words = f"'{sys.executable}' -um sweeps collect '{moved}' | head -n 1"
    subprocess.run(["bash", "-c", words], check=True)
    assert not (moved / "results" / "reliability_old.svg").exists()
    assert before and read_csv(moved / "results" / "table.csv") == before


def test_a_sweep_that_asks_for_no_scores_shows_those_of_an_earlier_launch(two_launches):
    assert "report: " in command("collect", two_launches.folder, "score=null").stdout


def test_models_whose_folders_have_one_name_are_told_apart(monkeypatch):
    monkeypatch.setattr(collect.scoring, "gap", lambda run, task: None)
    first = plan_sweep(AXIS, ["train.model_name_or_path=a/m"])
    second = plan_sweep(AXIS, ["train.model_name_or_path=b/m"])
    rows = collect.entries(first, [*first.runs, *second.runs])
    assert {row["model"] for row in rows} == {"a/m", "b/m"}


@pytest.fixture
def disk(tmp_path):
    """A disk of three megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


def remount(disk: Path, options: str) -> None:
    """Change a mounted disk's size, or make it read-only."""
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_same_command_continues(sweep_file, disk):
    train = {"checkpointing_steps": 4, "keep_last_n_checkpoints": 9}
    path = sweep_file(grid={}, train=train)
    done = command("launch", path, "--executor", "local", f"output_root={disk}")
    printed = done.stdout + done.stderr
    assert done.returncode in (1, 2)  # 2 where the tables had no room either
    assert "Traceback" not in printed and str(disk) in printed
    assert "No space left" in printed or "is full" in printed, printed
    remount(disk, "size=50M")
    launch(path, "--executor", "local", f"output_root={disk}")
    remount(disk, "ro")
    printed = launch(path, "--executor", "local", f"output_root={disk}", "grid.seed=[9]", code=2)
    assert "Read-only file system" in printed and "Traceback" not in printed


def test_a_file_that_is_called_like_an_option_does_not_hide_it(sweep_file, tmp_path, monkeypatch):
    """A hash of its content stands among a run's settings, under its path."""
    monkeypatch.chdir(tmp_path)
    Path("seed").write_text("conversations")
    path = sweep_file(grid={}, train={"seed": 7, "train_file": "seed"})
    (run,) = plan_sweep(path, []).runs
    finish_training(run, held_out_loss=1)
    shown = settings(run)
    assert shown["seed"] == 7
    assert shown["file seed"] == sha256(Path("seed"))[:8]


@pytest.mark.parametrize("typed", ["./a/m", "a/m/", "a/m"])
def test_a_model_has_its_label_however_its_path_is_spelt(monkeypatch, typed):
    monkeypatch.setattr(collect.scoring, "gap", lambda run, task: None)
    plan = plan_sweep(
        AXIS, [f"train.model_name_or_path={typed}", f"model_labels={{{typed}: Mine}}"]
    )
    assert {row["model"] for row in collect.entries(plan, plan.runs)} == {"Mine"}


def test_runs_csv_has_all_runs_of_the_folder_as_the_tables_have(toy_file):
    path = toy_file(grid={"seed": [1, 2, 3]})
    for seed in (1, 2):
        (run,) = plan_sweep(path, [f"grid.seed=[{seed}]"]).runs
        finish_training(run, held_out_loss=1.0)
    plan = plan_sweep(path, ["grid.seed=[2]"])
    collect.collect(plan)
    rows = read_csv(plan.folder / "results" / "runs.csv")
    assert [row["seed"] for row in rows] == ["2", "1"]

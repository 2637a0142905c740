"""The tables of a sweep's folder: which rate, which runs; figures are test_golden_records.py's."""

import json
import os
import subprocess
import sys

import pytest
from real import command, launch
from test_golden_records import GOLDEN, lay_out, read_csv

from sweeps.results import collect
from sweeps.results.selection import best_learning_rates
from sweeps.runs.grid import plan_sweep


def test_a_rate_is_chosen_for_each_number_of_epochs_and_content_of_a_file(sweep_file, tmp_path):
    """Runs on a data file before and after it was edited are not averaged."""
    score = {"tasks": [{"task": "mmlu", "data": "x"}], "select_on": "held_out_loss", "base": False}
    train = {"held_out": 5, "train_file": str(file := tmp_path / "chat.jsonl")}
    path = sweep_file(grid={"learning_rate": [1e-4, 1e-3]}, train=train, score=score)
    one, two = (plan_sweep(path, [f"train.num_train_epochs={n}"]) for n in (1, 2))
    for loss, run in enumerate((*one.runs, *two.runs), 1):
        run.create()
        file.write_text("old" if loss == 1 else "new")
        run.began("train")
        run.model.mkdir()
        run.metrics.write_text(f'{{"step": 1, "held_out_loss": {loss}}}\n')
    choices = best_learning_rates("held_out_loss", collect.runs_in_folder(one))
    assert sorted(choice.figures["held_out_loss"] for choice in choices) == [1, 2, 3]


def test_every_run_of_the_folder_is_in_the_table_and_gaps_are_of_the_last_launch(tmp_path):
    out, path = f"output_root={tmp_path}/out", GOLDEN / "axis.yaml"
    done = command("collect", path, out)
    assert done.returncode == 1 and "nothing to collect: no run of" in done.stdout
    assert not (tmp_path / "out").exists()
    lines = [*map(json.loads, (GOLDEN / "axis.jsonl").read_text().splitlines())]
    for reduction, lacks in (("mean", None), ("sum", "arc-dev")):
        asked = [out, f"grid.reduce_loss=[{reduction}]", "grid.learning_rate=[2.0e-5]"]
        plan_sweep(path, [*asked, "score=null", "train.seed=7"]).create()  # asked nothing by then
        planned = lay_out(path, [line for line in lines if line["task"] != lacks], *asked)
    (planned.folder / "broken-run").mkdir()
    (planned.folder / "broken-run" / "config.yaml").write_text("[]")
    done = command("collect", planned.folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("gap: ") == 1 and "arc-dev: not scored" in done.stdout
    assert "left out: " in done.stdout and "broken-run" in done.stdout
    assert "Also in this folder: " in command("status", planned.folder).stdout
    rows = read_csv(planned.folder / "results" / "table.csv")
    assert {row["reduce_loss"] for row in rows} == {"mean", "sum"}
    report = (planned.folder / "results" / "report.html").read_text()
    assert "arc-dev: not scored" in report and 'src="http' not in report
    # A folder that is moved is the same sweep, and what is of old does not pass for new.
    (planned.folder / "results" / "reliability_old.svg").write_text("old")
    moved = planned.folder.rename(tmp_path / "moved")
    # Nor are they lost where nobody reads on.
    call = ["bash", "-c", f"'{sys.executable}' -um sweeps collect '{moved}' | head -n 1"]
    subprocess.run(call, check=True)
    assert not (moved / "results" / "reliability_old.svg").exists()
    assert read_csv(moved / "results" / "table.csv") == rows
    assert "report: " in command("collect", moved, "score=null").stdout


def test_models_whose_folders_have_one_name_are_told_apart(monkeypatch):
    monkeypatch.setattr(collect.scoring, "gap", lambda *_: None)
    plans = [plan_sweep(GOLDEN / "axis.yaml", [f"train.model_name_or_path={x}/m"]) for x in "ab"]
    made = collect.entries(plans[0], [run for planned in plans for run in planned.runs])
    assert {line["model"] for line in made} == {"a/m", "b/m"}


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

"""The scripts that users type, on a real one-machine Slurm."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
import yaml
from real import LONG, MARKS, PROJECT, SECRET, command, empty, equal, logs, runs_of, wait_for

from sweeps import launch
from sweeps.executors import slurm

pytestmark = MARKS


@pytest.mark.parametrize("script", ["sweep_beta.sh", "sweep_lr.sh"])
def test_sbatch_and_bash_give_the_same_result(cluster, profile, sweep_file, tiny, tmp_path, script):
    """The scripts' own sweeps, with their model, data and sizes made tiny by overrides."""
    overrides = [
        f"train.model_name_or_path={tiny / 'model'}",
        f"train.train_file={tiny / 'chat.jsonl'}",
        "train.max_train_steps=20",
        "train.per_device_train_batch_size=2",
        "train.gradient_accumulation_steps=2",
        "train.chat_template_name=null",
        "train.logging_steps=1",
        "train.gradient_checkpointing=false",
        "world.mixed_precision=no",
        *(
            ["grid.learning_rate=[1e-3, 1e-2]", "grid.label_smoothing=[0.1]"]
            if "lr" in script
            else ["train.learning_rate=1e-3", "grid.label_smoothing=[0.0, 0.1]"]
        ),
        f'score.tasks=[{{"task": "mmlu", "data": "{tiny / "mmlu"}", "shots": 2}}]',
        "score.select_on=null",
        f"cluster={profile}",
        "workers=2",
    ]
    tables = []
    for how in ("sbatch", "bash"):
        output = tmp_path / how
        if how == "sbatch":
            call = ["sbatch", "--wait", "--mem=500M", f"--output={tmp_path}/job.out"]
        else:
            call = ["bash"]
        done = subprocess.run(
            [*call, f"slurm/{script}", *overrides, f"output_root={output}",
             *(["--executor", "local"] if how == "bash" else [])],
            cwd=PROJECT, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
        wait_for(empty)
        name = script.removeprefix("sweep_").removesuffix(".sh")
        path = output / "sweeps" / name / "results" / "table.csv"
        assert path.exists(), logs(tmp_path)
        with open(path, newline="") as rows:
            tables.append(list(csv.DictReader(rows)))
    # Scores sum in another order where the number of threads differs: equal but for the last bits.
    for left, right in zip(*tables, strict=True):
        assert left.keys() == right.keys()
        assert all(same(left[key], right[key]) for key in left), (left, right)
    found = {(row["label_smoothing"], row["learning_rate"]) for row in tables[0]}
    assert len(found) == 3  # the base model is a row
    ours, theirs = (sorted((tmp_path / how / "runs").iterdir()) for how in ("sbatch", "bash"))
    assert [run.name for run in ours] == [run.name for run in theirs]
    assert all(equal(left, right) for left, right in zip(ours, theirs, strict=True))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), f"{path} holds the planted secret"


def same(left: str, right: str) -> bool:
    """Whether two cells of CSV files say the same."""
    try:
        return left == right or float(left) == pytest.approx(float(right), rel=1e-9)
    except ValueError:
        return False


def test_smoke_queues_waits_and_says(cluster, profile, sweep_file, tiny, tmp_path):
    tasks = [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 2}]
    path = sweep_file(score={"tasks": tasks}, cluster=profile)
    done = command("smoke", path, "--executor", "slurm")
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    assert "submitted: train-0=" in done.stdout and "smoke: passed; to go on: " in done.stdout
    assert done.stdout.count("\nok ") == 4 and not runs_of(path)[0].path.exists()
    keys = yaml.safe_load(Path(profile).read_text())
    Path(profile).write_text(yaml.safe_dump(keys | {"setup": ["module load no-such || exit 1"]}))
    done = command("smoke", path, "--executor", "slurm")
    assert done.returncode == 1 and "module: command not found" in done.stdout, done.stdout
    assert "FAILED  train model-" in done.stdout and "before training" in done.stdout


def test_a_preempted_element_requeues_itself_alone(cluster, profile, sweep_file, tmp_path):
    path = sweep_file(train=LONG, cluster=profile)
    assert command("launch", path, "--executor", "slurm").returncode == 0
    first, second = runs_of(path)
    with chaos.held(first):
        element = slurm.active(launch.plan(path, []).sweep)["train", first.name].job
        assert chaos.disturb("preempt by signal", element, first.name)
    wait_for(lambda: first.manifest()["state"] == "preempted")
    assert "nothing to submit" in command("launch", path, "--executor", "slurm").stdout
    wait_for(empty)
    assert first.done and second.done
    assert (first.manifest()["restarts"], second.manifest()["restarts"]) == (1, 0)
    attempts = first.manifest()["attempts"]
    assert attempts[1]["from_step"] == attempts[0]["to_step"] > 0
    assert [a["job"] for a in attempts] == [element, element]
    assert "nothing to submit" in command("launch", path, "--executor", "slurm").stdout
    calm = tmp_path / "calm"
    assert command("launch", path, "--executor", "local", f"output_root={calm}").returncode == 0
    assert equal(first.path, calm / "runs" / first.name)


def test_restarts_without_progress_end(cluster, profile, sweep_file):
    """Preempted before the first checkpoint, again and again: the element gives up."""
    path = sweep_file(
        grid={}, train=LONG | {"checkpointing_steps": None}, cluster=profile, max_idle_restarts=1
    )
    assert command("launch", path, "--executor", "slurm").returncode == 0
    run = runs_of(path)[0]
    for count in (1, 2):
        wait_for(lambda n=count: len(run.manifest()["attempts"]) == n)
        os.kill(chaos.trainer(run), signal.SIGKILL)
    wait_for(empty)
    assert not run.done
    assert "2 times in a row without a new checkpoint" in run.manifest()["error"]
    shown = command("status", path).stdout
    assert "1 failed" in shown and "without a new checkpoint" in shown
    again = command("retry", path, "--executor", "slurm")
    assert "again: " in again.stdout, again.stderr
    wait_for(empty)
    assert run.done


def test_cancel_saves_and_the_same_command_continues(cluster, profile, sweep_file):
    path = sweep_file(grid={}, train=LONG | {"checkpointing_steps": None}, cluster=profile)
    assert command("launch", path, "--executor", "slurm").returncode == 0
    run = runs_of(path)[0]
    wait_for(lambda: run.metrics.exists() and run.metrics.stat().st_size > 300)
    with chaos.held(run, step=0):
        assert "1 running" in command("status", path).stdout
        assert command("cancel", path).stdout.startswith("cancelled: ")
    wait_for(empty)
    assert not run.done and run.step() > 0
    shown = command("status", path).stdout
    assert "1 cancelled" in shown and "To go on: " in shown
    assert command("launch", path, "--executor", "slurm").returncode == 0
    wait_for(empty)
    assert run.done and run.manifest()["attempts"][1]["from_step"] > 0


def test_two_submissions_at_once_queue_every_run_once(cluster, profile, sweep_file):
    path = sweep_file(grid={"seed": [1, 2, 3]}, train={"max_train_steps": 2}, cluster=profile)
    call = [sys.executable, "-m", "sweeps", "launch", str(path), "--executor", "slurm"]
    started = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0] for process in started]
    assert sum("submitted: " in text for text in said) == 1
    assert sum("nothing to submit" in text for text in said) == 2
    wait_for(empty)
    assert [len(run.manifest()["attempts"]) for run in runs_of(path)] == [1, 1, 1]


def test_an_element_that_died_is_sent_off_again_by_the_collect_job(cluster, profile, sweep_file):
    """Its supervisor is killed with -9, so that nobody is left to requeue it."""
    path = sweep_file(grid={}, train=LONG, cluster=profile)
    assert command("launch", path, "--executor", "slurm").returncode == 0
    run = runs_of(path)[0]
    with chaos.held(run):
        assert chaos.disturb("kill -9 supervisor", "", run.name)
    wait_for(empty)
    assert run.done
    assert len(list(slurm.jobs_root(launch.plan(path, []).sweep).iterdir())) == 2


def test_chaos(cluster, tmp_path):
    """24 runs, 30 % of them disturbed: all arrive, with the undisturbed weights."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("chaos.py"), tmp_path],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24/24 with the undisturbed run's weights" in done.stdout

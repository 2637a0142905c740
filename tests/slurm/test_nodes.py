"""Runs on several nodes, on a real Slurm of two: both are this machine, and gloo joins them."""

import subprocess
from pathlib import Path
from typing import Any

import psutil
from sweep_tools import (
    MARKS,
    command,
    empty,
    equal,
    kill,
    launch,
    logs,
    programs,
    rows,
    runs_of,
    wait_for,
)

from sweeps.runs.run import Run

pytestmark = MARKS
TWO_NODES = {"nodes": 2, "processes_per_node": 1}
ON_ONE_NODE = ("world.nodes=1", "world.processes_per_node=2")
TRAIN: dict[str, Any] = {
    "learning_rate": 1e-3,
    "label_smoothing": 0.1,
    "attention_dropout": 0.1,
    "num_train_epochs": 60,
    "checkpointing_steps": 5,
}


def ranks_on(run: Run, node: int) -> list[int]:
    """The ids of the ranks of a run on one of its nodes."""
    pids = []
    for pid in programs(run):
        variables = psutil.Process(pid).environ()
        if "LOCAL_RANK" in variables and variables["SLURM_NODEID"] == str(node):
            pids.append(pid)
    return pids


def undisturbed(path: Path, folder: Path) -> Run:
    """The same run on one node, with as many ranks, and without Slurm."""
    overrides = (f"output_root={folder}", *ON_ONE_NODE)
    launch(path, "--executor", "local", *overrides)
    (run,) = runs_of(path, *overrides)
    return run


def submit(path: Path) -> str:
    """What a launch on Slurm prints."""
    return launch(path, "--executor", "slurm")


def test_ranks_on_two_nodes_train_as_two_on_one_whatever_happens(
    cluster, profile, sweep_file, tmp_path
):
    """A rank is killed, the job is cancelled and launched again, and put back by an administrator:
    nobody is left behind, and the weights are bit for bit those of one node."""
    path = sweep_file(grid={}, train=TRAIN, world=TWO_NODES, cluster=profile(memory_per_node="1G"))
    shown = launch(path, "--executor", "slurm", "--dry-run")
    assert "JOB0 trains 1 run: --nodes=2 --time=20:00 --cpus-per-task=1 --mem=1G" in shown, shown
    submit(path)
    (run,) = runs_of(path)
    wait_for(lambda: run.last_saved_step() >= 10)
    (victim,) = ranks_on(run, 1)
    kill([victim])
    killed = wait_for(lambda: rows(run, "ended"))[0]
    assert killed["exit"] == -9 and killed["killed"], logs(tmp_path)
    step = run.last_saved_step()

    wait_for(lambda: run.last_saved_step() > step)
    command("cancel", path)
    wait_for(empty)
    assert rows(run, "ended")[1]["stopped"], logs(tmp_path)
    assert not programs(run)
    assert "1 stopped" in command("status", path).stdout

    step = run.last_saved_step()
    submit(path)
    wait_for(lambda: run.last_saved_step() > step)
    job = rows(run, "began")[-1]["job"]
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_for(empty)
    assert run.done, logs(tmp_path)
    assert len(rows(run, "began")) == 4
    assert not programs(run)
    assert equal(run, undisturbed(path, tmp_path / "calm"))

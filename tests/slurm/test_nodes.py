"""Runs on several nodes, on a real Slurm of two: both are this machine, and gloo joins them."""

import contextlib
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep_tools import (
    CLUSTER,
    MARKS,
    PROJECT,
    command,
    empty,
    equal,
    kill,
    launch,
    logs,
    programs,
    rows,
    runs_of,
    toy_weights,
    wait_for,
)

from sweeps.runs.processes import MEETING_PORTS
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import describe_job

pytestmark = MARKS
TWO_NODES = {"nodes": 2, "processes_per_node": 1}
ON_ONE_NODE = ("world.nodes=1", "world.processes_per_node=2")
TRAIN: dict[str, Any] = {
    "learning_rate": 1e-3,
    "label_smoothing": 0.1,
    "attention_dropout": 0.1,
    "num_train_epochs": 8,
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


def undisturbed(path: Path, folder: Path, *overrides: str) -> Run:
    """The same run on one node, with as many ranks, and without Slurm."""
    overrides = (f"output_root={folder}", *ON_ONE_NODE, *overrides)
    launch(path, "--executor", "local", *overrides)
    (run,) = runs_of(path, *overrides)
    return run


def submit(path: Path) -> str:
    """What a launch on Slurm prints."""
    return launch(path, "--executor", "slurm")


def submit_until_it_goes_on(path: Path, run: Run) -> None:
    """Launch a run again, and wait until it has saved a further step."""
    step = run.last_saved_step()
    submit(path)
    wait_for(lambda: run.last_saved_step() > step)


def element_below(folder: Path) -> psutil.Process:
    """The process of the element whose files are below a folder."""
    (element,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "submitit.core._submit" in (words := process.info["cmdline"] or [])
        and any(word.startswith(str(folder)) for word in words)  # not of a Slurm beside this one
    ]
    return element


@pytest.fixture
def taken_ports() -> Iterator[None]:
    """Other programs listen at the ports at which the first jobs of a Slurm would meet."""
    with contextlib.ExitStack() as stack:
        for port in MEETING_PORTS[:100]:
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # another program listens there indeed
                listener.bind(("", port))
                listener.listen()
        yield


@pytest.mark.usefixtures("taken_ports")
def test_two_nodes_train_as_one_with_two_processes_whatever_happens(
    cluster, profile, toy_file, tmp_path
):
    """A rank is killed, the job is cancelled, its element is killed, and it is warned of its time
    limit: nobody is left behind on either node, and the weights are those of one."""
    train = {"steps": 400, "pace": 0.1}
    path = toy_file(grid={}, train=train, world=TWO_NODES, cluster=profile(memory_per_node="1G"))
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

    submit_until_it_goes_on(path, run)
    assert len(ranks_on(run, 0)) == len(ranks_on(run, 1)) == 1
    element_below(tmp_path).kill()
    wait_for(empty)
    assert not programs(run)
    shown = command("status", path).stdout
    assert "1 dead" in shown and re.search(r"\d+_0 FAILED, exit .*, step \d+/400", shown), shown

    submit_until_it_goes_on(path, run)
    job = rows(run, "began")[-1]["job"]
    subprocess.run(["scancel", "--signal=USR2", "--batch", job], check=True)
    wait_for(empty)
    assert run.done, logs(tmp_path)
    jobs = [row["job"] for row in rows(run, "began")]
    assert jobs[0] == jobs[1] != jobs[2] != jobs[3] == jobs[4] == job
    assert not programs(run)
    assert equal(run, undisturbed(path, tmp_path / "calm", "train.pace=0"))


def test_a_command_that_is_warned_saves_and_goes_on(cluster, profile, command_file, hold, tmp_path):
    passed = ["PYTHONPATH", "TOY_HOLD"]
    keys = profile(memory_per_node="1G", pass_environment=passed)
    path = command_file(world=TWO_NODES, cluster=keys)
    submit(path)
    (run,) = runs_of(path)
    log = run.path / "train.log"
    wait_for(lambda: log.exists() and log.read_text().count("2 processes") == 2)
    job = rows(run, "began")[0]["job"]
    subprocess.run(["scancel", "--signal=USR2", "--batch", job], check=True)  # as Slurm signals it
    wait_for(lambda: len(rows(run, "began")) == 2)
    assert rows(run, "ended")[0]["stopped"] and run.last_saved_step() > 0, logs(tmp_path)
    hold.unlink()
    wait_for(empty)
    assert run.done, logs(tmp_path)
    assert (run.model / "state").read_text() == toy_weights(0.1, 1)


def sharding(how: str, folder: Path) -> dict[str, str]:
    """The file of `world:` that shards a run, which DeepSpeed's must also do without a GPU."""
    if how == "fsdp2":
        return {"fsdp": str(PROJECT / "configs" / "fsdp" / "fsdp2.json")}
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    file = folder / "zero.json"
    file.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 1.0}))
    return {"deepspeed": str(file)}


@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_a_second_node_without_its_slurmd_is_left_and_a_sharded_run_goes_on(
    cluster, impatient, profile, sweep_file, tmp_path, monkeypatch, how
):
    """Slurm gives the node up and requeues the job, while nothing there hears of it. The first
    node, where the element is, is lost in test_slurm.py."""
    monkeypatch.setenv("DS_BUILD_OPS", "0")
    variables = ["OMP_NUM_THREADS", "PYTHONPATH", "DS_BUILD_OPS"]
    path = sweep_file(
        grid={},
        train=TRAIN,
        world={**TWO_NODES, **sharding(how, tmp_path)},
        backend="toy.sharding_backend",
        cluster=profile(memory_per_node="2G", pass_environment=variables),
    )
    submit(path)
    (run,) = runs_of(path)
    wait_for(lambda: run.last_saved_step() >= 5)
    ranks = [*ranks_on(run, 0), *ranks_on(run, 1)]
    kill(ranks, signal.SIGSTOP)  # a step that takes until the node is given up
    subprocess.run([CLUSTER, "kill-slurmd", cluster, "n2"], check=True)
    (began,) = rows(run, "began")
    wait_for(lambda: describe_job(began["job"]).get("JobState") != "RUNNING", pause=0.5)
    kill(ranks, signal.SIGCONT)
    (ended,) = wait_for(lambda: rows(run, "ended"))
    assert ended["exit"] == 75 and ended["stopped"], logs(tmp_path)
    step = run.last_saved_step()
    wait_for(lambda: not programs(run), seconds=30)  # though nobody reaches that node
    down = "n2 down* (Not responding)"
    wait_for(lambda: down in command("status", path).stdout)
    shown = command("status", path).stdout
    assert "1 queued" in shown and "1 job cannot start now" in shown, shown
    assert "Once they are back, Slurm starts it" in shown
    subprocess.run([CLUSTER, "start-slurmd", cluster], check=True)
    wait_for(empty)
    assert run.done, logs(tmp_path)
    second = rows(run, "began")[-1]
    assert second["job"] == began["job"] and second["progress"][0] == step
    printed = (run.path / "train.log").read_text()
    assert printed.count("data: 64 conversations") == 2  # not once on each node
    assert printed.count("resumed: step ") == 1
    assert equal(run, undisturbed(path, tmp_path / "calm"))

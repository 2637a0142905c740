"""Queues that are full, narrow or busy, and jobs that cannot start, on a real Slurm."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_tools import CLUSTER, MARKS, command, empty, launch, logs, rows, runs_of, wait_for

pytestmark = MARKS


def submit(path: Path, *overrides: str, code: int = 0) -> str:
    """What a launch on Slurm prints."""
    return launch(path, "--executor", "slurm", *overrides, code=code)


def status(path: Path) -> str:
    """What `status` prints."""
    return command("status", path).stdout


@pytest.fixture(scope="module")
def narrow_slurm(tmp_path_factory) -> Iterator[Path]:
    """The folder of a private Slurm with arrays of four elements and a queue of twelve jobs."""
    folder = tmp_path_factory.mktemp("narrow")
    options = ("nodes=2", "array=4", "jobs=12", "age=2")
    subprocess.run([CLUSTER, "start", folder, *options], check=True)
    yield folder
    subprocess.run([CLUSTER, "stop", folder], check=True)


@pytest.fixture
def narrow(narrow_slurm, monkeypatch) -> None:
    """Commands of the test ask the narrow Slurm."""
    monkeypatch.setenv("SLURM_CONF", str(narrow_slurm / "slurm.conf"))


def test_more_runs_than_an_array_may_have_are_split(narrow, profile, toy_file, tmp_path, hold):
    """And a throttle of the sweep holds for all of them: the arrays wait for each other."""
    seeds = list(range(1, 10))
    path = toy_file(
        grid={"seed": seeds},
        train={"steps": 12},
        throttle=3,
        cluster=profile(
            memory_per_node="200M", pass_environment=["OMP_NUM_THREADS", "PYTHONPATH", "TOY_HOLD"]
        ),
    )
    printed = submit(path)
    assert re.findall(r"trains (\d) run", printed) == ["4", "4", "1"], printed
    assert "9 queued or running, nothing to add" in submit(path)
    hold.unlink()
    wait_for(empty)
    runs = runs_of(path)
    assert all(run.done and len(rows(run, "began")) == 1 for run in runs), logs(tmp_path)
    ends_of_first = [rows(run, "ended")[-1]["ended"] for run in runs[:4]]
    starts_of_second = [rows(run, "began")[0]["began"] for run in runs[4:8]]
    assert max(ends_of_first) <= min(starts_of_second)
    assert (runs[0].path.parent / "results" / "report.html").exists()


def test_a_full_queue_is_told_and_a_launch_that_waits_for_it_can_be_stopped(
    narrow, profile, toy_file, tmp_path
):
    path = toy_file(grid={"seed": [1, 2]}, train={"steps": 3}, cluster=profile())
    others = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    for indices in ("0-3", "0-3", "0-2"):
        subprocess.run([*others, f"--array={indices}"], check=True, capture_output=True)
    words = [sys.executable, "-m", "sweeps", "launch", str(path), "--executor", "slurm"]
    waiting = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    printed = ""
    while "is safe" not in printed:
        line = waiting.stderr.readline()
        assert line, printed
        printed += line
    assert "temporarily unable to accept job" in printed, printed
    assert "Slurm's queue may be full" in printed, printed
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(60) == 130
    shown = status(path)
    assert "2 runs: 2 to do" in shown and "not queued" in shown, shown
    subprocess.run(["scancel", "--user=root"], check=True)
    printed = submit(path)  # may wait until Slurm has forgotten the others
    assert "trains 2 runs" in printed, printed
    wait_for(empty)
    assert all(run.done for run in runs_of(path)), logs(tmp_path)


def test_a_job_that_cannot_start_is_told_and_a_mended_profile_is_not_ignored(
    cluster, profile, toy_file, tmp_path
):
    path = toy_file(grid={"seed": [1, 2]}, train={"steps": 3}, cluster=profile(cpus_per_process=64))
    submit(path)
    wait_for(lambda: "PartitionConfig" in status(path))
    shown = status(path)
    assert "2 jobs will not start (PartitionConfig): no node" in shown, shown
    assert "cpus_per_process" in shown
    assert f"python -m sweeps cancel {path.parent / 'out' / 'toy'}" in shown
    profile()
    printed = submit(path)
    assert "2 runs are queued with another profile" in printed, printed
    assert "(cpus_per_process: 64, now 1)" in printed
    assert "python -m sweeps cancel" in printed
    command("cancel", path)
    assert "trains 2 runs" in submit(path)
    wait_for(empty)
    assert all(run.done for run in runs_of(path)), logs(tmp_path)


def test_a_launch_right_after_a_cancel_waits_for_runs_that_save(
    cluster, profile, toy_file, tmp_path
):
    keys = {"steps": 60, "pace": 0.1, "save_every": None, "saving": 10.0}
    path = toy_file(grid={"seed": [1, 2]}, train=keys, cluster=profile())
    submit(path)
    runs = runs_of(path)
    wait_for(lambda: all(run.metrics.exists() for run in runs))
    command("cancel", path)
    printed = submit(path)
    assert "waiting for 2 runs to stop" in printed and "trains 2 runs" in printed, printed
    wait_for(empty)
    assert all(run.done for run in runs), logs(tmp_path)
    assert all(rows(run, "began")[1]["progress"][0] > 0 for run in runs)

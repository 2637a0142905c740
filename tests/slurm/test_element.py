"""What an element of a job array does when Slurm asks it to go, with a stand-in for scontrol."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sweep_tools import prepare, rows, runs_of, wait_for

from sweeps.launch import worker
from sweeps.launch.element import Element, take_over
from sweeps.launch.submitit_adapter import copy_pickle_lines, element_command, write_pickle
from sweeps.runs.files import is_locked, locked
from sweeps.runs.grid import plan_sweep
from sweeps.runs.stages import Outcome


@pytest.fixture
def element(toy_file, hold, tmp_path):
    """An element at work on a run of the toy trainer: its process, and a file of scontrol's calls.

    The controller says of its job what stands in the file `job` beside that, and refuses the first
    request to requeue.
    """
    path = toy_file(grid={}, train={"save_every": None})
    plan = plan_sweep(path, [])
    plan.create()
    place = plan.folder / "jobs" / "tag"
    place.mkdir(parents=True)
    (place / "names").write_text(f"{plan.runs[0].name}\n")
    write_pickle(Element(("train",)), place)
    calls = tmp_path / "calls"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        "#!/bin/sh\n"
        f"echo $@ >> '{calls}'\n"
        f"case $1 in show) cat '{tmp_path / 'job'}'; exit;; esac\n"
        f"[ $(grep -c requeue '{calls}') != 1 ]\n"
    )
    scontrol.chmod(0o755)
    (tmp_path / "job").write_text("JobState=RUNNING Reason=None Restarts=0\n")
    script = [
        *copy_pickle_lines(place, is_array=True),
        "exec " + element_command(sys.executable, place),
    ]
    variables = {
        **os.environ,
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    process = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    (run,) = runs_of(path)
    wait_for(run.metrics.exists)
    yield process, calls
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_warned_element_saves_and_requeues_itself(element, number):
    """Whether it is preempted or at its limit it cannot know, and does not say."""
    process, calls = element
    process.send_signal(number)
    printed, _ = process.communicate(timeout=120)
    asked = [line for line in Path(calls).read_text().splitlines() if "requeue" in line]
    assert asked == ["requeue 7_0", "requeue 7_0"]  # until the controller takes it
    assert re.search(r"saved at step \d+; Slurm starts it again", printed), printed
    assert "timed-out" not in printed and "Traceback" not in printed


@pytest.mark.parametrize("known", ["JobState=PENDING Restarts=0", "JobState=RUNNING Restarts=1"])
def test_an_element_that_slurm_has_requeued_by_itself_does_not_requeue(element, tmp_path, known):
    """As Slurm does once its node does not answer; the job may run elsewhere already."""
    process, calls = element
    (tmp_path / "job").write_text(f"{known}\n")
    process.send_signal(signal.SIGUSR2)
    printed, _ = process.communicate(timeout=120)
    assert "requeue" not in Path(calls).read_text()
    assert re.search(r"saved at step \d+; Slurm has requeued this job by itself", printed), printed


def test_an_element_whose_job_is_cancelled_does_not_say_that_it_was_requeued(element, tmp_path):
    process, calls = element
    (tmp_path / "job").write_text("JobState=CANCELLED Restarts=0\n")
    process.send_signal(signal.SIGUSR2)
    printed, _ = process.communicate(timeout=120)
    assert "requeue" not in Path(calls).read_text() and "has requeued" not in printed
    assert re.search(r"saved at step \d+; this job was cancelled", printed), printed


def test_an_element_whose_node_is_given_up_saves_and_leaves(element, tmp_path):
    process, _ = element
    (tmp_path / "job").write_text("JobState=PENDING Restarts=0\n")
    (tag,) = tmp_path.rglob("jobs/tag")
    with open(tag / "7_0_0_log.out", "a") as log:
        log.write("srun: error: Node failure on n1\n")
    printed, _ = process.communicate(timeout=120)
    assert re.search(r"saved at step \d+; Slurm has requeued this job by itself", printed), printed
    assert process.returncode == 75


def test_a_job_that_is_started_again_takes_its_run_over_from_the_earlier_start(
    toy_file, hold, tmp_path, monkeypatch, capsys
):
    """Which Slurm has given up, and which lives on: it saves and leaves, and notes that."""
    run = prepare(toy_file(grid={}, train={"save_every": None}))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with ThreadPoolExecutor() as threads:
        earlier = threads.submit(worker.work, run, lambda: False, ("train",))
        wait_for(run.metrics.exists)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        take_over(run, lambda: False)
        assert not is_locked(run.lock_file) and run.last_saved_step() > 0
        assert earlier.result(timeout=60) is Outcome.STOPPED
    assert rows(run, "ended")[0]["stopped"]
    assert "still runs on" in capsys.readouterr().out
    hold.unlink()
    assert worker.work(run, lambda: False, ("train",)) is Outcome.FINISHED_STAGES


def test_an_earlier_start_stays_asked_to_stop_where_the_new_one_has_to_go(toy_file, monkeypatch):
    """Its trainer may look for the file only after this start has been told to leave."""
    run = prepare(toy_file(grid={}))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run.note_beginning("train")
    with locked(run.lock_file, 1, "busy"):
        take_over(run, lambda: True)
        assert worker.work(run, lambda: True, ("train",)) is Outcome.STOPPED
        assert run.stop_file.exists()


def test_a_stop_file_is_left_to_who_holds_the_run_and_deleted_once_nobody_does(toy_file):
    run = prepare(toy_file(grid={}))
    run.stop_file.touch()
    log = run.path / "train.log"
    with ThreadPoolExecutor() as threads:
        with locked(run.lock_file, 1, "busy"):
            waiting = threads.submit(worker.work, run, lambda: False, ("train",))
            # It is not told to go by a file that is the other's, and waits for its turn.
            wait_for(lambda: log.exists() and "waiting: " in log.read_text(), 60)
            assert run.stop_file.exists()
        assert waiting.result(timeout=60) is Outcome.STOPPED  # its trainer finds the file
    assert worker.work(run, lambda: False, ("train",)) is Outcome.FINISHED_STAGES
    assert not run.stop_file.exists()

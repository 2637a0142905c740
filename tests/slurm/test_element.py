"""What an element of a job array does when Slurm asks it to go, with a stand-in for scontrol."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_tools import runs_of, wait_for

from sweeps.launch.element import Element
from sweeps.launch.submitit_adapter import copy_pickle_lines, element_command, write_pickle
from sweeps.runs.grid import plan_sweep


@pytest.fixture
def element(toy_file, hold, tmp_path):
    """An element at work on a run of the toy trainer: its process, and a file of scontrol's calls.

    The controller refuses the first request to requeue.
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
        "case $1 in show) echo JobState=RUNNING Reason=None; exit;; esac\n"
        f"[ $(grep -c requeue '{calls}') != 1 ]\n"
    )
    scontrol.chmod(0o755)
    script = [*copy_pickle_lines(place), "exec " + element_command(sys.executable, place)]
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

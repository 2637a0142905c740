"""A real time limit that expires: Slurm's shortest is one minute."""

import ctypes
import itertools
import os
import signal
import time
from pathlib import Path

import chaos
import yaml
from real import LONG, MARKS, command, empty, equal, logs, runs_of, wait_for

from sweeps import launch
from sweeps.executors import slurm

pytestmark = MARKS
ATTACH, DETACH = 16, 17  # ptrace(2)


def trace(request: int, pid: int) -> None:
    """Hold a process, or let it go: unlike SIGSTOP's, no SIGCONT of Slurm's ends this stop."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    if ptrace(request, pid, None, None):
        raise OSError(ctypes.get_errno(), f"ptrace({request}, {pid})")
    if request == ATTACH:
        os.waitpid(pid, 0)


def test_at_the_limit_an_element_saves_and_goes_on_alone(cluster, profile, sweep_file, tmp_path):
    """Two trainers stop; Slurm's warning wakes one, the other is held until the limit's own TERM.

    Both save, requeue their element and end with an undisturbed run's weights. A third element,
    done before the warning, is left alone.
    """
    limited = yaml.safe_load(Path(profile).read_text()) | {"time": "1", "signal_seconds": 25}
    Path(profile).write_text(yaml.safe_dump(limited))
    path = sweep_file(grid={"max_train_steps": [400, 399, 30]}, train=LONG, cluster=profile)
    launched = command("launch", path, "--executor", "slurm")
    assert launched.returncode == 0, launched.stderr
    warned, late, short = runs_of(path)
    stop = {warned.name: lambda pid: os.kill(pid, signal.SIGSTOP)}
    stop[late.name] = lambda pid: trace(ATTACH, pid)
    trainers = {}
    while len(trainers) < 2:  # whichever comes first: each would be done in some seconds
        for run in (warned, late):
            if run.name not in trainers and run.step() >= 20:
                trainers[run.name] = chaos.trainer(run)
                stop[run.name](trainers[run.name])
        time.sleep(0.1)
    busy = slurm.active(launch.plan(path, []).sweep)
    (submission,) = (launch.plan(path, []).folder / "jobs").iterdir()
    output = submission / f"{busy['train', late.name].job}_0_log.out"
    wait_for(lambda: "DUE TO TIME LIMIT" in output.read_text(), 120)
    trace(DETACH, trainers[late.name])
    wait_for(empty)

    assert "DUE TO TIME LIMIT" in output.read_text(), logs(tmp_path)
    for run in (warned, late):
        assert run.done, logs(tmp_path)
        attempts = run.manifest()["attempts"]
        assert len(attempts) > 1
        assert {a["job"] for a in attempts} == {busy["train", run.name].job}
        for before, after in itertools.pairwise(attempts):
            assert after["from_step"] == before["to_step"] >= 20
    assert short.done and len(short.manifest()["attempts"]) == 1
    assert len(list(slurm.jobs_root(launch.plan(path, []).sweep).iterdir())) == 1

    calm = tmp_path / "calm"
    assert command("launch", path, "--executor", "local", f"output_root={calm}").returncode == 0
    for run in (warned, late):
        assert equal(run.path, calm / "runs" / run.name)

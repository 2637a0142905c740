"""A real time limit that expires: Slurm's shortest is one minute."""

import contextlib
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


def test_at_the_limit_an_element_saves_and_goes_on_alone(cluster, profile, sweep_file, tmp_path):
    """Two trainers freeze; one wakes at the warning, the other only at the limit's own TERM.

    Both save, requeue their element and end with an undisturbed run's weights. A third element,
    done before the warning, is left alone.
    """
    limited = yaml.safe_load(Path(profile).read_text()) | {"time": "1", "signal_seconds": 25}
    Path(profile).write_text(yaml.safe_dump(limited))
    path = sweep_file(grid={"max_train_steps": [400, 399, 30]}, train=LONG, cluster=profile)
    launched = command("launch", path, "--executor", "slurm")
    assert launched.returncode == 0, launched.stderr
    warned, late, short = runs_of(path)
    frozen = {}
    for run in (warned, late):
        wait_for(lambda r=run: r.step() >= 20)
        frozen[run.name] = chaos.trainer(run)
        os.kill(frozen[run.name], signal.SIGSTOP)
    busy = slurm.active(launch.plan(path, []).sweep)
    (submission,) = (launch.plan(path, []).folder / "jobs").iterdir()
    output = submission / f"{busy['train', late.name].job}_0_log.out"
    wait_for(warned.stop.exists)  # Slurm's own warning came, and woke both
    end = time.monotonic() + 120
    while "DUE TO TIME LIMIT" not in output.read_text() and time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen[late.name], signal.SIGSTOP)
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(frozen[late.name], signal.SIGCONT)
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

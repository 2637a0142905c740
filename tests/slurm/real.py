"""What tests of whole sweeps share, on a real Slurm and without."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sweeps import launch
from sweeps.executors import slurm
from sweeps.files import SweepError
from sweeps.rundir import RunDir

PROJECT = Path(__file__).resolve().parents[2]
CLUSTER = Path(__file__).with_name("cluster.sh")
MARKS = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="starting slurmd needs root"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))),
        reason="needs: apt-get install slurm-wlm munge",
    ),
]
SECRET = "hf_planted5ecret0000"
LONG = {"num_train_epochs": 60, "checkpointing_steps": 20, "attention_dropout": 0.1}


def command(*arguments: object, prefix: tuple = (), **options) -> subprocess.CompletedProcess:
    """`python -m sweeps …`."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "sweeps", *map(str, arguments)],
        text=True,
        capture_output=True,
        check=False,
        **options,
    )


def wait_for(condition, seconds: float = 900, pause: float = 0.3) -> None:
    """Until `condition()` is true; the bound is for a machine that others keep busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(pause)


def empty() -> bool:
    """Whether the queue is; a controller that does not answer this time has not said so."""
    with contextlib.suppress(SweepError):
        return not slurm.queue()
    return False


def equal(left: Path, right: Path) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    a, b = (load_file(run / "model" / "model.safetensors") for run in (left, right))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def prepare(path: Path, *overrides: str) -> RunDir:
    """The run folder of a sweep's first run, made but not started."""
    cell = launch.plan(path, list(overrides)).cells[0]
    run = RunDir(cell.folder)
    run.create(cell.config)
    return run


def runs_of(path: Path) -> list[RunDir]:
    """The runs of a sweep file."""
    return [RunDir(cell.folder) for cell in launch.plan(path, []).cells]


def logs(folder: Path) -> str:
    """The ends of all logs below a folder."""
    found = [p for pattern in ("*.out", "train*.log", "score.log") for p in folder.rglob(pattern)]
    return "\n".join(f"{p}: {p.read_text(errors='replace')[-1500:]}" for p in found)

"""What tests of whole sweeps share, on a real Slurm and without."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from calibeval.io import InputError
from sweeps.runs.grid import plan_sweep
from sweeps.runs.processes import run_checked, run_or_empty
from sweeps.runs.run import Run

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


def command(*arguments: object, prefix: tuple = (), **options) -> subprocess.CompletedProcess:
    """`python -m sweeps …`."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "sweeps", *map(str, arguments)],
        text=True, capture_output=True, check=False, **options,
    )  # fmt: skip


def launch(*arguments: object, code: int = 0, **options) -> str:
    """What a launch says; it must end with this exit code."""
    done = command("launch", *arguments, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for(condition, seconds: float = 400, pause: float = 0.1):
    """Until `condition()` is true, which it returns; the bound is for a machine that is busy."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"timed out\n{state()}"
        time.sleep(pause)
    return found


def state() -> str:
    """What the controller says of its nodes and jobs, and the ends of its daemons' logs."""
    folder = Path(os.environ.get("SLURM_CONF", "none")).parent
    asked = (["sinfo", "-N", "-o", "%N %T %E"], ["squeue", "-o", "%i %j %T %r %M"])
    said = [run_or_empty(*words) or f"{words[0]}: no answer" for words in asked]
    return "\n".join(said + [f"{p}:\n{p.read_text()[-3000:]}" for p in folder.glob("slurm*.log")])


def empty() -> bool:
    """Whether the queue is; a controller that does not answer this time has not said so."""
    with contextlib.suppress(InputError):
        return not run_checked("squeue", "--noheader")
    return False


def runs_of(path: Path, *overrides: str) -> list[Run]:
    """The runs of a sweep file."""
    return plan_sweep(path, list(overrides)).runs


def prepare(path: Path, *overrides: str) -> Run:
    """The run folder of a sweep's first run, made but not started."""
    planned = plan_sweep(path, list(overrides))
    planned.create()
    return planned.runs[0]


def rows(run: Run, what: str) -> list[dict]:
    """What happened to a run: the lines that say `queued`, `began` or `ended`."""
    return [row for row in run.attempts() if what in row]


def programs(run: Run, stage: str = "train") -> list[int]:
    """The processes of `python -m sweeps <stage> RUN_DIR` on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[-3:] == ["sweeps", stage, str(run.path.absolute())] and "srun" not in words[0]:
            found.append(process.pid)
    return found


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def equal(left: Run, right: Run) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    if (left.model / "state").exists():  # of the toy trainer
        return (left.model / "state").read_text() == (right.model / "state").read_text()
    import torch
    from safetensors.torch import load_file

    a, b = (load_file(run.model / "model.safetensors") for run in (left, right))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def calm(path: Path, folder: Path) -> list[Run]:
    """The same runs, undisturbed, without Slurm and without the toy trainer's pauses."""
    changed = [f"output_root={folder}", "score=null"]
    if "backend: toy.backend" in path.read_text():
        changed.append("train.pace=0")
    launch(path, "--executor", "local", *changed)
    return runs_of(path, *changed)


def logs(folder: Path) -> str:
    """The ends of all logs below a folder, for a test that fails."""
    found = [p for one in ("*.out", "*.log", "attempts.jsonl") for p in folder.rglob(one)]
    return "\n".join(f"{p}: {p.read_text(errors='replace')[-1500:]}" for p in found)

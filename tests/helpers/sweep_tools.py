"""What tests of whole sweeps share, on a real Slurm and without it."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import yaml

from calibeval.io import InputError
from sweeps.runs.files import read_rows
from sweeps.runs.grid import plan_sweep
from sweeps.runs.processes import run_checked, run_or_empty
from sweeps.runs.run import Run

T = TypeVar("T")

PROJECT = Path(__file__).resolve().parents[2]
# The words of `backend: command` for a script that knows nothing of sweeps.
TOY_SCRIPT = PROJECT / "tests" / "slurm" / "toy" / "script.py"
TOY_COMMAND = ["python", str(TOY_SCRIPT), "--beta={beta}", "--seed", "{seed}", "--out={run_dir}"]
CLUSTER = PROJECT / "tests" / "slurm" / "cluster.sh"
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
# Tests on Slurm launch sweeps with this as HF_TOKEN and WANDB_API_KEY. They look for it in every
# file that a sweep has written: none may hold it.
SECRET = "hf_planted5ecret0000"
LOG_CHARACTERS = 1500  # of each log, at its end, that a failing test shows


def write_sweep(path: Path, train: dict, grid: dict | None, top: dict) -> Path:
    """Write a sweep file, over two smoothing factors unless a grid is given."""
    if grid is None:
        grid = {"label_smoothing": [0.0, 0.1]}
    raw = {
        "name": path.stem,
        "output_root": str(path.parent / "out"),
        "train": train,
        "grid": grid,
        **top,
    }
    path.write_text(yaml.safe_dump(raw, sort_keys=False, width=999))
    return path


def toy_weights(beta: float, seed: int, steps: int = 20) -> str:
    """The weights with which `toy/script.py` ends."""
    state = str(seed)
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state} {step} {beta}".encode()).hexdigest()
    return state


class CommandServer:
    """The process of `command_server.py`, which is started with the first command."""

    process: subprocess.Popen | None = None

    def run(
        self, words: list[str], folder: Path, environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess:
        """Run a command to its end; after so many seconds it is killed, and the test fails."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("command_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        server = self.process
        self.process = None  # unless all goes well
        with (
            tempfile.NamedTemporaryFile("r") as stdout,
            tempfile.NamedTemporaryFile("r") as stderr,
        ):
            request = {
                "words": words,
                "folder": str(folder),
                "environment": dict(environment),
                "stdout": stdout.name,
                "stderr": stderr.name,
            }
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            watch = threading.Timer(seconds, kill, [[pid]])
            watch.start()
            try:
                code = int(server.stdout.readline())
            except BaseException:
                kill([pid, server.pid])
                raise
            finally:
                watch.cancel()
            self.process = server
            return subprocess.CompletedProcess(words, code, stdout.read(), stderr.read())


SERVER = CommandServer()


def command(
    *arguments: object,
    prefix: tuple = (),
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    timeout: float = 280,
) -> subprocess.CompletedProcess:
    """Run `python -m sweeps ARGUMENTS…`, behind the words of `prefix`, to its end."""
    words = [str(word) for word in arguments]
    if not prefix:
        return SERVER.run(words, cwd or Path.cwd(), env, timeout)
    return subprocess.run(
        [*prefix, sys.executable, "-m", "sweeps", *words],
        text=True,
        capture_output=True,
        check=False,
    )


def launch(*arguments: object, code: int = 0, **options) -> str:
    """What a launch prints; it must end with this exit code."""
    done = command("launch", *arguments, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for(condition: Callable[[], T], seconds: float = 400, pause: float = 0.1) -> T:
    """Wait until `condition()` is true, and return it; the bound is for a machine that is busy."""
    end = time.monotonic() + seconds
    result = condition()
    while not result:
        assert time.monotonic() < end, f"timed out\n{slurm_state()}"
        time.sleep(pause)
        result = condition()
    return result


def slurm_state() -> str:
    """What the controller says of its nodes and jobs, and the ends of its daemons' logs."""
    texts = []
    for words in (["sinfo", "-N", "-o", "%N %T %E"], ["squeue", "-o", "%i %j %T %r %M"]):
        texts.append(run_or_empty(*words) or f"{words[0]}: no answer")
    folder = Path(os.environ.get("SLURM_CONF", "none")).parent
    for log in folder.glob("slurm*.log"):
        texts.append(f"{log}:\n{log.read_text()[-2 * LOG_CHARACTERS :]}")
    return "\n".join(texts)


def empty() -> bool:
    """Whether the queue is empty; a controller that does not answer has not said so."""
    with contextlib.suppress(InputError):
        return not run_checked("squeue", "--noheader")
    return False


def runs_of(path: Path, *overrides: str) -> list[Run]:
    """The runs of a sweep file."""
    return plan_sweep(path, list(overrides)).runs


def prepare(path: Path, *overrides: str) -> Run:
    """A sweep's first run, whose folder is made, and which is not started."""
    plan = plan_sweep(path, list(overrides))
    plan.create()
    return plan.runs[0]


def rows(run: Run, event: str) -> list[dict]:
    """What happened to a run: the rows with a time as `queued`, `began` or `ended`."""
    return [row for row in read_rows(run.attempts_file) if event in row]


def programs(run: Run, stage: str = "train") -> list[int]:
    """The ids of the processes of `python -m sweeps <stage> RUN_DIR` on this machine."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        is_stage = words[-3:] == ["sweeps", stage, str(run.path.absolute())]
        if is_stage and "srun" not in words[0]:
            pids.append(process.pid)
    return pids


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def equal(left: Run, right: Run) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    if (left.model / "state").exists():  # of the toy trainer
        return (left.model / "state").read_text() == (right.model / "state").read_text()
    import torch
    from safetensors.torch import load_file

    first = load_file(left.model / "model.safetensors")
    second = load_file(right.model / "model.safetensors")
    if first.keys() != second.keys():
        return False
    return all(torch.equal(first[key], second[key]) for key in first)


def calm(path: Path, folder: Path) -> list[Run]:
    """Train the same runs undisturbed, without Slurm and without the toy trainer's pauses."""
    overrides = [f"output_root={folder}", "score=null"]
    if "backend: toy.backend" in path.read_text():
        overrides.append("train.pace=0")
    launch(path, "--executor", "local", *overrides, timeout=1800)
    return runs_of(path, *overrides)


def logs(folder: Path) -> str:
    """The ends of all logs below a folder, for a test that fails."""
    texts = []
    for parent, _, names in os.walk(folder):  # unlike rglob, it lets a checkpoint's folder go
        for name in sorted(names):
            if name.endswith((".out", ".log")) or name == "attempts.jsonl":
                log = Path(parent, name)
                texts.append(f"{log}: {log.read_text(errors='replace')[-LOG_CHARACTERS:]}")
    return "\n".join(texts)

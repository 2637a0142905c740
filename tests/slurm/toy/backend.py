"""`backend: toy.backend`: the weights are a chain of hashes, so a resume that forgets or repeats a
step shows; its other keys are ways to fail."""

import hashlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

from calibeval.io import InputError
from calibeval.request import Strict
from sweeps.training import torchrun


class Train(Strict):
    model_name_or_path: str
    train_file: str | None = None
    learning_rate: float = 2e-5
    label_smoothing: float = 0.0
    seed: int = 0
    steps: int = 20
    pace: float = 0.02  # seconds a step
    save_every: int | None = 5
    fail_at: int | None = None  # step of an error
    nothing: bool = False  # leaves no model, and no word
    deaf: bool = False  # no warning reaches it, and in a job it waits at its tenth step for TERM


def packages(train, world) -> list[str]:
    return []


def missing(train, world) -> list[str]:
    return []


def train(run) -> None:
    config = run.config()
    keys = config.train_options
    torchrun.exec_torchrun(run)
    asked = []
    heard = (signal.SIGTERM,) if keys.deaf else (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    for number in heard:
        signal.signal(number, lambda number, _: asked.append(number))
    saved = sorted(run.checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))
    step = int(saved[-1].name[5:]) if saved else 0
    state = (saved[-1] / "state").read_text() if saved else str(keys.seed)
    print(f"device: none in {os.getcwd()}, from step {step}", flush=True)
    while step < keys.steps:
        time.sleep(keys.pace)
        while step >= 10 and held() and not (asked or run.stop.exists()):
            time.sleep(0.02)
        while keys.deaf and step == 10 and not asked and "SLURM_JOB_ID" in os.environ:
            time.sleep(0.02)
        meet(run, step, asked)
        step += 1
        state = hashlib.sha256(f"{state} {step} {keys.label_smoothing}".encode()).hexdigest()
        if step == keys.fail_at:
            raise InputError(f"step {step}: the loss is nan")
        if first():
            with open(run.metrics, "a") as out:
                row = {"step": step, "steps": keys.steps, "loss": 1 / step, "tokens_per_second": 9}
                out.write(json.dumps(row) + "\n")
        stopping = bool(asked) or (run.stop.exists() and not keys.deaf)
        if first() and (stopping or (keys.save_every and step % keys.save_every == 0)):
            save(run.checkpoints / f"step-{step}", state)
        if stopping and step < keys.steps:
            raise SystemExit(75)
    if not keys.nothing and first():
        save(run.model, state)


def held() -> bool:
    """Whether a test wants to meet runs at their tenth step."""
    return os.path.exists(os.environ.get("TOY_HOLD", ""))


def meet(run, step: int, asked: list) -> None:
    """Wait for the other ranks, as a collective operation does."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    (run.path / f"rank{rank}").write_text(f"{step:09}")
    while not asked and size > 1:
        there = [(run.path / f"rank{other}") for other in range(size)]
        if all(file.exists() and file.read_text() >= f"{step:09}" for file in there):
            return
        time.sleep(0.01)


def first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def save(folder: Path, state: str) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "state").write_text(state)
    part.rename(folder)

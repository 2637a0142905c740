"""`backend: toy.backend`, a trainer without a model, for tests of everything around training.

Its weights are a chain of hashes, so that a resume that forgets or repeats a step shows. Some of
its options are ways to fail.
"""

import hashlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

from calibeval.io import InputError
from calibeval.validation import Strict
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.runs.stages import Outcome
from sweeps.training import starting_ranks

trains_on_several_nodes = True
MEETING_STEP = 10  # at which tests meet a run that they hold


class Train(Strict):
    model_name_or_path: str
    train_file: str | None = None
    learning_rate: float = 2e-5
    label_smoothing: float = 0.0
    seed: int = 0
    steps: int = 20
    pace: float = 0.02  # seconds a step
    save_every: int | None = 5
    saving: float = 0.0  # seconds that it takes to save when asked to stop
    fail_at: int | None = None  # the step that ends in an error
    nothing: bool = False  # whether the run ends well, and leaves no model
    deaf: bool = False  # whether no warning reaches it; in a job it then waits for TERM


def packages(train_options: Train, world: World) -> list[str]:
    return []


def missing(train_options: Train, world: World) -> list[str]:
    return []


def train(run: Run) -> None:
    starting_ranks.exec_torchrun(run)
    options: Train = run.config().train_options
    signals: list[int] = []  # that this process has received
    heard = [signal.SIGTERM]
    if not options.deaf:
        heard += [signal.SIGINT, signal.SIGUSR2]
    for number in heard:
        signal.signal(number, lambda number, _: signals.append(number))

    step, state = newest_state(run, options)
    print(f"device: none in {os.getcwd()}, from step {step}", flush=True)
    while step < options.steps:
        time.sleep(options.pace)
        wait_while_held(run, options, step, signals)
        wait_for_other_ranks(run, step, signals)
        step += 1
        text = f"{state} {step} {options.label_smoothing}"
        state = hashlib.sha256(text.encode()).hexdigest()
        if step == options.fail_at:
            raise InputError(f"step {step}: the loss is nan")
        if is_first_rank():
            log_step(run, options, step)
        stopping = bool(signals) or (run.stop_file.exists() and not options.deaf)
        is_due = options.save_every is not None and step % options.save_every == 0
        if stopping:
            time.sleep(options.saving)
        if is_first_rank() and (stopping or is_due):
            save(run.checkpoints / f"step-{step}", state)
        if stopping and step < options.steps:
            raise SystemExit(Outcome.STOPPED.value)
    if is_first_rank() and not options.nothing:
        save(run.model, state)


def newest_state(run: Run, options: Train) -> tuple[int, str]:
    """The step and state to go on from."""
    steps = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]
    if not steps:
        return 0, str(options.seed)
    step = max(steps)
    return step, (run.checkpoints / f"step-{step}" / "state").read_text()


def wait_while_held(run: Run, options: Train, step: int, signals: list[int]) -> None:
    """Wait at the tenth step while a test holds runs there, or a deaf one in a job for TERM."""
    while step >= MEETING_STEP and is_held() and not (signals or run.stop_file.exists()):
        time.sleep(0.02)
    in_job = "SLURM_JOB_ID" in os.environ
    while options.deaf and in_job and step == MEETING_STEP and not signals:
        time.sleep(0.02)


def is_held() -> bool:
    """Whether a test wants to meet runs at their tenth step."""
    return os.path.exists(os.environ.get("TOY_HOLD", ""))


def wait_for_other_ranks(run: Run, step: int, signals: list[int]) -> None:
    """Wait until all ranks have come to this step, as a collective operation does."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    (run.path / f"rank{rank}").write_text(f"{step:09}")
    while world_size > 1 and not signals:
        files = [run.path / f"rank{other}" for other in range(world_size)]
        if all(file.exists() and file.read_text() >= f"{step:09}" for file in files):
            return
        time.sleep(0.01)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def log_step(run: Run, options: Train, step: int) -> None:
    row = {"step": step, "steps": options.steps, "loss": 1 / step, "tokens_per_second": 9}
    with open(run.metrics, "a") as file:
        file.write(json.dumps(row) + "\n")


def save(folder: Path, state: str) -> None:
    """Write a folder with the state, under another name first."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "state").write_text(state)
    part.rename(folder)

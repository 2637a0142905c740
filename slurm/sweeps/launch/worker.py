"""One run in a job or a worker: trained, scored, DONE; killed, it starts again, within bounds."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from sweeps.runs.files import last_error, tail
from sweeps.runs.processes import end_with_parent
from sweeps.runs.run import Run
from sweeps.runs.stages import STAGES, Outcome, next_stage

POLL = 0.2  # seconds
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)  # as a shell reports it


def work(
    run: Run,
    asked: Callable[[], bool],
    stages: Sequence[str] = STAGES,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Bring a run through these stages, or to where it has saved once `asked()`.

    Killed programs start again, but not more than `max_idle_restarts` times without progress.
    """
    config = run.config()
    while (stage := next_stage(run)) in stages:
        if (times := run.attempts_without_progress()) > config.max_idle_restarts:
            return _give_up(run, times)
        if asked():
            run.note("ended", stopped=True)
            return Outcome.STOPPED
        run.stop.unlink(missing_ok=True)
        run.began(stage)
        code, said = _execute(run, stage, asked, environment)
        if code == 1 and (found := re.findall(r"^ *exitcode *: (-?\d+)", "\n".join(said), re.M)):
            code = int(found[-1])  # torchrun says so of the rank that ended first
        if next_stage(run) != stage:
            run.note("ended", exit=code)
        elif asked() or code == Outcome.STOPPED.value:
            run.note("ended", exit=code, stopped=True)
            return Outcome.STOPPED
        elif code < 0 or code in KILLED:
            run.note("ended", exit=code, killed=True)
            print(f"{run.name}: {stage}: killed (exit {code}), step {run.step()}", flush=True)
        else:
            run.note("ended", exit=code, error=_reason(run, code, said))
            return Outcome.FAILED
    if stage is None:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # which only a resume needs
        (run.path / "DONE").touch()
        if config.keep == "scores" and config.score:
            shutil.rmtree(run.model, ignore_errors=True)
    return Outcome.DONE


def _give_up(run: Run, times: int) -> Outcome:
    error = f"{times} attempts in a row brought it no further"
    last = next((row["exit"] for row in reversed(run.attempts()) if "exit" in row), None)
    if last in (-signal.SIGKILL, KILLED[0]):
        error += ": out of memory, perhaps: raise memory_per_node or lower the batch"
    run.note("ended", error=error)
    return Outcome.FAILED


def _execute(
    run: Run, stage: str, asked: Callable[[], bool], environment: Mapping[str, str] | None
) -> tuple[int, list[str]]:
    """Run a stage's program to its end, asking it to save once `asked()`; its exit code and the
    last lines that it wrote."""
    python, log = sys.executable, run.path / f"{stage}.log"
    if stage == "score" and (other := run.config().score.python):
        python = os.path.abspath(other)
    own = {"PYTHONUNBUFFERED": "1", "WANDB_DIR": str(run.path), **(environment or {})}
    with open(log, "ab") as out:
        began = out.tell()
        child = subprocess.Popen(
            [python, "-m", "sweeps", stage, str(run.path)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | own, preexec_fn=end_with_parent, start_new_session=True,
        )  # fmt: skip
    stopping = False
    while (code := child.poll()) is None:
        time.sleep(POLL)
        if asked() and not stopping:
            stopping = True
            run.stop.touch()
            if run.trained:  # scoring keeps what it has
                os.killpg(child.pid, signal.SIGTERM)
    return code, tail(log, 400, max(1, min(log.stat().st_size - began, 1 << 16)))


def _reason(run: Run, code: int, said: list[str]) -> str:
    if shutil.disk_usage(run.path).free < 1 << 20:
        return f"the disk of {run.path} is full; make room and launch again"
    if code == 0:
        return f"its program ended well and left nothing: {last_error(said)}"
    return f"exit {code}: {last_error(said)}"

"""What submitit runs inside a job: one element of an array, or the collect job.

submitit's handler of USR2 (before the time limit, on preemption) calls `checkpoint`, keeps what it
returns and requeues this element alone.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibeval.io import InputError
from sweeps import score
from sweeps.files import SweepError
from sweeps.plan import plan
from sweeps.rundir import RunDir
from sweeps.supervise import Outcome, machine, train

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

LEAVE = 60  # seconds before the limit: a TERM that comes later is the limit's own
STARTED = time.monotonic()


@dataclass
class Element:
    """`train` trains a run and then scores it, unless scores have jobs of their own; `score` scores
    a run or a base model; `collect` makes the tables and sends off again what is lost."""

    sweep: str  # the copy of the sweep file made at submission
    what: str
    limit: int  # seconds

    def __call__(self, name: str) -> None:
        """Work in a thread, so that signals find the main thread free."""
        self._over, self._code = threading.Event(), Outcome.FAILED
        self._run: RunDir | None = None  # while it trains
        self._leaving = False
        _forget_half_written()
        signal.signal(signal.SIGTERM, self._terminated)
        threading.Thread(target=self._work, args=(name,), daemon=True).start()
        self._wait()
        if self._code is not Outcome.DONE:
            sys.stdout.flush()
            os._exit(self._code.value)  # what is to be said stands above, without a traceback

    def checkpoint(self, name: str) -> "DelayedSubmission | None":
        """Save, and the same again in the requeued job; nothing if it failed for good."""
        from submitit.helpers import DelayedSubmission

        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # one answer is enough
        self._leaving = True
        self._wait()
        again = DelayedSubmission(Element(*astuple(self)), name)
        return None if self._code in (Outcome.FAILED, Outcome.REFUSED) else again

    def _wait(self) -> None:
        while not self._over.wait(0.5):
            if self._leaving and self._run is not None:
                self._run.stop.touch()  # again, for a run that is being set up drops old ones
            elif self._leaving:  # scoring keeps its parts
                self._code = Outcome.STOPPED
                return

    def _terminated(self, number: int, frame: object) -> None:
        """scancel: save and leave. The limit ends in TERM too, if saving outlasts the warning."""
        if time.monotonic() - STARTED >= self.limit - LEAVE:
            signal.getsignal(signal.SIGUSR2)(number, frame)
        self._leaving = True

    def _work(self, name: str) -> None:
        try:
            self._code = self._do(name)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            self._code = Outcome.REFUSED
        finally:
            self._over.set()

    def _do(self, name: str) -> Outcome:
        if self.what == "collect":
            command = [sys.executable, "-m", "sweeps", "collect", self.sweep, "--resubmit"]
            return Outcome(subprocess.run(command, check=False).returncode)
        planned = plan(Path(self.sweep), [])
        sweep = planned.sweep
        cells = {cell.config.name: cell for cell in planned.cells}
        if self.what == "train":
            self._run = RunDir(cells[name].folder)
            outcome = train(self._run, idle_restarts=sweep.max_idle_restarts)
            self._run = None
            if outcome is Outcome.FAILED:
                error = RunDir(cells[name].folder).manifest().get("error")
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            apart = sweep.score is None or sweep.score.separate or machine() > 0
            if outcome is not Outcome.DONE or apart:
                return outcome
            if self._leaving:
                return Outcome.STOPPED
        subjects = {one.name: one for one in score.ready(sweep, planned.cells)}
        if name not in subjects:
            raise SweepError(f"{name}: is not trained, so it cannot be scored")
        score.run(subjects[name], sweep.score)
        if name in cells:
            score.discard(cells[name], sweep)
        return Outcome.DONE


def _forget_half_written() -> None:
    """Where a kill left a half-written file of this job, submitit writes nothing any more."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_ARRAY_JOB_ID"] + f"_{task}" if task else os.environ["SLURM_JOB_ID"]
    for path in Path(os.environ["SUBMITIT_FOLDER"]).glob(f"{job}_*.save_tmp"):
        path.unlink(missing_ok=True)

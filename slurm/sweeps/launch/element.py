"""What an element of a job array does: it works on one run, and requeues itself when asked to go.

Before the time limit and at a preemption, Slurm sends signals. They are only noted: `worker.work`
then lets the run save, and what comes next is decided afterwards.
"""

import signal
import subprocess
import sys
import time

from sweeps.launch import worker
from sweeps.launch.submitit_adapter import (
    Checkpointable,
    element_folder,
    element_index,
)
from sweeps.runs.processes import job_id
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import describe_job
from sweeps.runs.stages import Outcome

REQUEUE_PAUSE = 10  # seconds between attempts to requeue, while the controller does not answer
REQUEUE_PATIENCE = 60  # seconds to wait for its answer
ASK_PAUSE = 5  # seconds between questions about this job


class Element(Checkpointable):
    """The work of an element: submitit calls it, and exits with its SystemExit.

    It is Checkpointable so that submitit requeues, and does not fail, an element that is signaled
    before it has installed handlers of its own.
    """

    def __init__(self, stages: tuple[str, ...]) -> None:
        """An element that brings its run through these stages."""
        self.stages = stages

    def __call__(self) -> None:
        """Work on the run that `names` gives this element, until it is done, failed or saved."""
        run = assigned_run()
        heard: set[int] = set()
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda number, _: heard.add(number))
        outcome = worker.work(run, lambda: bool(heard), self.stages)
        while outcome is Outcome.STOPPED:
            if signal.SIGTERM in heard and cancelled():
                break
            if requeue():
                reached = "what is scored" if run.trained else f"at step {run.step()}"
                print(f"{run.name}: saved {reached}; Slurm starts it again", flush=True)
                break
            # Slurm itself ends this job if the controller does not come back in time.
            time.sleep(REQUEUE_PAUSE)
        sys.exit(outcome.value)  # without words: what is to be said stands in the log already


def requeue() -> bool:
    """Let Slurm put this job back into its queue; False, with a message, if it does not answer."""
    job = job_id()
    assert job is not None  # an element runs in a job
    try:
        subprocess.run(["scontrol", "requeue", job], timeout=REQUEUE_PATIENCE, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{error}; again in {REQUEUE_PAUSE} s", flush=True)
        return False
    return True


def assigned_run() -> Run:
    """The run whose name is this element's line in the `names` of its job."""
    place = element_folder()
    names = (place / "names").read_text().splitlines()
    sweep_folder = place.parents[1]
    return Run(sweep_folder / names[element_index()])


def cancelled() -> bool:
    """Whether Slurm sent TERM for a scancel, or for a requeue that is already under way.

    Otherwise it sent it at the time limit, or with the GraceTime of a preemption. In that time
    Slurm still says RUNNING, and it will not requeue a job that leaves by itself.
    """
    job = job_id()
    assert job is not None  # an element runs in a job
    known = describe_job(job)
    while not known:  # the controller is busy, or away
        time.sleep(ASK_PAUSE)
        known = describe_job(job)
    running = known.get("JobState") == "RUNNING"
    timed_out = known.get("Reason") == "TimeLimit"
    preempted = known.get("PreemptTime", "None") != "None"
    return not (running or timed_out or preempted)

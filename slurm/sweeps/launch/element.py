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
        if outcome is Outcome.STOPPED and (signal.SIGTERM not in heard or may_requeue()):
            # Slurm itself ends this job if the controller does not come back in time.
            while not requeue():
                time.sleep(REQUEUE_PAUSE)
            reached = "what is scored" if run.trained else f"at step {run.last_saved_step()}"
            print(f"{run.name}: saved {reached}; Slurm starts it again", flush=True)
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
    job_folder = element_folder()
    names = (job_folder / "names").read_text().splitlines()
    sweep_folder = job_folder.parents[1]
    return Run(sweep_folder / names[element_index()])


def may_requeue() -> bool:
    """Whether this job, to which Slurm has sent TERM, comes back only if it requeues itself.

    TERM comes at the time limit, with the GraceTime of a preemption, for a scancel, and for a
    requeue that Slurm has begun by itself. After the last two, Slurm alone decides what comes next.
    """
    job = job_id()
    assert job is not None  # an element runs in a job
    known = describe_job(job)
    while not known:  # the controller is busy, or away
        time.sleep(ASK_PAUSE)
        known = describe_job(job)
    # In its GraceTime a job is RUNNING, and Slurm does not requeue one that leaves by itself.
    is_running = known.get("JobState") == "RUNNING"
    is_timed_out = known.get("Reason") == "TimeLimit"
    is_preempted = known.get("PreemptTime", "None") != "None"
    return is_running or is_timed_out or is_preempted

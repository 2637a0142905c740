"""What an element of a job array does: it works on one run, and requeues itself when asked to go.

Before the time limit and at a preemption, Slurm sends signals. They are only noted: `worker.work`
then lets the run save, and what comes next is decided afterwards. How a run is stopped and goes on
is told step by step in `sweeps.training.checkpoint`.

Slurm requeues a job by itself once a node of it has not answered for some minutes. If only the
node's slurmd has died, the job's processes there live on, and no signal reaches them. They must not
be there any more when slurmd comes back: it would kill them, and Slurm may take the end of the old
start for that of the new one. So an element whose node was given up saves and leaves, and one that
starts again asks what its earlier start has left behind to do so, and waits for that.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from calibeval.io import regular_file
from sweeps.launch import worker
from sweeps.launch.sbatch import REQUEUE_REQUEST
from sweeps.launch.submitit_adapter import (
    Checkpointable,
    element_folder,
    element_index,
    element_log,
)
from sweeps.runs.events import EventKind
from sweeps.runs.files import is_locked, text_of, touch
from sweeps.runs.processes import job_label
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import describe_job
from sweeps.runs.stages import TRAIN, Outcome

# Slurm sends USR2 and TERM. Who types `scancel -s` may send any of them.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REQUEUE_PAUSE = 10  # seconds between attempts to requeue, while the controller does not answer
REQUEUE_PATIENCE = 60  # seconds to wait for its answer
REQUEUE_TIME = 3600  # seconds after which no more attempt is made
NODE_FAILURE = b"srun: error: Node failure on "  # what srun prints when Slurm gives up a node
LOOK_PAUSE = 2  # seconds between looks at what an srun has printed
HANDOVER_PAUSE = 1  # seconds between looks at what an earlier start of this job has left behind
HANDOVER_PATIENCE = 600  # seconds that it may take to save
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
        """Work on this element's run, until it is done, failed or saved; see `assigned_run`."""
        run = assigned_run()
        # An earlier start of this job may have asked, and its script have been killed meanwhile.
        requeue_request().unlink(missing_ok=True)
        heard: set[int] = set()
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: heard.add(number))
        watch = NodeWatch([element_log(), run.path / f"{TRAIN}.log"])

        def is_asked_to_stop() -> bool:
            return bool(heard) or watch.has_lost_node()

        take_over(run, is_asked_to_stop)
        outcome = worker.work(run, is_asked_to_stop, self.stages)
        # Without TERM, Slurm has not decided what becomes of this job. INT is a Ctrl-C: somebody
        # wants an end. Else the run was stopped by USR2, ahead of the time limit, or by another
        # signal that somebody has sent; by a stop file that somebody made, or a TERM to the program
        # alone, of which Slurm knows nothing; or because a node was given up. So it is requeued.
        heard_no_term = signal.SIGTERM not in heard
        was_stopped = outcome is Outcome.STOPPED and signal.SIGINT not in heard
        if was_stopped and not _has_scontrol():
            ask_script(run)
        elif was_stopped and (heard_no_term or may_requeue()):
            come_back(run)
        sys.exit(outcome.value)  # without words: what is to be said stands in the log already


class NodeWatch:
    """Tells whether Slurm has given up a node of this job, by what an srun prints then.

    Of a run on one node the srun is above this process, and prints into the log of the job; of one
    on several nodes it is the run's program, and prints into the log of that.
    """

    def __init__(self, logs: list[Path]) -> None:
        """Watch what is added to these logs from now on."""
        self._positions = {log: log.stat().st_size if log.exists() else 0 for log in logs}
        self._next_look = 0.0
        self._has_lost_node = False

    def has_lost_node(self) -> bool:
        """Whether a node was given up; the logs are looked at now and then."""
        now = time.monotonic()
        if now < self._next_look or self._has_lost_node:
            return self._has_lost_node
        self._next_look = now + LOOK_PAUSE
        for log, position in self._positions.items():
            with (
                contextlib.suppress(FileNotFoundError),
                open(log, "rb", opener=regular_file) as text,
            ):
                # A bit of what was seen is read again: the message may have been half written.
                text.seek(max(0, position - len(NODE_FAILURE)))
                added = text.read()
                self._positions[log] = text.tell()
                if NODE_FAILURE in added:
                    self._has_lost_node = True
        return self._has_lost_node


def take_over(run: Run, asked_to_stop: Callable[[], bool]) -> None:
    """Have what an earlier start of this job has left behind save and leave, and wait for that."""
    if restart_count() == 0 or not is_locked(run.lock_file):
        return
    beginnings = [event.details for event in run.events() if event.kind is EventKind.BEGAN]
    if not beginnings or beginnings[-1].get("job") != job_label():
        return
    host = beginnings[-1].get("host")
    print(
        f"{run.name}: still runs on {host}, where this job was started before; waiting for it to "
        f"save and to leave, at most {HANDOVER_PATIENCE} s",
        flush=True,
    )
    touch(run.stop_file)
    end = time.monotonic() + HANDOVER_PATIENCE
    while is_locked(run.lock_file) and time.monotonic() < end and not asked_to_stop():
        time.sleep(HANDOVER_PAUSE)
    time.sleep(HANDOVER_PAUSE)  # in which it notes how it has ended


def come_back(run: Run) -> None:
    """See to it that Slurm starts this job again, unless it was cancelled; say what comes next."""
    reached = _reached(run)
    end = time.monotonic() + REQUEUE_TIME
    while time.monotonic() < end:
        decision = decision_of_slurm()
        if decision is not None:
            print(f"{run.name}: saved {reached}; {decision}", flush=True)
            return
        if requeue():
            print(f"{run.name}: saved {reached}; Slurm starts it again", flush=True)
            return
        # Slurm itself ends this job if the controller does not come back in time.
        time.sleep(REQUEUE_PAUSE)
    print(f"{run.name}: saved {reached}, and not requeued: launch it again", flush=True)


def _reached(run: Run) -> str:
    return "what is scored" if run.trained else f"at step {run.last_saved_step()}"


def _has_scontrol() -> bool:
    return shutil.which("scontrol") is not None


def requeue_request() -> Path:
    """The file by which this element asks its batch script for a requeue."""
    return element_folder() / f"{job_label()}{REQUEUE_REQUEST}"


def ask_script(run: Run) -> None:
    """Leave it to the batch script, which has a scontrol outside of the container, to requeue."""
    touch(requeue_request())
    decision = "the job's script requeues it, unless it was cancelled"
    print(f"{run.name}: saved {_reached(run)}; {decision}", flush=True)


def restart_count() -> int:
    """How often Slurm has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def decision_of_slurm() -> str | None:
    """What has become of this job without this process, in words; None while it simply runs on."""
    label = job_label()
    assert label is not None  # an element runs in a job
    known = describe_job(label)
    if known.get("JobState") == "CANCELLED":
        return "this job was cancelled and does not start again"
    was_started_again = int(known.get("Restarts", "0")) > restart_count()
    if known.get("JobState") == "PENDING" or was_started_again:
        return "Slurm has requeued this job by itself"
    return None


def requeue() -> bool:
    """Let Slurm put this job back into its queue; False, with a message, if it does not answer."""
    label = job_label()
    assert label is not None  # an element runs in a job
    try:
        subprocess.run(["scontrol", "requeue", label], timeout=REQUEUE_PATIENCE, check=True)
    except subprocess.CalledProcessError:  # its own words stand in the log
        print(f"scontrol requeue {label} has failed; again in {REQUEUE_PAUSE} s", flush=True)
        return False
    except subprocess.TimeoutExpired:
        print(f"scontrol requeue {label} does not answer; again in {REQUEUE_PAUSE} s", flush=True)
        return False
    return True


def assigned_run() -> Run:
    """The run whose name is this element's line in the `names` of its job."""
    job_folder = element_folder()
    names = text_of(job_folder / "names").splitlines()
    sweep_folder = job_folder.parents[1]
    return Run(sweep_folder / names[element_index()])


def may_requeue() -> bool:
    """Whether this job, to which Slurm has sent TERM, comes back only if it requeues itself.

    TERM comes at the time limit, at a preemption, for a scancel, and for a requeue that somebody
    else has asked for. In the last two cases Slurm decides alone what comes next, and none of the
    three conditions below holds.
    """
    label = job_label()
    assert label is not None  # an element runs in a job
    known = describe_job(label)
    while not known:  # the controller is busy, or away
        time.sleep(ASK_PAUSE)
        known = describe_job(label)
    # The GraceTime of a preemption: TERM has come, and the job still counts as running. For a
    # scancel or somebody's requeue Slurm changes the state before it sends TERM. A job that leaves
    # before its GraceTime is over is not requeued by Slurm.
    is_in_grace_time = known.get("JobState") == "RUNNING"
    is_timed_out = known.get("Reason") == "TimeLimit"
    # A preemption without GraceTime, or one whose GraceTime is over.
    is_preempted = known.get("PreemptTime", "None") != "None"
    return is_in_grace_time or is_timed_out or is_preempted

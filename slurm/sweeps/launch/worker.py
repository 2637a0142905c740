"""One run, brought through its stages by programs of their own.

A program that is killed starts again, within bounds; one that fails does not. A job on Slurm and a
worker on this machine both call `work`.

A run on several nodes is brought through its stages on the first one alone: it writes into the
run's folder what happens, and decides what comes next. The program that trains is then an srun,
which starts `python -m sweeps train RUN_DIR` on each node, hands on what they print, and ends when
they do. So the other nodes know of nothing but the training, and have nothing left to do once it
ends, however it ends.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from calibeval.io import regular_file
from sweeps.launch.program_end import ProgramEnd
from sweeps.runs.events import Event, EventKind
from sweeps.runs.files import is_disk_full, is_locked, last_error, tail, touch
from sweeps.runs.processes import (
    MEETING_PORT,
    end_with_parent_and_ignore_warnings,
    free_meeting_port,
)
from sweeps.runs.run import Run
from sweeps.runs.stages import SCORE, STAGES, TRAIN, Outcome, next_stage

POLL = 0.2  # seconds between looks at a program that runs
# Exit codes by which a program between this process and the killed one, such as a shell or
# `open_instruct_backend.train`, reports the kill. Of its own program it sees the negative signal.
KILL_CODES_OF_WRAPPERS = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
# The exit code of a program of ours that refuses to begin, or has met what only its user can put
# right, such as a loss that is infinite or a disk that is full: see `calibeval.io.finish`.
BAD_INPUT = 2
# A program's error is looked for in the last lines of its output on one node: in so many lines, and
# so many bytes.
LOG_LINES = 400
LOG_BYTES = 1 << 16
# What ranks print that find no way to another node.
NODES_DO_NOT_MEET = re.compile(
    "[Nn]ame or service not known|[Nn]ame resolution|gai error|resolve hostname|resolve host"
    "|Unable to find address|No route to host|Connection refused|[Cc]onnect.*timed out"
)
NODE_PATIENCE = 30  # seconds between the end of a run's program on one node and that on all others


def work(
    run: Run,
    asked_to_stop: Callable[[], bool],
    stages: Sequence[str] = STAGES,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Bring a run through these stages, or to where it has saved once it is asked to stop.

    It is asked by `asked_to_stop`, or by the run's stop file: see `StopRequest`.

    Programs get `environment` on top of this process's. One that is killed starts again, but not
    more than `max_idle_restarts` times without progress. Where another process works on the run,
    this one gives up with FAILED too; attempts.jsonl then says `busy` and no error. Returns
    FINISHED_STAGES when the next stage is none of these: all is done, or what comes next is another
    array's.
    """
    stop_request = StopRequest(run, asked_to_stop)
    stage = next_stage(run)
    while stage is not None and stage in stages:
        count = run.attempts_without_progress(stage)
        if count > run.config().max_idle_restarts:
            return _give_up(run, count)
        if stop_request.is_made():
            run.note(EventKind.ENDED, stopped=True)
            return Outcome.STOPPED
        run.note_beginning(stage)
        end = _execute(run, stage, stop_request.is_made, environment)
        outcome = _note_end(run, stage, end, stop_request.is_made())
        if outcome is not None:
            return outcome
        stage = next_stage(run)
        stop_request.claim_stop_file()
    if stage is None:
        _finish(run)
    return Outcome.FINISHED_STAGES


class StopRequest:
    """Whether a worker is asked to stop its run: by its caller, or by the run's stop file.

    All who work on a run share one stop file, and it may be there for a foreign process: one that
    this worker did not start, such as the trainer of an earlier start of this job, which
    `element.take_over` has asked to leave. So `is_made` does not look at the file before the worker
    has claimed it, see `claim_stop_file`.

    The worker's own trainer looks at the file itself, and cannot know for whom it is there. Where
    it obeys a file that the worker has not claimed, it leaves with exit code 75, and the work ends
    as STOPPED although `is_made` never said so: see `_note_end`.
    """

    def __init__(self, run: Run, asked_to_stop: Callable[[], bool]) -> None:
        """A worker of this run, whose caller says by `asked_to_stop` whether it shall stop."""
        self._run = run
        self._asked_to_stop = asked_to_stop
        self._has_claimed_stop_file = False
        self.claim_stop_file()

    def claim_stop_file(self) -> None:
        """Make the stop file this worker's, for good, unless a foreign process may still read it.

        Called while no program of this worker runs. Workers never hold the run's lock, only their
        programs do: so whoever holds it now is foreign. A file that is there though nobody holds
        the lock was made for a process that has left, and is deleted.
        """
        if self._has_claimed_stop_file:
            return
        foreign_process_is_there = is_locked(self._run.lock_file)
        if not foreign_process_is_there:
            self._run.stop_file.unlink(missing_ok=True)
            self._has_claimed_stop_file = True

    def is_made(self) -> bool:
        """Whether this worker is asked to stop."""
        if self._asked_to_stop():
            return True
        return self._has_claimed_stop_file and self._run.stop_file.exists()


def _note_end(run: Run, stage: str, end: ProgramEnd, is_asked_to_stop: bool) -> Outcome | None:
    """Note how a stage's program ended; returns how the work ends with it, None if it goes on."""
    exit_code = end.telling_exit_code
    if next_stage(run) != stage:
        # The program did what it was for, whatever its exit code. One that trains may go on to
        # score: if that fails, the training counts as done, nothing is noted here, and the next
        # attempt, at scoring, shows the error.
        run.note(EventKind.ENDED, exit=exit_code)
        return None
    if is_asked_to_stop or exit_code == Outcome.STOPPED.value:
        # Also where the program failed meanwhile: the next attempt then shows how.
        run.note(EventKind.ENDED, exit=exit_code, stopped=True)
        return Outcome.STOPPED
    if exit_code < 0 or exit_code in KILL_CODES_OF_WRAPPERS:  # the same stage is tried again
        run.note(EventKind.ENDED, exit=exit_code, killed=True)
        step = run.last_saved_step()
        print(f"{run.name}: {stage}: killed (exit {exit_code}), step {step}", flush=True)
        return None
    if exit_code == BAD_INPUT and is_locked(run.lock_file):
        # The program has waited for the run's lock and ended, so that somebody else holds it:
        # another job, or who trains the run by hand. The run itself is well.
        run.note(EventKind.ENDED, exit=exit_code, busy=True)
        print(f"{run.name}: {stage}: another process is at this run", flush=True)
        return Outcome.FAILED
    run.note(EventKind.ENDED, exit=exit_code, error=_reason(run, exit_code, end.lines))
    return Outcome.FAILED


def finish_complete(runs: Iterable[Run]) -> None:
    """Finish the runs of which nothing is left to do, unless a process is at them.

    A worker may have been killed after its last program and before it finished the run, and an
    earlier launch may have kept what this one does not.
    """
    for run in runs:
        if next_stage(run) is None and not is_locked(run.lock_file):
            _finish(run)


def _finish(run: Run) -> None:
    """Mark a run as done, and delete what is not kept."""
    shutil.rmtree(run.checkpoints, ignore_errors=True)  # only resuming needs them
    if not run.done:
        touch(run.done_file)
    config = run.config()
    if config.keep == "scores" and config.score is not None:
        shutil.rmtree(run.model, ignore_errors=True)


def _give_up(run: Run, count: int) -> Outcome:
    """Note why a run is not tried again, and how its last `count` attempts ended."""
    times_by_end = Counter(_ends_of_attempts(run.events())[-count:])
    ends = ", ".join(f"{times} {end}" for end, times in times_by_end.items())
    error = f"{count} attempts in a row brought it no further ({ends})"
    exit_codes = [event.details["exit"] for event in run.events() if "exit" in event.details]
    if exit_codes and exit_codes[-1] in (-signal.SIGKILL, 128 + signal.SIGKILL):
        error += "; out of memory, perhaps: raise memory_per_node or lower the batch"
    run.note(EventKind.ENDED, error=error)
    return Outcome.FAILED


def _ends_of_attempts(events: Iterable[Event]) -> list[str]:
    """How each attempt of a run ended, in their order: `stopped`, `killed` and the like."""
    ends: list[str] = []
    is_open = False  # whether the end of the last attempt is still to come
    for event in events:
        if event.kind is EventKind.BEGAN:
            ends.append("ended with their worker")  # which did not live to note how
            is_open = True
        elif event.kind is EventKind.ENDED and is_open:
            ends[-1] = _end_in_words(event)
            is_open = False
    return ends


def _end_in_words(event: Event) -> str:
    """How an attempt ended that this event notes the end of."""
    if event.was_stopped:
        return "stopped"
    if event.was_killed:
        return "killed"
    if event.error is not None:
        return "failed"
    if event.met_another_process:
        return "met another process"
    return "ended well"


def _execute(
    run: Run,
    stage: str,
    is_asked_to_stop: Callable[[], bool],
    environment: Mapping[str, str] | None,
) -> ProgramEnd:
    """Run a stage's program to its end, and let it save once it is asked to stop."""
    nodes = run.config().world.nodes if stage == TRAIN else 1
    log = run.path / f"{stage}.log"
    variables = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "WANDB_DIR": str(run.path),
        **(environment or {}),
    }
    if nodes > 1:
        # This is the first of the nodes. Each element of an array is a job with its own number.
        variables[MEETING_PORT] = str(free_meeting_port(int(os.environ["SLURM_JOB_ID"])))
    with open(log, "ab", opener=regular_file) as out:
        start = out.tell()
        program = subprocess.Popen(
            [*_srun(nodes), _python(run, stage), "-m", "sweeps", stage, str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=variables,
            preexec_fn=end_with_parent_and_ignore_warnings,
            start_new_session=True,
        )
    was_asked = False
    while program.poll() is None:
        time.sleep(POLL)
        if not was_asked and is_asked_to_stop():
            was_asked = True
            _ask_to_stop(run, program)
    written = log.stat().st_size - start
    lines = tail(log, nodes * LOG_LINES, size=min(written, nodes * LOG_BYTES))
    return ProgramEnd(program.returncode, lines, nodes)


def _ask_to_stop(run: Run, program: subprocess.Popen) -> None:
    """Let a run's program save and leave.

    A trainer finds the stop file after its update, saves and leaves; it does not go on to score. A
    scorer looks for no file, and loses nothing when it is killed, so that it gets TERM. A program
    that was started to train scores once model/ is there.
    """
    touch(run.stop_file)
    is_scoring = run.trained
    if is_scoring:
        os.killpg(program.pid, signal.SIGTERM)


def _srun(nodes: int) -> list[str]:
    """The words before a program's command that start it on each node of this job; none for one.

    Where one node has failed, the others have some time to end and to say how.
    """
    if nodes == 1:
        return []
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    # Since Slurm 22.05, srun does not take the number of CPUs from its job.
    words.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    return [*words, "--kill-on-bad-exit=0", f"--wait={NODE_PATIENCE}"]


def _python(run: Run, stage: str) -> str:
    """The interpreter that a stage runs with."""
    score = run.config().score
    if stage == SCORE and score is not None and score.python:
        return os.path.abspath(score.python)
    return sys.executable


def _reason(run: Run, exit_code: int, lines: list[str]) -> str:
    """Why a program that was not killed has left its stage undone."""
    if is_disk_full(run.path):
        return f"the disk of {run.path} is full; make room and launch again"
    if exit_code == 0:
        return f"its program ended well and left nothing: {last_error(lines)}"
    reason = f"exit {exit_code}: {last_error(lines)}"
    if run.config().world.nodes > 1 and NODES_DO_NOT_MEET.search("\n".join(lines)):
        reason += (
            "; if its nodes do not find each other, name the network between them in the profile's "
            "setup: export GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…"
        )
    return reason

"""One run from lock to DONE: what `python -m sweeps train RUN_DIR` does, here or in a job.

lease → manifest → start the backend's program → wait → model/ → DONE. The program may be killed at
any moment: it is started again while that makes progress, and gives up after a set number of
restarts that did not.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from enum import Enum

from filelock import Timeout

from sweeps import rendezvous
from sweeps.backends import get_backend
from sweeps.backends.base import Backend, Program
from sweeps.children import Child, Start, start_cold
from sweeps.config import World
from sweeps.files import read_rows, write_text
from sweeps.locks import LEASE_SECONDS, unlockable
from sweeps.provenance import provenance
from sweeps.rundir import RunDir, now

POLL = 0.1  # seconds
REPORTED = ("held_out_loss", "held_out_entropy", "seconds")  # what the manifest says of metrics
EX_TEMPFAIL = 75  # sysexits.h: "try again later"
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)  # as a shell reports it


class Outcome(Enum):
    """How an attempt ended; the value is the exit code."""

    DONE = 0
    FAILED = 1
    REFUSED = 2  # the user must change something first
    BUSY = 3  # another process holds the run
    STOPPED = EX_TEMPFAIL  # saved and asked to leave: to be continued


def train(
    run: RunDir, *, start: Start = start_cold, idle_restarts: int = 3, echo: bool = False
) -> Outcome:
    """Train one run to DONE, or say why not; `echo` copies its log to the terminal."""
    config = run.config()
    if run.done:
        return Outcome.DONE
    rendezvous.check_allocation(config.world)
    if config.world.nodes > 1 and rendezvous.machine() > 0:
        return Outcome(rendezvous.follow(run, _follower(run, config.world)))
    lease = run.lease(lost=lambda: run.stop.touch())
    # In a job the former holder may be this very element on a node that died: outwait its lease.
    patience = 2 * LEASE_SECONDS if job_id() else 0
    try:
        lease.acquire(timeout=patience)
    except Timeout:
        return Outcome.BUSY
    except OSError as error:
        raise unlockable(run.lock, error) from error
    try:
        if run.done:  # finished by whoever held the lease before us
            return Outcome.DONE
        run.stop.unlink(missing_ok=True)
        with _stop_on_signal(run):
            return _attempts(run, config.world, start, idle_restarts, echo)
    finally:
        if config.world.nodes > 1:
            rendezvous.publish(run, 0, 0, ended=True)
        lease.release()


def _attempts(run: RunDir, world: World, start: Start, idle_restarts: int, echo: bool) -> Outcome:
    backend = get_backend(run.config().backend)
    keys = run.config().keys
    manifest = run.manifest()
    if manifest["state"] == "failed":
        manifest["idle_restarts"] = 0  # someone asked for it again
        manifest.pop("lost", None)
    elif manifest["attempts"] and "ended" not in manifest["attempts"][-1]:
        idle = _count_idle(manifest, manifest["attempts"][-1]["from_step"], run.step())
        if idle > idle_restarts:  # all was killed with it, again and again: nobody else counts
            return _failed(run, manifest, _killed(idle))
    while True:
        before = run.step()
        if manifest["attempts"]:
            manifest["restarts"] += 1
        attempt = {
            "started": now(),
            "host": socket.gethostname(),
            "job": job_id(),
            "from_step": before,
        }
        manifest["attempts"].append(attempt)
        manifest["state"] = "running"
        manifest.pop("error", None)
        manifest["provenance"] = provenance() | backend.provenance(keys)
        run.write_manifest(manifest)

        code = _execute(run, world, backend, start, len(manifest["attempts"]), echo)

        finished = code == 0 and backend.finish(run)
        reached = run.step()
        attempt |= {"ended": now(), "exit": code, "to_step": reached}
        if finished:
            manifest["state"] = "done"
            for row in read_rows(run.metrics):
                manifest |= {key: row[key] for key in row if key in REPORTED}
            run.write_manifest(manifest)
            backend.clean(run)
            write_text(run.path / "DONE", now() + "\n")
            return Outcome.DONE
        idle = _count_idle(manifest, before, reached)
        if run.stop.exists() and idle <= idle_restarts:
            manifest["state"] = "preempted"
            run.write_manifest(manifest)
            return Outcome.STOPPED
        # A signal kills the innocent (out of memory elsewhere, a lost node); an exit code is a bug
        # or bad input, and would only come again.
        killed = code <= 0 or code in KILLED or _rank_killed(run)
        if killed and not run.stop.exists() and idle <= idle_restarts:
            print(
                f"{run.name}: trainer killed (exit {code}) at step {reached}; restarting",
                flush=True,
            )
            run.write_manifest(manifest)
            continue
        return _failed(run, manifest, _killed(idle, code) if killed else _reason(run, code))


def _failed(run: RunDir, manifest: dict, error: str) -> Outcome:
    run.write_manifest(manifest | {"state": "failed", "error": error})
    return Outcome.FAILED


def _killed(times: int, code: int | None = None) -> str:
    exit_ = "" if code is None else f" (exit {code})"
    return f"killed{exit_} {times} times in a row without a new checkpoint"


def _count_idle(manifest: dict, before: int, reached: int) -> int:
    """Restarts in a row that added no checkpoint, this one included."""
    idle = 0 if reached > before else manifest.get("idle_restarts", 0) + 1
    manifest["idle_restarts"] = idle
    return idle


def _rank_killed(run: RunDir) -> bool:
    """Whether torch's launcher, which itself exits 1, says that a signal ended a rank."""
    return any(re.match(r"\s*exitcode\s*: -\d+", line) for line in run.log_tail())


def _follower(run: RunDir, world: World) -> Callable[[str, int], Child]:
    """How a machine that does not supervise starts its part."""
    backend = get_backend(run.config().backend)
    number = rendezvous.machine()

    def start(address: str, port: int) -> Child:
        program = backend.program(run)
        arguments = command(program, world, machine=number, address=address, port=port)
        return start_cold(arguments, program, run.path / f"train.node{number}.log")

    return start


def _execute(
    run: RunDir, world: World, backend: Backend, start: Start, attempt: int, echo: bool
) -> int:
    """Run the program once; returns its exit code."""
    program = backend.program(run)
    port = rendezvous.free_port() if world.nodes > 1 else None
    if port:
        rendezvous.publish(run, attempt, port)
    arguments = command(program, world, port=port)
    with open(run.log, "ab") as log:
        log.write(f"--- {now()} {socket.gethostname()} {job_id() or ''}\n".encode())
    offset = run.log.stat().st_size
    child = start(arguments, program, run.log)
    try:
        partial = b""
        while True:
            code = child.wait(POLL)
            with open(run.log, "rb") as log:
                log.seek(offset)
                fresh = log.read()
            offset += len(fresh)
            if echo and fresh:
                sys.stderr.buffer.write(fresh)
                sys.stderr.flush()
            *lines, partial = (partial + fresh).split(b"\n")
            for line in lines:
                _append_metrics(run, backend.metrics(line.decode("utf-8", "replace")))
            if code is not None:
                return code
    finally:
        _end(child)


def _append_metrics(run: RunDir, row: dict | None) -> None:
    if row is not None:
        with open(run.metrics, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def _end(child: Child) -> None:
    """Leave nothing running if the supervisor itself is on its way out."""
    if child.wait(0) is None:
        child.signal(signal.SIGTERM)
        if child.wait(10) is None:
            child.signal(signal.SIGKILL)


def command(program: Program, world: World, **meeting: int | str | None) -> list[str]:
    """The command line of one machine's part of a run; `meeting`: see launch_arguments."""
    target = ["-m", program.module] if program.module else [program.script]
    target += list(program.arguments)
    if world.size == 1 and not world.deepspeed and not program.accelerate:
        return [sys.executable, *target]
    return [sys.executable, "-m", *rendezvous.launch_arguments(world, **meeting), *target]


@contextlib.contextmanager
def _stop_on_signal(run: RunDir) -> Iterator[None]:
    """TERM, INT and USR2 become the stop file, so that the trainer saves before it leaves."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the local executor's threads: the main thread holds the handlers
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = [signal.signal(n, lambda *_: run.stop.touch()) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def job_id() -> str | None:
    """This Slurm job as squeue prints it, or None."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def _reason(run: RunDir, code: int) -> str:
    lines = [line for line in run.log_tail() if not line.startswith("---")]
    free = shutil.disk_usage(run.path).free >> 20
    if free < 1:
        return f"exit {code}: the disk of {run.path} is full; make room and type the same again"
    wrong = [line for line in lines if line.startswith("error: ") or "Error" in line]
    return f"exit {code}: {(wrong or lines or ['no output'])[-1][:500]}"

"""One run from lock to DONE: what `python -m sweeps train RUN_DIR` does, here or in a job.

lease → manifest → start the backend's program → wait → model/ → DONE. A killed program is started
again while that makes progress. Of several machines each does this under torchrun, and the first
alone writes; torchrun's own restarts would repeat bad input as readily as bad luck.
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
import time
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

from filelock import Timeout

from calibeval.io import counted
from sweeps.backends import get_backend
from sweeps.backends.base import Backend, Program
from sweeps.children import Child, Start, start_cold
from sweeps.config import World
from sweeps.files import LEASE_SECONDS, SweepError, lease, read_rows, unlockable, write_text
from sweeps.provenance import output, provenance
from sweeps.rundir import RunDir, now

POLL = 0.1  # seconds
REPORTED = ("held_out_loss", "held_out_entropy", "seconds")  # what the manifest says of metrics
EX_TEMPFAIL = 75  # sysexits.h: "try again later"
UNSEEN = 30  # seconds until another machine's log is surely seen on this one
PATIENCE = 600  # seconds that a machine waits for the first one
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)  # as a shell reports it
PORTS = range(10000, 32000)  # below Linux's ephemeral range, so no outgoing connection takes one


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
    world = run.config().world
    if run.done:
        return Outcome.DONE
    check_allocation(world)
    if world.nodes > 1 and machine() > 0:
        return _take_part(run, world)
    mine = lease(run.lock, timeout=0, lost=run.stop.touch)
    # In a job the former holder may be this very element on a node that died: outwait its lease.
    patience = 2 * LEASE_SECONDS if job_id() else 0
    try:
        mine.acquire(timeout=patience)
    except Timeout:
        return Outcome.BUSY
    except OSError as error:
        raise unlockable(run.lock, error) from error
    try:
        if run.done:  # finished by whoever held the lease before us
            return Outcome.DONE
        run.stop.unlink(missing_ok=True)
        with _stop_on_signal(run):
            return _attempts(run, world, start, idle_restarts, echo)
    finally:
        mine.release()


def _attempts(run: RunDir, world: World, start: Start, idle_restarts: int, echo: bool) -> Outcome:
    config = run.config()
    backend = get_backend(config.backend)
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
        manifest["restarts"] += bool(manifest["attempts"])
        attempt = {"started": now(), "host": socket.gethostname(), "job": job_id()}
        manifest["attempts"].append(attempt | {"from_step": before})
        manifest["state"] = "running"
        manifest.pop("error", None)
        manifest["provenance"] = provenance() | backend.provenance(config.keys)
        run.write_manifest(manifest)

        code = _execute(run, world, backend, start, echo)

        finished = code == 0 and backend.finish(run)
        reached = run.step()
        manifest["attempts"][-1] |= {"ended": now(), "exit": code, "to_step": reached}
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
            run.write_manifest(manifest | {"state": "preempted"})
            return Outcome.STOPPED
        # A signal kills the innocent (out of memory elsewhere, a lost node); an exit code is a bug
        # or bad input, and would only come again.
        killed = code <= 0 or code in KILLED or _rank_killed(run, world.nodes)
        if run.stop.exists() or not killed or idle > idle_restarts:
            return _failed(run, manifest, _killed(idle, code) if killed else _reason(run, code))
        print(f"{run.name}: trainer killed (exit {code}) at step {reached}; restarting", flush=True)


def _failed(run: RunDir, manifest: dict, error: str) -> Outcome:
    run.write_manifest(manifest | {"state": "failed", "error": error})
    return Outcome.FAILED


def _killed(times: int, code: int | None = None) -> str:
    exit_ = "" if code is None else f" (exit {code})"
    said = f"killed{exit_} {times} times in a row without a new checkpoint"
    memory = "; out of memory, perhaps: raise cluster.memory_per_node or lower the batch"
    return said + memory * (code in (-signal.SIGKILL, 128 + signal.SIGKILL))


def _count_idle(manifest: dict, before: int, reached: int) -> int:
    """Restarts in a row that added no checkpoint, this one included."""
    idle = 0 if reached > before else manifest.get("idle_restarts", 0) + 1
    manifest["idle_restarts"] = idle
    return idle


def _rank_killed(run: RunDir, nodes: int) -> bool:
    """Whether torchrun, which itself exits 1, says that a signal ended a rank."""
    end = time.monotonic() + (UNSEEN if nodes > 1 else 0)
    while not any(re.match(r"\s*exitcode\s*: -\d+", line) for line in run.log_tail()):
        if time.monotonic() >= end:
            return False
        time.sleep(1)
    return True


def _reason(run: RunDir, code: int) -> str:
    lines = [line for line in run.log_tail() if not line.startswith("---")]
    if shutil.disk_usage(run.path).free < 1 << 20:
        return f"exit {code}: the disk of {run.path} is full; make room and type the same again"
    # A progress bar leaves no line of its own for what is said after it.
    wrong = [found[0] for line in lines if (found := re.search("error: .*|.*Error.*", line))]
    wrong = [line for line in wrong if "ChildFailedError" not in line] or wrong  # torchrun's own
    return f"exit {code}: {(wrong or lines or ['no output'])[-1][:500]}"


def _execute(run: RunDir, world: World, backend: Backend, start: Start, echo: bool = False) -> int:
    """Run this machine's part of the program once; returns its exit code."""
    program, path = launched(backend.program(run), world), run.log
    if world.nodes > 1 and machine() > 0:
        path = run.path / f"train.node{machine()}.log"
    with open(path, "ab") as log:
        log.write(f"--- {now()} {socket.gethostname()} {job_id() or ''}\n".encode())
    offset = path.stat().st_size
    child = start(program, path)
    try:
        partial = b""
        while True:
            code = child.wait(POLL)
            with open(path, "rb") as log:
                log.seek(offset)
                fresh = log.read()
            offset += len(fresh)
            if echo and fresh:
                sys.stderr.buffer.write(fresh)
                sys.stderr.flush()
            *lines, partial = (partial + fresh).split(b"\n")
            for line in lines:
                if row := backend.metrics(line.decode("utf-8", "replace")):
                    with open(run.metrics, "a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
            if code is not None:
                return code
    finally:
        _end(child)


def _end(child: Child) -> None:
    """Leave nothing running if the supervisor itself is on its way out."""
    if child.wait(0) is None:
        child.signal(signal.SIGTERM)
        if child.wait(10) is None:
            child.signal(signal.SIGKILL)


def _take_part(run: RunDir, world: World) -> Outcome:
    """Another machine's part: in every attempt that the first one enters into the manifest."""
    backend, seen = get_backend(run.config().backend), 0
    while True:
        manifest = run.manifest()
        running, count = manifest["state"] == "running", len(manifest["attempts"])
        if running and count > seen:
            seen = count
            _execute(run, world, backend, start_cold)
        elif not running and (seen or run.done):
            return Outcome.DONE  # of what else there is to say, the first machine speaks
        time.sleep(1)


def launched(program: Program, world: World) -> Program:
    """This machine's part of a run: under torchrun, unless it is a single process, and with what
    `accelerate launch` would put into its environment."""
    told = {"ACCELERATE_MIXED_PRECISION": world.mixed_precision}
    if world.deepspeed:
        told["ACCELERATE_USE_DEEPSPEED"] = "true"
        told["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = os.path.abspath(world.deepspeed)
    program = replace(program, environment=told | program.environment)
    if world.size == 1 and not world.deepspeed:
        return program
    if world.nodes == 1:
        meeting = ["--standalone"]  # on a port that the kernel chooses
    else:
        meeting = [f"--nnodes={world.nodes}", "--rdzv-backend=c10d"]
        meeting += [f"--rdzv-id={os.environ['SLURM_JOB_ID']}", f"--rdzv-endpoint={_endpoint()}"]
        host = "true" if machine() == 0 else "false"
        meeting.append(f"--rdzv-conf=is_host={host},read_timeout={PATIENCE}")
    workers = f"--nproc-per-node={world.processes_per_node}"
    rank = ("-m", "sweeps.children")  # which ends with torchrun
    torchrun = ("-m", "torch.distributed.run", *meeting, workers, *rank)
    return replace(program, launcher=torchrun)


def _endpoint() -> str:
    """HOST:PORT where the machines of this job step meet: Slurm's address of the first one.

    Each element of an array has a job id of its own, so two on one machine have two ports.
    """
    nodes = _scontrol("hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
    address = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", nodes[0]))[1]
    return f"{address}:{PORTS[int(os.environ['SLURM_JOB_ID']) % len(PORTS)]}"


def _scontrol(*words: str) -> str:
    said = output("scontrol", "show", *words)
    if said is None:
        raise SweepError(f"scontrol show {' '.join(words)} does not answer")
    return said


def check_allocation(world: World) -> None:
    """Raise SweepError unless Slurm gave what the run asks for.

    A wrong number of tasks does not fail by itself: it trains with another global batch.
    """
    if "SLURM_STEP_ID" not in os.environ and world.nodes == 1:
        return
    found = int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1")))
    machines = int(os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1")))
    if (found, machines) != (world.nodes, world.nodes):
        raise SweepError(
            f"world: {counted(world.nodes, 'node')} with one task each asked for, Slurm started "
            f"{counted(found, 'task')} on {counted(machines, 'node')}; "
            f"use srun --nodes={world.nodes} --ntasks={world.nodes}"
        )
    listed = (output("nvidia-smi", "-L") or "").count("GPU ")
    if 0 < listed < world.processes_per_node:
        raise SweepError(
            f"world.processes_per_node: {world.processes_per_node} asked for, this node "
            f"({socket.gethostname()}) shows {counted(listed, 'GPU')}; "
            "set gpus_per_process in the cluster profile"
        )


def machine() -> int:
    """This machine's number in the run; one task runs on each."""
    return int(os.environ.get("SLURM_PROCID", "0"))


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

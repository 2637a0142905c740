"""Runs on this machine: `workers` at a time, each trained and then scored.

Each run has GPUs of its own, unless more workers than GPUs share them evenly: the launches of a
small model's kernels keep a GPU busy for part of a step only.
"""

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from calibeval.io import InputError, counted
from sweeps import score, supervise
from sweeps.backends.base import Program
from sweeps.children import Child, Start, start_cold, start_warm
from sweeps.config import Sweep
from sweeps.executors.slurm import submitted
from sweeps.files import SweepError, held, make_folder
from sweeps.plan import Cell, sweep_folder
from sweeps.provenance import output
from sweeps.rundir import RunDir
from sweeps.supervise import Outcome

Job = Callable[[], str | None]  # returns what went wrong


def launch(sweep: Sweep, cells: list[Cell], *, train: bool = True) -> list[str]:
    """Train and score what is missing; returns one line for each run that did not get there.

    Without `train` only what is trained already is scored. Ctrl-C (or TERM) lets running trainers
    save a checkpoint first, and scoring come to its end.
    """
    machine, stopping = Machine(at_once(sweep)), Stopping(sweep)
    if sweep.workers and (found := len(gpus())):
        print(f"{counted(machine.workers, 'run')} at a time on {counted(found, 'GPU')}", flush=True)
    runs = [RunDir(cell.folder) for cell in cells]
    jobs: list[tuple[str, Job]] = [
        (subject.name, lambda s=subject: _score(s, sweep, stopping, machine))
        for subject in score.bases(sweep, cells).values()
        if score.missing(subject, sweep.score)
    ]
    for cell, run in zip(cells, runs, strict=True):
        unscored = sweep.score is not None and score.missing(score.of_cell(cell), sweep.score)
        if unscored if run.done else train:
            jobs.append((run.name, lambda c=cell, r=run: _run(c, r, sweep, stopping, machine)))
        else:
            score.discard(cell, sweep)  # where the last launch did not come to it

    def stop(*_: object) -> None:
        stopping.set()
        for run in runs:
            if run.lock.exists():
                run.stop.touch()

    problems, done = [], "finished" if train else "scored"
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            ThreadPoolExecutor(machine.workers) as pool,
            tqdm(total=len(jobs), unit="run", desc=sweep.name, disable=not jobs) as bar,
        ):
            futures = {pool.submit(job): name for name, job in jobs}
            for future in as_completed(futures):
                problem = future.result()
                bar.update(1)
                bar.write(problem or f"{done}: {futures[future]}")
                if problem:
                    problems.append(problem)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return problems


def cancel(sweep: Sweep, cells: list[Cell]) -> tuple[list[str], list[str]]:
    """Ask running trainers to save and leave, and launches under way to start nothing more.

    Returns the names of the runs that train, without those of this sweep's Slurm jobs, and of what
    is being scored, which is not interrupted.
    """
    runs = [RunDir(cell.folder) for cell in cells]
    if any(run.path.exists() for run in runs):  # a launch may be under way that holds no lock now
        make_folder(sweep_folder(sweep))
        _stop_file(sweep).touch()  # before the runs leave, for the next would start then
    queued = submitted(sweep)
    busy = [run for run in runs if held(run.lock) and not (queued and run.job())]
    for run in busy:
        run.stop.touch()
    subjects = [*score.bases(sweep, cells).values(), *map(score.of_cell, cells)]
    return [run.name for run in busy], [s.name for s in subjects if held(s.lock)]


def _stop_file(sweep: Sweep) -> Path:
    return sweep_folder(sweep) / "stop"


class Stopping:
    """Whether this launch was asked to stop: by a signal, or since it began by a `cancel` on any
    machine that shares the folder."""

    def __init__(self, sweep: Sweep) -> None:
        self._event, self._file = threading.Event(), _stop_file(sweep)
        self._before = self._touched()

    def _touched(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        touched = self._touched()  # None: absent, removed by hand, or out of reach for a moment
        return self._event.is_set() or touched not in (None, self._before)


def gpus() -> list[str]:
    """The GPUs that a launch may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        listed = output("nvidia-smi", "--query-gpu=index", "--format=csv,noheader") or ""
        visible = ",".join(listed.split())
    names = (name.strip() for name in visible.split(","))
    return [name for name in names if name not in ("", "-1")]


def at_once(sweep: Sweep) -> int:
    """How many runs train at a time; raises SweepError if the GPUs are too few for even one."""
    found, each = len(gpus()), sweep.world.processes_per_node
    if not found:
        return sweep.workers or 1
    if found < each:
        raise SweepError(f"world.processes_per_node: {each}: {counted(found, 'GPU')} here")
    return min(sweep.workers or found, found // each) if each > 1 else sweep.workers or found


class Machine:
    """The GPUs of this machine, lent to `workers` at a time; without any, programs start warm."""

    def __init__(self, workers: int) -> None:
        self.workers, self._lent = workers, dict.fromkeys(gpus(), 0)
        self._changed = threading.Condition()
        here, cores = len(self._lent), len(os.sched_getaffinity(0))
        self._share = math.ceil(self.workers / max(here, 1))  # programs on a GPU
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.workers)))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def _idlest(self) -> list[str]:
        """The GPUs that have room for another program, those with the most first."""
        free = [gpu for gpu, programs in self._lent.items() if programs < self._share]
        return sorted(free, key=self._lent.get)

    @contextlib.contextmanager
    def lend(self, count: int) -> Iterator[Start]:
        """What starts programs on `count` GPUs that have room for them; waits for it."""
        if not self._lent:
            yield start_warm
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._idlest()) >= count)
            mine = self._idlest()[:count]
            for gpu in mine:
                self._lent[gpu] += 1

        def start(program: Program, log: Path) -> Child:
            # Cold: a fork of a process that looked at the GPUs could not use them.
            visible = program.environment | {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
            return start_cold(replace(program, environment=visible), log)

        try:
            yield start
        finally:
            with self._changed:
                for gpu in mine:
                    self._lent[gpu] -= 1
                self._changed.notify_all()


def _run(cell: Cell, run: RunDir, sweep: Sweep, stopping: Stopping, machine: Machine) -> str | None:
    if not run.done and (problem := _train(run, sweep, stopping, machine)):
        return problem
    problem = _score(score.of_cell(cell), sweep, stopping, machine)
    if problem is None:
        score.discard(cell, sweep)
    return problem


def _train(run: RunDir, sweep: Sweep, stopping: Stopping, machine: Machine) -> str | None:
    if stopping.is_set():
        return f"not started: {run.name}"

    try:
        with machine.lend(sweep.world.processes_per_node) as begin:

            def start(program: Program, log: Path) -> Child:
                if stopping.is_set():  # asked while the run was set up, which drops stop files
                    run.stop.touch()
                return begin(program, log)

            outcome = supervise.train(run, start=start, idle_restarts=sweep.max_idle_restarts)
    except InputError as error:
        return f"failed: {run.name}: {error}"
    if outcome is Outcome.BUSY:
        return f"busy: {run.name}: another process trains it"
    if outcome is Outcome.STOPPED:
        return f"stopped: {run.name}: saved at step {run.step()}; the same command continues"
    if outcome is Outcome.FAILED:
        return f"failed: {run.name}: {run.manifest().get('error')} (log: {run.log})"
    return None


def _score(
    subject: score.Subject, sweep: Sweep, stopping: Stopping, machine: Machine
) -> str | None:
    if sweep.score is None:
        return None
    if stopping.is_set():
        return f"not scored: {subject.name}"
    try:
        with machine.lend(1) as start:
            score.run(subject, sweep.score, start=start)
    except InputError as error:
        return f"failed: {error}"
    return None

"""Runs on this machine: `workers` at a time, each trained and then scored.

`cancel` touches `<output_root>/sweeps/<name>/stop`, and every launch under way then starts nothing
more, also one on another machine that shares the folder.
"""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from sweeps import score, supervise
from sweeps.backends.base import Program
from sweeps.children import Child, start_warm
from sweeps.config import Sweep
from sweeps.errors import SweepError
from sweeps.executors.slurm import submitted
from sweeps.files import make_folder
from sweeps.grid import Cell, sweep_folder
from sweeps.locks import held
from sweeps.rundir import RunDir
from sweeps.supervise import Outcome


def launch(sweep: Sweep, cells: list[Cell]) -> list[str]:
    """Train and score what is missing; returns one line for each run that did not get there.

    Ctrl-C (or TERM) lets every running trainer save a checkpoint first; the same command goes on
    from there.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // sweep.workers)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stopping = Stopping(sweep)
    runs = [RunDir(cell.folder) for cell in cells]
    jobs: list[tuple[str, Callable[[], str | None]]] = [
        (subject.name, lambda s=subject: _score(s, sweep, stopping))
        for subject in score.bases(sweep, cells).values()
        if score.missing(subject, sweep.score)
    ]
    for cell, run in zip(cells, runs, strict=True):
        unscored = sweep.score is not None and score.missing(score.of_cell(cell), sweep.score)
        if not run.done or unscored:
            jobs.append((run.name, lambda c=cell, r=run: _run(c, r, sweep, stopping)))
    problems = []

    def stop(*_: object) -> None:
        stopping.set()
        for run in runs:
            if run.lock.exists():
                run.stop.touch()

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            ThreadPoolExecutor(sweep.workers) as pool,
            tqdm(total=len(jobs), unit="run", desc=sweep.name, disable=not jobs) as bar,
        ):
            futures = {pool.submit(job): name for name, job in jobs}
            for future in as_completed(futures):
                problem = future.result()
                bar.update(1)
                bar.write(problem or f"finished: {futures[future]}")
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
    """Whether this launch was asked to stop: by a signal, or by `cancel` since it began."""

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


def _run(cell: Cell, run: RunDir, sweep: Sweep, stopping: Stopping) -> str | None:
    if stopping.is_set():
        return f"not started: {run.name}"

    def start(arguments: list[str], program: Program, log: Path) -> Child:
        if stopping.is_set():  # asked while the run was being set up, which drops old stop files
            run.stop.touch()
        return start_warm(arguments, program, log)

    try:
        outcome = supervise.train(run, start=start, idle_restarts=sweep.max_idle_restarts)
    except SweepError as error:
        return f"failed: {run.name}: {error}"
    if outcome is Outcome.BUSY:
        return f"busy: {run.name}: another process trains it"
    if outcome is Outcome.STOPPED:
        return f"stopped: {run.name}: saved at step {run.step()}; the same command continues"
    if outcome is Outcome.FAILED:
        return f"failed: {run.name}: {run.manifest().get('error')} (log: {run.log})"
    return _score(score.of_cell(cell), sweep, stopping)


def _score(subject: score.Subject, sweep: Sweep, stopping: Stopping) -> str | None:
    if sweep.score is None:
        return None
    if stopping.is_set():
        return f"not scored: {subject.name}"
    try:
        score.run(subject, sweep.score, start=start_warm)
    except SweepError as error:
        return f"failed: {error}"
    return None

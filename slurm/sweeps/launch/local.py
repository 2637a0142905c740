"""Launching on this machine: workers take run after run, and train and score it.

A worker has the GPUs of one run. Where there are more workers than sets of GPUs, several share a
set: a small model leaves a GPU idle for part of each step, while the CPU launches its kernels.
"""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from tqdm import tqdm

from calibeval.io import InputError, counted, printable
from sweeps.launch import worker
from sweeps.launch.snapshot import snapshot
from sweeps.runs import slurm_queue, stages
from sweeps.runs.events import EventKind
from sweeps.runs.files import is_locked, locked
from sweeps.runs.grid import SweepPlan
from sweeps.runs.processes import cli_command, visible_gpus
from sweeps.runs.run import Run
from sweeps.runs.schema import Sweep
from sweeps.runs.stages import Outcome

LAUNCH_PATIENCE = 1  # seconds to wait for another launch of the same sweep
THREAD_VARIABLES = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")  # torch's, tokenizers'


def gpus_of_workers(sweep: Sweep) -> list[str]:
    """The GPUs of each worker, as CUDA_VISIBLE_DEVICES names them; "" on a machine without GPUs.

    Raises InputError if there are too few GPUs for one run.
    """
    gpus = visible_gpus()
    if not gpus:
        return [""] * (sweep.workers or 1)
    each = sweep.world.processes_per_node
    if len(gpus) < each:
        raise InputError(f"world.processes_per_node: {each}: {counted(len(gpus), 'GPU')} here")
    gpu_sets = []
    for start in range(0, len(gpus) - each + 1, each):
        gpu_sets.append(",".join(gpus[start : start + each]))
    count = sweep.workers or len(gpu_sets)
    return [gpu_sets[number % len(gpu_sets)] for number in range(count)]


@dataclass(frozen=True)
class LaunchEnd:
    """How a launch on this machine ended."""

    stop_signal: int | None  # the number of the signal that stopped it
    unfinished: list[str]  # the names of runs that were stopped or failed


def launch_here(plan: SweepPlan) -> LaunchEnd:
    """Train and score what is not done yet.

    Raises InputError while another launch is at the folder, here or on Slurm.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    busy_message = f"{plan.folder}: another launch is at it; Ctrl-C there ends it"
    with locked(plan.lock, LAUNCH_PATIENCE, busy_message):
        refuse_a_launch_on_slurm(plan)
        plan.create()
        worker.finish_complete(plan.baselines_and_runs)
        gpu_sets = gpus_of_workers(plan.sweep)
        code_folder = snapshot(plan.folder)
        todo = [run for run in plan.baselines_and_runs if stages.next_stage(run)]
        for run in todo:
            run.note(EventKind.LAUNCHED, code=code_folder.name)
        pool = WorkerPool(gpu_sets, code_folder)
        pool.work_on(todo, title=plan.sweep.name)
    return LaunchEnd(pool.stop_signal, pool.unfinished)


def refuse_a_launch_on_slurm(plan: SweepPlan) -> None:
    """Raise InputError while the folder's runs are queued on Slurm, or a launch queues them.

    To be called with `plan.lock` held. A launch on Slurm looks at that lock while it holds its own,
    so that of two launches at the same time one at least sees the other.
    """
    if is_locked(plan.folder / "jobs" / ".lock"):
        raise InputError(
            f"{plan.folder}: a launch on Slurm is submitting; wait until it ends, or end it by "
            "Ctrl-C there"
        )
    if shutil.which("squeue") and slurm_queue.live_elements(plan.folder):
        raise InputError(f"{plan.folder}: is queued on Slurm; {cli_command('cancel', plan.folder)}")


class WorkerPool:
    """Workers, each a thread that takes run after run and starts the programs of its stages."""

    def __init__(self, gpu_sets: list[str], code_folder: Path) -> None:
        """A worker for each set of GPUs, which runs the packages in `code_folder`."""
        self.stop_signal: int | None = None  # the number of the signal that asked to stop
        self.unfinished: list[str] = []  # names of runs that were stopped or failed
        self._size = len(gpu_sets)
        self._free_gpus: SimpleQueue[str] = SimpleQueue()
        for gpus in gpu_sets:
            self._free_gpus.put(gpus)
        self._environment = self._shared_environment(code_folder)

    def _shared_environment(self, code_folder: Path) -> dict[str, str]:
        """The variables of all programs: a fair share of the cores, and the code of this launch."""
        cores = len(os.sched_getaffinity(0))
        threads = str(max(1, cores // self._size))
        environment = {name: os.environ.get(name, threads) for name in THREAD_VARIABLES}
        paths = [str(code_folder)]
        if os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment

    def work_on(self, runs: list[Run], title: str) -> None:
        """Train and score these runs; returns once all have ended, or have saved after a signal."""
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with (
                ThreadPoolExecutor(self._size) as threads,
                tqdm(total=len(runs), unit="run", desc=title, disable=not runs) as bar,
            ):
                futures = [threads.submit(self._work_on_one, run) for run in runs]
                for future in as_completed(futures):
                    bar.update(1)
                    bar.write(printable(future.result()))
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Ask all runs to save; at the second signal, leave at once.

        Checkpoints are whole at any time, and the kernel ends the programs that were started.
        """
        if self.stop_signal is not None:
            os._exit(128 + number)
        self.stop_signal = number

    def _work_on_one(self, run: Run) -> str:
        """Train and score a run; returns a line that says how it ended."""
        gpus = self._free_gpus.get()
        environment = dict(self._environment)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        try:
            outcome = worker.work(
                run, lambda: self.stop_signal is not None, environment=environment
            )
        except (InputError, OSError) as error:  # a full disk, a config that was edited
            self.unfinished.append(run.name)
            return f"failed: {run.name}: {error}"
        finally:
            self._free_gpus.put(gpus)
        if outcome is Outcome.FINISHED_STAGES:  # here these are all stages, so the run is done
            return f"done: {run.name}"
        self.unfinished.append(run.name)
        line = f"{outcome.name.lower()}: {run.name}"
        if outcome is Outcome.FAILED:
            # The last event may be another process's, which has kept the worker from the run.
            reason = run.events()[-1].error or "another process is at this run"
            line += f": {reason} (log: {run.path.absolute()}/*.log)"
        return line

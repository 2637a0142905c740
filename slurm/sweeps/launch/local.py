"""Runs on this machine: `workers` at a time, each in a process and on GPUs of its own.

More workers than GPUs share them evenly: the launches of a small model's kernels keep a GPU busy
for part of a step only.
"""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue

from tqdm import tqdm

from calibeval.io import InputError, counted
from sweeps.launch import worker
from sweeps.launch.snapshot import snapshot
from sweeps.runs import slurm_queue, stages
from sweeps.runs.files import locked
from sweeps.runs.grid import SweepPlan
from sweeps.runs.processes import visible_gpus
from sweeps.runs.run import Run
from sweeps.runs.schema import Sweep
from sweeps.runs.stages import Outcome
from sweeps.runs.yaml_io import cli_command


def workers(sweep: Sweep) -> list[str]:
    """The GPUs of each run that trains at a time; InputError if they are too few for one."""
    found, each = visible_gpus(), sweep.world.processes_per_node
    if not found:
        return [""] * (sweep.workers or 1)
    if len(found) < each:
        raise InputError(f"world.processes_per_node: {each}: {counted(len(found), 'GPU')} here")
    sets = [",".join(found[i : i + each]) for i in range(0, len(found) - each + 1, each)]
    return [sets[i % len(sets)] for i in range(sweep.workers or len(sets))]


def launch(plan: SweepPlan) -> tuple[int, list[str]]:
    """Train and score what is missing; returns the signal that stopped it, or 0, and the names of
    runs that did not get there."""
    if shutil.which("squeue") and slurm_queue.queued_jobs(plan.folder):
        raise InputError(f"{plan.folder}: is queued on Slurm; {cli_command('cancel', plan.folder)}")
    plan.folder.mkdir(parents=True, exist_ok=True)
    with locked(plan.lock, 1, f"{plan.folder}: another launch is at it; Ctrl-C there ends it"):
        plan.create()
        return _launch(plan, workers(plan.sweep))


def _launch(plan: SweepPlan, sets: list[str]) -> tuple[int, list[str]]:
    heard, lost, free, code = [], [], SimpleQueue(), snapshot(plan.folder)
    for one in sets:
        free.put(one)
    threads = str(max(1, len(os.sched_getaffinity(0)) // len(sets)))
    mine = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")  # torch's, tokenizers'
    own = {key: os.environ.get(key, threads) for key in mine}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
    todo = [run for run in (*plan.baselines, *plan.runs) if stages.next_stage(run)]

    def hear(number: int, _: object) -> None:
        if heard:  # once more: checkpoints are whole, and the kernel ends what we started
            os._exit(128 + number)
        heard.append(number)

    def one(run: Run) -> str:
        mine = free.get()
        try:
            visible = {"CUDA_VISIBLE_DEVICES": mine} if mine else {}
            outcome = worker.work(run, lambda: bool(heard), environment=own | visible)
        finally:
            free.put(mine)
        said = f"{outcome.name.lower()}: {run.name}"
        if outcome is not Outcome.DONE:
            lost.append(run.name)
        if outcome is Outcome.FAILED:
            said += f": {run.attempts()[-1].get('error')} (log: {run.path.absolute()}/*.log)"
        return said

    for run in todo:
        run.note("queued", code=code.name)
    before = {n: signal.signal(n, hear) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            ThreadPoolExecutor(len(sets)) as pool,
            tqdm(total=len(todo), unit="run", desc=plan.sweep.name, disable=not todo) as bar,
        ):
            for future in as_completed([pool.submit(one, run) for run in todo]):
                bar.update(1)
                bar.write(future.result())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return heard[0] if heard else 0, lost

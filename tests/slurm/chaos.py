"""Disturb a sweep on real Slurm and see whether it arrives: python tests/slurm/chaos.py DIR

Starts a private Slurm below DIR, trains a sweep of eight runs once undisturbed on this machine,
then launches it there, kills the launch halfway, launches again, and disturbs five of the runs at
random moments, each in its own way: warned by signal, preempted with grace, requeued by the
administrator, trainer or whole element killed with -9; then slurmd is restarted under the running
jobs. Launches once more for what was killed whole. Prints a summary; exits 1 unless each of these
was done and every run arrived with the undisturbed weights.
"""

import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import psutil
import yaml

from calibeval.io import InputError
from sweeps.runs import slurm_queue
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import LiveElement
from sweeps.training import fit

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import sweep_tools
import tiny_world

RUNS = 8
WARNED = "warned by signal"
TRAINER_KILLED = "kill -9 trainer"
PREEMPTED = "preempted with grace"
ELEMENT_KILLED = "kill -9 element"
REQUEUED = "requeued by administrator"
KINDS = (WARNED, TRAINER_KILLED, PREEMPTED, ELEMENT_KILLED, REQUEUED)
SLURMD_RESTARTED = "slurmd restart"
STEPS_TO_HIT = (0, 20, 60, 100)  # the saved step at which a run is disturbed
LAUNCHES = 3
TIME_LIMIT = 1800  # seconds


def make_sweep(folder: Path) -> Path:
    """A tiny world and a sweep over it: 4 learning rates × 2 smoothing factors."""
    tiny_world.main(folder)
    profile = {
        "cpus_per_process": 1,
        "gpus_per_process": 0,
        "memory_per_node": "1G",
        "time": "20:00",
        "signal_seconds": 20,
        "pass_environment": ["OMP_NUM_THREADS"],
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(profile))
    train = {
        "train_file": str(folder / "alpaca.jsonl"),
        "model_name_or_path": f"{folder}/model",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 12,
        "reduce_loss": "sum",
        "clip_grad_norm": 1.0,
        "attention_dropout": 0.1,
        "checkpointing_steps": 20,
        "keep_last_n_checkpoints": 2,
    }
    grid = {
        "learning_rate": [5e-4, 1e-3, 2e-3, 5e-3],
        "label_smoothing": [round(0.1 * i, 1) for i in range(RUNS // 4)],
    }
    sweep = {
        "name": "chaos",
        "output_root": str(folder / "out"),
        "workers": 2,
        "grid": grid,
        "cluster": str(folder / "cluster.yaml"),
        "max_idle_restarts": 5,
        "train": train,
    }
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def train(run: Run) -> None:
    """Train a run in this process, whose signals are the trainer's from then on."""
    fit.fit(run)


def train_undisturbed(config: Path, folder: Path) -> list[Run]:
    """Train the same runs without Slurm, one after another in each of two processes."""
    plan = plan_sweep(config, [f"output_root={folder}"])
    plan.create()
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        list(pool.map(train, plan.runs))
    return plan.runs


def disturb(kind: str, element: LiveElement, run: Run) -> bool:
    """Do one bad thing to a running element; False if it was too early or too late for it."""
    pids = sweep_tools.programs(run)
    if not pids:
        return False
    if kind == REQUEUED:
        done = subprocess.run(["scontrol", "requeue", element.label], check=False)
        return done.returncode == 0
    if kind == WARNED:
        # A busy controller may say no and deliver it all the same; scancel then tries again for a
        # minute, in which most runs would end undisturbed.
        scancel = ["scancel", "--quiet", "--signal=USR2", element.label]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(scancel, check=False, timeout=3)
        return True
    if kind == PREEMPTED:
        urgent = ["sbatch", "--partition=urgent", "--cpus-per-task=1", "--output=/dev/null"]
        urgent += ["--quiet", "--wrap=sleep 5"]
        done = subprocess.run(urgent, stdout=subprocess.DEVNULL, check=False)
        return done.returncode == 0
    if kind == ELEMENT_KILLED:
        with contextlib.suppress(psutil.NoSuchProcess):
            pids = [psutil.Process(pid).ppid() for pid in pids]
    sweep_tools.kill(pids)
    return True


@dataclass
class Chaos:
    """The disturbances of a sweep: how many of each kind there were, and which are to come."""

    plan: SweepPlan
    slurm: Path  # the folder of the private Slurm
    counts: Counter = field(default_factory=Counter)
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    # For every run that was seen running: the saved step at which to hit it, then infinite.
    due: dict[str, float] = field(default_factory=dict)

    def until_empty(self) -> None:
        """Watch the queue until it is empty, disturbing on the way."""
        end = time.monotonic() + TIME_LIMIT
        while time.monotonic() < end:
            time.sleep(0.5)
            try:
                jobs = slurm_queue.live_elements(self.plan.folder)
            except InputError:  # a controller that is busy
                continue
            if not jobs:
                return
            elements = [job for job in jobs if job.run is not None and job.state == "RUNNING"]
            self.disturb_one(elements)
            if elements:
                self.restart_slurmd()
        raise RuntimeError("the sweep did not end within half an hour")

    def disturb_one(self, elements: list[LiveElement]) -> None:
        """Disturb the first of the running elements that is due, until each kind has been."""
        runs = {run.name: run for run in self.plan.runs}
        hits = sum(self.counts[kind] for kind in KINDS)
        if hits == len(KINDS):
            return
        kind = KINDS[hits]
        for element in elements:
            assert element.run is not None
            if element.run not in self.due:
                self.due[element.run] = self.draw.choice(STEPS_TO_HIT)
            run = runs[element.run]
            if run.last_saved_step() < self.due[element.run]:
                continue
            if disturb(kind, element, run):
                self.due[element.run] = math.inf
                self.counts[kind] += 1
                print(f"chaos: {kind}: {element.run} ({element.label})", flush=True)
                return

    def restart_slurmd(self) -> None:
        """Restart slurmd under the running jobs, once. It takes a minute in which nothing else is
        disturbed, and so comes last."""
        if all(self.counts[kind] for kind in KINDS) and not self.counts[SLURMD_RESTARTED]:
            subprocess.run([sweep_tools.CLUSTER, "restart-slurmd", self.slurm], check=True)
            self.counts[SLURMD_RESTARTED] += 1


def launch_and_kill(plan: SweepPlan, config: Path) -> None:
    """Begin a launch on Slurm, and kill it as soon as it has written what to submit."""
    words = [sys.executable, "-m", "sweeps", "launch", str(config), "--executor", "slurm"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        sweep_tools.wait_for(lambda: list(plan.folder.glob("jobs/*/names")), pause=0.001)
        process.kill()


def main(folder: Path) -> int:
    """The whole experiment; the cluster is stopped at the end, whatever happens."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("SLURM_CONF", None)
    config = make_sweep(folder)
    undisturbed = train_undisturbed(config, folder / "calm")
    slurm = folder / "slurm"
    subprocess.run([sweep_tools.CLUSTER, "start", slurm, "grace=30"], check=True)
    os.environ["SLURM_CONF"] = str(slurm / "slurm.conf")
    try:
        plan = plan_sweep(config, [])
        chaos = Chaos(plan, slurm)
        launch_and_kill(plan, config)
        for _ in range(LAUNCHES):
            print(sweep_tools.launch(config, "--executor", "slurm"), end="", flush=True)
            chaos.until_empty()
            if all(run.done for run in plan.runs):
                break
        last_launch = sweep_tools.launch(config, "--executor", "slurm")
    finally:
        subprocess.run([sweep_tools.CLUSTER, "stop", slurm], check=False)
    restarts = sum(len(sweep_tools.rows(run, "began")) - 1 for run in plan.runs)
    same = 0
    for run, calm in zip(plan.runs, undisturbed, strict=True):
        if run.done and sweep_tools.equal(run, calm):
            same += 1
    print(f"{same}/{RUNS} with the undisturbed run's weights bit for bit")
    print(f"{restarts} restarts; {chaos.counts}; launched again: {last_launch.splitlines()[-1]}")
    arrived = same == RUNS and "nothing to add" in last_launch
    disturbed = all(chaos.counts[kind] for kind in (*KINDS, SLURMD_RESTARTED))
    return 0 if arrived and disturbed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))

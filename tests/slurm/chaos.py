"""Disturb a sweep on real Slurm and see whether it arrives: python tests/slurm/chaos.py DIR

Starts a private Slurm below DIR, trains a sweep of 24 runs once undisturbed on this machine, then
launches it there, kills the launch halfway, launches again, and disturbs 30 % of the running
elements at random moments: warned by signal, preempted with grace, requeued by the administrator,
trainer or whole element killed with -9; slurmd is restarted twice under the running jobs. Launches
once more for what was killed whole. Prints a summary; exits 1 unless every run arrived with the
undisturbed weights.
"""

import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import real
import yaml

from calibeval.io import InputError
from sweeps.runs import slurm_queue
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

sys.path.append(str(Path(__file__).parents[1] / "patches"))
import tiny_world

RUNS, SHARE = 24, 0.3
KINDS = ("warned by signal", "kill -9 trainer", "preempted with grace", "kill -9 element")
KINDS += ("requeued by administrator",)


def make_sweep(folder: Path) -> Path:
    """A tiny world and a sweep over it: 4 learning rates × 6 smoothing factors."""
    tiny_world.main(folder)
    profile = {"cpus_per_process": 1, "gpus_per_process": 0, "memory_per_node": "1G"}
    profile |= {"time": "20:00", "signal_seconds": 20, "pass_environment": ["OMP_NUM_THREADS"]}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(profile))
    train = {"train_file": str(folder / "alpaca.jsonl"), "model_name_or_path": f"{folder}/model"}
    train |= {"per_device_train_batch_size": 4, "num_train_epochs": 30, "reduce_loss": "sum"}
    train |= {"clip_grad_norm": 1.0, "attention_dropout": 0.1, "checkpointing_steps": 20}
    train["keep_last_n_checkpoints"] = 2
    grid = {"learning_rate": [5e-4, 1e-3, 2e-3, 5e-3]}
    grid["label_smoothing"] = [round(0.1 * i, 1) for i in range(RUNS // 4)]
    sweep = {"name": "chaos", "output_root": str(folder / "out"), "workers": 2, "grid": grid}
    sweep |= {"cluster": str(folder / "cluster.yaml"), "max_idle_restarts": 5, "train": train}
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def disturb(kind: str, one: slurm_queue.QueuedJob, run: Run) -> bool:
    """Do one bad thing to a running element; False if it was too early or too late for it."""
    pids = real.programs(run)
    if not pids:
        return False
    if kind == "requeued by administrator":
        return subprocess.run(["scontrol", "requeue", one.id], check=False).returncode == 0
    if kind == "warned by signal":  # a busy controller may say no, and deliver it all the same
        subprocess.run(["scancel", "--quiet", "--signal=USR2", one.id], check=False)
        return True
    if kind == "preempted with grace":
        urgent = ["sbatch", "--partition=urgent", "--cpus-per-task=1", "--output=/dev/null"]
        urgent += ["--quiet", "--wrap=sleep 5"]
        return subprocess.run(urgent, stdout=subprocess.DEVNULL).returncode == 0
    if kind == "kill -9 element":
        with contextlib.suppress(psutil.NoSuchProcess):
            pids = [psutil.Process(pid).ppid() for pid in pids]
    real.kill(pids)
    return True


def disturb_until_empty(planned: SweepPlan, disturbed: Counter, folder: Path) -> None:
    """Watch the queue until it is empty, disturbing on the way."""
    draw = random.Random(0)
    runs = {cell.name: cell for cell in planned.runs}
    due: dict[str, float] = {}  # every run seen running; the saved step to hit it at, or never
    restarts, last, end = 2, time.monotonic(), time.monotonic() + 1800
    while time.monotonic() < end:
        time.sleep(0.5)
        try:
            busy = slurm_queue.queued_jobs(planned.folder)
        except InputError:  # a controller that is busy
            continue
        if not busy:
            return
        hits = sum(count for kind, count in disturbed.items() if kind in KINDS)
        left = max(1, round(SHARE * len(runs))) - hits
        for one in busy:
            if one.run is None:
                continue
            if one.state == "RUNNING" and one.run not in due:
                chosen = draw.random() < 2 * SHARE
                due[one.run] = draw.choice([0, 20, 60, 200]) if chosen else math.inf
            kind = KINDS[hits % len(KINDS)]
            hit = left > 0 and one.state == "RUNNING" and runs[one.run].step() >= due[one.run]
            if hit and disturb(kind, one, runs[one.run]):
                due[one.run] = math.inf
                disturbed[kind] += 1
                print(f"chaos: {kind}: {one.run} ({one.id})", flush=True)
                break
        if restarts and disturbed and time.monotonic() - last > 15:
            subprocess.run([real.CLUSTER, "restart-slurmd", folder / "slurm"], check=True)
            restarts, last = restarts - 1, time.monotonic()
            disturbed["slurmd restart"] += 1
    raise RuntimeError("the sweep did not end within half an hour")


def main(folder: Path) -> int:
    """The whole experiment; the cluster is stopped at the end, whatever happens."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("SLURM_CONF", None)
    config, disturbed = make_sweep(folder), Counter()
    undisturbed = real.calm(config, folder / "calm")
    subprocess.run([real.CLUSTER, "start", folder / "slurm", "grace=30"], check=True)
    os.environ["SLURM_CONF"] = str(folder / "slurm" / "slurm.conf")
    launch = (config, "--executor", "slurm")
    try:
        planned = plan_sweep(config, [])
        runs = planned.runs
        killed = [sys.executable, "-m", "sweeps", "launch", *map(str, launch)]
        with subprocess.Popen(killed, stdout=subprocess.DEVNULL) as process:
            real.wait_for(lambda: list(planned.folder.glob("jobs/*/names")), pause=0.001)
            process.kill()
        for _ in range(3):
            print(real.launch(*launch), end="", flush=True)
            disturb_until_empty(planned, disturbed, folder)
            if all(run.done for run in runs):
                break
        again = real.launch(*launch).splitlines()[0]
    finally:
        subprocess.run([real.CLUSTER, "stop", folder / "slurm"], check=False)
    restarts = sum(len(real.rows(run, "began")) - 1 for run in runs)
    pairs = zip(runs, undisturbed, strict=True)
    same = sum(run.done and real.equal(run, calm) for run, calm in pairs)
    print(f"{same}/{RUNS} with the undisturbed run's weights bit for bit")
    print(f"{restarts} restarts; {disturbed}; launched again: {again}")
    return int(same != RUNS or "nothing to submit" not in again)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))

"""Disturb a sweep on real Slurm and see whether it arrives.

    python tests/slurm/chaos.py DIR [--runs 24] [--share 0.3] [--seed 0]

Starts a private Slurm below DIR, trains the sweep once undisturbed on this machine, then launches
it there, kills the launch halfway, launches again, and disturbs `share` of the running elements at
random moments: warned by signal, preempted with grace, requeued by the administrator, trainer or
whole element killed with -9; slurmd is restarted twice under the running jobs. Launches once more
for what was killed whole. Prints a summary; exits 1 unless every run arrived with the undisturbed
weights.
"""

import argparse
import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import real
import yaml

from calibeval.io import InputError
from sweeps import slurm
from sweeps.plan import Plan, plan
from sweeps.run import Run

sys.path.append(str(Path(__file__).parents[1] / "patches"))
import tiny_world

KINDS = ("warned by signal", "kill -9 trainer", "preempted with grace", "kill -9 element")
KINDS += ("requeued by administrator",)


@dataclass
class Result:
    """What the chaos did and what came of it."""

    equal: int = 0
    disturbed: Counter = field(default_factory=Counter)
    restarts: int = 0
    launches: int = 0
    again: str = ""


def make_sweep(folder: Path, runs: int) -> Path:
    """A tiny world and a sweep over it: 4 learning rates × runs/4 smoothing factors."""
    tiny_world.main(folder)
    profile = {"cpus_per_process": 1, "gpus_per_process": 0, "memory_per_node": "1G"}
    profile |= {"time": "20:00", "signal_seconds": 20, "pass_environment": ["OMP_NUM_THREADS"]}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(profile))
    train = {"train_file": str(folder / "alpaca.jsonl"), "model_name_or_path": f"{folder}/model"}
    train |= {"per_device_train_batch_size": 4, "num_train_epochs": 30, "reduce_loss": "sum"}
    train |= {"clip_grad_norm": 1.0, "attention_dropout": 0.1, "checkpointing_steps": 20}
    train["keep_last_n_checkpoints"] = 2
    grid = {"learning_rate": [5e-4, 1e-3, 2e-3, 5e-3]}
    grid["label_smoothing"] = [round(0.1 * i, 1) for i in range(runs // 4)]
    sweep = {"name": "chaos", "output_root": str(folder / "out"), "workers": 2, "grid": grid}
    sweep |= {"cluster": str(folder / "cluster.yaml"), "max_idle_restarts": 5, "train": train}
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def disturb(kind: str, one: slurm.Queued, run: Run) -> bool:
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


def launched(config: Path, result: Result) -> str:
    result.launches += 1
    done = real.command("launch", config, "--executor", "slurm")
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def chaos(folder: Path, *, runs: int = 24, share: float = 0.3, seed: int = 0) -> Result:
    """The whole experiment; the cluster is stopped at the end, whatever happens."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("SLURM_CONF", None)
    config, result = make_sweep(folder, runs), Result()
    undisturbed = real.calm(config, folder / "calm")
    subprocess.run([real.CLUSTER, "start", folder / "slurm", "grace=30"], check=True)
    os.environ["SLURM_CONF"] = str(folder / "slurm" / "slurm.conf")
    try:
        planned = plan(config, [])
        killed = [sys.executable, "-m", "sweeps", "launch", str(config), "--executor", "slurm"]
        with subprocess.Popen(killed, stdout=subprocess.DEVNULL) as process:
            real.wait_for(lambda: list(planned.folder.glob("jobs/*/names")), pause=0.001)
            process.kill()
        result.launches += 1
        while True:
            print(launched(config, result), end="", flush=True)
            disturb_until_empty(planned, random.Random(seed), share, result, folder)
            if all(cell.run.done for cell in planned.cells) or result.launches == 4:
                break
        for cell, calm in zip(planned.cells, undisturbed, strict=True):
            result.restarts += len(real.rows(cell.run, "began")) - 1
            result.equal += cell.run.done and real.equal(cell.run, calm)
        result.again = launched(config, result).splitlines()[0]
        return result
    finally:
        subprocess.run([real.CLUSTER, "stop", folder / "slurm"], check=False)


def disturb_until_empty(
    planned: Plan, draw: random.Random, share: float, result: Result, folder: Path
) -> None:
    """Watch the queue until it is empty, disturbing on the way."""
    runs = {cell.run.name: cell.run for cell in planned.cells}
    due: dict[str, float] = {}  # every run seen running; the saved step to hit it at, or never
    restarts, last, end = 2, time.monotonic(), time.monotonic() + 1800
    while time.monotonic() < end:
        time.sleep(0.5)
        try:
            busy = slurm.queue(planned.folder)
        except InputError:  # a controller that is busy
            continue
        if not busy:
            return
        hits = sum(count for kind, count in result.disturbed.items() if kind in KINDS)
        left = max(1, round(share * len(runs))) - hits
        for one in busy:
            if one.run is None:
                continue
            if one.state == "RUNNING" and one.run not in due:
                chosen = draw.random() < 2 * share
                due[one.run] = draw.choice([0, 20, 60, 200]) if chosen else math.inf
            kind = KINDS[hits % len(KINDS)]
            hit = left > 0 and one.state == "RUNNING" and runs[one.run].step() >= due[one.run]
            if hit and disturb(kind, one, runs[one.run]):
                due[one.run] = math.inf
                result.disturbed[kind] += 1
                print(f"chaos: {kind}: {one.run} ({one.id})", flush=True)
                break
        if restarts and result.disturbed and time.monotonic() - last > 15:
            subprocess.run([real.CLUSTER, "restart-slurmd", folder / "slurm"], check=True)
            restarts, last = restarts - 1, time.monotonic()
            result.disturbed["slurmd restart"] += 1
    raise RuntimeError("the sweep did not end within half an hour")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    result = chaos(a.folder.absolute(), runs=a.runs, share=a.share, seed=a.seed)
    print(f"{result.equal}/{a.runs} with the undisturbed run's weights bit for bit")
    print(f"{result.restarts} restarts, {result.launches} launches; {result.disturbed}")
    print(f"launched again: {result.again}")
    return int(result.equal != a.runs or "nothing to submit" not in result.again)


if __name__ == "__main__":
    sys.exit(main())

"""Disturb a sweep on real Slurm and see whether it arrives.

    python tests/slurm/chaos.py DIR [--runs 24] [--share 0.3] [--seed 0]

Starts a private Slurm below DIR, trains the sweep once undisturbed on this machine, then submits it
and disturbs `share` of the running elements at random moments: preempted by signal, trainer killed
with -9, supervisor killed with -9, requeued by the administrator; slurmd is restarted twice under
the running jobs. Prints a summary; exits 1 unless every run arrived with the undisturbed weights.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import real
import world
import yaml

from sweeps import launch
from sweeps.executors import slurm
from sweeps.files import SweepError

KINDS = ("preempt by signal", "kill -9 trainer", "kill -9 supervisor", "requeue by administrator")


@dataclass
class Result:
    """What the chaos did and what came of it."""

    runs: int = 0
    arrived: int = 0
    equal: int = 0
    disturbed: Counter = field(default_factory=Counter)
    elements: set = field(default_factory=set)
    restarts: int = 0
    submissions: int = 0
    queued_again: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.runs == self.arrived == self.equal and "nothing to submit" in self.queued_again

    def summary(self) -> str:
        """The summary for people."""
        kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(self.disturbed.items()))
        return (
            f"{self.arrived}/{self.runs} runs arrived in {self.seconds:.0f} s, "
            f"{self.equal}/{self.runs} with the undisturbed run's weights bit for bit\n"
            f"{len(self.elements)} elements disturbed: {kinds}\n"
            f"{self.restarts} restarts; {self.submissions} submission(s) by itself\n"
            f"submitted again: {self.queued_again}"
        )


def make_sweep(folder: Path, runs: int) -> Path:
    """A tiny world and a sweep over it: 4 learning rates × runs/4 smoothing factors."""
    folder.mkdir(parents=True, exist_ok=True)
    world.make_model(folder / "model")
    world.make_chat(folder / "chat.jsonl")
    profile = world.make_profile(folder / "cluster.yaml")
    sweep = {
        "name": "chaos",
        "output_root": str(folder / "out"),
        "cluster": str(profile),
        "workers": 2,
        "max_idle_restarts": 5,
        "train": {
            "model_name_or_path": str(folder / "model"),
            "train_file": str(folder / "chat.jsonl"),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 30,
            "reduce_loss": "sum",
            "clip_grad_norm": 1.0,
            "attention_dropout": 0.1,
            "checkpointing_steps": 20,
            "keep_last_n_checkpoints": 2,
        },
        "grid": {
            "learning_rate": [5e-4, 1e-3, 2e-3, 5e-3],
            "label_smoothing": [round(0.1 * i, 1) for i in range(runs // 4)],
        },
    }
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def sweeps(*arguments: str) -> str:
    """Run a command of the package; its output, also when it exits 1."""
    done = real.command(*arguments)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"sweeps {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def processes(module: str, run: str) -> list[int]:
    """Processes of `python -m module … run`."""
    every = [(p.pid, p.info["cmdline"] or [""]) for p in psutil.process_iter(["cmdline"])]
    mine = [(pid, words) for pid, words in every if module in words and "srun" not in words[0]]
    return [pid for pid, words in mine if any(word.endswith(run) for word in words)]


def tell(pids: list[int], number: int) -> None:
    """Send a signal to those processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def trainer(run) -> int:
    """The process that trains a run on this machine; waits for it to start."""
    end = time.monotonic() + 300
    while not (found := processes("sweeps.trainer", run.name)):
        if time.monotonic() > end:
            raise RuntimeError(f"{run.name}: no trainer started")
        time.sleep(0.2)
    return found[0]


@contextlib.contextmanager
def held(run, step: int = 20):
    """A run in Slurm whose trainer stands still once it has saved, however busy the machine is.

    So what is done to it meanwhile comes before its end; it goes on afterwards, if it lives.
    """
    real.wait_for(lambda: run.step() >= step, pause=0.02)
    pid = trainer(run)
    tell([pid], signal.SIGSTOP)
    try:
        yield
    finally:
        tell([pid], signal.SIGCONT)


def disturb(kind: str, job: str, run: str) -> bool:
    """Do one bad thing to a running element; False if it was too early or too late for it."""
    if kind == "requeue by administrator":
        return subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0
    pids = processes("sweeps.trainer", run)
    if kind == "preempt by signal":
        # scancel repeats itself for a minute if it hears of a requeue first: there is none yet.
        tell(pids, signal.SIGSTOP)
        subprocess.run(["scancel", "--quiet", "--signal=USR2", job], check=False)
        tell(pids, signal.SIGCONT)
        return bool(pids)
    if kind == "kill -9 supervisor":
        try:
            pids = [psutil.Process(pid).ppid() for pid in pids]
        except psutil.NoSuchProcess:  # they have ended meanwhile
            return False
    tell(pids, signal.SIGKILL)
    return bool(pids)


def chaos(folder: Path, *, runs: int = 24, share: float = 0.3, seed: int = 0) -> Result:
    """The whole experiment; the cluster is stopped at the end, whatever happens."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = ":".join(str(real.PROJECT / n) for n in ("kernel", "slurm", "eval"))
    draw = random.Random(seed)
    config = make_sweep(folder, runs)
    calm = folder / "calm"
    os.environ.pop("SLURM_CONF", None)
    sweeps("launch", str(config), "--executor", "local", f"output_root={calm}")

    cluster = [str(real.CLUSTER)]
    subprocess.run([*cluster, "start", str(folder / "slurm")], check=True)
    os.environ["SLURM_CONF"] = str(folder / "slurm" / "slurm.conf")
    try:
        result = Result(runs=runs)
        begin = time.monotonic()
        print(sweeps("launch", str(config), "--executor", "slurm"), end="", flush=True)
        victims = _disturb_until_empty(config, runs, share, draw, result, [*cluster], folder)
        result.seconds = time.monotonic() - begin
        result.elements = victims
        for path in sorted((folder / "out" / "runs").iterdir()):
            manifest = json.loads((path / "manifest.json").read_text())
            result.restarts += manifest["restarts"]
            if (path / "DONE").exists():
                result.arrived += 1
                result.equal += real.equal(path, calm / "runs" / path.name)
        result.submissions = len(list((folder / "out" / "sweeps" / "chaos" / "jobs").iterdir()))
        result.queued_again = sweeps("launch", str(config), "--executor", "slurm").splitlines()[-1]
        return result
    finally:
        subprocess.run([*cluster, "stop", str(folder / "slurm")], check=False)


def _disturb_until_empty(config, runs, share, draw, result, cluster, folder) -> set[str]:
    """Watch the queue until it is empty, disturbing on the way; returns the disturbed runs."""
    planned = launch.plan(config, [])
    target = max(1, round(share * runs))
    due: dict[str, float] = {}  # every run seen running; when to hit it, or never
    hit: set[str] = set()
    restarts, last = 2, time.monotonic()
    end = time.monotonic() + 1800
    while True:
        if time.monotonic() > end:
            raise RuntimeError("the sweep did not end within half an hour")
        time.sleep(0.5)
        try:
            if not slurm.queue():
                return hit
            busy = slurm.active(planned.sweep)
        except SweepError:  # the controller has too much to do
            continue
        running = {run for _, run in busy if due.get(run, math.inf) < math.inf}
        for (_, run), element in busy.items():
            if element.state != "RUNNING":
                continue
            if run not in due:
                pending = sum(1 for name in due if name in running and name not in hit)
                chance = (target - len(hit) - pending) / max(1, runs - len(due))
                at = time.monotonic() + draw.uniform(0, 12)
                due[run] = at if draw.random() < 1.5 * chance else math.inf
            elif time.monotonic() >= due[run] and run not in hit:
                kind = KINDS[len(hit) % len(KINDS)]
                if disturb(kind, element.job, run):
                    hit.add(run)
                    result.disturbed[kind] += 1
                    print(f"chaos: {kind}: {run} ({element.job})", flush=True)
        if restarts and hit and time.monotonic() - last > 15:
            subprocess.run([*cluster, "restart-slurmd", str(folder / "slurm")], check=True)
            restarts, last = restarts - 1, time.monotonic()
            result.disturbed["slurmd restart"] += 1
            print("chaos: slurmd restart", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    result = chaos(a.folder.absolute(), runs=a.runs, share=a.share, seed=a.seed)
    print(result.summary())
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())

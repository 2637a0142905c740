"""Fixtures: a tiny world on disk, sweep files over it, profiles, and a private Slurm."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep_tools
import yaml

HERE = Path(__file__).parent

# A shell that runs tests in the background lets them ignore Ctrl-C, and what they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: more threads only wait for each other
PYTHONPATH = [str(HERE)]  # where programs find the toy trainer
for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    # This folder is there already in a worker of pytest-xdist, whose parent has read this file.
    if entry not in ("", *PYTHONPATH):
        PYTHONPATH.append(entry)
os.environ["PYTHONPATH"] = os.pathsep.join(PYTHONPATH)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with model/, chat.jsonl and mmlu/."""
    import tiny_world

    folder = tmp_path_factory.mktemp("tiny")
    tiny_world.main(folder)
    (folder / "alpaca.jsonl").rename(folder / "chat.jsonl")
    return folder


@pytest.fixture
def sweep_file(tiny, tmp_path) -> Callable[..., Path]:
    """A factory of sweep files: `sweep_file(grid={…}, train={…}, **top)` → path."""

    def make(
        grid: dict | None = None, train: dict | None = None, name: str = "tiny", **top: Any
    ) -> Path:
        keys = {
            "model_name_or_path": str(tiny / "model"),
            "train_file": str(tiny / "chat.jsonl"),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "reduce_loss": "sum",
            "logging_steps": 2,
            **(train or {}),
        }
        return sweep_tools.write_sweep(tmp_path / f"{name}.yaml", keys, grid, top)

    return make


@pytest.fixture
def toy_file(tmp_path) -> Callable[..., Path]:
    """The same with the toy trainer, of `toy/backend.py`, which takes a second."""
    model = tmp_path / "base model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).touch()

    def make(
        grid: dict | None = None, train: dict | None = None, name: str = "toy", **top: Any
    ) -> Path:
        keys = {"model_name_or_path": str(model), **(train or {})}
        return sweep_tools.write_sweep(
            tmp_path / f"{name}.yaml", keys, grid, {"backend": "toy.backend", **top}
        )

    return make


@pytest.fixture
def command_file(tmp_path) -> Callable[..., Path]:
    """The same with a command, `toy/script.py` unless the words of another one are given."""

    def make(
        words: list = sweep_tools.TOY_COMMAND,
        grid: dict | None = None,
        train: dict | None = None,
        name: str = "own",
        **top: Any,
    ) -> Path:
        keys = {"command": words, **(train or {})}
        grid = grid or {"beta": [0.1], "seed": [1]}
        path = tmp_path / f"{name}.yaml"
        return sweep_tools.write_sweep(path, keys, grid, {"backend": "command", **top})

    return make


@pytest.fixture
def hold(tmp_path, monkeypatch) -> Path:
    """While this file exists, runs of the toy trainer wait at their tenth step to be met."""
    path = tmp_path / "hold"
    path.touch()
    monkeypatch.setenv("TOY_HOLD", str(path))
    return path


@pytest.fixture(scope="session")
def cluster_of_worker(tmp_path_factory) -> Iterator[Path]:
    """The folder of a Slurm that is started once, as that takes longer than some tests."""
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([sweep_tools.CLUSTER, "start", folder, "nodes=2", "grace=60"], check=True)
    yield folder
    subprocess.run([sweep_tools.CLUSTER, "stop", folder], check=True)


@pytest.fixture
def cluster(cluster_of_worker, monkeypatch) -> Path:
    """A private Slurm of two nodes (both this machine), whose partition `urgent` preempts."""
    monkeypatch.setenv("SLURM_CONF", str(cluster_of_worker / "slurm.conf"))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("HF_TOKEN", sweep_tools.SECRET)
    monkeypatch.setenv("WANDB_API_KEY", sweep_tools.SECRET)
    monkeypatch.setenv("SBATCH_ACCOUNT", "not-mine")  # of the shell: it must not reach the jobs
    return cluster_of_worker


@pytest.fixture
def impatient(cluster) -> Iterator[None]:
    """Lets Slurm give up a node after seconds of silence; every slurmd is back afterwards."""
    subprocess.run([sweep_tools.CLUSTER, "slurmd-timeout", cluster, "5"], check=True)
    yield
    subprocess.run([sweep_tools.CLUSTER, "slurmd-timeout", cluster, "300"], check=True)
    subprocess.run([sweep_tools.CLUSTER, "start-slurmd", cluster], check=True)


@pytest.fixture
def profile(tmp_path) -> Callable[..., str]:
    """A factory of cluster profiles: one core a process, no GPU; `profile(key=value)` → path."""

    def make(**keys: Any) -> str:
        path = tmp_path / "cluster.yaml"
        raw = {
            "cpus_per_process": 1,
            "gpus_per_process": 0,
            "memory_per_node": "500M",
            "time": "20:00",
            "signal_seconds": 20,
            "pass_environment": ["OMP_NUM_THREADS", "PYTHONPATH"],
            **keys,
        }
        path.write_text(yaml.safe_dump(raw))
        return str(path)

    return make

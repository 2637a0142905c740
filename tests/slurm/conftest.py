"""Fixtures: a tiny world on disk, and sweep files over it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # for world.py and chaos.py, which are no tests
import real
import world
from transformers import AutoTokenizer

from sweeps.trainer.data import set_template

os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with model/, chat.jsonl and mmlu/."""
    folder = tmp_path_factory.mktemp("tiny")
    world.make_model(folder / "model")
    world.make_chat(folder / "chat.jsonl")
    world.make_mmlu(folder / "mmlu")
    return folder


@pytest.fixture
def tokenizer(tiny):
    """The tiny model's, with Tulu's template."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    set_template(tokenizer, None)
    return tokenizer


@pytest.fixture
def sweep_file(tiny, tmp_path):
    """A factory of sweep files: `sweep_file(grid={…}, train={…}, **top)` → path."""

    def make(grid: dict | None = None, train: dict | None = None, **top) -> Path:
        raw = {
            "name": "tiny",
            "output_root": str(tmp_path / "out"),
            "train": {
                "model_name_or_path": str(tiny / "model"),
                "train_file": str(tiny / "chat.jsonl"),
                "per_device_train_batch_size": 4,
                "num_train_epochs": 2,
                "reduce_loss": "sum",
                "logging_steps": 2,
                **(train or {}),
            },
            "grid": {"label_smoothing": [0.0, 0.1]} if grid is None else grid,
            **top,
        }
        path = tmp_path / f"{raw['name']}.yaml"
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        return path

    return make


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A private Slurm with two nodes (both this machine)."""
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([real.CLUSTER, "start", folder, "2"], check=True)
    before = dict(os.environ)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PYTHON"] = sys.executable
    os.environ["HF_TOKEN"] = os.environ["WANDB_API_KEY"] = real.SECRET
    yield folder
    subprocess.run([real.CLUSTER, "stop", folder], check=True)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def profile(tmp_path) -> str:
    return str(world.make_profile(tmp_path / "cluster.yaml"))

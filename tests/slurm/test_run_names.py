"""The names of runs' folders.

A name ends in a digest of all that decides a run. Another name would mean that a sweep launched
again trains everything again, and that no recorded run is found any more.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run

TRAIN = {"model_name_or_path": "models/tiny", "train_file": "data/chats.jsonl"}


def planned(folder: Path, **keys: Any) -> list[Run]:
    """The runs of a sweep file with these keys."""
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"name": "s", "output_root": str(folder / "runs"), **keys}))
    return plan_sweep(file, []).runs


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"train": TRAIN}, "tiny-lr2e-05-beta0-seed42-1f3a049c"),
        (
            {
                "train": {
                    **TRAIN,
                    "label_smoothing": 0.1,
                    "reduce_loss": "token_mean",
                    "lora": {"r": 8, "targets": ["q_proj", "v_proj"]},
                    "filter_eps": "auto",
                },
                "world": {"processes_per_node": 4, "mixed_precision": "bf16", "fsdp": "fsdp.json"},
            },
            "tiny-lr2e-05-beta0.1-seed42-0dfe5aad",
        ),
        (
            {
                "backend": "open-instruct",
                "train": {**TRAIN, "label_smoothing": 0.1},
                "world": {"processes_per_node": 8, "deepspeed": "zero3.json"},
            },
            "tiny-lr2e-05-beta0.1-seed42-143dc221",
        ),
    ],
)
def test_names_of_runs_are_what_they_were(tmp_path, keys, name):
    (run,) = planned(tmp_path, **keys)
    assert run.name == name


def test_several_nodes_are_another_run_and_one_node_is_the_same(tmp_path):
    """Recorded runs keep the names that they had before `world.nodes` was a key."""
    world = {"processes_per_node": 2}
    (before,) = planned(tmp_path, train=TRAIN, world=world)
    (one,) = planned(tmp_path, train=TRAIN, world={**world, "nodes": 1})
    (two,) = planned(tmp_path, train=TRAIN, world={**world, "nodes": 2})
    assert before.name == one.name != two.name
    two.create()
    assert Run(two.path).config().world.processes == 4

"""The names of runs' folders, which stay what they were when an option is added.

A name ends in a digest of all that decides a run. Another name would mean that a sweep launched
again trains everything again, and that no recorded run is found any more.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sweeps.results.settings import settings, varied_settings
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run
from sweeps.runs.schema import compatible_values, option
from sweeps.training import hf_backend, open_instruct_backend
from sweeps.training.options import LoraOptions, TrainOptions

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
    """Where this fails after an option was added: `sweeps.training.options` says what it lacks."""
    (run,) = planned(tmp_path, **keys)
    assert run.name == name


class LoraOptionsOfTomorrow(LoraOptions):
    rslora: bool = option(False, "", added_later=True)


class TrainOptionsOfTomorrow(TrainOptions):
    neftune_alpha: float | None = option(None, "", added_later=True)
    lora: LoraOptionsOfTomorrow | None = None


@pytest.fixture
def tomorrow(monkeypatch):
    """tomorrow() adds options to backend trainer."""
    return lambda: monkeypatch.setattr(hf_backend, "Train", TrainOptionsOfTomorrow)


@pytest.mark.parametrize("lora", [None, {"r": 8}])
def test_an_option_that_was_added_later_renames_the_runs_that_use_it_alone(
    tmp_path, tomorrow, lora
):
    train = {**TRAIN, "lora": lora}
    (before,) = planned(tmp_path, train=train)
    before.create()
    tomorrow()
    (run,) = planned(tmp_path, train=train)
    assert run.name == before.name
    assert Run(before.path).config().train_options.neftune_alpha is None  # of the older file
    (run,) = planned(tmp_path, train={**train, "neftune_alpha": None})
    assert run.name == before.name
    (run,) = planned(tmp_path, train={**train, "neftune_alpha": 5.0})
    assert run.name != before.name
    run.create()
    assert Run(run.path).config().train_options.neftune_alpha == 5.0
    (run,) = planned(tmp_path, train={**train, "lora": {"r": 8, "rslora": True}})
    assert run.name != before.name and run.config().train["lora"]["rslora"]


def test_tables_have_a_column_for_an_option_that_was_added_later(tmp_path, tomorrow):
    tomorrow()
    runs = planned(tmp_path, train=TRAIN, grid={"neftune_alpha": [None, 5.0]})
    assert varied_settings(runs) == ["neftune_alpha"]
    assert [settings(run)["neftune_alpha"] for run in runs] == ["None", 5.0]


@pytest.mark.parametrize("options", [hf_backend.Train, open_instruct_backend.Train])
def test_options_of_today_decide_runs_also_at_their_defaults(options):
    chosen = options(**TRAIN)
    assert compatible_values(chosen) == chosen.model_dump()


def test_several_nodes_are_another_run_and_one_node_is_the_same(tmp_path):
    """Runs keep the names that they had before `world.nodes` was a key."""
    world = {"processes_per_node": 2}
    (before,) = planned(tmp_path, train=TRAIN, world=world)
    (one,) = planned(tmp_path, train=TRAIN, world={**world, "nodes": 1})
    (two,) = planned(tmp_path, train=TRAIN, world={**world, "nodes": 2})
    assert before.name == one.name != two.name
    two.create()
    assert Run(two.path).config().world.processes == 4
    before.create()
    older = before.config_file.read_text().replace("  nodes: 1\n", "")
    before.config_file.write_text(older)
    assert Run(before.path).config().world.nodes == 1

"""A launch by newer code leaves files that the code of queued jobs, an older snapshot, can read.

Models of configs refuse keys that they do not know, so a key that came later may stand in a file
only where it is used.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from sweep_tools import prepare

from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run


def without_key(file: Path, key: str) -> str:
    """Write a file as code did that did not know one of its keys; returns the text."""
    values = yaml.safe_load(file.read_text())
    del values[key]
    text = yaml.safe_dump(values, sort_keys=False)
    file.write_text(text)
    return text


def keys_below(value: Any) -> set[str]:
    """All keys in a value, on every level."""
    if isinstance(value, dict):
        keys = set(value)
        for item in value.values():
            keys |= keys_below(item)
        return keys
    if isinstance(value, list):
        return set().union(*map(keys_below, value))
    return set()


@pytest.mark.parametrize("key", ["max_idle_restarts", "keep"])
def test_a_launch_that_asks_for_nothing_new_leaves_the_files_as_they_are(toy_file, key):
    path = toy_file(grid={}, keep="all", max_idle_restarts=3)
    run = prepare(path)
    launched = run.path.parent / "launched.yaml"
    texts = {file: without_key(file, key) for file in (run.config_file, launched)}
    prepare(path)
    for file, text in texts.items():
        assert file.read_text() == text


def test_a_launch_that_asks_for_more_writes_no_later_key_that_it_does_not_use(toy_file, tiny):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(grid={}, score={"tasks": [task], "base": False})
    run = prepare(path, "score=null")
    prepare(path)
    launched = run.path.parent / "launched.yaml"
    for file in (run.config_file, launched):
        values = yaml.safe_load(file.read_text())
        assert values["score"]["tasks"][0]["task"] == "mmlu"
        assert "processes_per_node" in values["world"]
        assert "nodes" not in keys_below(values)  # of `world`, which had no such key at first


def test_a_later_key_that_is_used_is_written(toy_file):
    run = prepare(toy_file(grid={}), "world.nodes=2")
    for file in (run.config_file, run.path.parent / "launched.yaml"):
        assert yaml.safe_load(file.read_text())["world"]["nodes"] == 2
    assert Run(run.path).config().world.nodes == 2


def test_a_config_that_newer_code_has_written_is_written_anew(toy_file):
    """By a launch of older code, which is asked for what it knows."""
    path = toy_file(grid={})
    run = prepare(path)
    with open(run.config_file, "a") as config:
        config.write("key_of_newer_code: 1\n")
    prepare(path)
    assert "key_of_newer_code" not in run.config_file.read_text()
    assert plan_sweep(run.path.parent, []).runs[0].config() == Run(run.path).config()


def test_a_model_before_fine_tuning_is_restarted_as_often_as_a_run(toy_file, tiny):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(grid={}, score={"tasks": [task]}, max_idle_restarts=0, keep="scores")
    (baseline,) = plan_sweep(path, []).baselines
    config = baseline.config()
    assert (config.max_idle_restarts, config.keep) == (0, "scores")
    (as_before,) = plan_sweep(path, ["max_idle_restarts=3", "keep=all"]).baselines
    assert baseline.name == as_before.name

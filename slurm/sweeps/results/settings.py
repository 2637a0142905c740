"""The settings of runs, as tables show them: all that decides a run, and what tells runs apart."""

from collections.abc import Sequence
from typing import Any

from sweeps.runs.run import Run
from sweeps.runs.stages import TRAIN

# The settings of each run that index.jsonl has, and so every table over scores. Runs that differ in
# another one are told apart by a column of its own: see `varied_settings`. (runs.csv has the values
# of `grid:` and the seed.)
# This list does not make index.jsonl: `collect._labels` writes each of these settings there, under
# the name that calibeval's tables have for it. A key that is added here has to be added there, or
# no table over scores tells runs apart by it. In best_learning_rates.csv it has its own name, or
# that of `selection.COLUMN_NAMES`.
SHOWN = (
    "train_file",
    "model_name_or_path",
    "num_train_epochs",
    "label_smoothing",
    "learning_rate",
    "seed",
)
# Runs that are alike in all settings without these two compete for the best rate. So
# best_learning_rates.csv begins with the other columns, in the order above.
SHOWN_WITHOUT_RATE_AND_SEED = tuple(key for key in SHOWN if key not in ("learning_rate", "seed"))


def settings(run: Run) -> dict[str, Any]:
    """All that decides a run, on one level: the config's keys, and the hashes of its files.

    A hash stands under the file's path as the config names it, or under `file PATH` where a setting
    is called so. So the tables tell runs apart whose file was edited in between, and have a column
    for that path then. What is no text and no number, null among it, is written as text: columns
    are compared and sorted.
    """
    config = run.config()
    values = {"backend": config.backend, **config.world.model_dump(), **config.train}
    for path, file_hash in _hashes_by_path(run).items():
        values[f"file {path}" if path in values else path] = file_hash
    for key, value in values.items():
        if not isinstance(value, (str, int, float)):
            values[key] = str(value)
    return values


def _hashes_by_path(run: Run) -> dict[str, str]:
    """The hash that each file of a run had when its training last began, by the file's path."""
    hashes: dict[str, str] = {}
    for event in run.events():
        if event.stage == TRAIN:
            hashes.update(event.details.get("files", {}))
    return hashes


def varied_settings(runs: Sequence[Run]) -> list[str]:
    """The settings in which trained runs differ, apart from those that every table shows."""
    seen: dict[str, set] = {}
    for run in runs:
        if run.config().is_baseline:
            continue
        for key, value in settings(run).items():
            seen.setdefault(key, set()).add(value)
    return [key for key, values in seen.items() if len(values) > 1 and key not in SHOWN]

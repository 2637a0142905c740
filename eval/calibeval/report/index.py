"""The index of `collect`: a line a record file, read as the rows of a table.

Lines alike in all but the seed and the data set are one `TableRow`: one setting, trained once for
each seed. `calibeval.report` and `calibeval.report.figures` print and draw the rows.
"""

import math
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator
from tqdm import tqdm

from calibeval import measures
from calibeval.io import InputError, json_lines, one_line
from calibeval.measures import (
    Cluster,
    ConfidenceDefinition,
    Evaluation,
    TooFewClusters,
    same_normaliser,
    same_prompts,
    same_questions,
    stats,
)
from calibeval.validation import Text, checked, is_unicode

Scalar = bool | int | float | str | None


# The columns of table.csv that `report.tidy` makes. No key of an index may have such a
# name, since each key becomes a column too. (`tidy` has a column `floor`, which it renames to
# `floor_95` at its end, so that neither name is free.)
RESERVED_COLUMNS = (
    "seeds",
    "questions",
    "letter_mass",
    "confidence",
    "metric",
    "value",
    "low",
    "high",
    "floor",
    "floor_95",
    "p",
)


class Entry(BaseModel, strict=True, extra="allow"):
    """One record file, and what is known of the training behind it; any other key is a scalar.

    One such key is `calibrator`, by what a run's answers were recalibrated after training, such as
    "temperature" (`studies.temperatures` writes it). A line without it is of the model's own
    answers.
    """

    records: Text  # a path, from the index's folder
    dataset: Text
    model: Text
    label_smoothing: Annotated[float, Field(ge=0, le=1)] | None
    train_data: Text | None = None
    seed: Annotated[float, Field(multiple_of=1)] | None = None
    __pydantic_extra__: dict[str, Scalar]

    @model_validator(mode="after")
    def _has_keys_that_may_be_columns(self) -> "Entry":
        for name, value in self.__pydantic_extra__.items():
            if name in RESERVED_COLUMNS:
                raise ValueError(
                    f"{name!r} is a column of figures in table.csv; give the key another name, "
                    f"such as 'train_{name}'"
                )
            if isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
                raise ValueError(f"{name}: expected a number below {LARGEST_INTEGER:.3g}")
            if isinstance(value, str) and not is_unicode(value):
                raise ValueError(f"{name} is {value!a}: half of a surrogate pair is no text")
        return self


@dataclass(frozen=True)
class IndexedFile:
    """A line of the index that was checked, and whose record file is there.

    Attributes:
        path: The record file.
        dataset: The data set that its questions are of.
        model: The model's name.
        seed: The seed of its training; None before fine-tuning, or where nobody knows.
        keys: The line's keys and values, in its order, without those that are null. But
            `label_smoothing` is kept, which is null before fine-tuning.
    """

    path: Path
    dataset: str
    model: str
    seed: float | None
    keys: dict[str, Scalar]


# These keys may differ between the lines of one row: they say which records a line is of, of which
# questions, and which of the repetitions of one setting.
NO_ROW_KEYS = ("records", "dataset", "seed", "run")
LARGEST_INTEGER = 1 << 63  # what an array of whole numbers can hold
OTHER_DATASET = "if it is meant, another 'dataset' in the index keeps them apart"
# Rows that agree in these keys stand together. `Results.reference` says which are compared: mostly
# such rows.
BLOCK_KEYS = ("train_data", "model")
FIRST_KEYS = (*BLOCK_KEYS, "label_smoothing")
HEADINGS = {"train_data": "SFT data", "label_smoothing": "β"}


@dataclass(eq=False)
class TableRow:
    """One setting, a row of the tables, with an evaluation for each data set and seed.

    Attributes:
        setting: What the index says of it, by key.
        shown: The keys that are columns of the table.
        short_names: Training data's short names, as people know them, by their paths.
        evaluations: By data set and then by seed, in their order.
    """

    setting: dict[str, Any]
    shown: tuple[str, ...]
    short_names: dict[str, str]
    evaluations: dict[str, dict[float | None, Evaluation]] = field(default_factory=dict)

    @property
    def beta(self) -> float | None:
        """Label smoothing; None before fine-tuning."""
        return self.setting["label_smoothing"]

    @property
    def block(self) -> tuple[str, ...]:
        """The training data and model under whose heading the row stands."""
        return tuple(self.text(key) for key in BLOCK_KEYS if key in self.shown)

    def text(self, key: str) -> str:
        """Return a key's value as tables print it."""
        value = self.setting.get(key)
        if value is None:
            return "base" if key == "label_smoothing" else "–"
        if isinstance(value, float):
            return f"{value:g}"
        if key == "train_data":
            return self.short_names.get(value, value)
        return str(value)

    def name(self, *left_out_keys: str) -> str:
        """Return what tells the row from others, such as "1.5B, β = 0.1", less what some keys say.

        Titles and legends have it.
        """
        parts = []
        for key in self.shown:
            value = self.setting.get(key)
            if key in left_out_keys:
                continue
            if key == "label_smoothing":
                parts.append("base" if value is None else f"β = {self.text(key)}")
            elif isinstance(value, str):
                parts.append(self.text(key))
            elif value is not None:
                label = "lr" if key == "learning_rate" else key.replace("_", " ")
                parts.append(f"{label} {self.text(key)}")
        return ", ".join(parts)

    def evaluations_of(self, data_set: str) -> list[Evaluation]:
        """Return the row's evaluations on a data set, in the order of their seeds."""
        return list(self.evaluations.get(data_set, {}).values())

    def estimate(
        self, data_set: str, metric: str, among: ConfidenceDefinition = "choices"
    ) -> stats.Estimate:
        """Return a metric over the row's seeds; its value is None where there is none."""
        of_data_set = self.evaluations_of(data_set)
        return stats.estimate(of_data_set, metric, among) if of_data_set else stats.Estimate()


@dataclass(frozen=True)
class Results:
    """Every row, the data sets, and the keys that are columns."""

    rows: list[TableRow]
    data_sets: list[str]
    shown: tuple[str, ...]

    @property
    def evaluations(self) -> dict[str, list[Evaluation]]:
        """All rows' evaluations by data set, in the order of the rows and of their seeds."""
        return {
            data_set: [found for row in self.rows for found in row.evaluations_of(data_set)]
            for data_set in self.data_sets
        }

    def reference(self, row: TableRow) -> TableRow | None:
        """Return the row that `row` is compared with: β = 0 without a calibrator, otherwise alike.

        None if there is no such row, or it is the row itself. A model before fine-tuning lacks keys
        such as its training data; it is compared with the row that agrees in all the keys that it
        has, if there is exactly one.
        """
        keys = [key for key in self.shown if key not in ("label_smoothing", "calibrator")]
        if row.beta is None:
            keys = [key for key in keys if key in row.setting]
        candidates = [
            other
            for other in self.rows
            if other.beta == 0
            and other.setting.get("calibrator") is None
            and all(other.setting.get(key) == row.setting.get(key) for key in keys)
        ]
        if len(candidates) != 1 or candidates[0] is row:
            return None
        return candidates[0]


def heading(key: str) -> str:
    """Return a key as a column's heading."""
    if key in HEADINGS:
        return HEADINGS[key]
    return key.replace("_", " ").capitalize() if key.isidentifier() else key


def read(
    index: Path, cluster: Cluster | None = None, metrics: Collection[str] | None = None
) -> Results:
    """Return the rows of an index, of all metrics or of some, which takes less time.

    With `cluster` subjects are resampled, but for data sets with too few of them.
    Lines that cannot be averaged or compared raise `InputError`, which names both files.
    """
    files = read_lines(Path(index))
    with ThreadPoolExecutor() as pool:  # NumPy lets other threads run
        loading = pool.map(lambda file: _load(file.path, cluster, metrics), files)
        loaded = list(tqdm(loading, "record files", len(files), disable=None, delay=2))
    _check_comparable(files, loaded)
    shown = varying_keys(files)
    short_names = _short_names(files)
    rows: dict[tuple[Scalar, ...], TableRow] = {}
    evaluation_of = dict(zip((file.path for file in files), loaded, strict=True))
    for file in sorted(files, key=_seed_order):
        evaluation = evaluation_of[file.path]
        shown_values = tuple(file.keys.get(key) for key in shown)
        if shown_values not in rows:
            setting = {key: value for key, value in file.keys.items() if key not in NO_ROW_KEYS}
            rows[shown_values] = TableRow(setting, shown, short_names)
        _add(evaluation, file, rows[shown_values])
    data_sets = list(dict.fromkeys(file.dataset for file in files))
    return Results(sorted(rows.values(), key=_order), data_sets, shown)


def _seed_order(file: IndexedFile) -> float:
    """By which files come in the order of their seeds, those without one first."""
    return -math.inf if file.seed is None else file.seed


def _load(path: Path, cluster: Cluster | None, metrics: Collection[str] | None) -> Evaluation:
    """A record file's evaluation, over resamples of its questions where it has too few subjects."""
    try:
        return measures.load(path, cluster=cluster, metrics=metrics)
    except TooFewClusters:
        return measures.load(path, metrics=metrics)


def _check_comparable(files: list[IndexedFile], loaded: list[Evaluation]) -> None:
    """Raise `InputError` unless a data set's questions are the same everywhere, asked alike."""
    first_of_dataset: dict[str, Evaluation] = {}
    first_of_model: dict[tuple[str, str], Evaluation] = {}  # by data set and model
    for file, evaluation in zip(files, loaded, strict=True):
        first = first_of_dataset.setdefault(file.dataset, evaluation)
        same_questions([first, evaluation])
        same_normaliser(first, evaluation, OTHER_DATASET)
        same_prompts(first, evaluation, wording=False, remedy=OTHER_DATASET)
        # A model with a shorter context is asked with fewer examples, so the prompts' very words
        # are compared only within one model.
        first_alike = first_of_model.setdefault((file.dataset, file.model), evaluation)
        same_prompts(first_alike, evaluation, remedy=OTHER_DATASET)


def _short_names(files: list[IndexedFile]) -> dict[str, str]:
    """The file names of training data by their paths, where no two are alike."""
    paths = {str(file.keys["train_data"]) for file in files if file.keys.get("train_data")}
    names = {path: PurePath(path).name or path for path in paths}
    every = list(names.values())
    return {path: name for path, name in names.items() if every.count(name) == 1}


def _add(evaluation: Evaluation, file: IndexedFile, row: TableRow) -> None:
    """Add an indexed file's evaluation to its row.

    Raises `InputError` where the row has one of this seed already, or one without a seed: nobody
    could tell which repetition that is. Files without a seed are added first (`_seed_order`), so
    every file with one finds them.
    """
    known = row.evaluations.setdefault(file.dataset, {})
    for other in (file.seed, None):
        if other in known:
            raise InputError(
                f"{known[other].path} and {evaluation.path}: both are {file.dataset}, "
                f"{row.name()}, with seeds {other} and {file.seed}; give the index the key that "
                "tells them apart: seed, train_data, …"
            )
    known[file.seed] = evaluation


def read_lines(index: Path) -> list[IndexedFile]:
    """Return the checked lines of an index, with record paths from the index's folder."""
    files = []
    place_of: dict[Path, str] = {}
    for where, raw_line in json_lines(index):
        line = _without_control_characters(raw_line)
        entry = checked(Entry, line, where)
        path = index.parent / entry.records
        if not path.is_file():
            raise InputError(f"{where}: no record file {path}")
        first = place_of.setdefault(path.resolve(), where)
        if first != where:
            raise InputError(f"{where}: {path} is on {first.removeprefix(f'{index}, ')} already")
        keys = {
            key: value
            for key, value in line.items()
            if value is not None or key == "label_smoothing"
        }
        # The line's own seed: `Entry.seed` is a float, which makes 1.0 of 1.
        files.append(IndexedFile(path, entry.dataset, entry.model, line.get("seed"), keys))
    if not files:
        raise InputError(f"{index}: no lines; expected one JSON object a record file")
    return files


def _without_control_characters(line: dict[str, Any]) -> dict[str, Any]:
    """A line of an index whose texts go into tables and figures; the path stays as it is."""
    return {
        one_line(key): one_line(value) if isinstance(value, str) and key != "records" else value
        for key, value in line.items()
    }


def varying_keys(files: list[IndexedFile]) -> tuple[str, ...]:
    """Return the keys that tell rows apart: model, β, and whatever else varies."""

    def varies(key: str) -> bool:
        # Where a tuned model's line lacks the key, that is a value like any other, None. The line
        # of a model before fine-tuning counts only where it has the key: such a model has no
        # learning rate, and that alone does not make the learning rate vary.
        counted_files = [
            file for file in files if key in file.keys or file.keys["label_smoothing"] is not None
        ]
        return len({file.keys.get(key) for file in counted_files}) > 1

    keys = dict.fromkeys(Entry.model_fields)
    for file in files:
        keys.update(dict.fromkeys(file.keys))
    first = [key for key in FIRST_KEYS if key != "train_data" or varies(key)]
    others = [key for key in keys if key not in (*NO_ROW_KEYS, *FIRST_KEYS) and varies(key)]
    return (*first, *others)


def _order(row: TableRow) -> tuple[tuple[int, float, str], ...]:
    """What rows are sorted by: their block, then the calibrator, then β, then what else varies.

    So a block's rows without a calibrator come first, in the order of β, and then those with one.
    Absent values come before numbers, and numbers before texts.
    """
    keys = dict.fromkeys(("train_data", "model", "calibrator", "label_smoothing", *row.shown))
    return tuple(_sort_key(row.setting.get(key)) for key in keys if key in row.shown)


def _sort_key(value: Scalar) -> tuple[int, float, str]:
    if value is None:
        return (0, 0, "")
    if isinstance(value, (int, float)):
        return (1, value, "")
    return (2, 0, value)

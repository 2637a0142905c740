"""The index of `collect`: a line a record file; lines alike in all but the seed are a row."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import BaseModel, Field
from tqdm import tqdm

from calibeval import stats
from calibeval.io import InputError, json_lines
from calibeval.request import Text, checked


class Line(BaseModel, strict=True, extra="allow"):
    """One record file, and what is known of the run behind it; any other key is a scalar."""

    records: Text  # a path, from the index's folder
    dataset: Text
    model: Text
    label_smoothing: Annotated[float, Field(ge=0, le=1)] | None
    train_data: Text | None = None
    seed: Annotated[float, Field(multiple_of=1)] | None = None
    __pydantic_extra__: dict[str, bool | int | float | str | None]


# Which records, of which questions, or one row's repetitions: none of them a row.
NO_ROW = ("records", "dataset", "seed", "run")
FIRST = ("train_data", "model", "label_smoothing")
HEADINGS = {"train_data": "SFT data", "label_smoothing": "β"}


@dataclass(eq=False)
class Row:
    """One setting: its keys, and its runs by column group (data set) and seed, in their order."""

    keys: dict
    shown: tuple[str, ...]
    short: dict[str, str]  # training data as people know it
    runs: dict[str, dict[float | None, stats.Run]] = field(default_factory=dict)

    @property
    def beta(self) -> float | None:
        """Label smoothing; None before fine-tuning."""
        return self.keys["label_smoothing"]

    @property
    def block(self) -> tuple[str, ...]:
        """Rows that are compared with each other: the same training data and model."""
        return tuple(self.text(key) for key in FIRST[:2] if key in self.shown)

    def text(self, key: str) -> str:
        """A key's value as tables print it."""
        value = self.keys.get(key)
        if value is None:
            return "base" if key == "label_smoothing" else "–"
        return f"{value:g}" if isinstance(value, float) else self.short.get(value, str(value))

    def name(self, *leave_out: str) -> str:
        """What tells the row from others, for titles and legends."""
        parts = []
        for key in (key for key in self.shown if key not in leave_out):
            value, text = self.keys.get(key), self.text(key)
            if key == "label_smoothing":
                parts.append(text if value is None else f"β = {text}")
            elif value is not None:
                said = "lr" if key == "learning_rate" else key.replace("_", " ")
                parts.append(text if isinstance(value, str) else f"{said} {text}")
        return ", ".join(parts)

    def estimate(self, group: str, metric: str, confidence: str = "choices") -> stats.Estimate:
        """A metric over the row's seeds; its value is None where there is none."""
        runs = [*self.runs.get(group, {}).values()]
        return stats.estimate(runs, metric, confidence) if runs else stats.Estimate()


@dataclass(frozen=True)
class Results:
    """Every row, the column groups (data sets), and the keys that are columns."""

    rows: list[Row]
    groups: list[str]
    shown: tuple[str, ...]

    def reference(self, row: Row) -> Row | None:
        """β = 0 without a calibrator, otherwise as `row`; None if there is no such row, or it is.

        A model before fine-tuning has no training data and the like: any will do, if only one has.
        """
        keys = [k for k in self.shown if k not in ("label_smoothing", "calibrator")]
        keys = [k for k in keys if row.beta is not None or k in row.keys]
        plain = [r for r in self.rows if r.beta == 0 and r.keys.get("calibrator") is None]
        found = [r for r in plain if all(r.keys.get(k) == row.keys.get(k) for k in keys)]
        return found[0] if len(found) == 1 and found[0] is not row else None


def heading(key: str) -> str:
    """A key as a column's heading."""
    return HEADINGS.get(key) or (key.replace("_", " ").capitalize() if key.isidentifier() else key)


def read(index: Path) -> Results:
    """Rows of an index; refuses lines that cannot be averaged or compared, naming both files."""
    lines = read_lines(Path(index))
    with ThreadPoolExecutor() as pool:  # NumPy lets other threads run
        found = pool.map(stats.load, [line["records"] for line in lines])
        runs = [*tqdm(found, "record files", len(lines), disable=None, delay=2)]
    pairs = [*zip(lines, runs, strict=True)]
    first: dict[tuple, stats.Run] = {}  # of each data set, and of it by each model
    for line, run in pairs:
        one = first.setdefault((line["dataset"], None), run)
        stats.same_questions([one, run])
        stats.same_prompts(one, run, texts=False)
        # Of a model with another context length, prompts have fewer examples.
        stats.same_prompts(first.setdefault((line["dataset"], line["model"]), run), run)
    shown = columns(lines)
    paths = {line["train_data"] for line in lines if line.get("train_data")}
    last = {path: PurePath(path).name or path for path in paths}
    short = {path: name for path, name in last.items() if [*last.values()].count(name) == 1}
    rows: dict[tuple, Row] = {}
    for line, run in sorted(pairs, key=lambda pair: pair[0].get("seed", -math.inf)):
        keys = {key: value for key, value in line.items() if key not in NO_ROW}
        row = rows.setdefault(tuple(line.get(key) for key in shown), Row(keys, shown, short))
        known, seed = row.runs.setdefault(line["dataset"], {}), line.get("seed")
        for other in known.keys() & {seed, None}:
            raise InputError(
                f"{known[other].path} and {run.path}: both are {line['dataset']}, {row.name()}, "
                f"with seeds {other} and {seed}; give the index the key that tells them apart: "
                "seed, train_data, …"
            )
        known[seed] = run
    groups = list(dict.fromkeys(line["dataset"] for line in lines))
    return Results(sorted(rows.values(), key=_order), groups, shown)


def read_lines(index: Path) -> list[dict]:
    """Checked lines; record paths relative to the index's folder."""
    lines, seen = [], {}
    for where, line in json_lines(index):
        checked(Line, line, where)
        path = index.parent / line["records"]
        if not path.is_file():
            raise InputError(f"{where}: no record file {path}")
        if (first := seen.setdefault(path.resolve(), where)) != where:
            raise InputError(f"{where}: {path} is on {first.removeprefix(f'{index}, ')} already")
        line = {k: v for k, v in line.items() if v is not None or k == "label_smoothing"}
        lines.append(line | {"records": path})
    if not lines:
        raise InputError(f"{index}: no lines; expected one JSON object a record file")
    return lines


def columns(lines: list[dict]) -> tuple[str, ...]:
    """The keys that tell rows apart: model, β, and whatever else varies."""

    def varies(key: str) -> bool:
        # What only fine-tuning has, such as its learning rate, the base model need not lack.
        tuned = [line for line in lines if key in line or line["label_smoothing"] is not None]
        return len({line.get(key) for line in tuned}) > 1

    every = dict.fromkeys((*Line.model_fields, *(key for line in lines for key in line)))
    free = [key for key in every if key not in (*NO_ROW, *FIRST) and varies(key)]
    return (*FIRST[:1] * varies("train_data"), *FIRST[1:], *free)


def _order(row: Row) -> tuple:
    """By block, calibrators after β, then whatever else varies; absent before numbers, text."""
    keys = dict.fromkeys(("train_data", "model", "calibrator", "label_smoothing", *row.shown))
    values = [row.keys.get(key) for key in keys if key in row.shown]
    return tuple(
        (0, 0, "") if v is None else (1, v, "") if isinstance(v, (int, float)) else (2, 0, v)
        for v in values
    )

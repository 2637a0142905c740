"""Records: one JSON line a question, from which every metric recomputes.

    {"id", "subject", "label", "logprobs": [natural log, one a choice], "letter_mass",
     "prompt_sha256", "shots", "model", "versions"}

`RECORDS.jsonl.meta.json` beside them holds the settings and costs of the run.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibeval.io import InputError, json_lines

FIELDS = {
    "id": (str, "text in quotes"),
    "subject": (str, "text in quotes"),
    "label": (int, "a whole number"),
    "logprobs": (list, "a list of numbers"),
    "letter_mass": ((int, float), "a number"),
}


@dataclass(frozen=True)
class Records:
    """A record file as arrays; choices are padded with log-probability −∞."""

    path: Path
    ids: list[str]
    subjects: np.ndarray  # (N,) str
    labels: np.ndarray  # (N,) int
    logprobs: np.ndarray  # (N, K)
    letter_mass: np.ndarray  # (N,)
    model: str

    def __len__(self) -> int:
        return len(self.ids)


def sidecar(path: Path) -> Path:
    """Where a record file's settings are."""
    return path.with_name(path.name + ".meta.json")


def read(path: Path) -> Records:
    """Read and check a record file; the first bad line raises `InputError` with its number."""
    path = Path(path)
    require(path)
    rows, seen = [], {}
    try:
        for number, row in json_lines(path):
            check(row, f"{path}, line {number}")
            if row["id"] in seen:
                raise InputError(
                    f"{path}, line {number}: id {row['id']!r} is on line {seen[row['id']]} already"
                )
            seen[row["id"]] = number
            rows.append(row)
    except InputError as error:
        if rows:
            raise InputError(
                f"{error}; the records before it ({len(rows)}) are intact, and `score` with the "
                f"same options completes the file"
            ) from error
        raise
    if not rows:
        raise InputError(f"{path}: no records")
    width = max(len(row["logprobs"]) for row in rows)
    logprobs = np.full((len(rows), width), -np.inf)
    for i, row in enumerate(rows):
        logprobs[i, : len(row["logprobs"])] = row["logprobs"]
    return Records(
        path,
        [row["id"] for row in rows],
        np.array([row["subject"] for row in rows]),
        np.array([row["label"] for row in rows]),
        logprobs,
        np.array([row["letter_mass"] for row in rows], dtype=float),
        rows[0].get("model", "?"),
    )


def require(path: Path) -> None:
    """Raise `InputError` unless there is such a file."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {found}; expected a record file")


def check(row: dict, where: str) -> None:
    """Raise `InputError` unless the row is a whole record."""
    for key, (kind, expected) in FIELDS.items():
        if key not in row:
            raise InputError(f"{where}: no {key!r}; found {', '.join(row)}")
        if not isinstance(row[key], kind) or isinstance(row[key], bool):
            raise InputError(f"{where}: {key} is {row[key]!r}, expected {expected}")
    logprobs, label = row["logprobs"], row["label"]
    if not 2 <= len(logprobs) <= 26:
        raise InputError(f"{where}: logprobs: found {len(logprobs)}, expected 2 to 26")
    if not all(isinstance(v, (int, float)) and v <= 1e-6 for v in logprobs):
        raise InputError(f"{where}: logprobs are {logprobs}, expected numbers ≤ 0")
    if not 0 <= label < len(logprobs):
        raise InputError(f"{where}: label is {label}, expected 0 to {len(logprobs) - 1}")


def intact(path: Path) -> list[dict]:
    """The whole records of a file that may be cut short or damaged, each id once."""
    found = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(text)
            check(row, str(path))
        except (ValueError, TypeError):  # `InputError` is a ValueError
            continue
        found.setdefault(row["id"], row)
    return list(found.values())


def line(record: dict) -> str:
    """One record as a line of JSON."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"

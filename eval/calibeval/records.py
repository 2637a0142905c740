"""Records: one JSON line a question, from which every metric recomputes.

`Record` is the line, with "versions" beside it; `RECORDS.jsonl.meta.json` holds the settings.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from calibeval.io import InputError, counted, json_lines, read_text, write_text
from calibeval.request import checked

# What probabilities may sum to: lm-evaluation-harness rounds log-probabilities to the model's
# dtype, and bfloat16's 8 bits turn a sum of 1 into 1.005.
MOST = 1.01
ALIKE = ("scoring", "normalise", "model")  # in all records of a file
LogProbability = Annotated[float, Field(le=1e-6, allow_inf_nan=False)]


class Record(BaseModel, strict=True):
    """A question's K choices, answered by their letters or texts."""

    id: str
    subject: str
    label: NonNegativeInt  # index of the right choice
    logprobs: list[LogProbability] = Field(min_length=2)  # natural; sums over tokens
    # Of the letters among all tokens; null where nobody knows, as after a temperature.
    letter_mass: float | None = Field(None, ge=0, allow_inf_nan=False)
    model: str = "?"
    prompt_sha256: str | None = None
    shots: NonNegativeInt | None = None
    scoring: Literal["letters", "continuation"] = "letters"
    normalise: Literal["sum", "bytes", "characters"] = "sum"  # the convention
    bytes: list[PositiveInt] | None = None  # lengths of the choices' texts
    characters: list[PositiveInt] | None = None

    @model_validator(mode="after")
    def _whole(self):
        k = len(self.logprobs)
        if self.label >= k:
            raise ValueError(f"label is {self.label}, expected 0 to {k - 1}")
        if self.scoring == "letters":
            total = sum(map(math.exp, self.logprobs))
            if total > MOST:
                raise ValueError(f"the probabilities of logprobs sum to {total:.3g}, more than 1")
        for name, lengths in (("bytes", self.bytes), ("characters", self.characters)):
            if lengths is not None and len(lengths) != k:
                raise ValueError(f"{name}: found {len(lengths)}, expected {k}, one a choice")
        self.normalised(self.normalise)
        return self

    def normalised(self, by: str) -> np.ndarray:
        """(K,) s = log p(text | question): s, s / bytes or s / characters."""
        scores = np.array(self.logprobs)
        if by == "sum":
            return scores
        other = getattr(self, by, None)
        if self.scoring != "continuation" or other is None:
            raise ValueError(f"no {by!r} by which to normalise; scoring is {self.scoring!r}")
        return scores / other


@dataclass(frozen=True)
class Records:
    """A record file as arrays; choices that a question lacks are padded with −∞."""

    path: Path
    ids: list[str]
    labels: np.ndarray  # (N,) int
    logprobs: np.ndarray  # (N, K), normalised; finite where there is a choice
    letter_mass: np.ndarray  # (N,), NaN for continuations and where nobody knows
    prompts: np.ndarray  # (N,) SHA-256 of what each question was asked with, or None
    model: str
    scoring: str
    normalise: str

    def __len__(self) -> int:
        return len(self.ids)


def sidecar(path: Path) -> Path:
    """Where a record file's settings are."""
    return path.with_name(path.name + ".meta.json")


def read(path: Path, normalise: str | None = None) -> Records:
    """Read and check a record file; the first bad line raises `InputError` with its number.

    `normalise` is sum, bytes or characters; by default the records' convention.
    """
    path = Path(path)
    rows = [(where, checked(Record, raw, where)) for where, raw in json_lines(path)]
    about = meta(path)
    if len(rows) != (expected := about.get("questions", len(rows))):
        found = counted(len(rows), "record")
        raise InputError(f"{path}: {found}, but {sidecar(path).name} says {expected}")
    expected = (about.get("settings") or {}).get("prompts_sha256")
    if expected is None:
        return joined(path, rows, normalise, (*ALIKE, "shots"))
    # With a sidecar, fewer examples may stand before a question that would not fit otherwise.
    if prompts_digest((row.prompt_sha256, row.label) for _, row in rows) != expected:
        what = f"its prompts are not those that {sidecar(path).name} was written for"
        raise InputError(f"{path}: {what}; expected the records of one run in their order")
    return joined(path, rows, normalise)


def joined(
    path: Path,
    rows: Sequence[tuple[str, Record]],  # each with its place
    normalise: str | None = None,
    alike: Sequence[str] = ALIKE,
) -> Records:
    """Records that belong together; the first that does not raises `InputError`."""
    if not rows:
        raise InputError(f"{path}: no records")
    first, seen, scores = rows[0][1], {}, []
    for where, row in rows:
        if row.id in seen:
            raise InputError(f"{where}: id {row.id!r} is on {seen[row.id]} already")
        seen[row.id] = where.removeprefix(f"{path}, ")
        for key in alike:
            if (found := getattr(row, key)) != (one := getattr(first, key)):
                raise InputError(f"{where}: {key} {found!r} after {one!r}; expected the same")
        try:
            scores.append(row.normalised(normalise or row.normalise))
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
    every = [row for _, row in rows]
    counts = np.array([len(row.logprobs) for row in every])
    logprobs = np.full((len(rows), counts.max()), -np.inf)
    logprobs[np.arange(counts.max()) < counts[:, None]] = np.concatenate(scores)
    return Records(
        path,
        list(seen),
        np.array([row.label for row in every]),
        logprobs,
        np.array([r.letter_mass if r.scoring == "letters" else None for r in every], float),
        np.array([row.prompt_sha256 for row in every], object),
        first.model,
        first.scoring,
        normalise or first.normalise,
    )


def prompts_digest(asked: Iterable[tuple[str | None, int]]) -> str:
    """SHA-256 of what was asked, from each prompt's digest and the right answer."""
    text = "".join(f"{digest} {label}\n" for digest, label in asked)
    return hashlib.sha256(text.encode()).hexdigest()


def meta(path: Path) -> dict:
    """A record file's sidecar; empty where there is none, `InputError` where it is damaged."""
    if not sidecar(path).is_file():
        return {}
    try:
        return dict(json.loads(read_text(sidecar(path))))
    except (ValueError, TypeError) as error:
        raise InputError(f"{sidecar(path)}: not a JSON object ({error})") from error


def asked(path: Path) -> dict:
    """The settings a model was asked with; records at a temperature raise `InputError`."""
    about = meta(path)
    if "temperature" in about:
        raise InputError(f"{path}: is what a temperature made of a model's answers; give another")
    return about.get("settings") or {}


def write(path: Path, rows: Iterable[dict], about: dict) -> None:
    """Write a record file and its sidecar, with the numbers of questions and bytes."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    text = "".join(lines)
    about = about | {"questions": len(lines), "bytes": len(text.encode())}
    # The sidecar first: records without their settings would be unusable.
    write_text(sidecar(path), json.dumps(about, indent=1))
    write_text(path, text)

"""Records: one JSON line a question, from which every metric recomputes.

`Record` is the line, with the packages' "versions" beside it; `RECORDS.jsonl.meta.json`, the
sidecar, holds the settings that the model was asked with. `read` gives a whole file as arrays,
`Records`. While records are made, `store` keeps them.
"""

import hashlib
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from calibeval.io import (
    LARGE_FILE,
    InputError,
    counted,
    hanging,
    json_object,
    parse_json,
    placed_lines,
    read_text,
    refuse_larger,
    show,
    write_text,
)
from calibeval.validation import Unicode, checked

# What probabilities may sum to: lm-evaluation-harness rounds log-probabilities to the model's
# dtype, and bfloat16's 8 bits turn a sum of 1 into 1.005.
MOST_PROBABILITY = 1.01
# Keys that are the same in all records of a file.
ALIKE = ("scoring", "normalise", "model", "chat_template")
# Where no sidecar tells the prompts, the number of examples must be the same in all records too.
# Where one does, fewer examples may stand before a question that would not fit otherwise.
ALIKE_IF_PROMPTS_UNKNOWN = (*ALIKE, "shots")
# No model gives less than −1e9; a damaged file's −1e200 would overflow when it is squared.
LogProbability = Annotated[float, Field(ge=-1e9, le=1e-6, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, le=1 << 40)]  # a float can divide by it
WRITTEN_CONFIDENCES = ("p_true", "agreement")  # keys of probabilities of written answers
MASS_TOLERANCE = 0.01  # of letters' mass, for the same rounding
# This is the key of a setting in the sidecar of another program's records. It is false where the
# program's log does not say whether the model was asked in a chat. Where it is true or absent,
# records without a `chat_template` were not asked in a chat.
TEMPLATE_IS_KNOWN = "chat_template_is_known"


RawRecord = dict[str, Any]  # a record as it is written, before `Record` has checked it


class Record(BaseModel, strict=True):
    """A question's K choices, answered by their letters or texts, or the answer that was written.

    A written answer is the only choice, and its label is 0 where it is right, else 1.
    """

    id: Unicode
    subject: Unicode
    label: NonNegativeInt  # index of the right choice
    # Natural; sums over tokens. None of a written answer of which another program knows no more
    # than the agreement.
    logprobs: list[LogProbability]
    # Of the letters among all tokens; null where nobody knows, as after a temperature.
    letter_mass: float | None = Field(None, ge=0, allow_inf_nan=False)
    model: Unicode = "?"
    prompt_sha256: Unicode | None = None
    shots: NonNegativeInt | None = None
    # SHA-256 of the template's text. Null: not asked in a chat, or see `TEMPLATE_IS_KNOWN`.
    chat_template: str | None = None
    scoring: Literal["letters", "continuation", "generate"] = "letters"
    # By what the task's users divide texts' log-probabilities, and metrics do unless told.
    normalise: Literal["sum", "bytes", "characters", "tokens", "p_true", "agreement"] = "sum"
    bytes: list[Length] | None = None  # lengths of the choices' texts
    characters: list[Length] | None = None
    tokens: list[Length] | None = None  # of a written answer
    # Of a written answer: other probabilities that it is right, which stand in for its likelihood.
    p_true: Annotated[float, Field(ge=0, le=1)] | None = None
    agreement: Annotated[float, Field(ge=0, le=1)] | None = None
    truncated: NonNegativeInt = 0  # tokens that the prompt lost at its beginning, to fit

    @model_validator(mode="after")
    def _is_whole(self) -> "Record":
        choices = len(self.logprobs)
        is_written = self.scoring == "generate"
        if is_written and not choices and self.agreement is not None:
            choices = 1
        if choices == 0 or (choices == 1) != is_written:
            expected = "1, of the written answer" if is_written else "2 or more"
            raise ValueError(f"logprobs is {self.logprobs}: expected {expected}, found {choices}")
        last_label = 1 if is_written else choices - 1
        if self.label > last_label:
            raise ValueError(f"label is {self.label}, expected 0 to {last_label}")
        if self.scoring == "letters":
            total = sum(map(math.exp, self.logprobs))
            if total > MOST_PROBABILITY:
                raise ValueError(f"the probabilities of logprobs sum to {total:.3g}, more than 1")
            mass = total if self.letter_mass is None else self.letter_mass
            if abs(mass - total) > MASS_TOLERANCE:
                raise ValueError(
                    f"letter_mass is {mass:.3g}, but the probabilities of logprobs sum to "
                    f"{total:.3g}"
                )
        for name in ("bytes", "characters", "tokens"):
            lengths = getattr(self, name)
            if lengths is not None and len(lengths) != choices:
                raise ValueError(f"{name}: found {len(lengths)}, expected {choices}, one a choice")
        self.normalised(self.normalise)  # raises where the lengths for it are missing
        return self

    def normalised(self, by: str) -> list[float]:
        """Return s = log p(text | question), or s by the length of each choice, (K,).

        `by` is sum, bytes, characters or tokens. Of a written answer it may also be p_true or
        agreement, whose logarithm is returned. `ValueError` where the record lacks what it takes.
        """
        if by == "sum" and self.logprobs:
            return self.logprobs
        lengths = getattr(self, by, None)
        if by in WRITTEN_CONFIDENCES and lengths is not None:
            return [math.log(lengths) if lengths else -math.inf]
        if self.scoring == "letters" or lengths is None:
            remedy = ""
            if by == "agreement":
                remedy = "; score with --samples 10"
            elif not self.logprobs:
                remedy = "; this answer has its agreement alone: --normalise agreement"
            raise ValueError(
                f"no {by!r} by which to normalise; scoring is {self.scoring!r}{remedy}"
            )
        return [logprob / length for logprob, length in zip(self.logprobs, lengths, strict=True)]


class SidecarSettings(BaseModel, strict=True, extra="allow"):
    """What is read here of the settings that a model was asked with."""

    prompts_sha256: str | None = None
    shots: NonNegativeInt | None = None
    chat_template_is_known: bool = True


class AppliedTemperature(BaseModel, strict=True, extra="allow"):
    """What is read of the temperature that records are at."""

    temperature: float | None = Field(None, allow_inf_nan=False)
    normalise: str | None = None  # by what the records were read that it was fitted on


class Sidecar(BaseModel, strict=True, extra="allow"):
    """A record file's sidecar: what must be of its type, whoever has written it."""

    questions: NonNegativeInt | None = None
    bytes: NonNegativeInt | None = None
    settings: SidecarSettings | None = None
    temperature: AppliedTemperature | None = None


@dataclass(frozen=True)
class Records:
    """A record file as arrays over N questions; choices that one lacks are padded with −∞."""

    path: Path
    ids: list[str]
    labels: np.ndarray  # (N,) int
    logprobs: np.ndarray  # (N, K), normalised; finite where there is a choice
    letter_mass: np.ndarray  # (N,), NaN for continuations and where nobody knows
    prompts: np.ndarray  # (N,) SHA-256 of what each question was asked with, or None
    model: str
    scoring: str
    normalise: str
    subjects: np.ndarray  # (N,) each question's subject
    chat_template: str | None = None
    chat_template_is_known: bool = True  # if not, they may have been asked in a chat all the same
    # The examples that were wanted before each question, of which a prompt that would not fit has
    # fewer; without a sidecar that says so, the most that any has. None where nobody knows.
    shots: int | None = None
    truncated_prompts: int = 0  # how many lost their beginning, to fit the model
    shown_shots: str | None = None  # what `described_shots` says of them; None where nobody knows

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def references(self) -> np.ndarray:
        """(N,) What two files of one data set agree in: the right choice, 0 of written answers.

        The label of a written answer is the model's, not the question's.
        """
        return np.zeros_like(self.labels) if self.scoring == "generate" else self.labels

    @property
    def tied(self) -> int:
        """How many questions have several likeliest choices, of which the first is the answer."""
        is_likeliest = self.logprobs == self.logprobs.max(1, keepdims=True)
        return int((is_likeliest.sum(1) > 1).sum())


def warn_of_ties(path: Path, tied: int, questions: int) -> None:
    """Print how many questions are tied, if any is: the order of the choices decides these."""
    if tied:
        message = (
            f"warning: {path}: {tied} of {counted(questions, 'question')} have several likeliest "
            "choices, of which the first counts as the answer"
        )
        show(hanging(message), to_stderr=True)


def sidecar(path: Path) -> Path:
    """Return where a record file's settings are."""
    return path.with_name(path.name + ".meta.json")


def read(path: Path, normalise: str | None = None) -> Records:
    """Read and check a record file; the first bad line raises `InputError` with its number.

    `normalise` is what `Record.normalised` takes; by default the records' convention. Records at a
    temperature take no other likelihood than that which it was fitted to.
    """
    path = Path(path)
    if path.is_file():
        refuse_larger(path, path.stat().st_size, LARGE_FILE)
    about = meta(path)
    fitted_by = (about.get("temperature") or {}).get("normalise")
    if fitted_by and normalise not in (None, fitted_by, *WRITTEN_CONFIDENCES):
        raise InputError(
            f"{path}: its temperature was fitted by {fitted_by!r}, so it says nothing by "
            f"{normalise!r}; leave --normalise out"
        )
    settings = about.get("settings") or {}
    expected_prompts = settings.get("prompts_sha256")
    alike = ALIKE_IF_PROMPTS_UNKNOWN if expected_prompts is None else ALIKE
    records = joined(path, _placed_records(path), normalise, alike)
    records = replace(
        records,
        shots=settings.get("shots", records.shots),
        chat_template_is_known=settings.get(TEMPLATE_IS_KNOWN, True),
    )
    expected_questions = about.get("questions", len(records))
    if len(records) != expected_questions:
        found = counted(len(records), "record")
        raise InputError(f"{path}: {found}, but {sidecar(path).name} says {expected_questions}")
    if expected_prompts is not None:
        prompts = zip(records.prompts, records.references.tolist(), strict=True)
        if prompts_digest(prompts) != expected_prompts:
            raise InputError(
                f"{path}: its prompts are not those that {sidecar(path).name} was written for; "
                "expected the records of one run in their order"
            )
    size = path.stat().st_size
    expected_size = about.get("bytes", size)
    if size != expected_size:
        raise InputError(
            f"{path}: {size:,} bytes, but {sidecar(path).name} says {expected_size:,}: one of the "
            "two is of another scoring, which a kill between their writing leaves; delete both and "
            "score again, or delete the sidecar alone if the records were edited on purpose"
        )
    return records


def _placed_records(path: Path) -> Iterator[tuple[str, Record]]:
    """The records of a file, each with its place."""
    for where, line in placed_lines(path):
        try:
            record = Record.model_validate_json(line)
        except ValidationError:
            # pydantic parses faster than `json` and takes a little less, such as half of a
            # surrogate pair in a key of another program. What is wrong `checked` says.
            record = checked(Record, json_object(where, line), where)
        yield where, record


def common(path_a: Path, path_b: Path, normalise: str | None = None) -> tuple[Records, Records]:
    """Read the questions that two files have in common, with the same right answers; say how many.

    Raises `InputError` where there is none, and what `read` raises.
    """
    whole_a = read(path_a, normalise)
    whole_b = read(path_b, normalise)
    ids = {question for question, _ in _ids_and_labels(whole_a) & _ids_and_labels(whole_b)}
    if not ids:
        raise InputError(
            f"{path_a} and {path_b}: no question in common, by id and right answer; expected "
            "records of one data set"
        )
    note = (
        f"{path_a} and {path_b}: {counted(len(ids), 'question')} of {len(whole_a)} and "
        f"{len(whole_b)} are common; the others are left out"
    )
    show(hanging(note), to_stderr=True)
    return _part(whole_a, ids, normalise), _part(whole_b, ids, normalise)


def _ids_and_labels(records: Records) -> set[tuple[str, int]]:
    return set(zip(records.ids, records.references.tolist(), strict=True))


def _part(whole: Records, ids: set[str], normalise: str | None) -> Records:
    """The records of some questions alone."""
    rows = ((where, record) for where, record in _placed_records(whole.path) if record.id in ids)
    return replace(
        joined(whole.path, rows, normalise),
        shots=whole.shots,
        chat_template_is_known=whole.chat_template_is_known,
    )


def joined(
    path: Path,
    rows: Iterable[tuple[str, Record]],
    normalise: str | None = None,
    alike: Sequence[str] = ALIKE,
) -> Records:
    """Join records, each with its place; the first that does not belong raises `InputError`.

    `alike` are the keys whose values must be the same in all. The records are taken one by one and
    not kept, so that a million of them fit into memory.
    """
    first: Record | None = None
    alike_values = attrgetter(*alike)
    place_of_id: dict[str, str] = {}
    labels = array("q")
    logprobs = array("d")  # of all choices, one question after another
    choices = array("q")
    letter_mass = array("d")
    prompts: list[str | None] = []
    subjects: list[str] = []
    shots: list[int | None] = []
    truncated_prompts = 0
    for where, row in rows:
        first = first or row
        if row.id in place_of_id:
            raise InputError(f"{where}: id {row.id!r} is on {place_of_id[row.id]} already")
        place_of_id[row.id] = where.removeprefix(f"{path}, ")
        if alike_values(row) != alike_values(first):
            raise InputError(f"{where}: {_difference(row, first, alike)}; expected the same")
        try:
            values = row.normalised(normalise or row.normalise)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
        logprobs.extend(values)
        choices.append(len(values))
        labels.append(row.label)
        letter_mass.append(_letter_mass(row))
        prompts.append(row.prompt_sha256)
        subjects.append(sys.intern(row.subject))
        shots.append(row.shots)
        if row.truncated:
            truncated_prompts += 1
    if first is None:
        raise InputError(f"{path}: no records")
    known_shots = [number for number in shots if number is not None]
    shown_shots = None
    if len(known_shots) == len(shots):
        shown_shots = described_shots(questions_of_shots(known_shots))
    return Records(
        path=path,
        ids=list(place_of_id),
        labels=np.array(labels),
        logprobs=_padded(np.array(logprobs), np.array(choices)),
        letter_mass=np.array(letter_mass),
        prompts=np.array(prompts, object),
        model=first.model,
        scoring=first.scoring,
        normalise=normalise or first.normalise,
        subjects=np.array(subjects, object),
        chat_template=first.chat_template,
        shots=max(known_shots, default=None),
        truncated_prompts=truncated_prompts,
        shown_shots=shown_shots,
    )


def questions_of_shots(shots: Iterable[int]) -> dict[int, int]:
    """Return how many questions have how many examples before them, the most examples first."""
    return dict(sorted(Counter(shots).items(), reverse=True))


def described_shots(questions: Mapping[int, int]) -> str:
    """Return what `questions_of_shots` counts in words: "5 before 300 questions, 4 before 42"."""
    (first, number), *others = questions.items()
    parts = [f"{first or 'none'} before {counted(number, 'question')}"]
    parts += [f"{shots or 'none'} before {number}" for shots, number in others]
    return ", ".join(parts)


def _difference(row: Record, first: Record, keys: Sequence[str]) -> str:
    """The first of the keys in which two records differ, with both values."""
    key = next(key for key in keys if getattr(row, key) != getattr(first, key))
    return f"{key} {getattr(row, key)!r} after {getattr(first, key)!r}"


def _padded(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of so many values each as an array (N, K), with −∞ behind the shorter ones."""
    most = lengths.max()
    padded = np.full((len(lengths), most), -np.inf)
    padded[np.arange(most) < lengths[:, None]] = values
    return padded


def _letter_mass(row: Record) -> float:
    """The letters' probability among all tokens; NaN of texts and where nobody knows."""
    if row.scoring != "letters" or row.letter_mass is None:
        return math.nan
    return row.letter_mass


def prompts_digest(prompts: Iterable[tuple[str | None, int]]) -> str:
    """Return the SHA-256 of what was asked, from each prompt's digest and right answer.

    It depends on their order. `prompts_sha256` of a sidecar is of the file's order, that of an
    `Evaluation` of the order of the ids, so that files in other orders can be compared.
    """
    total = hashlib.sha256()
    for digest, label in prompts:
        total.update(f"{digest} {label}\n".encode())
    return total.hexdigest()


def meta(path: Path) -> dict[str, Any]:
    """Return a record file's sidecar; empty without one, `InputError` where it is damaged."""
    if not sidecar(path).is_file():
        return {}
    try:
        about = dict(parse_json(read_text(sidecar(path))))
    except (ValueError, TypeError) as error:
        raise InputError(f"{sidecar(path)}: not a JSON object ({error})") from error
    checked(Sidecar, about, str(sidecar(path)))
    return about


def settings_of_scoring(path: Path) -> dict[str, Any]:
    """Return the settings that a model was scored with, by the file's sidecar; empty without one.

    Records at a temperature raise `InputError`: no model was asked for these.
    """
    about = meta(path)
    if "temperature" in about:
        raise InputError(f"{path}: is what a temperature made of a model's answers; give another")
    return about.get("settings") or {}


def write(path: Path, rows: Iterable[RawRecord], about: dict[str, Any]) -> None:
    """Write a record file and its sidecar `about`, with the numbers of questions and bytes."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    text = "".join(lines)
    sizes = {"questions": len(lines), "bytes": len(text.encode())}
    # The sidecar first: records without their settings would be unusable.
    write_text(sidecar(path), json.dumps({**about, **sizes}, indent=1))
    write_text(path, text)

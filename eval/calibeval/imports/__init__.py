"""Other programs' logs as records.

    logs         what a log is read as
    lm_eval      lm-evaluation-harness
    inspect_ai   Inspect
    lighteval    lighteval

Samples of which nothing is known, such as those in which Inspect found no answer, are left out,
counted and said: `logs.LEFT_OUT` lists why.

Whether the model was asked in its chat is known only where lm-evaluation-harness's results say. Of
other logs the sidecar says that it is not known, and `compare` takes them as asked in either way.

To add a program, write a module with a `LogFormat`, and let `format_of` choose it.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibeval import records
from calibeval.imports.inspect_ai import INSPECT
from calibeval.imports.lighteval import LIGHTEVAL
from calibeval.imports.lm_eval import LM_EVAL
from calibeval.imports.logs import LEFT_OUT, NOT_A_SAMPLE, LeftOut, Log, LogFormat, LogSample
from calibeval.io import InputError, counted, sha256, show
from calibeval.records import RawRecord
from calibeval.validation import checked

# What makes a file's name: a data set's may be anything in a log.
DATA_SET_NAME = re.compile(r"\w[\w.+=-]{0,199}")


@dataclass
class _Target:
    """A record file to be written."""

    program: str
    rows: list[tuple[str, RawRecord]] = field(default_factory=list)  # each with its place
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of each log, by its name
    left_out: Counter[str] = field(default_factory=Counter)  # by the reason, of `LEFT_OUT`
    tells_of_chats: bool = True  # whether all its logs do
    tied: int = 0  # questions with several likeliest choices


def convert(paths: list[Path], out: Path, epoch: int | None = None) -> dict[str, int]:
    """Write logs as records, to a file `*.jsonl` or to a folder with a file a data set.

    `epoch` says which answers are read of a log that asks each question several times.

    Returns how many questions each file has. Raises `InputError`, naming file and place, for what
    is no multiple choice, and for files that do not belong into one, as those with other examples
    do not; then nothing is written.
    """
    targets: dict[Path, _Target] = {}
    for path in paths:
        _add_log(path, out, targets, epoch)
    for file, target in targets.items():
        placed_records = [
            (place, checked(records.Record, row, place)) for place, row in target.rows
        ]
        try:
            # What could not be read as one file, or has an id twice, is refused.
            joined = records.joined(file, placed_records, alike=records.ALIKE_IF_PROMPTS_UNKNOWN)
        except InputError as error:
            raise InputError(
                f"{error}; ask all questions of a log alike, and give logs of others another --out"
            ) from error
        target.tied = joined.tied
    for file, target in targets.items():
        _write(file, target)
    return {str(file): len(target.rows) for file, target in targets.items()}


def _add_log(path: Path, out: Path, targets: dict[Path, _Target], epoch: int | None) -> None:
    """Read a log, and add its rows to the file that they belong to."""
    log_format = format_of(path)
    log = log_format.read(path)
    if not log.samples:
        raise InputError(f"{path}: no samples")
    file = out
    if out.suffix != ".jsonl":
        if not DATA_SET_NAME.fullmatch(log.data_set):
            raise InputError(
                f"{path}: its task {log.data_set[:60]!r} does not make a file's name; "
                "give --out FILE.jsonl"
            )
        file = out / f"{log.data_set}.jsonl"
    if file.exists():
        raise InputError(f"{file}: exists; give another --out, or delete it")
    target = targets.setdefault(file, _Target(log_format.program))
    if target.program != log_format.program:
        raise InputError(
            f"{path}: is of {log_format.program}, but other logs for {file} are of "
            f"{target.program}; give each program's logs another --out"
        )
    left_out: Counter[str] = Counter()
    samples = _samples_of_epoch(log, epoch, path)
    for sample in samples:
        try:
            row = sample.make_row()
        except LeftOut as reason:
            left_out[reason.reason] += 1
            continue
        except NOT_A_SAMPLE as error:
            problem = str(error) if type(error) is ValueError else repr(error)
            raise InputError(
                f"{sample.place}: {problem}; expected {log_format.expected}"
            ) from error
        target.rows.append((sample.place, {**row, **log.shared}))
    if left_out.total() == len(samples):
        raise InputError(
            f"{path}: none of {counted(len(samples), 'sample')} can be used: "
            f"{_described_as_left_out(left_out)}"
        )
    # Logs of two runs may have one name; then the second is known by its path as it was given.
    name = str(path) if path.name in target.digests else path.name
    target.digests[name] = sha256(path)
    target.left_out += left_out
    target.tells_of_chats = target.tells_of_chats and log.tells_of_chats


def _samples_of_epoch(log: Log, epoch: int | None, path: Path) -> list[LogSample]:
    """The samples in which each question is asked once; `InputError` where none is chosen."""
    epochs = sorted({sample.epoch for sample in log.samples})
    if epoch is None and len(epochs) > 1:
        raise InputError(
            f"{path}: its questions were asked in {len(epochs)} epochs, and records hold one "
            f"answer to each; give --epoch {epochs[0]}, or another up to {epochs[-1]}"
        )
    if epoch is not None and epoch not in epochs:
        raise InputError(f"{path}: no epoch {epoch}; there are {', '.join(map(str, epochs))}")
    return [sample for sample in log.samples if epoch in (None, sample.epoch)]


def _described_as_left_out(left_out: Counter[str]) -> str:
    """How many samples are left out, and why."""
    parts = []
    for reason, words in LEFT_OUT.items():
        if left_out[reason]:
            parts.append(f"{counted(left_out[reason], 'sample')} {words}")
    return ", ".join(parts)


def _write(file: Path, target: _Target) -> None:
    """Write a record file with its sidecar, and say so."""
    rows = [row for _, row in target.rows]
    first = rows[0]
    settings: dict[str, Any] = {"engine": target.program, "samples": target.digests}
    if not target.tells_of_chats:
        settings[records.TEMPLATE_IS_KNOWN] = False
    settings.update(target.left_out)
    if target.left_out:
        show(
            f"warning: {file}: {_described_as_left_out(target.left_out)} left out, "
            f"{len(rows)} kept: every metric is of those that are kept",
            to_stderr=True,
        )
    about = {
        "settings": settings,
        "model": first["model"],
        "versions": first["versions"],
    }
    records.write(file, rows, about)
    scoring = first.get("scoring", "letters")
    normalise = first.get("normalise", "sum")
    records.warn_of_ties(file, target.tied, len(rows))
    questions = counted(len(rows), "question")
    show(f"{file}: {questions}, {scoring} by {normalise}", to_stderr=True)


def format_of(path: Path) -> LogFormat:
    """The format of a log, by its name's end."""
    if path.suffix == ".parquet":
        return LIGHTEVAL
    return INSPECT if path.suffix in (".json", ".eval") else LM_EVAL

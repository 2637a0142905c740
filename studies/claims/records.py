"""The published records of every run, one Parquet file a model, readable with pandas alone.

    records/<model>.parquet                 every question of every run of a model
    records/questions.parquet               what was asked, which is the same for all models
    records/manifest.json                   the SHA-256, rows and bytes of these two kinds of files
    records/<model>/entropy_gap.jsonl       entropy less log loss on held-out answers, a line a run
    records/<model>/<origin>/<run>.parquet  a staged run: ended, and not yet merged into its model's

A row of a model's file is one question of one run, beside the run's learning rate, β and seed. The
column `part` is the run's `RunRecord.origin`. A run that was not scored has one row, whose task is
null. Log-probabilities are kept in steps of 1/128, as 16-bit integers: `row.logprob_steps / 128`.
Rounding moves a log-probability by at most 1/256, as often up as down. So it moves a probability p
among all tokens by about p / 256 at most, and one among the choices by about p (1 - p) / 128 at
most, where p is rounded one way and the others the other way. The smallest 16-bit number stands for
all log-probabilities below −256; only long continuations have such, whose probability is 0 either
way. A row group is a run, so that one run is read without the others.

`add` stages a run: it writes the run's own small file. `merge` moves staged runs into the model's
file; both hold a lock. Where a run is staged and is in the model's file too, it was recorded again
after the merge, or the merge was killed; the staged file counts, and in the second case says the
same. A kill at any moment loses nothing: a staged file goes only after the model's file and the
manifest are whole.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from calibeval.io import InputError, atomic_write, json_lines, sha256, write_text
from sweeps.runs.files import locked

STEPS_PER_NAT = 128  # Log-probabilities are kept as whole numbers of 1/128 nat.
SMALLEST_STEP = -(2**15)
LOCK_SECONDS = 600.0  # a merge of the largest model takes under one minute

RUN_SCHEMA = pa.schema(
    [
        ("part", pa.string()),
        ("run", pa.string()),
        ("learning_rate", pa.float64()),
        ("label_smoothing", pa.float64()),
        ("seed", pa.int32()),
        ("held_out_loss", pa.float64()),
        ("temperature", pa.float64()),
        ("alpha", pa.float64()),
        ("task", pa.string()),
        ("question", pa.int32()),
        ("logprob_steps", pa.list_(pa.int16())),
    ],
    metadata={"logprob_step": f"1/{STEPS_PER_NAT}"},
)
QUESTION_SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("question", pa.int32()),
        ("id", pa.string()),
        ("subject", pa.string()),
        ("label", pa.int32()),
        ("prompt_sha256", pa.string()),
        ("shots", pa.int32()),
        ("scoring", pa.string()),
        ("normalise", pa.string()),
        ("characters", pa.list_(pa.int32())),
        ("bytes", pa.list_(pa.int32())),
        ("choices", pa.int32()),
    ]
)
QUESTION_FIELDS = (
    "id",
    "subject",
    "label",
    "prompt_sha256",
    "shots",
    "scoring",
    "normalise",
    "characters",
    "bytes",
)
Questions = dict[str, list[dict[str, Any]]]  # by task, in the order in which they were asked


@dataclass
class RunRecord:
    """What is kept of a run beside its answers, and how many questions of each task it answered.

    A further field is a column of RUN_SCHEMA too. All files are read by these columns, so the
    published ones must then be rewritten, which no command does.
    """

    # A part of the study, a step (`temperature` or `averaged`), a derivation of `derived.py`, or
    # `base`, the base model, which all parts share. Of the origin `temperature` are both the step's
    # runs, which are stored and were asked nothing, and the derivation's, which have answers.
    origin: str
    run: str
    learning_rate: float | None = None
    label_smoothing: float | None = None
    seed: int | None = None
    held_out_loss: float | None = None
    temperature: float | None = None  # at which the run's answers are read
    alpha: float | None = None  # the tuned model's weight, of the step `averaged`
    tasks: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What tells a run apart: a model of `recommended` has its name in other parts too."""
        return self.origin, self.run


RECORD_COLUMNS = [each.name for each in fields(RunRecord) if each.name != "tasks"]
# The same in the files, whose columns keep the names under which they were published.
FILE_COLUMNS = ["part" if name == "origin" else name for name in RECORD_COLUMNS]


class RecordStore:
    """The folder of all published records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = folder / "manifest.json"
        self.question_file = folder / "questions.parquet"

    def model_file(self, model: str) -> Path:
        """The file of all merged runs of a model."""
        return self.folder / f"{model}.parquet"

    def staged_file(self, model: str, origin: str, run: str) -> Path:
        """The file of one run until it is merged."""
        return self.folder / model / origin / f"{run}.parquet"

    def entropy_gap_file(self, model: str) -> Path:
        """The entropy gaps of a model's runs, as JSON lines."""
        return self.folder / model / "entropy_gap.jsonl"

    def models(self) -> list[str]:
        """The models that have records, in the order of their names."""
        merged = {path.stem for path in self.folder.glob("*.parquet")} - {"questions"}
        staged = {path.parents[1].name for path in self.folder.glob("*/*/*.parquet")}
        return sorted(merged | staged)

    def runs(self, model: str) -> list[RunRecord]:
        """Every run of a model, merged or not, in the order of origins and names."""
        records, _ = self._records_and_files(model)
        return [records[key] for key in sorted(records)]

    def keys(self, model: str) -> set[tuple[str, str]]:
        """The origin and the name of every run of a model."""
        return {record.key for record in self.runs(model)}

    def questions(self) -> Questions:
        """What was asked, by task: the fields of a record that no model changes."""
        questions: Questions = {}
        if self.question_file.exists():
            for row in pq.read_table(self.question_file).to_pylist():
                task = row.pop("task")
                del row["question"]
                given = {key: value for key, value in row.items() if value is not None}
                questions.setdefault(task, []).append(given)
        return questions

    def add(self, model: str, record: RunRecord, files: dict[str, Path]) -> None:
        """Write a run's records, {task: file of JSON lines}, as a file of its own.

        A run that was not scored has no files. Raises InputError if a task was asked otherwise
        than of the runs that are there.
        """
        questions: Questions = {}
        steps: list[np.ndarray] = []
        for task, path in files.items():
            rows = [row for _, row in json_lines(path)]
            questions[task] = [_question_of(row) for row in rows]
            steps += [_steps_of(row["logprobs"]) for row in rows]
        self._keep_questions(questions)
        tasks = {task: len(asked) for task, asked in questions.items()}
        answered = replace(record, tasks=tasks)
        # Without the lock, a merge that has read an earlier file of this run could then delete the
        # file that is written here in its place.
        with self._lock():
            _write_tables(self.staged_file(model, *record.key), [_run_table(answered, steps)])

    def merge(self, model: str) -> None:
        """Move the runs that have files of their own into the model's file."""
        if not self._staged(model):
            return
        with self._lock():
            staged = self._staged(model)
            _, file_of_run = self._records_and_files(model)
            tables = (_read_run(file_of_run[key], key) for key in sorted(file_of_run))
            _write_tables(self.model_file(model), tables)
            self._update_manifest(self.model_file(model))
            for path in staged:
                path.unlink()

    def file_state(self, model: str, record: RunRecord) -> str:
        """The name, size and time of the file that holds a run's answers, as a text.

        If the text has not changed, neither have the answers. If it has changed, they may still be
        the same: a merge moves them into another file and changes none.
        """
        path = self._file_of(model, record.key)
        status = path.stat()
        return f"{path.name} {status.st_size} {status.st_mtime_ns}"

    def unpack(self, model: str, record: RunRecord, questions: Questions, out: Path) -> None:
        """Write a run's records as `<out>/<task>.jsonl`.

        They are as they were scored, but for three things: log-probabilities are rounded to whole
        steps, `letter_mass` is summed over them, and `model` is the run's name.
        """
        path = self._file_of(model, record.key)
        table = _read_run(path, record.key)
        for task, count in record.tasks.items():
            of_task = table.filter(pc.field("task") == task)
            steps = of_task["logprob_steps"].to_pylist()
            answers_all = len(steps) == len(questions[task])
            if not answers_all or len(steps) != count:
                raise InputError(f"{path}: {record.run} does not answer every question of {task}")
            with atomic_write(out / f"{task}.jsonl") as file:
                for question, steps_of_question in zip(questions[task], steps, strict=True):
                    row = {key: question[key] for key in QUESTION_FIELDS if key in question}
                    logprobs = np.array(steps_of_question) / STEPS_PER_NAT
                    row["logprobs"] = logprobs.tolist()
                    row["model"] = record.run
                    if question.get("scoring", "letters") == "letters":
                        row["letter_mass"] = float(np.exp(logprobs).sum())
                    file.write(json.dumps(row) + "\n")

    def _staged(self, model: str) -> list[Path]:
        return sorted((self.folder / model).glob("*/*.parquet"))

    def _file_of(self, model: str, key: tuple[str, str]) -> Path:
        """The file that counts for a run: its own, where it has one."""
        staged = self.staged_file(model, *key)
        return staged if staged.exists() else self.model_file(model)

    def _records_and_files(
        self, model: str
    ) -> tuple[dict[tuple[str, str], RunRecord], dict[tuple[str, str], Path]]:
        """Every run of a model, and the file that counts for it as `_file_of` says, by their keys.

        Staged files are read first, so that a run which is merged meanwhile is seen twice and never
        missed. Of a run that is in both files the staged one counts, which is met first.
        """
        records: dict[tuple[str, str], RunRecord] = {}
        files: dict[tuple[str, str], Path] = {}
        for path in [*self._staged(model), self.model_file(model)]:
            for record in _read_records(path):
                records.setdefault(record.key, record)
                files.setdefault(record.key, path)
        return records, files

    def _keep_questions(self, questions: Questions) -> None:
        """Add the questions of new tasks; raises InputError where a known task was asked others."""
        if not questions:
            return
        with self._lock():
            known = self.questions()
            for task, asked in questions.items():
                if known.get(task, asked) != asked:
                    words = f"{task} was asked in other words, or of other questions"
                    raise InputError(f"{self.question_file}: {words}")
            if questions.keys() <= known.keys():
                return
            rows = [
                {"task": task, "question": number, **question}
                for task, asked in {**known, **questions}.items()
                for number, question in enumerate(asked)
            ]
            table = pa.Table.from_pylist(rows, schema=QUESTION_SCHEMA)
            with atomic_write(self.question_file, "wb") as file:
                pq.write_table(table, file, compression="zstd", compression_level=19)
            self._update_manifest(self.question_file)

    def _update_manifest(self, path: Path) -> None:
        entries = {}
        if self.manifest.exists():
            entries = json.loads(self.manifest.read_text())
        entries[path.name] = {
            "sha256": sha256(path),
            "rows": pq.read_metadata(path).num_rows,
            "bytes": path.stat().st_size,
        }
        write_text(self.manifest, json.dumps(entries, indent=2, sort_keys=True) + "\n")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process at a time change what all runs share."""
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"{self.folder}: another process has been writing for {LOCK_SECONDS:.0f} seconds"
        with locked(self.folder / ".lock", LOCK_SECONDS, busy):
            yield


def _question_of(row: dict[str, Any]) -> dict[str, Any]:
    question = {key: row[key] for key in QUESTION_FIELDS if row.get(key) is not None}
    question["choices"] = len(row["logprobs"])
    return question


def _steps_of(logprobs: list[float]) -> np.ndarray:
    steps = np.rint(STEPS_PER_NAT * np.array(logprobs))
    return np.clip(steps, SMALLEST_STEP, 0).astype(np.int16)


def _run_table(record: RunRecord, steps: list[np.ndarray]) -> pa.Table:
    """A run's rows: `steps` has an array for each question, one task after another."""
    tasks: list[str | None] = []
    numbers: list[int | None] = []
    for task, count in record.tasks.items():
        tasks += [task] * count
        numbers += range(count)
    answers: list[np.ndarray | None] = [*steps]
    if not tasks:  # a run that was not scored has one row
        tasks.append(None)
        numbers.append(None)
        answers.append(None)
    value_of = asdict(record)
    columns: dict[str, list[Any]] = {}
    for name, column in zip(RECORD_COLUMNS, FILE_COLUMNS, strict=True):
        columns[column] = [value_of[name]] * len(tasks)
    columns.update(task=tasks, question=numbers, logprob_steps=answers)
    return pa.Table.from_pydict(columns, schema=RUN_SCHEMA)


def _write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write a file of runs, each of which becomes a row group."""
    with (
        atomic_write(path, "wb") as file,
        pq.ParquetWriter(
            file,
            RUN_SCHEMA,
            compression="zstd",
            compression_level=19,
            use_dictionary=[*FILE_COLUMNS, "task"],
            # The high bytes of all steps, and then their low bytes, compress better than pairs.
            column_encoding={
                "logprob_steps.list.element": "BYTE_STREAM_SPLIT",
                "question": "DELTA_BINARY_PACKED",
            },
            data_page_size=2**24,  # a run's steps in one page
            write_batch_size=2**20,
        ) as writer,
    ):
        for table in tables:
            writer.write_table(table, row_group_size=table.num_rows)


def _read_run(path: Path, key: tuple[str, str]) -> pa.Table:
    origin, run = key
    return pq.read_table(path, filters=[("part", "==", origin), ("run", "==", run)])


def _read_records(path: Path) -> list[RunRecord]:
    """The runs of a file, without their answers; none where there is no file."""
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:  # no run is merged yet, or this one has been since it was listed
        return []
    records = []
    with file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=[*FILE_COLUMNS, "task"])
            (values,) = table.select(FILE_COLUMNS).slice(0, 1).to_pylist()
            values["origin"] = values.pop("part")
            counts = table["task"].value_counts().to_pylist()
            tasks = {each["values"]: each["counts"] for each in counts if each["values"]}
            records.append(RunRecord(**values, tasks=tasks))
    return records

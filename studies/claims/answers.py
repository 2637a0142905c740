"""The runs of a model that have answers, and how they are found by origin, β and seed."""

from dataclasses import dataclass
from pathlib import Path

from calibeval.io import InputError, read_text, write_text
from studies.claims.parts import Study
from studies.claims.records import RunRecord


@dataclass(frozen=True)
class AnsweredRun:
    """A run, and the folder of its answers, `<folder>/<task>.jsonl` for each task."""

    record: RunRecord
    folder: Path


@dataclass(frozen=True)
class Term:
    """The runs of an origin (`RunRecord.origin`), at one label smoothing or, without it, at any."""

    origin: str
    label_smoothing: float | None = None

    def matches(self, record: RunRecord) -> bool:
        """Whether a run is one of these."""
        if record.origin != self.origin:
            return False
        return self.label_smoothing is None or record.label_smoothing == self.label_smoothing


BASE = Term("base")
PLAIN = Term("recommended", 0.0)
SMOOTHED = Term("recommended", 0.1)
OVER_TRAINED = Term("over-trained", 0.0)
# PLAIN at a temperature that is fitted on MMLU's val questions, and OVER_TRAINED at one that is
# fitted on its test questions, each half for the other.
PLAIN_AT_TEMPERATURE = Term("temperature")
OVER_TRAINED_AT_TEMPERATURE = Term("over-trained-temperature")
# The tasks that are answered by letters, with the names of the page's tables.
LETTER_TASKS = {"mmlu": "MMLU", "arc-letters": "ARC-Easy", "hellaswag-letters": "HellaSwag"}
UNPACKED = "DONE"  # beside a run's unpacked answers: the state of the file they come from


def unpacked_folder(study: Study, origin: str, run: str) -> Path:
    """Where a run's answers are unpacked."""
    return study.runs_folder / "unpacked" / study.model / origin / run


def unpack_scored_runs(study: Study) -> list[AnsweredRun]:
    """The runs that were scored, whose records are unpacked where that is not done already."""
    records = study.store.runs(study.model)
    if not records:
        raise InputError(f"{study.store.folder}: no records of {study.model}")
    questions = study.store.questions()
    runs = []
    for record in records:
        if not record.tasks:
            continue
        folder = unpacked_folder(study, *record.key)
        if not _is_unpacked(study, record, folder):
            (folder / UNPACKED).unlink(missing_ok=True)
            study.store.unpack(study.model, record, questions, folder)
            write_text(folder / UNPACKED, study.store.file_state(study.model, record))
        runs.append(AnsweredRun(record, folder))
    return runs


def _is_unpacked(study: Study, record: RunRecord, folder: Path) -> bool:
    """Whether the folder has what the store has of a run, and not what it once had."""
    done = folder / UNPACKED
    return done.exists() and read_text(done) == study.store.file_state(study.model, record)


def files_by_seed(runs: list[AnsweredRun], term: Term, task: str) -> dict[int | None, Path]:
    """The files of the answers to a task by seed; the base model's has the seed None.

    Raises InputError where two runs have one seed, as they have once a learning rate was changed:
    nothing says which of them is meant.
    """
    runs_by_seed: dict[int | None, AnsweredRun] = {}
    for run in runs:
        if task not in run.record.tasks or not term.matches(run.record):
            continue
        seed = run.record.seed
        if seed in runs_by_seed:
            both = f"{runs_by_seed[seed].record.run} and {run.record.run}"
            smoothing = "" if term.label_smoothing is None else f", β = {term.label_smoothing:g}"
            raise InputError(
                f"{both} are both runs of {term.origin}{smoothing}, seed {seed}, and one of them "
                "must go: records/MODEL/PART/RUN.parquet where it is not merged yet, else its rows "
                "of records/MODEL.parquet"
            )
        runs_by_seed[seed] = run
    return {seed: run.folder / f"{task}.jsonl" for seed, run in runs_by_seed.items()}

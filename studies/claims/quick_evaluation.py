"""The metrics of a record file that a table prints, and no others.

`evaluations.load` measures every metric of a file, its reliability curves and its floors,
which takes two seconds a file of MMLU's size; a study has hundreds of files. The metrics of one
column take a tenth of it.
"""

from functools import cache
from pathlib import Path

from calibeval import records as record_files
from calibeval.measures import evaluations
from calibeval.measures.evaluations import Evaluation
from calibeval.measures.samples import ConfidenceDefinition
from calibeval.records import Records

# The state of a file: when it was written last, in nanoseconds, and its size in bytes.
FileState = tuple[int, int]


def state_of(path: Path) -> FileState:
    """What changes once a file is written anew."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def load(path: Path, metrics: tuple[str, ...], normalise: str | None = None) -> Evaluation:
    """The evaluation of a record file as it is now, with some metrics and their draws.

    These are equal to those of `evaluations.load`; the evaluation has neither floors nor
    curves. `normalise` is the length by which continuations' log-probabilities are divided (None:
    the records' own).
    """
    return _load(path, state_of(path), metrics, normalise)


@cache
def _load(
    path: Path, state: FileState, metrics: tuple[str, ...], normalise: str | None
) -> Evaluation:
    """`load`, kept for each `state` of the file: a run stands in many rows of a table."""
    return evaluations.measure(_records(path, state, normalise), metrics=metrics)


@cache
def _records(path: Path, state: FileState, normalise: str | None) -> Records:
    """The records in `path`, kept likewise: some 4 MB for a file of MMLU's size.

    Tables ask the same files for one metric after another, and reading takes as long as measuring.
    """
    return record_files.read(path, normalise)


def ece_floors(path: Path) -> dict[ConfidenceDefinition, float]:
    """What 95 of 100 calibrated models with a file's confidences read as ECE at most."""
    return _ece_floors(path, state_of(path))


@cache
def _ece_floors(path: Path, state: FileState) -> dict[ConfidenceDefinition, float]:
    """`ece_floors`, kept likewise."""
    # Sorted by id as `measure` sorts them, so that the same answers are simulated as there.
    records = evaluations.in_order(_records(path, state, None))
    samples = evaluations.samples_of(records)
    return {
        among: evaluations.floor_tests(sample, ("ece",))["ece"].floor
        for among, sample in samples.items()
    }

"""The figures of a record file that the verdicts rest on, and no others.

`calibeval.evaluations.load` measures every metric of a file, its reliability curves and its floors,
which takes minutes; accuracy, log loss and the squared calibration error take seconds.
"""

from functools import cache
from pathlib import Path

from calibeval import evaluations
from calibeval import records as record_files
from calibeval.evaluations import Evaluation

SQUARED_ERROR = "rms_debiased"  # whose difference is that of the squares
MEANS = ("accuracy", "nll")
METRIC_NAMES = (*MEANS, SQUARED_ERROR)


@cache
def load(path: Path, normalise: str | None = None) -> Evaluation:
    """A record file's accuracy, log loss and squared calibration error, with their draws.

    They equal those of `calibeval.evaluations.load`; the evaluation has neither floors nor curves.
    `normalise` is the length by which continuations' log-probabilities are divided (None: the
    records' own).
    """
    return evaluations.measure(record_files.read(path, normalise), metrics=METRIC_NAMES)

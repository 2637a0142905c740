"""The figures of a record file that the verdicts rest on, and no others.

`calibeval.evaluations.load` measures every metric of a file, its reliability curves and its floors,
which takes minutes; accuracy, log loss and the squared calibration error take seconds.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np

from calibeval import evaluations, measures
from calibeval import records as record_files
from calibeval.evaluations import Evaluation
from calibeval.measures import METRICS, Sample
from calibeval.records import Records
from calibeval.squared_error import SquareDraws, square_draws

SQUARED_ERROR = "rms_debiased"  # whose difference is that of the squares
MEANS = ("accuracy", "nll")
METRIC_NAMES = (*MEANS, SQUARED_ERROR)


@cache
def load(path: Path, normalise: str | None = None) -> Evaluation:
    """A record file's accuracy, log loss and squared calibration error, with their draws.

    They equal those of `calibeval.evaluations.load`; the evaluation has no other figures.
    `normalise` is the length by which continuations' log-probabilities are divided (None: the
    records' own).
    """
    return measure(record_files.read(path, normalise))


def measure(records: Records) -> Evaluation:
    """Accuracy, log loss and squared calibration error of records in memory."""
    records = evaluations.in_order(records)
    observed = evaluations.samples_of(records)
    values = {}
    draws = {}
    squares = {}
    for confidence, sample in observed.items():
        values[confidence] = {name: evaluations.finite(METRICS[name](sample)[0]) for name in MEANS}
        draws[confidence], squares[confidence] = _resample(sample)
    answers = [*zip(records.ids, records.labels.tolist(), strict=True)]
    questions = json.dumps(answers, ensure_ascii=False)
    return Evaluation(
        path=records.path,
        normalise=records.normalise,
        scoring=records.scoring,
        model=records.model,
        questions=len(records),
        questions_sha256=hashlib.sha256(questions.encode()).hexdigest(),
        prompts_sha256=None,
        letter_mass=None,
        confidences=tuple(observed),
        reliability={},
        values=values,
        floors={},
        draws=draws,
        squares={confidence: {SQUARED_ERROR: draw} for confidence, draw in squares.items()},
    )


def _resample(sample: Sample) -> tuple[dict[str, np.ndarray], SquareDraws]:
    """Accuracy and log loss of resamples of the questions, (R,) each, and the squared errors."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in MEANS}
    bins = []
    for times in measures.resamples(len(sample.scores.labels), evaluations.RESAMPLES):
        resampled = Sample(sample.scores, times)
        for name, some in parts.items():
            some.append(METRICS[name](resampled))
        bins.append(resampled.bins)
    draws = {name: np.concatenate(some) for name, some in parts.items()}
    return draws, square_draws(sample.bins, bins)

"""The figures of a record file that the verdicts rest on, and no others.

`calibeval.stats.load` measures every metric of a file, its reliability curves and its floors, which
takes minutes; accuracy, log loss and the squared calibration error take seconds.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np

from calibeval import measures, runs, stats
from calibeval import records as record_files
from calibeval.measures import METRICS, Sample
from calibeval.records import Records

SQUARED_ERROR = "rms_debiased"  # whose difference is that of the squares
MEANS = ("accuracy", "nll")
METRIC_NAMES = (*MEANS, SQUARED_ERROR)


@cache
def load(path: Path, normalise: str | None = None) -> stats.Run:
    """A record file's accuracy, log loss and squared calibration error, with their draws.

    They equal those of `calibeval.stats.load`; the run has no other figures. `normalise` is the
    length by which continuations' log-probabilities are divided (None: the records' own).
    """
    return measure(record_files.read(path, normalise))


def measure(records: Records) -> stats.Run:
    """Accuracy, log loss and squared calibration error of records in memory."""
    records = runs.in_order(records)
    observed = runs.samples(records)
    values = {}
    draws = {}
    squares = {}
    for confidence, sample in observed.items():
        values[confidence] = {name: runs.finite(METRICS[name](sample)[0]) for name in MEANS}
        draws[confidence], squares[confidence] = _resample(sample)
    answers = [*zip(records.ids, records.labels.tolist(), strict=True)]
    questions = json.dumps(answers, ensure_ascii=False)
    return stats.Run(
        path=records.path,
        convention=records.normalise,
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
        squares=squares,
    )


def _resample(sample: Sample) -> tuple[dict[str, np.ndarray], runs.SquareDraws]:
    """Accuracy and log loss of resamples of the questions, (R,) each, and the squared errors."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in MEANS}
    bins = []
    for times in measures.resamples(len(sample.scores.labels), runs.RESAMPLES):
        resampled = Sample(sample.scores, times)
        for name, some in parts.items():
            some.append(METRICS[name](resampled))
        bins.append(resampled.bins)
    draws = {name: np.concatenate(some) for name, some in parts.items()}
    return draws, runs.square_draws(sample.bins, bins)

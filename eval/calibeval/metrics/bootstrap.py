"""Bootstrap resamples of the questions, and simulated answers of a calibrated model."""

from collections.abc import Iterator

import numpy as np

from calibeval.metrics.samples import Sample
from calibeval.metrics.scores import Scores

RESAMPLES, SIMULATIONS, SEED = 1000, 200, 0
CELLS = 300_000  # samples × questions at a time: larger arrays cost more page faults than they save


def resamples(n: int, count: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Yield (R, n) counts of how often each of n questions is drawn.

    The same for every run over as many questions: differences between runs are paired.
    """
    rng = np.random.default_rng(SEED)
    for rows in _chunks(count, n):
        drawn = rng.integers(0, n, (rows, n), dtype=np.int32)
        yield np.stack([np.bincount(row, minlength=n) for row in drawn]).astype(float)


def calibrated(scores: Scores, count: int = SIMULATIONS) -> Iterator[Sample]:
    """Yield samples whose labels are drawn from the stated probabilities.

    They say what a perfectly calibrated model with these confidences reads on as many questions.
    Mass outside the choices draws the label K: none of them.
    """
    rng = np.random.default_rng(SEED)
    edges = scores.probs.cumsum(1)
    if np.allclose(edges[:, -1], 1):
        edges /= edges[:, -1:]
    for rows in _chunks(count, len(edges)):
        draws = rng.random((rows, len(edges)))
        yield Sample(scores, labels=sum((draws >= edge).astype(int) for edge in edges.T))


def _chunks(count: int, n: int) -> Iterator[int]:
    size = max(1, CELLS // n)
    while count > 0:
        yield min(size, count)
        count -= size

"""Accuracy and the proper scores: means over questions."""

import numpy as np

from calibeval.metrics.samples import Sample


def accuracy(sample: Sample) -> np.ndarray:
    """Share of questions whose likeliest choice is right."""
    return sample.mean(sample.scores.correct)


def nll(sample: Sample) -> np.ndarray:
    """Mean −log p(right choice), in nats; ∞ where a right choice has probability 0."""
    with np.errstate(divide="ignore"):
        values = -np.log(sample.scores.right)
    finite = np.isfinite(values)
    mean = sample.mean(np.where(finite, values, 0))
    return np.where(sample.mean(~finite) > 0, np.inf, mean)


def brier(sample: Sample) -> np.ndarray:
    """Mean Σ_k (p_k − y_k)² (Brier 1950), with any mass outside the choices as one more outcome."""
    p = sample.scores.probs
    rest = 1 - p.sum(1)
    return sample.mean((p**2).sum(1) + 1 - 2 * sample.scores.right + rest**2)

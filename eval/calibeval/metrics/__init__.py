"""The metric battery: every figure with a 95 % bootstrap interval, in both confidences.

Pure NumPy; takes records, never a model.
"""

from collections.abc import Callable

import numpy as np

from calibeval.metrics import binned
from calibeval.metrics.bootstrap import RESAMPLES, resamples
from calibeval.metrics.scores import CONFIDENCES, Scores, scores
from calibeval.records import Records

__all__ = ["CONFIDENCES", "METRICS", "RESAMPLES", "battery", "values"]


def accuracy(sample: Scores, at: np.ndarray) -> np.ndarray:
    """Share of questions whose likeliest choice is right."""
    return sample.correct[at].mean(1)


def nll(sample: Scores, at: np.ndarray) -> np.ndarray:
    """Mean −log p(right choice), in nats."""
    right = sample.probs[np.arange(len(sample.labels)), sample.labels]
    with np.errstate(divide="ignore"):
        return -np.log(right)[at].mean(1)


def brier(sample: Scores, at: np.ndarray) -> np.ndarray:
    """Mean Σ_k (p_k − y_k)² (Brier 1950), with any mass outside the choices as one more outcome."""
    rows = np.arange(len(sample.labels))
    score = (sample.probs**2).sum(1) + 1 - 2 * sample.probs[rows, sample.labels]
    return (score + (1 - sample.probs.sum(1)) ** 2)[at].mean(1)


def _binned(function: Callable) -> Callable:
    return lambda sample, at: function(sample.confidence[at], sample.correct[at])


METRICS: dict[str, Callable[[Scores, np.ndarray], np.ndarray]] = {
    "accuracy": accuracy,
    "ece": _binned(binned.ece),
    "rms": _binned(binned.rms),
    "rms_hendrycks": _binned(binned.rms_hendrycks),
    "nll": nll,
    "brier": brier,
}


def values(sample: Scores) -> dict[str, float]:
    """Every metric's value on the questions as they are."""
    whole = np.arange(len(sample.labels))[None]
    return {name: float(metric(sample, whole)[0]) for name, metric in METRICS.items()}


def battery(records: Records, count: int = RESAMPLES) -> dict:
    """{confidence: {metric: {value, low, high, sd}}}, intervals from `count` resamples."""
    result = {}
    for confidence in CONFIDENCES:
        sample = scores(records, confidence)
        drawn = {name: [] for name in METRICS}
        for at in resamples(sample.order, count):
            for name, metric in METRICS.items():
                drawn[name].append(metric(sample, at))
        result[confidence] = {
            name: _summary(value, np.concatenate(drawn[name]))
            for name, value in values(sample).items()
        }
    return result


def _summary(value: float, drawn: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high), "sd": float(drawn.std(ddof=1))}

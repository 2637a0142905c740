"""The metric battery: every figure with a 95 % bootstrap interval, in both confidences.

Pure NumPy; takes records, never a model.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from calibeval.metrics import binned, proper, ranking
from calibeval.metrics.bootstrap import RESAMPLES, calibrated, resamples
from calibeval.metrics.samples import Sample
from calibeval.metrics.scores import CONFIDENCES, Scores, scores
from calibeval.records import Records

__all__ = ["CALIBRATION", "CONFIDENCES", "METRICS", "RESAMPLES", "battery", "values"]

Metric = Callable[[Sample], np.ndarray]

# Those that read 0 for a perfectly calibrated model with endless questions.
CALIBRATION: dict[str, Metric] = {
    "ece": binned.ece,
    "rms": binned.rms,
    "rms_hendrycks": binned.rms_hendrycks,
    "ece_10": partial(binned.ece, bins=10),
    "ece_30": partial(binned.ece, bins=30),
    "ece_equal_mass": binned.ece_equal_mass,
    "ece_debiased": binned.ece_debiased,
    "ece_signed": binned.ece_signed,
    "smece": binned.smece,
    "mce": binned.mce,
    "sce": binned.sce,
    "ace": binned.ace,
    "tace": binned.tace,
}
METRICS: dict[str, Metric] = {
    "accuracy": proper.accuracy,
    **CALIBRATION,
    "nll": proper.nll,
    "brier": proper.brier,
    "auroc": ranking.auroc,
    "accuracy_at_50": partial(ranking.accuracy_at_coverage, coverage=0.5),
    "accuracy_at_80": partial(ranking.accuracy_at_coverage, coverage=0.8),
}


def values(of: Scores, names: Sequence[str] = tuple(METRICS)) -> dict[str, float]:
    """The metrics' values on the questions as they are."""
    sample = Sample(of)
    return {name: float(METRICS[name](sample)[0]) for name in names}


def drawn(
    of: Scores, count: int = RESAMPLES, names: Sequence[str] = tuple(METRICS)
) -> dict[str, np.ndarray]:
    """The metrics' values on each bootstrap resample, (count,)."""
    chunks = (Sample(of, times) for times in resamples(len(of.labels), count))
    parts = [{name: METRICS[name](sample) for name in names} for sample in chunks]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def noise_floor(of: Scores) -> dict[str, float]:
    """What each calibration error reads, in the mean, for a calibrated model with these answers."""
    parts = [
        {name: metric(sample) for name, metric in CALIBRATION.items()} for sample in calibrated(of)
    ]
    return {name: float(np.concatenate([p[name] for p in parts]).mean()) for name in CALIBRATION}


def battery(records: Records, count: int = RESAMPLES) -> dict:
    """{confidence: {metric: {value, low, high, sd[, floor]}}} from `count` resamples."""
    return {c: _figures(scores(records, c), count) for c in CONFIDENCES}


def _figures(of: Scores, count: int) -> dict:
    samples, floor = drawn(of, count), noise_floor(of)
    return {
        name: summary(value, samples[name]) | ({"floor": floor[name]} if name in floor else {})
        for name, value in values(of).items()
    }


def summary(value: float, sample: np.ndarray) -> dict[str, float | None]:
    """Value, 95 % percentile interval and standard deviation; None where not finite."""
    with np.errstate(invalid="ignore"):
        low, high = np.quantile(sample, [0.025, 0.975])
        figures = {"value": value, "low": low, "high": high, "sd": sample.std(ddof=1)}
    return {key: float(v) if np.isfinite(v) else None for key, v in figures.items()}

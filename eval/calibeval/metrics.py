"""Calibration metrics of arrays: `ece(probabilities, labels)` and the like.

    from calibeval import metrics

    metrics.ece(probabilities, labels)                        # a number
    metrics.ece(probabilities, labels, bins=10)
    metrics.nll(probabilities, labels, interval=True)         # an Estimate: value, low, high
    metrics.nll(probabilities, labels, interval=True, clusters=subjects)

Arrays are NumPy's, PyTorch's of any precision and device, or lists. Either

    probabilities (N, K) of K choices, and labels (N,), the index of the right one, or
    probabilities (N,) that an answer is right, and labels (N,), whether it was: 0 and 1, or bool.

Rows of (N, K) may sum to less than 1: what is missing belongs to no choice. The *confidence* is the
likeliest choice's probability, or the one that was given. Everything is computed in double
precision by `calibeval.measures`, as for record files. Input that cannot be probabilities and
labels raises `InputError`, a `ValueError`.

With `interval=True` a function returns an `Estimate`. Means and ranks have a 95 % interval over
resamples of the questions, or of whole `clusters` of questions, such as subjects, of which there
must be ten. Of calibration errors (`ece`, `rms` and the like) no interval is known to cover, and a
calibrated model does not read 0: they have the floor that 95 % of calibrated models stay below
(`floor`) and the share `p_calibrated` of them that read this error or a larger one.

A metric is defined in `calibeval.measures.definitions`, which also says where a new one goes; the
function of its name here checks arrays and calls it.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, Union, overload

import numpy as np
from typing_extensions import TypedDict

from calibeval.io import InputError
from calibeval.measures import definitions, evaluations, samples, stats
from calibeval.measures.definitions import METRICS
from calibeval.measures.samples import BINS, EventScores, Sample, Scores
from calibeval.measures.stats import Estimate
from calibeval.records import MOST_PROBABILITY

if TYPE_CHECKING:
    import torch

__all__ = [
    "Estimate",
    "accuracy",
    "aurc",
    "auroc",
    "brier",
    "ece",
    "ece_classwise",
    "ece_equal_mass",
    "ece_signed",
    "nll",
    "reliability",
    "rms",
    "rms_debiased",
    "smooth_ece",
]

Array: TypeAlias = Union[np.ndarray, "torch.Tensor", Sequence[Any]]


class _MetricWithInterval(Protocol):
    """The signatures of a metric that has an interval: a number without it, else an `Estimate`."""

    @overload
    def __call__(
        self, probabilities: Array, labels: Array, *, interval: Literal[False] = False
    ) -> float: ...

    @overload
    def __call__(
        self,
        probabilities: Array,
        labels: Array,
        *,
        interval: Literal[True],
        clusters: Array | None = None,
    ) -> Estimate: ...


class _BinnedErrorWithFloor(Protocol):
    """The signatures of a calibration error over bins: a number, or an `Estimate` with a floor."""

    @overload
    def __call__(
        self,
        probabilities: Array,
        labels: Array,
        bins: int = BINS,
        *,
        interval: Literal[False] = False,
    ) -> float: ...

    @overload
    def __call__(
        self, probabilities: Array, labels: Array, bins: int = BINS, *, interval: Literal[True]
    ) -> Estimate: ...


def _takes_interval_and_clusters(plain: Callable[[Array, Array], float]) -> _MetricWithInterval:
    """Give a metric the keywords `interval` and `clusters`."""

    @wraps(plain)
    def metric(
        probabilities: Array,
        labels: Array,
        *,
        interval: bool = False,
        clusters: Array | None = None,
    ) -> float | Estimate:
        if interval:
            return _estimate_with_interval(
                plain.__name__, _checked_scores(probabilities, labels), clusters
            )
        if clusters is not None:
            raise InputError("clusters: they are for intervals; give interval=True as well")
        return plain(probabilities, labels)

    return metric  # type: ignore[return-value]


def _takes_interval(plain: Callable[[Array, Array, int], float]) -> _BinnedErrorWithFloor:
    """Give a calibration error over bins the keyword `interval`."""

    @wraps(plain)
    def metric(
        probabilities: Array, labels: Array, bins: int = BINS, *, interval: bool = False
    ) -> float | Estimate:
        if interval:
            return _estimate_with_floor(
                plain.__name__, _checked_scores(probabilities, labels, bins)
            )
        return plain(probabilities, labels, bins)

    return metric  # type: ignore[return-value]


@_takes_interval_and_clusters
def accuracy(probabilities: Array, labels: Array) -> float:
    """Share of right answers."""
    return _observed_value(definitions.accuracy, _checked_scores(probabilities, labels))


@_takes_interval_and_clusters
def nll(probabilities: Array, labels: Array) -> float:
    """Mean −log p(right choice), in nats; of (N,) −log of what was given to what came true.

    It is infinite where a right choice has the probability 0.
    """
    return _observed_value(definitions.nll, _checked_scores(probabilities, labels))


@_takes_interval_and_clusters
def brier(probabilities: Array, labels: Array) -> float:
    """Mean Σ_k (p_k − y_k)² over choices (Brier 1950), from 0 to 2; of (N,) mean (p − y)².

    Probability that belongs to no choice counts as one more outcome.
    """
    return _observed_value(definitions.brier, _checked_scores(probabilities, labels))


@_takes_interval_and_clusters
def ece_signed(probabilities: Array, labels: Array) -> float:
    """Mean confidence − accuracy: above 0 is over-confident."""
    return _observed_value(definitions.ece_signed, _checked_scores(probabilities, labels))


@_takes_interval_and_clusters
def auroc(probabilities: Array, labels: Array) -> float:
    """P(confidence right > wrong) + ½ P(equal), over pairs of a right and a wrong answer.

    How well confidence tells right answers from wrong ones, 0 to 1; NaN where all answers are right
    or all are wrong.
    """
    return _observed_value(definitions.auroc, _checked_scores(probabilities, labels))


@_takes_interval_and_clusters
def aurc(probabilities: Array, labels: Array) -> float:
    """Area under the risk-coverage curve, Σ_k risk(k) / N (Geifman & El-Yaniv 2017).

    risk(k) is the share of wrong answers among the k surest; of equally sure ones the mean over all
    orders.
    """
    return _observed_value(definitions.aurc, _checked_scores(probabilities, labels))


@_takes_interval
def ece(probabilities: Array, labels: Array, bins: int = BINS) -> float:
    """Expected calibration error, Σ w_b |accuracy_b − confidence_b| (Naeini et al. 2015).

    Over `bins` bins of equal width; w_b is the share of answers in bin b, which holds its lower
    edge, the last one 1 as well.
    """
    return _observed_value(definitions.ece, _checked_scores(probabilities, labels, bins))


@_takes_interval
def ece_equal_mass(probabilities: Array, labels: Array, bins: int = BINS) -> float:
    """`ece` over bins of as many answers each, but for equal confidences (Nixon et al. 2019)."""
    return _observed_value(definitions.ece_equal_mass, _checked_scores(probabilities, labels, bins))


def ece_classwise(probabilities: Array, labels: Array, bins: int = BINS) -> float:
    """Mean over choices of the ECE of each choice's probability (Kull et al. 2019)."""
    return _observed_value(definitions.ece_classwise, _checked_scores(probabilities, labels, bins))


@_takes_interval
def rms(probabilities: Array, labels: Array, bins: int = BINS) -> float:
    """Root mean square calibration error, sqrt(Σ w_b (accuracy_b − confidence_b)²).

    Over the bins of `ece`, and never below it (Hendrycks et al. 2019).
    """
    return _observed_value(definitions.rms, _checked_scores(probabilities, labels, bins))


@_takes_interval
def rms_debiased(probabilities: Array, labels: Array, bins: int = BINS) -> float:
    """`rms` less what finitely many answers add to it (Kumar et al. 2019, section 5).

    sqrt(max(0, Σ w_b (Δ_b² − s_b²))) for the gap Δ_b of bin b and the noise s_b² of that gap.
    """
    return _observed_value(definitions.rms_debiased, _checked_scores(probabilities, labels, bins))


@overload
def smooth_ece(
    probabilities: Array, labels: Array, *, interval: Literal[False] = False
) -> float: ...


@overload
def smooth_ece(probabilities: Array, labels: Array, *, interval: Literal[True]) -> Estimate: ...


def smooth_ece(probabilities: Array, labels: Array, *, interval: bool = False) -> float | Estimate:
    """Smooth calibration error (Błasiok & Nakkiran 2023), as relplot's `smECE` computes it.

    Gaussian kernels reflected at 0 and 1 take the place of bins; their width is the least that is
    no less than the error at that width.
    """
    scores = _checked_scores(probabilities, labels)
    if interval:
        return _estimate_with_floor("smooth_ece", scores)
    return _observed_value(definitions.smooth_ece, scores)


class Reliability(TypedDict):
    """A reliability diagram, in lists: bars over B bins, and curves over 101 confidences."""

    count: list[int]  # answers of each bin
    confidence: list[float | None]  # their mean confidence; None in an empty bin
    accuracy: list[float | None]  # the share of them that are right
    at: list[float]  # the curves' confidences, from the least to the greatest
    smooth: list[float]  # accuracy by the kernel of `smooth_ece`
    smooth_low: list[float]  # its 95 % band over resamples of the answers
    smooth_high: list[float]
    isotonic: list[float]  # accuracy by isotonic regression (CORP)
    isotonic_low: list[float]  # where that lies in 95 % of calibrated models
    isotonic_high: list[float]


def reliability(
    probabilities: Array, labels: Array, bins: int = BINS, *, clusters: Array | None = None
) -> Reliability:
    """Return what a reliability diagram shows: bars over bins, and curves with 95 % bands.

    With `clusters` the band of `smooth` is over resamples of whole clusters of answers. That of
    `isotonic` is of simulated answers, one by one, in any case.
    """
    sample = Sample.observed(_checked_scores(probabilities, labels, bins))
    numbers = None if clusters is None else _cluster_numbers(clusters, len(sample.scores.labels))
    bins_of_answers = sample.bins
    (counts,) = bins_of_answers.count
    confidences: list[float | None] = []
    accuracies: list[float | None] = []
    sums = zip(
        counts, bins_of_answers.confidence_sum[0], bins_of_answers.correct_sum[0], strict=True
    )
    for count, confidence_sum, correct_sum in sums:
        confidences.append(float(confidence_sum / count) if count else None)
        accuracies.append(float(correct_sum / count) if count else None)
    curves = evaluations.reliability(sample, numbers)
    return Reliability(confidence=confidences, accuracy=accuracies, **curves)  # type: ignore[typeddict-item]


def _checked_scores(probabilities: Array, labels: Array, bins: int = BINS) -> Scores:
    """Check probabilities and labels, and return them as `calibeval.measures` takes them."""
    p = _numbers(probabilities, "probabilities")
    y = _numbers(labels, "labels")
    if p.ndim not in (1, 2) or p.size == 0:
        raise InputError(f"probabilities: shape {p.shape}; expected (N, K) of choices, or (N,)")
    if y.shape != p.shape[:1]:
        raise InputError(
            f"labels: shape {y.shape} beside probabilities of shape {p.shape}; expected "
            f"({p.shape[0]},), one a row"
        )
    if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or bins < 1:
        raise InputError(f"bins: {bins!r}; expected a whole number from 1")
    sums = p if p.ndim == 1 else p.sum(1)
    bad = ~(np.isfinite(sums) & (sums <= MOST_PROBABILITY))
    bad |= ~(p >= 0) if p.ndim == 1 else ~(p >= 0).all(1)
    if bad.any():
        row = int(bad.argmax())
        raise InputError(
            f"probabilities: row {row} is {p[row].tolist()}; expected numbers from 0 whose sum is "
            f"at most 1 (to {MOST_PROBABILITY}, for rounding). Of logits take the softmax"
        )
    choices = 2 if p.ndim == 1 else p.shape[1]
    bad = ~((y >= 0) & (y < choices) & (y == np.floor(y)))
    if bad.any():
        row = int(bad.argmax())
        expected = "0 or 1, whether it came true" if p.ndim == 1 else f"0 to {choices - 1}"
        raise InputError(f"labels: row {row} is {y[row]:g}; expected {expected}")
    if p.ndim == 1:
        return EventScores(np.minimum(p, 1), y.astype(bool), int(bins))
    with np.errstate(divide="ignore"):  # the logarithm of 0 is −∞
        return Scores(np.log(np.minimum(p, 1)), y.astype(int), int(bins))


def _numbers(values: Array, name: str) -> np.ndarray:
    """An array or tensor in double precision."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: not an array of numbers ({error})") from error


def _cluster_numbers(clusters: Array, questions: int) -> np.ndarray:
    """The number of each question's cluster, from 0."""
    if hasattr(clusters, "detach"):
        clusters = clusters.detach().cpu().numpy()
    names, numbers = np.unique(np.asarray(clusters), return_inverse=True)
    if numbers.shape != (questions,):
        raise InputError(
            f"clusters: shape {numbers.shape}; expected ({questions},), one name or number a row"
        )
    if len(names) < evaluations.FEWEST_CLUSTERS:
        raise evaluations.TooFewClusters(
            f"clusters: {len(names)} of them; expected {evaluations.FEWEST_CLUSTERS} or more to "
            "resample"
        )
    return numbers


def _observed_value(measure: Callable[[Sample], np.ndarray], scores: Scores) -> float:
    """A metric of the questions as they are."""
    return float(measure(Sample.observed(scores))[0])


def _estimate_with_interval(name: str, scores: Scores, clusters: Array | None) -> Estimate:
    """A metric with its 95 % interval; its value is None where it is not finite."""
    metric = METRICS[name]
    questions = len(scores.labels)
    numbers = None if clusters is None else _cluster_numbers(clusters, questions)
    observed = Sample.observed(scores)
    values = metric(observed)
    if not np.isfinite(values).all():
        return Estimate()
    drawn = [
        metric.draws(Sample.resampled(scores, counts))
        for counts in samples.resamples(questions, evaluations.RESAMPLES, numbers)
    ]
    cluster_count = None if numbers is None else int(numbers.max()) + 1
    unit_values = evaluations.unit_values(observed, numbers)
    draws = np.concatenate(drawn)[None]
    side = stats.side_of(name, values, draws, [unit_values], cluster_count)
    return stats.estimate_mean(side, metric.lowest, metric.highest)


def _estimate_with_floor(name: str, scores: Scores) -> Estimate:
    """A calibration error beside those of calibrated models."""
    sample = Sample.observed(scores)
    test = evaluations.floor_tests(sample, [name])[name]
    return Estimate(float(METRICS[name](sample)[0]), floor=test.floor, p_calibrated=test.p)

"""Estimates with intervals: of one run, of several seeds of it, and of the difference of two.

A `Run` holds the figures of one record file and their draws over resamples of its questions. The
questions are resampled with replacement, the same way for every run over the same questions, so
that what runs share is counted once over seeds and cancels in a difference. An interval is given
only where simulation has shown that it covers (tests/eval/interval_coverage.py).

Arrays are named by S runs (seeds) and R resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibeval.comparable import same_normaliser, same_prompts, same_questions
from calibeval.measures import METRICS, WITH_FLOOR, WITH_INTERVAL
from calibeval.runs import (
    CONFIDENCES,
    FEWEST_CLUSTERS,
    HIGH,
    LOW,
    RESAMPLES,
    Cluster,
    Run,
    TooFewClusters,
    code_digest,
    consistency,
    finite,
    in_order,
    load,
    measure,
    quantile,
    reliability,
    samples,
)

# What `calibeval.runs` computes is part of this module's names: its users need one import.
__all__ = [
    "CONFIDENCES",
    "LOW_MASS",
    "METRICS",
    "RESAMPLES",
    "Cluster",
    "Estimate",
    "Run",
    "Side",
    "TooFewClusters",
    "better",
    "code_digest",
    "consistency",
    "contrast",
    "coverage_of",
    "difference",
    "estimate",
    "estimate_sum",
    "holm",
    "in_order",
    "load",
    "measure",
    "reliability",
    "same_normaliser",
    "same_prompts",
    "same_questions",
    "samples",
    "seed_inflation",
]

LOW_MASS = 0.9  # letter mass below which the letters are not what the model wants to say
NORMAL_QUANTILE = 1.959964  # of the standard normal distribution, at HIGH
# Below this a number is 0 but for rounding.
ROUNDING = 1e-12
MANY_DEGREES = 1e6  # of freedom: Student's distribution is the normal one
FAMILY_LEVEL = 0.05  # how probable one false finding or more may be among many comparisons


@dataclass(frozen=True)
class Estimate:
    """A figure with its uncertainty; what is not known is None.

    Attributes:
        value: The figure.
        low, high: The ends of its 95 % interval, where one is known to cover.
        null_q95: Of calibration errors only: the 95th percentile of what calibrated models with
            these confidences read. It is printed as "floor".
        p: Of calibration errors only: the share of those models that read as much as this one.
        p_none: Of differences with an interval only: the two-sided p-value of there being none, in
            the mean over seeds and questions. It is below 0.05 where the interval leaves out 0.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    null_q95: float | None = None
    p: float | None = None
    p_none: float | None = None

    @property
    def significant(self) -> bool:
        """Whether a difference's interval leaves out 0."""
        if self.low is None or self.high is None:
            return False
        return self.low > ROUNDING or self.high < -ROUNDING

    def as_dict(self) -> dict[str, float | None]:
        """Return the figures under the names that JSON and tables print."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "floor": self.null_q95,
            "p": self.p,
        }

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        text = f"{self.value:.4f}"
        if self.low is not None:
            text += f" [{self.low:.4f}, {self.high:.4f}]"
        if self.null_q95 is not None:
            text += f" floor {self.null_q95:.3f}, p {self.p:.3f}"
        return text


class Side(NamedTuple):
    """One side of a difference: the figures of its runs, and their draws."""

    figures: np.ndarray  # (S,)
    draws: np.ndarray  # (S, R); NaN where there are none
    clusters: int | None = None  # how many were resampled as a whole; None: single questions

    def times(self, weight: float) -> "Side":
        """The side with its figures and draws times a weight."""
        return self._replace(figures=weight * self.figures, draws=weight * self.draws)


def estimate(runs: Sequence[Run], metric: str, confidence: str) -> Estimate:
    """Return a metric of one run, or its mean over seeds, with a 95 % interval or a floor.

    For `rms_debiased` over seeds the root of the mean of the squared errors. The value is None
    where a run has no such confidence. Raises `InputError` where the runs' questions differ.
    """
    same_questions(runs)
    if any(confidence not in run.confidences for run in runs):
        return Estimate()
    null_q95 = p = None
    if metric in WITH_FLOOR:
        tests = [run.floors[confidence][metric] for run in runs]
        null_q95 = float(np.mean([test.null_q95 for test in tests]))
        # Seeds answer the same questions, so their p-values depend on each other: Bonferroni's
        # bound.
        p = min(1.0, len(runs) * min(test.p for test in tests))
    side = _side(runs, metric, confidence)
    if metric == "rms_debiased":
        return Estimate(math.sqrt(max(side.figures.mean(), 0)), null_q95=null_q95, p=p)
    ends = METRICS[metric].lowest, METRICS[metric].highest
    found = estimate_sum(side, ends=ends)
    return Estimate(found.value, found.low, found.high, null_q95, p)


def difference(
    a: Sequence[Run], b: Sequence[Run], metric: str, confidence: str, paired: bool = True
) -> Estimate:
    """Return b − a as a `contrast`; each a run or the seeds of one row."""
    return contrast([(-1, a), (1, b)], metric, confidence, paired)


def contrast(
    terms: Sequence[tuple[int, Sequence[Run]]],
    metric: str,
    confidence: str = "choices",
    paired: bool = True,
) -> Estimate:
    """Return Σ weight × mean figure of each term's runs, over the same questions; 95 % interval.

    How far an effect is another one in another setting: (1, b′), (−1, a′), (−1, b), (1, a). As many
    runs in all terms are paired in their order, if `paired`. For `rms_debiased` the figure is of
    the *squared* errors (what miscalibration adds to the Brier score of the likeliest choice):
    roots differ irregularly near 0, so no interval of theirs is known to cover. Where subjects are
    resampled, none is known for the squares either.

    Raises `InputError` where the runs' questions differ.
    """
    runs = [run for _, term_runs in terms for run in term_runs]
    same_questions(runs)
    if any(confidence not in run.confidences for run in runs):
        return Estimate()
    if metric == "rms_debiased" and runs[0].cluster is None:
        sides = _square_sides(terms, confidence)
    else:
        sides = [_side(some, metric, confidence).times(weight) for weight, some in terms]
    return estimate_sum(*sides, paired=paired)


def estimate_sum(
    *sides: Side, ends: tuple[float, float] | None = None, paired: bool = True
) -> Estimate:
    """Return the sum of the sides' means over seeds, with a 95 % interval if all draws are finite.

    Sides of as many runs are paired in their order, if `paired`. `ends` are the least and the
    greatest that one side's figure can be.
    """
    if paired and len({len(side.figures) for side in sides}) == 1:
        figures = sum(side.figures for side in sides)
        draws = sum(side.draws for side in sides)
        sides = (Side(np.asarray(figures), np.asarray(draws), sides[0].clusters),)
    value = finite(float(sum(side.figures.mean() for side in sides)))
    if value is None:
        return Estimate()
    summed_draws = _summed(sides)
    if not np.isfinite(summed_draws).all():
        return Estimate(value)
    from_mean = quantile(summed_draws, [LOW, HIGH]) - summed_draws.mean()
    inflation = seed_inflation(sides) * cluster_inflation(sides[0].clusters)
    low, high = (value + inflation * from_mean).tolist()
    # What varies over no resample (one question, all right) says nothing of other questions, but
    # for a difference of 0 on each.
    is_zero_difference = ends is None and abs(value) <= ROUNDING
    if high - low < ROUNDING and not is_zero_difference:
        return Estimate(value)
    if ends is not None:
        return Estimate(value, max(low, ends[0]), min(high, ends[1]))
    half_width = value - low if value > 0 else high - value
    p_none = two_sided_p(value, half_width, degrees_of_freedom(sides))
    return Estimate(value, low, high, p_none=p_none)


def cluster_inflation(clusters: int | None) -> float:
    """How much wider an interval over C resampled clusters must be than its draws.

    sqrt(C / (C − 1)) since the draws vary around the clusters' own mean, times Student's quantile
    of C − 1 degrees of freedom over the normal one (Cameron & Miller 2015, sections II and VI).
    """
    if clusters is None:
        return 1.0
    ratio = student_quantile(clusters - 1) / NORMAL_QUANTILE
    return math.sqrt(clusters / (clusters - 1)) * ratio


def student_quantile(degrees: float) -> float:
    """The quantile at HIGH of Student's distribution."""
    from scipy.special import stdtrit  # scipy.stats takes half a second to load

    return float(stdtrit(min(degrees, MANY_DEGREES), HIGH))


def two_sided_p(value: float, half_width: float, degrees: float) -> float:
    """The p-value of 0 for a value whose 95 % interval reaches so far towards 0.

    The value has Student's distribution around the truth, scaled so that the interval's end is at
    its quantile: p is below 0.05 where the interval leaves out 0.
    """
    from scipy.special import stdtr

    if abs(value) <= ROUNDING:
        return 1.0
    scale = half_width / student_quantile(degrees)
    return float(2 * stdtr(min(degrees, MANY_DEGREES), -abs(value) / scale))


def degrees_of_freedom(sides: Sequence[Side]) -> float:
    """Degrees of freedom of an interval's width (Welch & Satterthwaite), from 1 to infinity.

    (q + Σ v)² / (Σ v² / (S − 1) + q² / (C − 1)) for the questions' part q of the variance, each
    side's part v of what its S seeds differ by, and C resampled clusters.
    """
    question_variance = float(_summed(sides).var(ddof=1))
    total = question_variance
    squares = 0.0
    if sides[0].clusters is not None:
        squares += question_variance**2 / (sides[0].clusters - 1)
    for side in sides:
        seeds = len(side.figures)
        if seeds > 1:
            part = max(side.figures.var(ddof=1) - _own_noise(side), 0.0) / seeds
            total += part
            squares += part**2 / (seeds - 1)
    return total**2 / squares if squares else math.inf


def _own_noise(side: Side) -> float:
    """The question noise that each seed has for itself.

    It is the mean variance less the mean covariance of the seeds' draws.
    """
    seeds = len(side.figures)
    covariance = np.cov(side.draws)
    trace = np.trace(covariance)
    return max((trace - (covariance.sum() - trace) / (seeds - 1)) / seeds, 0.0)


def holm(p_values: Sequence[float | None], level: float = FAMILY_LEVEL) -> list[bool]:
    """Which of m comparisons survive Holm's correction (Holm 1979).

    From the least p on, the i-th of them is compared with level / (m − i + 1), and the first that
    is not below ends it: the probability that any true null hypothesis falls is at most `level`,
    however the comparisons depend on each other. None is no comparison.
    """
    made = [place for place, p in enumerate(p_values) if p is not None]
    made.sort(key=lambda place: p_values[place] or 0.0)
    survives = [False] * len(p_values)
    for rank, place in enumerate(made):
        if (p_values[place] or 0.0) >= level / (len(made) - rank):
            break
        survives[place] = True
    return survives


def _summed(sides: Sequence[Side]) -> np.ndarray:
    """The sum of the sides' draws, each their mean over its runs, (R,)."""
    return np.asarray(sum(side.draws.mean(0) for side in sides))


def seed_inflation(sides: Sequence[Side]) -> float:
    """Return how much wider than its question noise an interval of means over seeds must be.

    sqrt(1 + Σ max(0, r² s² − r^1.5 o) / (S q)) for the resampled mean's variance q, where s² is
    the variance of the S figures, o the question noise that each has for itself (the mean variance
    less the mean covariance of their draws), and r = t/z, Student's quantile of S − 1 degrees of
    freedom over the normal one. Taking off o makes seeds that do not differ cover more than 0.98,
    and r² o makes seeds that differ by about o cover less than 0.93.
    """
    question_variance = _summed(sides).var(ddof=1)
    if not question_variance:
        return 1.0
    seed_variance = 0.0
    for side in sides:
        seeds = len(side.figures)
        if seeds > 1:
            ratio = student_quantile(seeds - 1) / NORMAL_QUANTILE
            spread = ratio**2 * side.figures.var(ddof=1) - ratio**1.5 * _own_noise(side)
            seed_variance += max(spread, 0.0) / seeds
    return math.sqrt(1 + seed_variance / question_variance)


def _side(runs: Sequence[Run], metric: str, confidence: str) -> Side:
    """The figures of some runs, of `rms_debiased` squared; draws of what has an interval."""
    if metric == "rms_debiased":
        figures = np.array([run.squares[confidence].observed for run in runs])
    else:
        figures = np.array([run.values[confidence][metric] for run in runs], float)
    if metric in WITH_INTERVAL:
        draws = np.stack([run.draws[confidence][metric] for run in runs])
    else:
        draws = np.full((len(runs), 1), np.nan)
    return Side(figures, draws, runs[0].subjects if runs[0].cluster else None)


def _square_sides(terms: Sequence[tuple[int, Sequence[Run]]], confidence: str) -> list[Side]:
    """The weighted sides of a contrast of squared calibration errors.

    Their draws are A + κ (B + D) in the words of `runs.SquareDraws`, κ² = max(0, V − v min(2,
    4 v / V)) / V with V the variance of the contrast's part in B + D and v that in A. The gaps B is
    made of hold their own noise, which adds 2 v to V in the mean; where two sides err in opposite
    directions their parts in B add up, and shrinking each side's gaps by itself would lose that. V
    is noisy: taking off all of 2 v wherever V is large covers 0.92 to 0.98 in simulation, this 0.95
    to 0.98.
    """
    noise_parts = []  # (S, R) each
    gap_parts = []
    for _, runs in terms:
        noise_parts.append(np.stack([run.squares[confidence].noise for run in runs]))
        gap_parts.append(np.stack([run.squares[confidence].gaps for run in runs]))
    by_noise = _weighted_sum(terms, noise_parts)
    by_gaps = _weighted_sum(terms, gap_parts)
    ratio = by_noise.var() / by_gaps.var() if by_gaps.any() else math.inf
    kappa = math.sqrt(max(1 - ratio * min(2, 4 * ratio), 0))
    sides = []
    for (weight, runs), noise, gaps in zip(terms, noise_parts, gap_parts, strict=True):
        figures = _side(runs, "rms_debiased", confidence).figures
        sides.append(Side(figures, noise + kappa * gaps).times(weight))
    return sides


def _weighted_sum(
    terms: Sequence[tuple[int, Sequence[Run]]], parts: Sequence[np.ndarray]
) -> np.ndarray:
    """Σ weight × the mean over runs of each term's part (S, R), (R,)."""
    means = [weight * part.mean(0) for (weight, _), part in zip(terms, parts, strict=True)]
    return np.asarray(sum(means))


def coverage_of(runs: Sequence[Run]) -> str:
    """What the intervals of runs over the same questions cover, in words."""
    run = runs[0]
    if run.cluster is not None:
        return f"over resamples of all {run.subjects} subjects: it holds for subjects like these"
    if run.subjects == 1:
        return "over resamples of the questions"
    text = f"over resamples of the questions: it holds for these {run.subjects} subjects"
    if run.subjects >= FEWEST_CLUSTERS:
        text += "; --cluster subject covers others like them"
    return text


def better(metric: str, found: Estimate) -> str | None:
    """Return which run a difference speaks for, "a" or "b".

    None where the interval holds 0 or there is none, and for `ece_signed`, of which neither
    direction is better.
    """
    direction = METRICS[metric].better
    if direction == "neither" or not found.significant or found.low is None:
        return None
    is_higher = found.low > 0
    return "b" if is_higher == (direction == "higher") else "a"

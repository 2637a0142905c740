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
from typing import Any, NamedTuple

import numpy as np

from calibeval import records
from calibeval.io import InputError
from calibeval.measures import METRICS, WITH_FLOOR, WITH_INTERVAL
from calibeval.runs import (
    CONFIDENCES,
    HIGH,
    LOW,
    RESAMPLES,
    Run,
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
    "Estimate",
    "Run",
    "Side",
    "better",
    "code_digest",
    "consistency",
    "contrast",
    "difference",
    "estimate",
    "estimate_sum",
    "in_order",
    "load",
    "measure",
    "reliability",
    "same_prompts",
    "same_questions",
    "samples",
    "seed_inflation",
]

LOW_MASS = 0.9  # letter mass below which the letters are not what the model wants to say
NORMAL_QUANTILE = 1.959964  # of the standard normal distribution, at HIGH
# Below this a number is 0 but for rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A figure with its uncertainty; what is not known is None.

    Attributes:
        value: The figure.
        low, high: The ends of its 95 % interval, where one is known to cover.
        null_q95: Of calibration errors only: the 95th percentile of what calibrated models with
            these confidences read. It is printed as "floor".
        p: Of calibration errors only: the share of those models that read as much as this one.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    null_q95: float | None = None
    p: float | None = None

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

    def times(self, weight: float) -> "Side":
        """The side with its figures and draws times a weight."""
        return Side(weight * self.figures, weight * self.draws)


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
    roots differ irregularly near 0, so no interval of theirs is known to cover.

    Raises `InputError` where the runs' questions differ.
    """
    runs = [run for _, term_runs in terms for run in term_runs]
    same_questions(runs)
    if any(confidence not in run.confidences for run in runs):
        return Estimate()
    if metric == "rms_debiased":
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
        sides = (Side(np.asarray(figures), np.asarray(draws)),)
    value = finite(float(sum(side.figures.mean() for side in sides)))
    if value is None:
        return Estimate()
    summed_draws = _summed(sides)
    if not np.isfinite(summed_draws).all():
        return Estimate(value)
    from_mean = quantile(summed_draws, [LOW, HIGH]) - summed_draws.mean()
    low, high = (value + seed_inflation(sides) * from_mean).tolist()
    # What varies over no resample (one question, all right) says nothing of other questions, but
    # for a difference of 0 on each.
    is_zero_difference = ends is None and abs(value) <= ROUNDING
    if high - low < ROUNDING and not is_zero_difference:
        return Estimate(value)
    if ends is not None:
        low = max(low, ends[0])
        high = min(high, ends[1])
    return Estimate(value, low, high)


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
            from scipy.special import stdtrit  # scipy.stats takes half a second to load

            covariance = np.cov(side.draws)
            trace = np.trace(covariance)
            own_noise = max((trace - (covariance.sum() - trace) / (seeds - 1)) / seeds, 0.0)
            ratio = float(stdtrit(seeds - 1, HIGH)) / NORMAL_QUANTILE
            spread = ratio**2 * side.figures.var(ddof=1) - ratio**1.5 * own_noise
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
    return Side(figures, draws)


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


def same_questions(runs: Sequence[Run]) -> None:
    """Raise `InputError` unless all runs answered the same questions."""
    for run in runs[1:]:
        if run.questions_sha256 != runs[0].questions_sha256:
            raise InputError(
                f"{runs[0].path} and {run.path}: {runs[0].questions:,} and {run.questions:,} "
                "questions; expected the same ids and right answers in both"
            )


def same_prompts(a: Run, b: Run, texts: bool = True) -> None:
    """Raise `InputError` where the questions of two runs were asked in other words.

    A difference would be the prompts' as well: letters or texts, how many examples, and, if
    `texts`, their very words; as far as the records and their sidecars say.
    """
    conditions_of_b = _conditions(b, texts)
    for name, first in _conditions(a, texts).items():
        second = conditions_of_b[name]
        if first is not None and second is not None and first != second:
            raise InputError(
                f"{a.path} and {b.path}: the same questions, asked with {name} {first!r} and "
                f"{second!r}, so a difference is not the models' alone; if it is meant, "
                "`compare --different-prompts`, or another 'dataset' in the index"
            )


def _conditions(run: Run, texts: bool) -> dict[str, Any]:
    """How a run's questions were asked; None what is not known or, of the texts, not wanted."""
    settings = records.meta(run.path).get("settings") or {}
    return {
        "scoring": run.scoring,
        "shots": settings.get("shots"),
        "prompts": run.prompts_sha256 if texts else None,
    }


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

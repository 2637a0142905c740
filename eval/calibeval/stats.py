"""Estimates with intervals: of one evaluation, of several seeds, and of the difference of two.

An `Evaluation` (see `calibeval.evaluations`) holds the metrics of one record file and their draws
over resamples of its questions. The questions are resampled with replacement, the same way for
every file of the same questions, so that what files share is counted once over seeds and cancels in
a difference. An interval is given only where simulation has shown that it covers
(tests/eval/interval_coverage.py).

Where a test or a correction goes:

- A test of a difference: `estimate_sum`, where `p_no_difference` is the larger p of the interval
  and, where there is one, of the sign test. The interval must hold 0 wherever p is not below
  `evaluations.SIGNIFICANCE`, as it is widened there; tests/eval/test_stats.py compares the two.
- A test of calibration: `evaluations.floor_tests`, which simulates calibrated answers. What it
  returns is kept with the evaluation (`evaluations.FloorTest`), so `_to_json` and `_from_json`
  there must write and read a further field.
- A correction for many comparisons: in the place of `holm`, which is called by `api.compare` for
  all comparisons of a call and by `report.difference_table` for all cells of a table. Which p count
  is `p_of_comparison`'s to say. Its name is printed by `compare` (`__main__`) and by
  `report._family_note`, and eval/METRICS.md and eval/README.md tell it. `calibeval.diagnosis` does
  not correct.
- A field of `Estimate`: `as_dict` lists what JSON prints. It leaves out `p_no_difference`, which
  `api.compare` returns as "p" and by which `report` chooses what is bold.

Then run tests/eval/interval_coverage.py and tell the test in eval/METRICS.md.

Letters, in arrays' shapes and in the formulas of `degrees_of_freedom` and `seed_inflation`:

    S   seeds of a side
    R   resamples
    C   resampled clusters
    q   variance of the resampled sum, which is due to the questions
    s²  variance of a side's S values, due to the seeds and to the questions
    o   the part of s² due to the questions and not shared by the seeds: the mean variance of their
        draws less the mean covariance (`_own_noise`)
    r   Student's quantile of S − 1 degrees of freedom over the normal one
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from calibeval import comparable, evaluations
from calibeval.comparable import same_questions
from calibeval.evaluations import (
    FEWEST_CLUSTERS,
    HIGH,
    LOW,
    SIGNIFICANCE,
    Evaluation,
    finite,
    quantile,
)
from calibeval.measures import (
    COMPARED_BY_SQUARE,
    METRICS,
    WITH_FLOOR,
    WITH_INTERVAL,
    ConfidenceDefinition,
)
from calibeval.squared_error import root_of_square, shrinkage

LOW_MASS = 0.9  # letter mass below which the letters are not what the model wants to say
NORMAL_QUANTILE = 1.959964  # of the standard normal distribution, at HIGH
# Below this a number is 0 but for rounding.
ROUNDING = 1e-12
MANY_DEGREES = 1e6  # of freedom: Student's distribution is the normal one
# The power of r, Student's quantile over the normal one, by which `seed_inflation` multiplies the
# questions' part of what seeds differ by. It is fitted (tests/eval/interval_coverage.py): with 0
# the intervals of seeds that do not differ cover more than 0.98, and with 2 those of seeds that
# differ by about as much as their question noise cover less than 0.93.
NOISE_EXPONENT = 1.5
FAMILY_LEVEL = SIGNIFICANCE  # how probable one false finding or more may be among comparisons


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty; what is not known is None.

    Attributes:
        value: The number.
        low, high: The ends of its 95 % interval, where one is known to cover.
        floor: Of calibration errors only: the 95th percentile of the errors of calibrated models
            with these confidences. Over several seeds it is the mean of the seeds' percentiles,
            which is more than the 95th percentile of such a mean.
        p_calibrated: Of calibration errors only: the share of those models whose error is as large
            as this one or larger. Over S seeds it is S times the least of the seeds' shares, at
            most 1: a bound of the p-value of all seeds being calibrated. It is not derived from
            `floor`, so a mean below the floor may have a small p, and one above it a large p. JSON
            and tables call it "p", as a calibration error has no other.
        p_no_difference: Of differences with an interval only: the two-sided p-value of there being
            none, in the mean over seeds and questions. It is below 0.05 where the interval leaves
            out 0. It is the "p" of `compare`.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    p_calibrated: float | None = None
    p_no_difference: float | None = None

    @property
    def null_q95(self) -> float | None:
        """What `floor` was called until 0.1."""
        _warn_of_former_field("null_q95", "floor")
        return self.floor

    @property
    def p(self) -> float | None:
        """What `p_calibrated` was called until 0.1."""
        _warn_of_former_field("p", "p_calibrated")
        return self.p_calibrated

    @property
    def p_none(self) -> float | None:
        """What `p_no_difference` was called until 0.1."""
        _warn_of_former_field("p_none", "p_no_difference")
        return self.p_no_difference

    @property
    def significant(self) -> bool:
        """Whether a difference's interval leaves out 0."""
        if self.low is None or self.high is None:
            return False
        return self.low > ROUNDING or self.high < -ROUNDING

    def as_dict(self) -> dict[str, float | None]:
        """Return the numbers under the names that JSON prints."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "floor": self.floor,
            "p": self.p_calibrated,
        }

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        text = f"{self.value:.4f}"
        if self.low is not None:
            text += f" [{self.low:.4f}, {self.high:.4f}]"
        if self.floor is not None:
            text += f" floor {self.floor:.3f}, p {self.p_calibrated:.3f}"
        return text


def _warn_of_former_field(former: str, name: str) -> None:
    """Say what a field of `Estimate` is called now, at the line that reads the former name."""
    warnings.warn(f"Estimate.{former} is Estimate.{name} now", FutureWarning, stacklevel=3)


class Side(NamedTuple):
    """One side of a difference: a metric's value in each of S evaluations, and its draws.

    Only metrics with an interval have draws, and so a side; of others `_values` gives the values.
    """

    values: np.ndarray  # (S,)
    draws: np.ndarray  # (S, R); not finite in resamples of which the metric is not defined
    cluster_count: int | None = None  # of those resampled as a whole; None: single questions
    # (S, M, U): values of M metrics, each computed of one of U units alone. It is None where they
    # are too many to keep. A unit is what is resampled, a question or a subject. Of a mean, such as
    # accuracy, M is 1: the metric itself. Of another metric, such as AUROC, which a single question
    # does not have, they are all metrics with an interval instead. Two sides differ in a unit where
    # any of its M values does; `sign_test_p` counts these units.
    unit_values: np.ndarray | None = None
    is_mean: bool = False  # whether the metric is a mean over the questions

    def weighted(self, weight: float) -> "Side":
        """Return the side with its values, draws and units' values multiplied by a weight."""
        unit_values = None if self.unit_values is None else weight * self.unit_values
        return self._replace(
            values=weight * self.values, draws=weight * self.draws, unit_values=unit_values
        )


def estimate(seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition) -> Estimate:
    """Return a metric of one evaluation, or its mean over seeds, with a 95 % interval or a floor.

    For a metric that is compared by its square, `rms_debiased`, it is the root of the mean of the
    squared errors. The value is None where an evaluation lacks the definition of confidence
    `among`. There is no floor where an evaluation has none, as one that was `measure`d for some
    metrics alone. Raises `InputError` where the questions differ.
    """
    same_questions(seeds)
    if any(among not in evaluation.confidences for evaluation in seeds):
        return Estimate()
    floor = None
    p_calibrated = None
    has_floor = metric in WITH_FLOOR and all(evaluation.floor_tests for evaluation in seeds)
    if has_floor:
        tests = [evaluation.floor_tests[among][metric] for evaluation in seeds]
        floor = float(np.mean([test.floor for test in tests]))
        # Seeds answer the same questions, so their p-values depend on each other: Bonferroni's
        # bound.
        p_calibrated = min(1.0, len(seeds) * min(test.p for test in tests))
    if metric in COMPARED_BY_SQUARE:
        root = float(root_of_square(_values(seeds, metric, among).mean()))
        return Estimate(root, floor=floor, p_calibrated=p_calibrated)
    if metric not in WITH_INTERVAL:
        mean_value = finite(float(_values(seeds, metric, among).mean()))
        return Estimate(mean_value, floor=floor, p_calibrated=p_calibrated)
    side = _side(seeds, metric, among)
    mean = estimate_mean(side, METRICS[metric].lowest, METRICS[metric].highest)
    return Estimate(mean.value, mean.low, mean.high, floor, p_calibrated)


def difference(
    a: Sequence[Evaluation],
    b: Sequence[Evaluation],
    metric: str,
    among: ConfidenceDefinition,
    paired: bool = True,
) -> Estimate:
    """Return b − a as a `contrast`; each side is one evaluation, or those of one row's seeds.

    Sides of unequal numbers of seeds are compared without pairs, whatever `paired` says.
    """
    return contrast([(-1, a), (1, b)], metric, among, paired)


def contrast(
    terms: Sequence[tuple[int, Sequence[Evaluation]]],
    metric: str,
    among: ConfidenceDefinition = "choices",
    paired: bool = True,
) -> Estimate:
    """Return Σ weight × a metric's mean over each term's seeds, with its 95 % interval.

    Two terms are a difference, b − a: (1, b), (−1, a). Four may be a difference of differences,
    (b′ − a′) − (b − a), by how much an effect is greater in another setting: (1, b′), (−1, a′),
    (−1, b), (1, a).

    If `paired`, the terms' seeds are paired in their order, so the first of each must be alike.
    Terms with unequal numbers of seeds have no pairs: they are compared without, whatever `paired`
    says, and whoever prints the estimate must say so, as `calibeval.report` does. A metric that is
    compared by its square, `rms_debiased`, is taken as the *squared* error (what miscalibration
    adds to the Brier score of the likeliest choice): roots differ irregularly near 0, so no
    interval of theirs is known to cover. Where subjects are resampled, none is known for the
    squares either.

    What seeds differ by is added for the terms that have two seeds or more. For a term of a single
    run it counts as 0: the interval covers the questions and the other terms' seeds. That is right
    of a model before fine-tuning, which has no seed, and too narrow for a setting trained once.

    Raises `InputError` where the questions differ.
    """
    everything = [evaluation for _, seeds in terms for evaluation in seeds]
    same_questions(everything)
    if any(among not in evaluation.confidences for evaluation in everything):
        return Estimate()
    if metric in COMPARED_BY_SQUARE and everything[0].cluster is None:
        sides = _square_sides(terms, metric, among)
    elif metric in WITH_INTERVAL:
        sides = [_side(seeds, metric, among).weighted(weight) for weight, seeds in terms]
    else:
        means = [weight * _values(seeds, metric, among).mean() for weight, seeds in terms]
        return Estimate(finite(float(sum(means))))
    return estimate_sum(*sides, paired=paired)


def estimate_mean(side: Side, lowest: float = -math.inf, highest: float = math.inf) -> Estimate:
    """Return a side's mean over seeds, with a 95 % interval if all draws are finite and vary.

    The interval ends at `lowest` and `highest`, the least and the greatest that a value can be.
    Draws that do not vary, as the accuracy of one question or of answers that are all right, say
    nothing of other questions.
    """
    value = finite(float(side.values.mean()))
    if value is None:
        return Estimate()
    interval = _interval(value, [side])
    if interval is None:
        return Estimate(value)
    low, high = interval
    if high - low < ROUNDING:
        return Estimate(value)
    # Rounded probabilities can put the value itself a little outside; the interval still holds it.
    low = min(max(low, lowest), value)
    high = max(min(high, highest), value)
    return Estimate(value, low, high)


def estimate_sum(*sides: Side, paired: bool = True) -> Estimate:
    """Return the sum of the sides' means over seeds, with a 95 % interval if all draws are finite.

    It is a difference where a side's weight is negative (`Side.weighted`). If `paired`, the sides'
    seeds are paired in their order; sides with unequal numbers of seeds have no pairs and are
    summed without (`are_paired` tells). Draws that do not vary say nothing of other questions,
    unless the sum is 0 for every seed: sides that agree in every resample agree on any questions.
    Where the sides differ in few questions or subjects, all in one direction, p is at least that of
    a sign test (`sign_test_p`), and the interval holds 0 where that is not below 0.05.
    """
    if paired and are_paired(sides):
        sides = (_in_pairs(sides),)
    value = finite(float(sum(side.values.mean() for side in sides)))
    if value is None:
        return Estimate()
    interval = _interval(value, sides)
    if interval is None:
        return Estimate(value)
    low, high = interval
    seeds_differ = any(np.ptp(side.values) > ROUNDING for side in sides)
    if high - low < ROUNDING and (abs(value) > ROUNDING or seeds_differ):
        return Estimate(value)
    # p follows from the interval and not from the draws, so that the two never disagree.
    half_width = value - low if value > 0 else high - value
    p_no_difference = two_sided_p(value, half_width, degrees_of_freedom(sides))
    is_mean = all(side.is_mean for side in sides)
    sign_p = sign_test_p(value, _summed(sides), _summed_units(sides), is_mean)
    if sign_p is not None:
        p_no_difference = max(p_no_difference, sign_p)
        if sign_p >= SIGNIFICANCE:
            low = min(low, 0.0)
            high = max(high, 0.0)
    return Estimate(value, low, high, p_no_difference=p_no_difference)


def are_paired(sides: Sequence[Side]) -> bool:
    """Whether `estimate_sum` can pair the sides' seeds: each side has as many."""
    return len({len(side.values) for side in sides}) == 1


def sign_test_p(
    value: float,
    summed_draws: np.ndarray,
    summed_units: np.ndarray | None = None,
    is_mean: bool = False,
) -> float | None:
    """Return the p-value of the sign test of a difference; None where there is no such test.

    A unit is what is resampled, a question or a subject. If k units differ, all in one direction,
    p = 2 · ½^k (McNemar's exact test of answers that changed): 0.0625 of five units, 0.031 of six.
    If none differs, p is 1.

    There is no such test where units differ in both directions, nor where so many of them differ
    that their number is not known. The interval alone decides then.

    Args:
        value: The sum of the sides as they are.
        summed_draws: Those of R resamples, (R,).
        summed_units: The sum of the sides' `Side.unit_values`, (M, U), in each of U units: the
            metric itself if it is a mean (M = 1), else every metric with an interval. None where
            there are too many units to keep.
        is_mean: Whether the metric is a mean over the questions.
    """
    if is_mean and summed_units is not None:
        in_both_directions = _have_both_signs(summed_units)
    else:
        # A rank or an error over bins compares units with each other, so no unit has a sign of its
        # own in it. There, and where units are not kept, the sums over resamples give the sign.
        in_both_directions = _have_both_signs(summed_draws)
    if in_both_directions:
        return None
    if not _differs(summed_draws).any():
        differing_units: float | None = 0
    elif summed_units is not None:
        # A unit differs if it does so in any of the M metrics.
        differing_units = int(_differs(summed_units).any(0).sum())
    else:
        differing_units = _units_by_draws(value, summed_draws)
    if differing_units is None:
        return None
    return min(1.0, 2 * 0.5**differing_units)


def _have_both_signs(sums: np.ndarray) -> bool:
    """Whether some sums are above 0 and others below it, by more than rounding."""
    return bool(sums.min() < -ROUNDING and sums.max() > ROUNDING)


def _differs(sums: np.ndarray) -> np.ndarray:
    """Where a sum of sides is not 0 but for rounding."""
    return np.abs(sums) > ROUNDING


def _units_by_draws(value: float, summed_draws: np.ndarray) -> float | None:
    """Estimate how many of many units differ, from resamples; None where none of these is 0.

    It is the smaller of two estimates of this number k:

    By the share of the resamples that are 0: a share exp(−k) holds none of k units of many. Where
    no resample is 0, k is not known but large, and the interval decides alone.

    By the variance: a unit that differs by x is drawn as often as a Poisson number says, so the
    sum's variance is Σ x², and (Σ x)² / Σ x² is k where all differ by as much, as answers that are
    right or wrong do. It is less where they do not.

    The number is needed for k up to 5, of which the sign test's p is above 0.05 while the interval
    alone may leave out 0. For k of 4 and 5 it may leave it out because exp(−k) is below 2.5 %, so
    that the lower quantile of the draws of a value above 0 is above 0 too. For k ≤ 3 it may by
    chance. There exp(−k) is more than 2.5 %, so the lower quantile is 0. But `_interval` shifts the
    draws until their mean is the value: it begins at value + (quantile − mean of the draws), where
    nothing widens it. Here that is value − mean of the draws. It is 0 but for the randomness of the
    resamples, and whether it is above 0 or below it is chance.
    """
    zero_share = float((~_differs(summed_draws)).mean())
    if zero_share == 0:
        return None
    by_share = -math.log(zero_share)
    by_variance = value**2 / float(summed_draws.var())
    return min(by_share, by_variance)


def _in_pairs(sides: Sequence[Side]) -> Side:
    """The sum of sides of as many seeds each, which are paired in their order."""
    kept = [side.unit_values for side in sides if side.unit_values is not None]
    unit_values = np.asarray(sum(kept)) if len(kept) == len(sides) else None
    return Side(
        values=np.asarray(sum(side.values for side in sides)),
        draws=np.asarray(sum(side.draws for side in sides)),
        cluster_count=_cluster_count(sides),
        unit_values=unit_values,
        is_mean=all(side.is_mean for side in sides),
    )


def _cluster_count(sides: Sequence[Side]) -> int | None:
    """How many clusters were resampled, of all sides alike: they are of the same questions."""
    (cluster_count,) = {side.cluster_count for side in sides}
    return cluster_count


def _interval(value: float, sides: Sequence[Side]) -> tuple[float, float] | None:
    """The ends of a 95 % interval around the sum of the sides' means; None without all draws."""
    summed_draws = _summed(sides)
    if not np.isfinite(summed_draws).all():
        return None
    from_mean = quantile(summed_draws, [LOW, HIGH]) - summed_draws.mean()
    inflation = seed_inflation(sides) * cluster_inflation(_cluster_count(sides))
    low, high = (value + inflation * from_mean).tolist()
    return low, high


def cluster_inflation(cluster_count: int | None) -> float:
    """How much wider an interval over C resampled clusters must be than its draws.

    sqrt(C / (C − 1)) since the draws vary around the clusters' own mean, times Student's quantile
    of C − 1 degrees of freedom over the normal one (Cameron & Miller 2015, sections II and VI).
    """
    if cluster_count is None:
        return 1.0
    ratio = student_quantile(cluster_count - 1) / NORMAL_QUANTILE
    return math.sqrt(cluster_count / (cluster_count - 1)) * ratio


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

    (q + Σ v)² / (Σ v² / (S − 1) + q² / (C − 1)), in the letters of this module's head. The sums are
    over the sides, and v = max(0, s² − o) / S is what a side's seeds add to the variance of its
    mean, estimated without bias but for the 0. `seed_inflation` adds more to the interval's width,
    since few seeds show s² badly. Where single questions were resampled, q² / (C − 1) is left out.
    """
    question_variance = float(_summed(sides).var(ddof=1))
    total = question_variance
    squares = 0.0
    cluster_count = _cluster_count(sides)
    if cluster_count is not None:
        squares += question_variance**2 / (cluster_count - 1)
    for side in sides:
        seeds = len(side.values)
        if seeds > 1:
            part = max(side.values.var(ddof=1) - _own_noise(side), 0.0) / seeds
            total += part
            squares += part**2 / (seeds - 1)
    return total**2 / squares if squares else math.inf


def _own_noise(side: Side) -> float:
    """The question noise that a side's seeds do not share.

    It is the mean variance less the mean covariance of the seeds' draws. The covariance is the
    noise that seeds share, since they answer the same questions.
    """
    seeds = len(side.values)
    covariance = np.cov(side.draws)
    trace = np.trace(covariance)
    return max((trace - (covariance.sum() - trace) / (seeds - 1)) / seeds, 0.0)


def holm(p_values: Sequence[float | None], level: float = FAMILY_LEVEL) -> list[bool]:
    """Which of m comparisons survive Holm's correction (Holm 1979).

    From the least p on, the i-th of them is compared with level / (m − i + 1), and the first that
    is not below ends it: the probability that any true null hypothesis falls is at most `level`,
    however the comparisons depend on each other. None is no comparison.
    """
    least_first = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    survives = [False] * len(p_values)
    for rank, (p, place) in enumerate(least_first):
        if p >= level / (len(least_first) - rank):
            break
        survives[place] = True
    return survives


def _summed(sides: Sequence[Side]) -> np.ndarray:
    """The sum of the sides' draws, each their mean over its seeds, (R,)."""
    return np.asarray(sum(side.draws.mean(0) for side in sides))


def _summed_units(sides: Sequence[Side]) -> np.ndarray | None:
    """The sum of the sides' `unit_values`, each their mean over its seeds, (M, U)."""
    means = []
    for side in sides:
        if side.unit_values is None:
            return None
        means.append(side.unit_values.mean(0))
    return np.asarray(sum(means))


def seed_inflation(sides: Sequence[Side]) -> float:
    """Return how much wider than its question noise an interval of means over seeds must be.

    The seeds' own variance would be s² − o. Of few seeds Student's factor widens it to
    r² (s² − o), but simulation shows that r² o takes off too much, so that intervals cover too
    little. So it is r² s² − r^e o, where e = `NOISE_EXPONENT` is fitted by simulation.
    (`degrees_of_freedom` uses s² − o itself.) The factor is

    sqrt(1 + (Σ over sides of max(0, r² s² − r^e o) / S) / q),

    in the letters of this module's head.
    """
    question_variance = _summed(sides).var(ddof=1)
    if not question_variance:
        return 1.0
    seed_variance = 0.0
    for side in sides:
        seeds = len(side.values)
        if seeds > 1:
            ratio = student_quantile(seeds - 1) / NORMAL_QUANTILE
            own_noise = ratio**NOISE_EXPONENT * _own_noise(side)
            spread = ratio**2 * side.values.var(ddof=1) - own_noise
            seed_variance += max(spread, 0.0) / seeds
    return math.sqrt(1 + seed_variance / question_variance)


def _values(seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition) -> np.ndarray:
    """A metric of each evaluation, squared if it is compared by squares, (S,); NaN where None."""
    if metric in COMPARED_BY_SQUARE:
        return np.array([evaluation.squares[among][metric].observed for evaluation in seeds])
    return np.array([evaluation.values[among][metric] for evaluation in seeds], float)


def _side(seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition) -> Side:
    """One side of a metric that has an interval."""
    return Side(
        values=_values(seeds, metric, among),
        draws=np.stack([evaluation.draws[among][metric] for evaluation in seeds]),
        cluster_count=seeds[0].cluster_count,
        unit_values=_unit_values(seeds, metric, among),
        is_mean=METRICS[metric].is_mean,
    )


def _unit_values(
    seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition
) -> np.ndarray | None:
    """The units' own values in the M metrics by which they differ, (S, M, U).

    See `Side.unit_values`. A rank or an error over bins may differ though no unit's own value of it
    does, so there all metrics with an interval are looked at.
    """
    names = [metric] if METRICS[metric].is_mean else list(WITH_INTERVAL)
    by_seed = [evaluation.unit_values.get(among, {}) for evaluation in seeds]
    if not all(name in of_seed for of_seed in by_seed for name in names):
        return None
    return np.stack([[of_seed[name] for name in names] for of_seed in by_seed])


def _square_sides(
    terms: Sequence[tuple[int, Sequence[Evaluation]]], metric: str, among: ConfidenceDefinition
) -> list[Side]:
    """The weighted sides of a contrast of squared calibration errors.

    Their draws are A + κ (B + D) in the words of `calibeval.squared_error`, with one κ for the
    whole contrast. Single questions are resampled: over subjects no such draws are known to
    cover.
    """
    noise_parts = []  # A, (S, R) for each term
    gap_parts = []  # B + D
    for _, seeds in terms:
        squares = [evaluation.squares[among][metric] for evaluation in seeds]
        noise_parts.append(np.stack([square.noise_part for square in squares]))
        gap_parts.append(np.stack([square.gap_part for square in squares]))
    kappa = shrinkage(_weighted_sum(terms, noise_parts), _weighted_sum(terms, gap_parts))
    sides = []
    for (weight, seeds), noise_part, gap_part in zip(terms, noise_parts, gap_parts, strict=True):
        side = Side(
            values=_values(seeds, metric, among),
            draws=noise_part + kappa * gap_part,
            unit_values=_unit_values(seeds, metric, among),
            is_mean=METRICS[metric].is_mean,
        )
        sides.append(side.weighted(weight))
    return sides


def _weighted_sum(
    terms: Sequence[tuple[int, Sequence[Evaluation]]], parts: Sequence[np.ndarray]
) -> np.ndarray:
    """Σ weight × the mean over seeds of each term's part (S, R), (R,)."""
    means = [weight * part.mean(0) for (weight, _), part in zip(terms, parts, strict=True)]
    return np.asarray(sum(means))


def coverage_of(alike: Sequence[Evaluation]) -> str:
    """What the intervals of evaluations of the same questions cover, in words."""
    first = alike[0]
    if first.cluster == "subject":
        return f"over resamples of all {first.subjects} subjects: they hold for subjects like these"
    if first.subjects == 1:
        return "over resamples of the questions"
    text = f"over resamples of the questions: they hold for these {first.subjects} subjects"
    if first.subjects >= FEWEST_CLUSTERS:
        text += "; --cluster subject covers others like them"
    return text


def p_of_comparison(metric: str, difference: Estimate) -> float | None:
    """The p-value with which a difference counts among many comparisons; None where it does not.

    A metric of which neither direction is better, `ece_signed`, is shown and not compared.
    """
    return None if METRICS[metric].better == "neither" else difference.p_no_difference


def better(metric: str, found: Estimate) -> str | None:
    """Return which side a difference speaks for, "a" or "b".

    None where the interval holds 0 or there is none, and for `ece_signed`, of which neither
    direction is better.
    """
    direction = METRICS[metric].better
    if direction == "neither" or not found.significant or found.low is None:
        return None
    is_higher = found.low > 0
    return "b" if is_higher == (direction == "higher") else "a"


# What of other modules could be had as `calibeval.stats.NAME` until 0.1; `Run` is `Evaluation` now.
_MOVED_FROM_EVALUATIONS = (
    "CONFIDENCES",
    "Cluster",
    "RESAMPLES",
    "TooFewClusters",
    "code_digest",
    "in_order",
    "load",
    "measure",
    "reliability",
)
_RENAMED = {"Run": "Evaluation", "consistency": "floor_tests", "samples": "samples_of"}
_MOVED_FROM_COMPARABLE = ("same_normaliser", "same_prompts")


def __getattr__(name: str) -> Any:
    new_name = _RENAMED.get(name, name)
    module: ModuleType
    if name in _MOVED_FROM_COMPARABLE:
        module = comparable
    elif name in _RENAMED or name in _MOVED_FROM_EVALUATIONS:
        module = evaluations
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"calibeval.stats.{name} is {module.__name__}.{new_name} now", FutureWarning, stacklevel=2
    )
    return getattr(module, new_name)

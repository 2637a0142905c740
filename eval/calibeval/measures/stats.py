"""Estimates with intervals: of one evaluation, of several seeds, and of the difference of two.

An `Evaluation` (see `evaluations`) holds the metrics of one record file and their draws over
resamples of its questions. The questions are resampled with replacement, the same way for every
file of the same questions, so that what files share is counted once over seeds and cancels in a
difference. An interval is given only where simulation has shown that it covers
(tests/eval/interval_coverage.py).

Resamples of few answers, or of few questions that differ, do not tell how many others would. What
counts is how many questions make up a value or a difference (`effective_count`). Of a mean that
counts right answers the interval is then widened to one by formula: Wilson's of one run, Bonett and
Price's of a difference. Of other metrics there is none.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibeval.measures.comparable import same_questions
from calibeval.measures.definitions import COMPARED_BY_SQUARE, METRICS, WITH_FLOOR, WITH_INTERVAL
from calibeval.measures.evaluations import (
    FEWEST_CLUSTERS,
    HIGH,
    LOW,
    SIGNIFICANCE,
    Evaluation,
    finite,
    quantile,
)
from calibeval.measures.samples import AMONG_WORDS, ConfidenceDefinition
from calibeval.measures.squared_error import root_of_square, shrinkage

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
# An interval from resamples needs so many questions to make up a value that is a mean, a rank among
# all questions, or a difference; and so many subjects, where these are resampled, to differ.
FEWEST_OF_MEAN = 20
FEWEST_OF_RANK = 50
FEWEST_OF_DIFFERENCE = 6
# Where a model rarely has enough of them for an interval, it has one just when more questions than
# usual went wrong by luck, so that fewer count. With 1 such an interval of the log loss covers
# 0.91, with 2 it covers 0.93 (tests/eval/interval_coverage.py, 98.6 % right).
LUCKY = 2
# With so many answers right and wrong, or right in one model alone, no formula is needed.
ENOUGH_ANSWERS = 20
FEW_QUESTIONS = 100  # below these intervals may hold the truth less often than they say
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


class Side(NamedTuple):
    """One side of a difference: a metric's value in each of S evaluations, and its draws.

    Only metrics with an interval have draws, and so a side; of others `_values` gives the values.
    """

    values: np.ndarray  # (S,)
    draws: np.ndarray  # (S, R); not finite in resamples of which the metric is not defined
    cluster_count: int | None = None  # of those resampled as a whole; None: single questions
    # (S, U): the metric of each of U units alone, a question or a subject. Of metrics that no
    # single question has, such as AUROC, it is the Brier score. None: not known.
    unit_values: np.ndarray | None = None
    # (S, U): which units' answers are right, or their share, if a right answer adds something to
    # the metric at once, however probable it is: 1, or −1 where it is taken off. Else None.
    right_answers: np.ndarray | None = None
    right_answer_adds: int = 1
    is_mean: bool = True  # whether the metric is a mean of `unit_values`

    def weighted(self, weight: float) -> "Side":
        """Return the side with all that it holds of its metric multiplied by a weight."""
        unit_values = None if self.unit_values is None else weight * self.unit_values
        right_answers = None if self.right_answers is None else weight * self.right_answers
        return self._replace(
            values=weight * self.values,
            draws=weight * self.draws,
            unit_values=unit_values,
            right_answers=right_answers,
        )


def estimate(seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition) -> Estimate:
    """Return a metric of one evaluation, or its mean over seeds, with a 95 % interval or a floor.

    For a metric that is compared by its square, `rms_debiased`, it is the root of the mean of the
    squared errors. The value is None where an evaluation lacks the definition of confidence
    `among`. There is no interval or floor where an evaluation lacks that part. Raises `InputError`
    where the questions differ.
    """
    same_questions(seeds)
    if not _was_computed(seeds, metric, among):
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
    has_draws = all(evaluation.draws for evaluation in seeds)
    if metric not in WITH_INTERVAL or not has_draws:
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
    if not _was_computed(everything, metric, among):
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
    """Return a side's mean over seeds, with a 95 % interval where one is known to cover.

    The interval ends at `lowest` and `highest`, the least and the greatest that a value can be.
    """
    value = finite(float(side.values.mean()))
    if value is None:
        return Estimate()
    interval = _interval(value, [side])
    if interval is None:
        return Estimate(value)
    if side.cluster_count is None and side.right_answers is not None:
        answers = side.right_answers.mean(0)
        interval = _with_formula(interval, value, answers, side.right_answer_adds, wilson)
    elif side.cluster_count is None and side.unit_values is not None:
        units = side.unit_values.mean(0)
        questions = effective_count(units)
        if questions < (FEWEST_OF_MEAN if side.is_mean else FEWEST_OF_RANK):
            return Estimate(value)
        if lowest < 0 and np.count_nonzero(units < 0) < FEWEST_OF_MEAN:
            return Estimate(value)  # how often a value is far below 0 would be read off too few
        if questions < FEWEST_OF_RANK:
            interval = _widened(interval, value, questions / LUCKY)
    low, high = interval
    if high - low < ROUNDING:
        return Estimate(value)
    # Rounded probabilities can put the value itself a little outside; the interval still holds it.
    low = min(max(low, lowest), value)
    high = max(min(high, highest), value)
    return Estimate(value, low, high)


def estimate_sum(*sides: Side, paired: bool = True) -> Estimate:
    """Return the sum of the sides' means over seeds, with a 95 % interval where one is known.

    It is a difference where a side's weight is negative (`Side.weighted`). If `paired`, the sides'
    seeds are paired in their order; sides with unequal numbers of seeds have no pairs and are
    summed without (`are_paired` tells). Where few questions or subjects make up the difference,
    resamples do not tell how much others would differ: see this module's head.
    """
    if finite(sum(float(side.values.mean()) for side in sides)) is None:
        return Estimate()
    if paired and are_paired(sides):
        sides = (_in_pairs(sides),)
    value = float(sum(side.values.mean() for side in sides))
    interval = _interval(value, sides)
    if interval is None:
        return Estimate(value)
    cluster_count = _cluster_count(sides)
    units = _summed_units([side.unit_values for side in sides])
    right_answers = _summed_units([side.right_answers for side in sides])
    if cluster_count is None and right_answers is not None:
        adds = sides[0].right_answer_adds
        interval = _with_formula(interval, value, right_answers, adds, bonett_price)
    elif units is not None:
        by_question = cluster_count is None
        differing = effective_count(units) if by_question else np.count_nonzero(units)
        if differing < FEWEST_OF_DIFFERENCE:
            return Estimate(value)
        if by_question:
            interval = _widened(interval, value, differing)
    low, high = interval
    if high - low < ROUNDING:
        return Estimate(value)
    # p follows from the interval and not from the draws, so that the two never disagree.
    half_width = value - low if value > 0 else high - value
    p_no_difference = two_sided_p(value, half_width, degrees_of_freedom(sides))
    return Estimate(value, low, high, p_no_difference=p_no_difference)


def effective_count(units: np.ndarray) -> float:
    """How many units make up the sum of their values (U,): (Σ |v|)² / Σ v².

    It is k where k of them are not 0 and all as large, and less where few are much larger.
    """
    squares = float((units.astype(float) ** 2).sum())
    return float(np.abs(units).sum(dtype=float)) ** 2 / squares if squares else 0.0


def _widened(interval: tuple[float, float], value: float, questions: float) -> tuple[float, float]:
    """An interval that few questions make up, as wide as one over so few clusters."""
    if questions >= FEWEST_OF_RANK:
        return interval
    low, high = interval
    inflation = cluster_inflation(questions)
    return value + inflation * (low - value), value + inflation * (high - value)


def _with_formula(
    interval: tuple[float, float],
    value: float,
    right_answers: np.ndarray,
    right_answer_adds: int,
    formula: Callable[[np.ndarray], tuple[float, float, float]],
) -> tuple[float, float]:
    """An interval, widened to that of the right answers' mean by a formula where these are few.

    Args:
        interval: The interval from resamples, around `value`.
        value: The metric.
        right_answers: Which answers are right, or in a difference in one model alone, (N,).
        right_answer_adds: What a right answer adds to the metric, 1 or −1.
        formula: Returns the ends of the mean's interval, and how many answers tell of it.
    """
    low, high, answers = formula(right_answers)
    if answers >= ENOUGH_ANSWERS:
        return interval
    others = value - right_answer_adds * float(right_answers.mean(dtype=float))
    ends = (others + right_answer_adds * low, others + right_answer_adds * high)
    return min(*interval, *ends), max(*interval, *ends)


def wilson(right_answers: np.ndarray) -> tuple[float, float, float]:
    """The ends of Wilson's interval of a rate, and how many answers are right or wrong.

    The smaller number of the two counts. Right answers are 1, others 0, means over seeds between
    (Wilson 1927). Of N right answers of N the interval begins at N / (N + 3.84).
    """
    questions = len(right_answers)
    rate = float(right_answers.mean(dtype=float))
    shrink = 1 + NORMAL_QUANTILE**2 / questions
    middle = (rate + NORMAL_QUANTILE**2 / (2 * questions)) / shrink
    variance = rate * (1 - rate) / questions + (NORMAL_QUANTILE / (2 * questions)) ** 2
    half_width = NORMAL_QUANTILE * math.sqrt(variance) / shrink
    fewer = questions * min(rate, 1 - rate)
    return middle - half_width, middle + half_width, fewer


def bonett_price(differences: np.ndarray) -> tuple[float, float, float]:
    """The ends of the adjusted interval of a paired difference of rates (Bonett & Price 2012).

    It adds one question of each direction to those whose answers differ, whose number comes third.

    Args:
        differences: 1 where an answer is right in one model alone, −1 where it is in the other
            alone, else 0; of means over seeds also between, (N,).
    """
    questions = len(differences)
    up = (float(differences.clip(min=0).sum(dtype=float)) + 1) / (questions + 2)
    down = (float((-differences).clip(min=0).sum(dtype=float)) + 1) / (questions + 2)
    middle = up - down
    variance = (up + down - middle**2) / (questions + 2)
    half_width = NORMAL_QUANTILE * math.sqrt(max(variance, 0.0))
    most = max(1.0, float(np.abs(differences).max()))  # that a question can differ by
    low = max(middle - half_width, -most)
    high = min(middle + half_width, most)
    return low, high, effective_count(differences)


def are_paired(sides: Sequence[Side]) -> bool:
    """Whether `estimate_sum` can pair the sides' seeds: each side has as many."""
    return len({len(side.values) for side in sides}) == 1


def _in_pairs(sides: Sequence[Side]) -> Side:
    """The sum of sides of as many seeds each, which are paired in their order."""
    return Side(
        values=np.asarray(sum(side.values for side in sides)),
        draws=np.asarray(sum(side.draws for side in sides)),
        cluster_count=_cluster_count(sides),
        unit_values=_sum_where_known([side.unit_values for side in sides]),
        right_answers=_sum_where_known([side.right_answers for side in sides]),
        right_answer_adds=sides[0].right_answer_adds,
    )


def _sum_where_known(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The sum of arrays; None where one of them is."""
    known = [part for part in parts if part is not None]
    return np.asarray(sum(known)) if len(known) == len(parts) else None


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


def cluster_inflation(cluster_count: float | None) -> float:
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


def holm(p_values: Sequence[float | None]) -> list[bool]:
    """Which of m comparisons survive Holm's correction (Holm 1979).

    From the least p on, the i-th of them is compared with FAMILY_LEVEL / (m − i + 1), and the first
    that is not below ends it: the probability that any true null hypothesis falls is at most
    FAMILY_LEVEL, however the comparisons depend on each other. None is no comparison.
    """
    least_first = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    survives = [False] * len(p_values)
    for rank, (p, place) in enumerate(least_first):
        if p >= FAMILY_LEVEL / (len(least_first) - rank):
            break
        survives[place] = True
    return survives


def _summed(sides: Sequence[Side]) -> np.ndarray:
    """The sum of the sides' draws, each their mean over its seeds, (R,)."""
    return np.asarray(sum(side.draws.mean(0) for side in sides))


def _summed_units(by_side: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The sum over sides of units' values (S, U), each side's their mean over seeds, (U,)."""
    return _sum_where_known([None if units is None else units.mean(0) for units in by_side])


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


def _was_computed(
    evaluations: Sequence[Evaluation], metric: str, among: ConfidenceDefinition
) -> bool:
    """Whether all have the metric; some are computed only where they are named."""
    of_metric = "squared_values" if metric in COMPARED_BY_SQUARE else "values"
    return all(
        metric in getattr(evaluation, of_metric).get(among, {}) for evaluation in evaluations
    )


def _values(seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition) -> np.ndarray:
    """A metric of each evaluation, squared if it is compared by squares, (S,); NaN where None."""
    if metric in COMPARED_BY_SQUARE:
        return np.array([evaluation.squared_values[among][metric] for evaluation in seeds])
    return np.array([evaluation.values[among][metric] for evaluation in seeds], float)


def _side(seeds: Sequence[Evaluation], metric: str, among: ConfidenceDefinition) -> Side:
    """One side of a metric that has an interval."""
    draws = np.stack([evaluation.draws[among][metric] for evaluation in seeds])
    units = [evaluation.unit_values.get(among) for evaluation in seeds]
    return side_of(metric, _values(seeds, metric, among), draws, units, seeds[0].cluster_count)


def side_of(
    metric: str,
    values: np.ndarray,
    draws: np.ndarray,
    unit_values: Sequence[Mapping[str, np.ndarray] | None],
    cluster_count: int | None = None,
) -> Side:
    """Return a side of a metric from its values (S,), its draws (S, R) and S times unit values.

    The unit values are by metric, as `evaluations.unit_values` returns them, or None.
    """
    known = [of_seed for of_seed in unit_values if of_seed]
    if len(known) < len(values):
        return Side(values, draws, cluster_count)
    is_mean = METRICS[metric].is_mean
    own_metric = metric if is_mean else "brier"
    right_answers = None
    right_answer_adds = METRICS[metric].right_answer_adds
    if right_answer_adds:
        right_answers = np.stack([of_seed["accuracy"] for of_seed in known])
    return Side(
        values,
        draws,
        cluster_count,
        unit_values=np.stack([of_seed[own_metric] for of_seed in known]),
        right_answers=right_answers,
        right_answer_adds=right_answer_adds,
        is_mean=is_mean,
    )


def _square_sides(
    terms: Sequence[tuple[int, Sequence[Evaluation]]], metric: str, among: ConfidenceDefinition
) -> list[Side]:
    """The weighted sides of a contrast of squared calibration errors.

    Their draws are A + κ (B + D) in the words of `squared_error`, with one κ for the
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
        draws = noise_part + kappa * gap_part
        units = [evaluation.unit_values.get(among) for evaluation in seeds]
        side = side_of(metric, _values(seeds, metric, among), draws, units)
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
    text = "over resamples of the questions"
    if first.subjects > 1:
        text += f": they hold for these {first.subjects} subjects"
    if first.subjects >= FEWEST_CLUSTERS:
        text += "; --cluster subject covers others like them"
    if first.questions < FEW_QUESTIONS:
        text += f"; of fewer than {FEW_QUESTIONS} questions some hold the truth less often"
    return text


def left_out_bins(evaluation: Evaluation) -> str | None:
    """What `rms_debiased` leaves out of an evaluation, in words; None where that is nothing."""
    parts = [
        f"{bins} {AMONG_WORDS[among]}" for among, bins in evaluation.bins_of_one.items() if bins
    ]
    if not parts:
        return None
    return (
        "rms_debiased leaves out bins of one question, which do not tell their noise: "
        f"{', '.join(parts)}"
    )


def differing_answers(a: Evaluation, b: Evaluation) -> int:
    """Return how many questions are answered right in one of two evaluations alone."""
    right_in_a, right_in_b = (
        evaluation.unit_values["choices"]["accuracy"] for evaluation in (a, b)
    )
    return int(np.count_nonzero(right_in_a != right_in_b))


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

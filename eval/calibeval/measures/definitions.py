"""Every metric, as a function of a `Sample`, and the table of them. NumPy alone; never a model.

A metric takes a `Sample` (`calibeval.measures.samples`) and returns one number for each of its R
samples, (R,), so that a thousand resamples are computed together.

To add a metric, write it as a function of a `Sample`, here or in another module (`Sample` says what
it may read), and give it a row in `_TABLE` at the end of this file. From there `calibeval metrics`,
`calibeval compare`, `table.csv` and the tests of every metric's laws have it. What is left to do:

- Tell its definition in eval/METRICS.md. If its row says "interval", run
  tests/eval/interval_coverage.py; if it is a mean over the questions, say `is_mean`.
- For arrays, write a function of its name in `calibeval.metrics`.
- Tables show it where `--columns` or a sweep's `score.columns` names it.

For bin b of n_b of the N questions, w_b = n_b / N and Δ_b = accuracy − confidence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from calibeval.measures.bins import Binning
from calibeval.measures.samples import QuestionsApart, Sample, Scores
from calibeval.measures.squared_error import debiased_square, root_of_square

Better = Literal["higher", "lower", "neither"]  # which values of a metric are better
Uncertainty = Literal["interval", "floor", "none"]


def accuracy(sample: Sample) -> np.ndarray:
    """Share of questions whose likeliest choice is right."""
    return sample.mean(sample.correct)


def nll(sample: Sample) -> np.ndarray:
    """Mean −log p(right choice), in nats."""
    return -sample.mean_if_labels_known(sample.scores.right_logprob)


def brier(sample: Sample) -> np.ndarray:
    """Mean Σ_k (p_k − y_k)² (Brier 1950), with any mass outside the choices as one more outcome."""
    return sample.mean_if_labels_known(sample.scores.brier_score)


def ece_signed(sample: Sample) -> np.ndarray:
    """Mean confidence − accuracy, −Σ w_b Δ_b whatever the bins: above 0 is over-confident."""
    return sample.mean(sample.scores.confidence) - sample.mean(sample.correct)


def auroc(sample: Sample) -> np.ndarray:
    """P(confidence right > wrong) + ½ P(equal), over pairs of answers; NaN without such pairs.

    By the sum of ranks (Mann & Whitney 1947): an answer's rank, equal ones having their mean, less
    ½ is the number of answers below it and half of the equal ones. Summed over the m right answers
    it counts their pairs with the wrong ones, and m² / 2 with each other.
    """
    answers, right = sample.by_level
    ranks = sample.answers_up_to_level - answers / 2
    right_total = right.sum(1)
    pairs = right_total * (sample.answers_up_to_level[:, -1] - right_total)
    concordant = np.einsum("rn,rn->r", right, ranks) - right_total**2 / 2
    return concordant / np.where(pairs > 0, pairs, np.nan)


def aurc(sample: Sample) -> np.ndarray:
    """Area under the risk-coverage curve, Σ_k risk(k) / N (Geifman & El-Yaniv 2017).

    risk(k) is the share of wrong answers among the k surest; of equally sure ones the mean over
    all orders. A wrong answer in place i adds Σ_{k ≥ i} 1 / k = H(N) − H(i − 1) to Σ_k risk(k). Of
    m equally sure answers behind M surer ones, in the places M + 1 to M + m, let e be wrong. Over
    all orders each of these e is in each of the m places equally often, so i − 1 runs from M to
    M + m − 1, and together they add e H(N) − e / m Σ_{M ≤ i < M + m} H(i).
    """
    answers, right = sample.by_level
    # Of each level from the surest on: m, e, and in `surer` M.
    at_level = answers[:, ::-1]
    wrong = at_level - right[:, ::-1]
    total = sample.answers_up_to_level[:, -1:]
    surer = total - sample.answers_up_to_level[:, ::-1]
    sums_below = harmonic_sums(1 << int(total.max()).bit_length())
    sums = sums_below.take(surer)  # Σ_{i < M} H(i) of each level
    sums_of_total = sums_below.take(total)  # Σ_{i < N} H(i)
    # The next level's M is M + m, so neighbours differ by the level's Σ_{M ≤ i < M + m} H(i).
    growth = np.diff(sums, axis=1, append=sums_of_total)
    wrong_share = wrong / np.maximum(at_level, 1)
    harmonic_of_total = (sums_of_total + total) / total  # H(N), as Σ_{i < N} H(i) = N H(N) − N
    wrong_parts = np.einsum("rn,rn->r", wrong_share, growth)
    areas = wrong.sum(1) * harmonic_of_total[:, 0] - wrong_parts
    return areas / total[:, 0]


@lru_cache(maxsize=2)
def harmonic_sums(size: int) -> np.ndarray:
    """Σ_{i < n} H(i) for n from 0 to `size`, with H(n) = Σ_{i ≤ n} 1 / i."""
    harmonic = np.cumsum(1 / np.arange(1, size))
    return np.concatenate([[0, 0], np.cumsum(harmonic)])


def ece(sample: Sample) -> np.ndarray:
    """Expected calibration error, Σ w_b |Δ_b| over equal-width bins (Naeini et al. 2015)."""
    return (sample.bins.weight * np.abs(sample.bins.gap)).sum(1)


def ece_equal_mass(sample: Sample) -> np.ndarray:
    """`ece` over bins that hold as many questions each (Nixon et al. 2019, "adaptive")."""
    bins = sample.scores.equal_mass.of(sample.ranked_correct, _counts(sample))
    return (bins.weight * np.abs(bins.gap)).sum(1)


def ece_classwise(sample: Sample) -> np.ndarray:
    """Mean over choices k of Σ w_b |Δ_b|, for p_k and whether k is right (Kull et al. 2019).

    Over bins of equal width. Simulated answers do not tell which choice is right (`Sample`).
    """
    sample.refuse_without_labels()
    scores = sample.scores
    errors = []
    for choice in range(scores.probs.shape[1]):
        binning = Binning(scores.probs[:, choice], scores.equal_width_edges)
        is_right = (scores.labels == choice)[None, binning.order].astype(float)
        counts = None
        if not sample.has_each_once:
            counts = sample.counts.take(binning.order, axis=1).astype(float, copy=False)
        bins = binning.of(is_right, counts)
        errors.append((bins.weight * np.abs(bins.gap)).sum(1))
    return np.mean(errors, axis=0)


def rms(sample: Sample) -> np.ndarray:
    """Root mean square calibration error, sqrt(Σ w_b Δ_b²) over the bins of `ece`, never below it.

    The definition of Hendrycks et al. 2019. With their bins of 100 questions a calibrated model
    would read 0.045 or so however many questions there are, so the bins are those of `ece`.
    """
    return np.sqrt((sample.bins.weight * sample.bins.gap**2).sum(1))


def rms_debiased(sample: Sample) -> np.ndarray:
    """sqrt(max(0, Σ w_b (Δ_b² − s_b²))), s_b² = Σ_b (y − p − Δ_b)² / (n_b (n_b − 1)).

    s_b² estimates the noise of Δ_b without bias, also where confidences differ within a bin; with
    one confidence a bin it is a_b (1 − a_b) / (n_b − 1) (Kumar et al. 2019, section 5). A bin of
    one question does not tell its noise and counts as 0.
    """
    return root_of_square(debiased_square(sample.bins))


def rms_hendrycks(sample: Sample) -> np.ndarray:
    """What hendrycks/test's `rmsce` returns: (Σ w_b² Δ_b²)^¼, not a root mean square.

    Confidences of ½ or less are folded to (1 − p, 1 − correct) first, bins have about 100
    questions, and the weight is squared with the gap. For comparison with published tables; it may
    lie below the expected error.
    """
    folded = sample.scores.folded
    is_folded = (sample.scores.level <= 0.5)[folded.order]
    correct = np.atleast_2d(sample.correct).take(folded.order, axis=1)
    counts = None
    if not sample.has_each_once:
        counts = sample.counts.take(folded.order, axis=1).astype(float, copy=False)
    folded_correct = correct != is_folded  # 1 − correct where the confidence is folded
    bins = folded.of(folded_correct.astype(float), counts)
    return ((bins.weight * bins.gap) ** 2).sum(1) ** 0.25


def smooth_ece(sample: Sample) -> np.ndarray:
    """Smooth calibration error (Błasiok & Nakkiran 2023), as relplot computes it.

    Σ_t |Σ_i K_σ(t, p_i)(p_i − y_i)| / Σ_t Σ_i K_σ(t, p_i) over a mesh of t, K_σ the Gaussian kernel
    reflected at 0 and 1, and σ the least of a binary search with σ ≥ the error at σ. At each t the
    denominator has `kernel_smoothing.DENSITY_FLOOR` besides, which changes next to nothing.
    """
    return smooth_ece_at(sample)[0]


def smooth_ece_at(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Return the smooth calibration error and its bandwidth σ, (R,) both."""
    counts = _counts(sample)
    gaps = sample.scores.ranked_confidence - sample.ranked_correct
    if counts is not None:
        gaps = counts * gaps
    return sample.scores.smoother.error(gaps, counts)


def smooth_curve(sample: Sample, bandwidth: float, mesh: np.ndarray) -> np.ndarray:
    """Accuracy at each confidence of a mesh, (R, T): t + Σ K_σ(t, p)(y − p) / Σ K_σ(t, p)."""
    counts = _counts(sample)
    gaps = sample.ranked_correct - sample.scores.ranked_confidence
    if counts is not None:
        gaps = counts * gaps
    return mesh + sample.scores.smoother.mean(gaps, counts, bandwidth, mesh)


def _counts(sample: Sample) -> np.ndarray | None:
    """How often each question is in a sample; None where each is there once."""
    return None if sample.has_each_once else sample.ranked_counts


def isotonic_fit(sample: Sample) -> np.ndarray:
    """Isotonic regression of right on confidence: the best increasing recalibration.

    Pool-adjacent-violators on the mean of each level of confidence. Returns the recalibrated
    confidences (R, N) of the questions by ascending confidence, `Scores.order`.
    """
    from scipy.optimize import isotonic_regression

    levels = sample.scores.level_segments
    answers, right = np.broadcast_arrays(*sample.by_level)
    rows = []
    for weight, correct_sum in zip(answers, right, strict=True):
        if weight.all():
            fitted = isotonic_regression(correct_sum / weight, weights=weight).x
        else:  # a resample lacks some levels
            drawn = weight > 0
            mean = correct_sum[drawn] / weight[drawn]
            fitted = np.zeros(len(weight))
            fitted[drawn] = isotonic_regression(mean, weights=weight[drawn]).x
        rows.append(levels.spread(fitted))
    return np.stack(rows)


def mcb(sample: Sample) -> np.ndarray:
    """Miscalibration: mean (p − y)² − mean (r − y)², what recalibration takes off.

    The Brier score of the likeliest choice is MCB − DSC + UNC, with r of `isotonic_fit` and UNC the
    score of the mean accuracy ȳ as a forecast (CORP; Dimitriadis, Gneiting & Jordan 2021).
    """
    stated = _square_score(sample, sample.scores.ranked_confidence)
    return np.maximum(stated - _square_score(sample, isotonic_fit(sample)), 0)


def dsc(sample: Sample) -> np.ndarray:
    """Discrimination: mean (ȳ − y)² − mean (r − y)², what recalibrated confidences tell.

    For the terms see `mcb`.
    """
    total = sample.ranked_counts.sum(1, keepdims=True)
    mean_correct = (sample.ranked_counts * sample.ranked_correct).sum(1, keepdims=True) / total
    constant = _square_score(sample, mean_correct)
    return np.maximum(constant - _square_score(sample, isotonic_fit(sample)), 0)


def _square_score(sample: Sample, forecast: np.ndarray) -> np.ndarray:
    """Mean (forecast − y)² of each sample, (R,), for questions by ascending confidence."""
    squares = (forecast - sample.ranked_correct) ** 2
    if sample.has_each_once:
        return squares.mean(1)
    return (sample.ranked_counts * squares).sum(1) / sample.ranked_counts.sum(1)


@dataclass(frozen=True)
class Metric:
    """A metric, and all that tables and intervals need to know of it.

    Attributes:
        function: Computes it, from a `Sample` of R samples to (R,). Its name is the metric's.
        better: Whether a higher or a lower value is better, or neither.
        uncertainty: "interval" if it is smooth in the sample, so that plain bootstrap intervals
            cover; "floor" if it is a calibration error, which is never below 0 and reads more than
            0 of a calibrated model on few questions; "none" if neither is known to hold.
        heading: Its name in a table's head.
        note: A sentence below a table that has it.
        is_mean: Whether it is a mean over the questions, of a value that each has by itself.
        right_answer_adds: What a right answer adds to this value at once, however probable it is.
        lowest, highest: The values that bound its interval.
        difference: How tables print its difference.
    """

    function: Callable[[Sample], np.ndarray]
    better: Better
    uncertainty: Uncertainty
    heading: str
    note: str = ""
    is_mean: bool = False
    right_answer_adds: int = 0
    lowest: float = -np.inf
    highest: float = np.inf
    difference: "PrintedDifference | None" = None

    @property
    def name(self) -> str:
        """The metric's name in options, tables and JSON."""
        return self.function.__name__

    def draws(self, resampled: Sample) -> np.ndarray:
        """Compute the metric of resamples, (R,), from `Cells` where the questions are very many."""
        return self(resampled if self.is_mean else resampled.coarse)

    def of_questions(self, scores: Scores) -> np.ndarray:
        """Return each question's own value, (N,), of a metric that is a mean."""
        return self(QuestionsApart(scores)).astype(float)

    def __call__(self, sample: Sample) -> np.ndarray:
        """Compute the metric of each sample, (R,).

        Raises `ValueError` where its function returns another shape, as one does that reads the
        scores' answers in place of the sample's.
        """
        values = self.function(sample)
        if values.shape != (sample.size,):
            raise ValueError(
                f"metric {self.name} returned shape {values.shape} of {sample.size} samples; "
                f"expected ({sample.size},): it must read answers and counts from the sample; one "
                "that reads confidences alone is the same of calibrated models, so has no floor"
            )
        return values


@dataclass(frozen=True)
class PrintedDifference:
    """How a table of differences prints a metric whose difference is of another kind or size.

    Attributes:
        heading: What takes the place of the metric's heading.
        note: A sentence below the table.
        scale: By what the difference is multiplied.
        digits: How many digits behind the point it has at least.
    """

    heading: str
    note: str
    scale: int
    digits: int


_TABLE = (
    Metric(
        accuracy,
        "higher",
        "interval",
        "Acc",
        is_mean=True,
        right_answer_adds=1,
        lowest=0,
        highest=1,
    ),
    Metric(nll, "lower", "interval", "NLL", is_mean=True, lowest=0),
    Metric(brier, "lower", "interval", "Brier", is_mean=True, lowest=0, highest=2),
    Metric(
        ece_signed,
        "neither",
        "interval",
        "signed ECE",
        is_mean=True,
        right_answer_adds=-1,
        lowest=-1,
        highest=1,
    ),
    Metric(
        auroc,
        "higher",
        "interval",
        "AUROC",
        "AUROC: how well confidence tells right answers from wrong ones; ½ is not at all.",
        lowest=0,
        highest=1,
    ),
    Metric(
        aurc,
        "lower",
        "interval",
        "AURC",
        "AURC: mean error of the k surest answers over all k.",
        lowest=0,
        highest=1,
    ),
    Metric(
        ece,
        "lower",
        "floor",
        "ECE",
        "ECE: 15 equal-width bins of the likeliest choice's probability.",
    ),
    Metric(
        ece_equal_mass,
        "lower",
        "floor",
        "equal-mass ECE",
        "Equal-mass ECE: 15 bins of as many answers each.",
    ),
    Metric(
        ece_classwise,
        "lower",
        "none",
        "class-wise ECE",
        "Class-wise ECE: the mean over choices of the ECE of each choice's probability.",
    ),
    Metric(rms, "lower", "floor", "RMS", "RMS: the root mean square of the same bins' gaps."),
    Metric(
        rms_debiased,
        "lower",
        "floor",
        "debiased RMS",
        "Debiased RMS: the same less what finitely many answers add to it; bins of one answer, "
        "which do not tell that, are left out.",
        difference=PrintedDifference(
            heading="MSCE × 1000",
            note="MSCE: mean squared calibration error, the debiased RMS squared, in thousandths.",
            scale=1000,
            digits=1,
        ),
    ),
    Metric(smooth_ece, "lower", "floor", "smooth ECE"),
    Metric(mcb, "lower", "floor", "MCB"),
    Metric(
        rms_hendrycks,
        "lower",
        "floor",
        "Hendrycks' RMS",
        "Hendrycks' RMS: what hendrycks/test prints as RMS; not a root mean square.",
    ),
    Metric(dsc, "higher", "none", "DSC"),
)
METRICS = {metric.name: metric for metric in _TABLE}
WITH_INTERVAL = {n: metric for n, metric in METRICS.items() if metric.uncertainty == "interval"}
WITH_FLOOR = {n: metric for n, metric in METRICS.items() if metric.uncertainty == "floor"}
# What is averaged over seeds, and compared, by its square (`squared_error`), since roots differ
# irregularly near 0.
COMPARED_BY_SQUARE = {rms_debiased.__name__: METRICS[rms_debiased.__name__]}

# The calibration error that figures draw over β, that † marks in tables, and that training logs.
MAIN_ERROR = "ece"
# What is said of an evaluation where there is room for a line only.
SUMMARY = ("accuracy", "nll", MAIN_ERROR)

"""Scored questions, samples of them, and every metric. NumPy alone; never a model.

What the probability of a choice is, is one of two definitions of confidence:

choices:    p_k = softmax of the choices' log-probabilities (the official way)
vocabulary: p_k = exp(log-probability), what the model gives the letter among all its tokens

`Scores` holds N questions under one of them, and `Sample` R samples of these questions: the
questions as they are, resamples of them, or simulated answers. A metric takes a `Sample` and
returns one number for each of the R samples, (R,), so that a thousand resamples are computed
together. A sample never copies questions: it counts how often it holds each of them, or says anew
which are answered right. `calibeval.runs` makes the intervals and floors of a record file from
them.

To add a metric, write it here as a function of a `Sample`, and give it a row in the table METRICS
at the end of this file. Tables, figures, `calibeval metrics`, `calibeval compare` and the tests of
every metric's laws read it from there; then tell its definition in eval/METRICS.md.

For bin b of n_b of the N questions, w_b = n_b / N and Δ_b = accuracy − confidence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from calibeval import kernel_smoothing
from calibeval.records import Records

BINS = 15
QUESTIONS_PER_FOLDED_BIN = 100
SEED = 0
# Samples × questions that are computed at a time: larger arrays cost more page faults than they
# save.
CHUNK_CELLS = 300_000

# Confidences that agree to so many decimals are ties, and lie on the same side of a bin's edge:
# renormalising over the choices leaves equal ones with other last digits.
TIE_DECIMALS = 10

Better = Literal["higher", "lower", "neither"]
Uncertainty = Literal["interval", "floor", "none"]


class Scores:
    """N questions with up to K choices, under one definition of confidence.

    Attributes:
        logprobs: Natural log-probabilities (N, K), −∞ for a choice that the question lacks.
        labels: The right choices, (N,).
        probs: Probabilities (N, K), whose rows need not sum to 1.
        best: The likeliest choice, the first of equals, (N,).
        confidence: The probability of the likeliest choice, (N,).
        correct: 1.0 where the likeliest choice is right, else 0.0, (N,).
        right_logprob: Log-probability of the right choice, (N,).
    """

    def __init__(self, logprobs: np.ndarray, labels: np.ndarray):
        rows = np.arange(len(labels))
        self.logprobs = logprobs
        self.labels = labels
        self.probs = np.exp(logprobs)
        self.best = logprobs.argmax(1)
        self.confidence = self.probs[rows, self.best]
        self.correct = (self.best == labels).astype(float)
        self.right_logprob = logprobs[rows, labels]

    @cached_property
    def level(self) -> np.ndarray:
        """The confidence in TIE_DECIMALS decimals, by which questions are ranked and tied, (N,)."""
        return self.confidence.round(TIE_DECIMALS)

    @cached_property
    def equal_width(self) -> "Binning":
        """Bins of the confidence, with the inner edges 1/B, …, 1 − 1/B."""
        return Binning(self.confidence, np.arange(1, BINS) / BINS)

    @cached_property
    def folded(self) -> "Binning":
        """Hendrycks' bins of about 100 questions each, of max(p, 1 − p) for the confidence p.

        Inner edge i of B bins is the value in place round(i N / B) of all N in their order.
        """
        folded = np.maximum(self.confidence, 1 - self.confidence)
        bins = max(1, len(folded) // QUESTIONS_PER_FOLDED_BIN)
        places = np.round(np.arange(1, bins) * len(folded) / bins).astype(int)
        return Binning(folded, np.sort(folded)[places])

    @cached_property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """The questions by ascending confidence, and where each run of equal ones starts there."""
        order = np.argsort(self.level, kind="stable")
        starts = np.unique(self.level[order], return_index=True)[1]
        return order, starts


def scores(records: Records, confidence: str) -> Scores:
    """Return the records' questions under a definition of confidence, "choices" or "vocabulary"."""
    logprobs = records.logprobs
    if confidence == "choices":
        logprobs = logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True)
    return Scores(logprobs, records.labels)


@dataclass(frozen=True)
class Bins:
    """Counts and sums of R samples over B bins, each (R, B)."""

    count: np.ndarray
    confidence_sum: np.ndarray
    correct_sum: np.ndarray
    square_sum: np.ndarray  # of (correct − confidence)²

    @property
    def weight(self) -> np.ndarray:
        """w_b = n_b / N."""
        return self.count / np.maximum(self.count.sum(1, keepdims=True), 1)

    @property
    def gap(self) -> np.ndarray:
        """Δ_b = accuracy_b − confidence_b; 0 in an empty bin."""
        return (self.correct_sum - self.confidence_sum) / np.maximum(self.count, 1)

    @property
    def noise(self) -> np.ndarray:
        """s_b² = Σ (y − p − Δ_b)² / (n_b (n_b − 1)), the variance of Δ_b; 0 below two questions."""
        spread = self.square_sum / np.maximum(self.count, 1) - self.gap**2
        return np.where(self.count > 1, spread / np.maximum(self.count - 1, 1), 0)


class Binning:
    """Bins [0, e_1), [e_1, e_2), …, [e_B−1, 1] of probabilities p (N,).

    A bin holds its lower edge, and the last one 1 as well; p and edges are compared in TIE_DECIMALS
    decimals.
    """

    def __init__(self, p: np.ndarray, edges: np.ndarray):
        rounded_edges = edges.round(TIE_DECIMALS)
        bin_of = np.searchsorted(rounded_edges, p.round(TIE_DECIMALS), side="right")
        member = np.eye(len(edges) + 1)[bin_of]  # (N, B)
        p = p[:, None]
        # Sums over bins are products with these (N, 3 B) and (N, 2 B): first what holds whether p
        # came true or not, then what is added where it did, from (y − p)² = p² + y (1 − 2 p).
        self._of_all = np.hstack([member, member * p, member * p**2])
        self._of_true = np.hstack([member, member * (1 - 2 * p)])

    def of(self, came_true: np.ndarray, times: np.ndarray) -> Bins:
        """Return the bins of R samples.

        Args:
            came_true: 1 where what has the probability p came true, else 0, (N,) or (R, N).
            times: How often each sample has each question, (R, N) or (1, N).
        """
        count, confidence_sum, p_squared_sum = np.hsplit(times @ self._of_all, 3)
        correct_sum, added_square_sum = np.hsplit(times * came_true @ self._of_true, 2)
        return Bins(count, confidence_sum, correct_sum, added_square_sum + p_squared_sum)


class Sample:
    """R samples of the scored questions.

    Args:
        scores: The questions.
        times: How often each sample has each question, (R, N); by default one sample has each once.
        correct: 1 where an answer is right, else 0, (R, N), to use in place of the scores' (N,).
    """

    def __init__(
        self,
        scores: Scores,
        times: np.ndarray | None = None,
        correct: np.ndarray | None = None,
    ):
        self.scores = scores
        self.times = np.ones((1, len(scores.labels))) if times is None else times
        self.correct = scores.correct if correct is None else correct

    @cached_property
    def bins(self) -> Bins:
        """Equal-width bins of the confidence."""
        return self.scores.equal_width.of(self.correct, self.times)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over each sample, (R,), of a value of every question, (N,)."""
        return self.times @ values / self.times.sum(1)


def resamples(questions: int, count: int) -> Iterator[np.ndarray]:
    """Yield arrays (R, N) of how often each of N questions is drawn, `count` rows in all.

    Each row draws N questions with replacement. The rows are the same for every run over as many
    questions, so differences between runs are paired.
    """
    rng = np.random.default_rng(SEED)
    for rows in _chunk_rows(count, questions):
        drawn = rng.integers(0, questions, (rows, questions), dtype=np.int32)
        times = [np.bincount(row, minlength=questions) for row in drawn]
        yield np.stack(times).astype(float)


def calibrated(scores: Scores, count: int) -> Iterator[Sample]:
    """Yield samples, `count` in all, whose answers are right with the probability that they state.

    They tell what a perfectly calibrated model with these confidences reads on these questions.
    """
    rng = np.random.default_rng(SEED)
    questions = len(scores.labels)
    # A uniform draw names the choice in whose share of [0, 1] it falls, and the answer is right
    # where that is the likeliest one.
    share_end = scores.probs.cumsum(1)[np.arange(questions), scores.best]
    share_start = share_end - scores.confidence
    for rows in _chunk_rows(count, questions):
        draws = rng.random((rows, questions))
        correct = (share_start <= draws) & (draws < share_end)
        yield Sample(scores, correct=correct.astype(float))


def _chunk_rows(count: int, questions: int) -> Iterator[int]:
    """Split `count` rows of so many questions into chunks that fit the processor's caches."""
    most = max(1, CHUNK_CELLS // questions)
    while count > 0:
        yield min(most, count)
        count -= most


def accuracy(sample: Sample) -> np.ndarray:
    """Share of questions whose likeliest choice is right."""
    return sample.mean(sample.scores.correct)


def nll(sample: Sample) -> np.ndarray:
    """Mean −log p(right choice), in nats."""
    return -sample.mean(sample.scores.right_logprob)


def brier(sample: Sample) -> np.ndarray:
    """Mean Σ_k (p_k − y_k)² (Brier 1950), with any mass outside the choices as one more outcome."""
    p = sample.scores.probs
    outside = 1 - p.sum(1)
    right = np.exp(sample.scores.right_logprob)
    return sample.mean((p**2).sum(1) + 1 - 2 * right + outside**2)


def ece_signed(sample: Sample) -> np.ndarray:
    """Mean confidence − accuracy, −Σ w_b Δ_b whatever the bins: above 0 is over-confident."""
    return sample.mean(sample.scores.confidence - sample.scores.correct)


def ranked(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Right and wrong answers of each run of equal confidence, ascending, (R, runs) both."""
    order, starts = sample.scores.ranks
    times = sample.times[:, order]
    correct = sample.scores.correct[order]
    right = np.add.reduceat(times * correct, starts, axis=1)
    answers = np.add.reduceat(times, starts, axis=1)
    return right, answers - right


def auroc(sample: Sample) -> np.ndarray:
    """P(confidence right > wrong) + ½ P(equal), over pairs of answers; NaN without such pairs."""
    right, wrong = ranked(sample)
    wrong_below = wrong.cumsum(1) - wrong / 2
    pairs = right.sum(1) * wrong.sum(1)
    return np.einsum("rn,rn->r", right, wrong_below) / np.where(pairs > 0, pairs, np.nan)


def aurc(sample: Sample) -> np.ndarray:
    """Area under the risk-coverage curve, Σ_k risk(k) / N (Geifman & El-Yaniv 2017).

    risk(k) is the share of wrong answers among the k surest; of equally sure ones the mean over
    all orders: behind M answers, E of them wrong, m with e wrong add
    e + (E − M e / m)(H(M + m) − H(M)), H(n) = Σ_{i ≤ n} 1 / i.
    """
    right, wrong = ranked(sample)
    right = right[:, ::-1]
    wrong = wrong[:, ::-1]
    size = right + wrong
    before = size.cumsum(1) - size
    wrong_before = wrong.cumsum(1) - wrong
    total = size.sum(1)
    harmonic = np.concatenate([[0], np.cumsum(1 / np.arange(1, total.max() + 1))])
    wrong_share = wrong / np.maximum(size, 1)
    harmonic_growth = harmonic[(before + size).astype(int)] - harmonic[before.astype(int)]
    areas = wrong + (wrong_before - before * wrong_share) * harmonic_growth
    return areas.sum(1) / total


def ece(sample: Sample) -> np.ndarray:
    """Expected calibration error, Σ w_b |Δ_b| over equal-width bins (Naeini et al. 2015)."""
    return (sample.bins.weight * np.abs(sample.bins.gap)).sum(1)


def rms(sample: Sample) -> np.ndarray:
    """Root mean square calibration error, sqrt(Σ w_b Δ_b²) over the bins of `ece`, never below it.

    The definition of Hendrycks et al. 2019; their bins of 100 questions alone read 0.045 at any N.
    """
    return np.sqrt((sample.bins.weight * sample.bins.gap**2).sum(1))


def rms_debiased(sample: Sample) -> np.ndarray:
    """sqrt(max(0, Σ w_b (Δ_b² − s_b²))), s_b² = Σ_b (y − p − Δ_b)² / (n_b (n_b − 1)).

    s_b² estimates the noise of Δ_b without bias, also where confidences differ within a bin; with
    one confidence a bin it is a_b (1 − a_b) / (n_b − 1) (Kumar et al. 2019, section 5). A bin of
    one question does not tell its noise and counts as 0.
    """
    return np.sqrt(np.maximum(debiased_square(sample.bins), 0))


def debiased_square(bins: Bins) -> np.ndarray:
    """Σ w_b (Δ_b² − s_b²), the debiased squared l2 calibration error; it may be below 0."""
    terms = bins.weight * (bins.gap**2 - bins.noise)
    return np.where(bins.count > 1, terms, 0).sum(1)


def rms_hendrycks(sample: Sample) -> np.ndarray:
    """What hendrycks/test's `rmsce` returns: (Σ w_b² Δ_b²)^¼, not a root mean square.

    Confidences of ½ or less are folded to (1 − p, 1 − correct) first, bins have about 100
    questions, and the weight is squared with the gap. For comparison with published tables; it may
    lie below the expected error.
    """
    is_folded = sample.scores.level <= 0.5
    came_true = (sample.correct != is_folded).astype(float)
    bins = sample.scores.folded.of(came_true, sample.times)
    return ((bins.weight * bins.gap) ** 2).sum(1) ** 0.25


def smooth_ece(sample: Sample) -> np.ndarray:
    """Smooth calibration error (Błasiok & Nakkiran 2023), as relplot computes it.

    Σ_t |Σ_i K_σ(t, p_i)(p_i − y_i)| / Σ_t Σ_i K_σ(t, p_i) over a mesh of t, K_σ the Gaussian kernel
    reflected at 0 and 1, and σ the least of a binary search with σ ≥ the error at σ.
    """
    return smooth_ece_at(sample)[0]


def smooth_ece_at(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Return the smooth calibration error and its bandwidth σ, (R,) both."""
    p = sample.scores.confidence
    gaps = sample.times * (p - sample.correct)
    return kernel_smoothing.smooth_error(p, gaps, sample.times)


def smooth_curve(sample: Sample, bandwidth: float, mesh: np.ndarray) -> np.ndarray:
    """Accuracy at each confidence of a mesh, (R, T): t + Σ K_σ(t, p)(y − p) / Σ K_σ(t, p)."""
    p = sample.scores.confidence
    gaps = sample.times * (sample.correct - p)
    return mesh + kernel_smoothing.smooth_mean(p, gaps, sample.times, bandwidth, mesh)


def recalibrated(sample: Sample) -> np.ndarray:
    """Isotonic regression of right on confidence, (R, N): the best increasing recalibration.

    Pool-adjacent-violators on the mean of each run of equal confidences.
    """
    from scipy.optimize import isotonic_regression

    levels, level_of = np.unique(sample.scores.level, return_inverse=True)
    all_times, all_correct = np.broadcast_arrays(sample.times, np.atleast_2d(sample.correct))
    rows = []
    for times, correct in zip(all_times, all_correct, strict=True):
        weight = np.bincount(level_of, times, len(levels))
        correct_sum = np.bincount(level_of, times * correct, len(levels))
        drawn = weight > 0
        mean = correct_sum[drawn] / weight[drawn]
        fitted = np.zeros(len(levels))
        fitted[drawn] = isotonic_regression(mean, weights=weight[drawn]).x
        rows.append(fitted[level_of])
    return np.stack(rows)


def murphy(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """(MCB, DSC) of the Brier score of the likeliest choice = MCB − DSC + UNC, (R,) both.

    MCB = mean (p − y)² − mean (r − y)², what recalibration takes off, and DSC = mean (ȳ − y)² −
    mean (r − y)², what recalibrated confidences tell, with r of `recalibrated` (CORP; Dimitriadis,
    Gneiting & Jordan 2021).
    """
    times = sample.times
    total = times.sum(1)
    mean_correct = (times * sample.correct).sum(1, keepdims=True) / total[:, None]

    def score(forecast: np.ndarray) -> np.ndarray:
        return (times * (forecast - sample.correct) ** 2).sum(1) / total

    stated = score(sample.scores.confidence)
    best = score(recalibrated(sample))
    constant = score(mean_correct)
    return np.maximum(stated - best, 0), np.maximum(constant - best, 0)


def mcb(sample: Sample) -> np.ndarray:
    """Miscalibration, the first part of `murphy`."""
    return murphy(sample)[0]


def dsc(sample: Sample) -> np.ndarray:
    """Discrimination, the second part of `murphy`."""
    return murphy(sample)[1]


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
        lowest, highest: The values that bound its interval.
    """

    function: Callable[[Sample], np.ndarray]
    better: Better
    uncertainty: Uncertainty
    heading: str
    note: str = ""
    lowest: float = -np.inf
    highest: float = np.inf

    @property
    def name(self) -> str:
        """The metric's name in options, tables and JSON."""
        return self.function.__name__

    def __call__(self, sample: Sample) -> np.ndarray:
        """Compute the metric of each sample, (R,)."""
        return self.function(sample)


_TABLE = (
    Metric(accuracy, "higher", "interval", "Acc", lowest=0, highest=1),
    Metric(nll, "lower", "interval", "NLL", lowest=0),
    Metric(brier, "lower", "interval", "Brier", lowest=0, highest=2),
    Metric(ece_signed, "neither", "interval", "signed ECE", lowest=-1, highest=1),
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
    Metric(rms, "lower", "floor", "RMS", "RMS: the root mean square of the same bins' gaps."),
    Metric(
        rms_debiased,
        "lower",
        "floor",
        "debiased RMS",
        "Debiased RMS: the same less what finitely many answers add to it.",
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

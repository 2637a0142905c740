"""Scored questions, many samples of them at once, and every metric. NumPy alone; never a model.

choices:    p_k = softmax of the choices' log-probabilities (the official way)
vocabulary: p_k = exp(log-probability): what the model gives the letter among all its tokens

A metric takes R samples of N questions and returns (R,). A sample never copies questions: it counts
them (`times`) or says anew which are right. For bin b of n_b of N questions: w_b = n_b / N,
Δ_b = accuracy − confidence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibeval.records import Records

BINS = 15
SEED = 0
LEAST, REFINE, MESH = 0.001, 10, 200  # relplot's: least σ, steps of its search, points
CELLS = 300_000  # samples × questions at a time: larger arrays cost more page faults than they save


class Scores:
    """N questions with up to K choices; arrays are (N,) where not said."""

    def __init__(self, logprobs: np.ndarray, labels: np.ndarray):
        each = np.arange(len(labels))
        self.logprobs = logprobs  # (N, K) natural log, −∞ for a choice that the question lacks
        self.labels = labels
        self.probs = np.exp(logprobs)  # (N, K); rows need not sum to 1
        self.best = logprobs.argmax(1)  # the likeliest choice, the first of equals
        self.confidence = self.probs[each, self.best]
        self.correct = (self.best == labels).astype(float)
        self.right = logprobs[each, labels]  # log-probability of the right choice

    @cached_property
    def equal_width(self) -> "Binning":
        """Bins with the inner edges 1/B, …, 1 − 1/B of the likeliest choice's probability."""
        return Binning(self.confidence, np.arange(1, BINS) / BINS)

    @cached_property
    def folded(self) -> "Binning":
        """Hendrycks' bins of about 100: edges p_(round(i N / B)) of max(p, 1 − p)."""
        p = np.maximum(self.confidence, 1 - self.confidence)
        bins = max(1, len(p) // 100)
        return Binning(p, np.sort(p)[np.round(np.arange(1, bins) * len(p) / bins).astype(int)])

    @cached_property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """Places by ascending confidence, and where runs of equal ones start there."""
        order = np.argsort(self.confidence, kind="stable")
        return order, np.unique(self.confidence[order], return_index=True)[1]


def scores(records: Records, confidence: str) -> Scores:
    """The records' log-probabilities under one definition of confidence."""
    logprobs = records.logprobs
    if confidence == "choices":
        logprobs = logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True)
    return Scores(logprobs, records.labels)


@dataclass(frozen=True)
class Bins:
    """Per-bin count and sums of R samples, (R, B)."""

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
    """Bins [0, e_1), [e_1, e_2), …, [e_B−1, 1] of probabilities p (N,)."""

    def __init__(self, p: np.ndarray, edges: np.ndarray):
        member = np.eye(len(edges) + 1)[np.searchsorted(edges, p, side="right")]
        p = p[:, None]
        self.all = np.hstack([member, member * p, member * p**2])
        # (y − p)² = y (1 − 2 p) + p² for y of 0 or 1
        self.right = np.hstack([member, member * (1 - 2 * p)])

    def of(self, y: np.ndarray, times: np.ndarray) -> Bins:
        """The bins of samples: whether p came true, (N,) or (R, N); times (R, N) or (1, N)."""
        count, total, squares = np.hsplit(times @ self.all, 3)
        right, rest = np.hsplit(times * y @ self.right, 2)
        return Bins(count, total, right, rest + squares)


class Sample:
    """R samples of the scored questions."""

    def __init__(
        self,
        scores: Scores,
        times: np.ndarray | None = None,  # (R, N); default: each question once
        correct: np.ndarray | None = None,  # (R, N) 0 or 1, to use in place of the scores' own (N,)
    ):
        self.scores = scores
        self.times = np.ones((1, len(scores.labels))) if times is None else times
        self.correct = scores.correct if correct is None else correct

    @cached_property
    def top(self) -> Bins:
        """Equal-width bins of the likeliest choice's probability."""
        return self.scores.equal_width.of(self.correct, self.times)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean over each sample of a figure of every question, (N,) → (R,)."""
        return self.times @ values / self.times.sum(1)


def resamples(n: int, count: int) -> Iterator[np.ndarray]:
    """Yield (R, n) counts of how often each of n questions is drawn, `count` rows in all.

    The same for every run over as many questions: differences between runs are paired.
    """
    rng = np.random.default_rng(SEED)
    for rows in _chunks(count, n):
        drawn = rng.integers(0, n, (rows, n), dtype=np.int32)
        yield np.stack([np.bincount(row, minlength=n) for row in drawn]).astype(float)


def calibrated(of: Scores, count: int) -> Iterator[Sample]:
    """Yield `count` samples whose answers are right with the probability that they state.

    They say what a perfectly calibrated model with these confidences reads on as many questions.
    """
    rng = np.random.default_rng(SEED)
    high = of.probs.cumsum(1)[np.arange(len(of.best)), of.best]
    for rows in _chunks(count, len(high)):
        draws = rng.random((rows, len(high)))  # right: those within the likeliest choice's share
        yield Sample(of, correct=((high - of.confidence <= draws) & (draws < high)).astype(float))


def _chunks(count: int, n: int) -> Iterator[int]:
    size = max(1, CELLS // n)
    while count > 0:
        yield min(size, count)
        count -= size


def accuracy(sample: Sample) -> np.ndarray:
    """Share of questions whose likeliest choice is right."""
    return sample.mean(sample.scores.correct)


def nll(sample: Sample) -> np.ndarray:
    """Mean −log p(right choice), in nats."""
    return -sample.mean(sample.scores.right)


def brier(sample: Sample) -> np.ndarray:
    """Mean Σ_k (p_k − y_k)² (Brier 1950), with any mass outside the choices as one more outcome."""
    p = sample.scores.probs
    rest = 1 - p.sum(1)
    return sample.mean((p**2).sum(1) + 1 - 2 * np.exp(sample.scores.right) + rest**2)


def ece_signed(sample: Sample) -> np.ndarray:
    """Mean confidence − accuracy, −Σ w_b Δ_b whatever the bins: above 0 is over-confident."""
    return sample.mean(sample.scores.confidence - sample.scores.correct)


def ranked(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Right and wrong answers of each run of equal confidence, ascending, (R, runs) both."""
    order, starts = sample.scores.ranks
    times = sample.times[:, order]
    correct = sample.scores.correct[order]
    right, every = (np.add.reduceat(x, starts, axis=1) for x in (times * correct, times))
    return right, every - right


def auroc(sample: Sample) -> np.ndarray:
    """P(confidence right > wrong) + ½ P(equal), over pairs of answers; NaN without such pairs."""
    right, wrong = ranked(sample)
    below = wrong.cumsum(1) - wrong / 2
    pairs = right.sum(1) * wrong.sum(1)
    return np.einsum("rn,rn->r", right, below) / np.where(pairs > 0, pairs, np.nan)


def aurc(sample: Sample) -> np.ndarray:
    """Area under the risk-coverage curve, Σ_k risk(k) / N (Geifman & El-Yaniv 2017).

    risk(k) is the share of wrong answers among the k surest; of equally sure ones the mean over
    all orders: behind M answers, E of them wrong, m with e wrong add
    e + (E − M e / m)(H(M + m) − H(M)), H(n) = Σ_{i ≤ n} 1 / i.
    """
    right, wrong = (x[:, ::-1] for x in ranked(sample))
    size = right + wrong
    before, missed = size.cumsum(1) - size, wrong.cumsum(1) - wrong
    total = size.sum(1)
    harmonic = np.concatenate([[0], np.cumsum(1 / np.arange(1, total.max() + 1))])
    share = wrong / np.maximum(size, 1)
    grown = harmonic[(before + size).astype(int)] - harmonic[before.astype(int)]
    return (wrong + (missed - before * share) * grown).sum(1) / total


def ece(sample: Sample) -> np.ndarray:
    """Expected calibration error, Σ w_b |Δ_b| over equal-width bins (Naeini et al. 2015)."""
    return (sample.top.weight * np.abs(sample.top.gap)).sum(1)


def rms(sample: Sample) -> np.ndarray:
    """Root mean square calibration error, sqrt(Σ w_b Δ_b²) over the bins of `ece`, never below it.

    The definition of Hendrycks et al. 2019; their bins of 100 questions alone read 0.045 at any N.
    """
    return np.sqrt((sample.top.weight * sample.top.gap**2).sum(1))


def rms_debiased(sample: Sample) -> np.ndarray:
    """sqrt(max(0, Σ w_b (Δ_b² − s_b²))), s_b² = Σ_b (y − p − Δ_b)² / (n_b (n_b − 1)).

    s_b² estimates the noise of Δ_b without bias, also where confidences differ within a bin; with
    one confidence a bin it is a_b (1 − a_b) / (n_b − 1) (Kumar et al. 2019, section 5). A bin of
    one question does not tell its noise and counts as 0.
    """
    return np.sqrt(np.maximum(squared(sample.top), 0))


def squared(b: Bins) -> np.ndarray:
    """Σ w_b (Δ_b² − s_b²), the debiased squared l2 calibration error; it may be below 0."""
    return np.where(b.count > 1, b.weight * (b.gap**2 - b.noise), 0).sum(1)


def rms_hendrycks(sample: Sample) -> np.ndarray:
    """What hendrycks/test's `rmsce` returns: (Σ w_b² Δ_b²)^¼, not a root mean square.

    Confidences of ½ or less are folded to (1 − p, 1 − correct) first, bins have about 100
    questions, and the weight is squared with the gap. For comparison with published tables; it may
    lie below the expected error.
    """
    p = sample.scores.confidence
    b = sample.scores.folded.of((sample.correct != (p <= 0.5)).astype(float), sample.times)
    return ((b.weight * b.gap) ** 2).sum(1) ** 0.25


def smooth_ece(sample: Sample) -> np.ndarray:
    """Smooth calibration error (Błasiok & Nakkiran 2023), as relplot computes it.

    Σ_t |Σ_i K_σ(t, p_i)(p_i − y_i)| / Σ_t Σ_i K_σ(t, p_i) over a mesh of t, K_σ the Gaussian kernel
    reflected at 0 and 1, and σ the least of a binary search with σ ≥ the error at σ.
    """
    return smooth_ece_at(sample)[0]


def smooth_ece_at(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """(smooth ECE, its σ), (R,) both."""
    p = sample.scores.confidence
    gap = sample.times * (p - sample.correct)  # (R, N)
    kept: dict[int, tuple] = {}  # by a grid's size: spectra of the gaps and of the questions

    def error(sigma: np.ndarray) -> np.ndarray:
        """The error of each sample at its own σ, (R,); 0 where σ is too small to matter."""
        found = np.zeros(len(gap))
        for level in np.unique(sigma[sigma >= LEAST]):
            rows, size = np.flatnonzero(sigma == level), grid_size(level)
            if size not in kept:
                kept[size] = tuple(spectra(p, of, size) for of in (gap, sample.times))
            gaps, counts = kept[size]
            # Questions once each, as simulations have them, are one row for all samples.
            counts = counts if len(counts) == 1 else counts[rows]
            mesh = np.linspace(0, 1, max(round(10 / level), MESH))
            above, density = (smoothed(of, level, mesh) for of in (gaps[rows], counts))
            found[rows] = np.abs(above).sum(1) / (density + 1e-4).sum(1)
        return found

    high, low = np.ones(len(gap)), np.zeros(len(gap))
    for _ in range(REFINE):
        middle = (high + low) / 2
        below = (middle < LEAST) | (middle < error(middle))
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return error(high), high


def smooth_curve(sample: Sample, sigma: float, mesh: np.ndarray) -> np.ndarray:
    """Accuracy at each confidence of a mesh, (R, T): t + Σ K_σ(t, p)(y − p) / Σ K_σ(t, p)."""
    p, size = sample.scores.confidence, grid_size(sigma)
    gaps, counts = (
        smoothed(spectra(p, values, size), sigma, mesh)
        for values in (sample.times * (sample.correct - p), sample.times)
    )
    return mesh + gaps / (counts + 1e-4)


def grid_size(sigma: float) -> int:
    """Places of a grid that is fine enough for σ."""
    return max(2000, round(20 / sigma)) // 2 + 1


def spectra(p: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Fourier transforms (R, size) of values (R, N) at p, reflected at 0 and 1.

    Each value is shared between the two nearest of `size` places.
    """
    place = (p * (size - 1)).astype(int).clip(0, size - 2)
    part = p * (size - 1) - place
    pairs = ((place, 1 - part), (place + 1, part))
    grid = np.stack([sum(np.bincount(at, w * of, size) for at, w in pairs) for of in values])
    return np.fft.rfft(np.hstack([grid, grid[:, -2:0:-1]]))


def smoothed(of: np.ndarray, sigma: float, mesh: np.ndarray) -> np.ndarray:
    """Σ_i K_σ(t, p_i) value_i at each t of a mesh, (R, T), from `spectra` (R, size)."""
    size = of.shape[1]
    around = np.zeros(2 * size - 2)
    around[:size] = np.exp(-((np.linspace(0, 1, size) - 0.5) ** 2) / (2 * sigma**2))
    kernel = np.fft.rfft(np.roll(around, -(size // 2))) / (np.sqrt(2 * np.pi) * sigma)
    found = np.fft.irfft(of * kernel)
    at = (mesh * (size - 1)).astype(int).clip(0, size - 2)
    rest = mesh * (size - 1) - at
    return found[:, at] * (1 - rest) + found[:, at + 1] * rest


def recalibrated(sample: Sample) -> np.ndarray:
    """Isotonic regression of right on confidence, (R, N): the best increasing recalibration.

    Pool-adjacent-violators on the mean of each run of equal confidences.
    """
    from scipy.optimize import isotonic_regression

    levels, place = np.unique(sample.scores.confidence, return_inverse=True)
    found = []
    every = np.broadcast_arrays(sample.times, np.atleast_2d(sample.correct))
    for times, correct in zip(*every, strict=True):
        weight = np.bincount(place, times, len(levels))
        use, fitted = weight > 0, np.zeros(len(levels))
        mean = np.bincount(place, times * correct, len(levels))[use] / weight[use]
        fitted[use] = isotonic_regression(mean, weights=weight[use]).x
        found.append(fitted[place])
    return np.stack(found)


def murphy(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """(MCB, DSC) of the Brier score of the likeliest choice = MCB − DSC + UNC, (R,) both.

    MCB = mean (p − y)² − mean (r − y)², what recalibration takes off, and DSC = mean (ȳ − y)² −
    mean (r − y)², what recalibrated confidences tell, with r of `recalibrated` (CORP; Dimitriadis,
    Gneiting & Jordan 2021).
    """
    times, total = sample.times, sample.times.sum(1)
    base = (times * sample.correct).sum(1, keepdims=True) / total[:, None]
    score, best, flat = (
        (times * (said - sample.correct) ** 2).sum(1) / total
        for said in (sample.scores.confidence, recalibrated(sample), base)
    )
    return np.maximum(score - best, 0), np.maximum(flat - best, 0)


# Smooth in the sample, so that plain bootstrap intervals cover.
REGULAR = {m.__name__: m for m in (accuracy, nll, brier, ece_signed, auroc, aurc)}
# Never below 0: a calibrated model reads more than 0 on few questions.
CALIBRATION = {m.__name__: m for m in (ece, rms, rms_debiased, smooth_ece)}
CALIBRATION |= {"mcb": lambda sample: murphy(sample)[0], "rms_hendrycks": rms_hendrycks}
METRICS = REGULAR | CALIBRATION | {"dsc": lambda sample: murphy(sample)[1]}

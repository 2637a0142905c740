"""Scored questions, and many weighted samples of them at once: as drawn, resampled, or simulated.

choices:    p_k = softmax of the choices' log-probabilities (the official way)
vocabulary: p_k = exp(log-probability): what the model gives the letter among all its tokens

A sample never copies questions; it counts them. R samples of N questions are `times` (R, N).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibeval.records import Records

SEED = 0
CELLS = 300_000  # samples × questions at a time: larger arrays cost more page faults than they save


class Scores:
    """N questions with up to K choices, and orders of them; arrays are (N,) where not said."""

    def __init__(self, logprobs: np.ndarray, labels: np.ndarray):
        each = np.arange(len(labels))
        self.logprobs = logprobs  # (N, K) natural log, −∞ for a choice that the question lacks
        self.labels = labels
        self.probs = np.exp(logprobs)  # (N, K); rows need not sum to 1
        self.best = logprobs.argmax(1)  # the likeliest choice, the first of equals
        self.confidence = self.probs[each, self.best]
        self.correct = (self.best == labels).astype(float)
        self.right = logprobs[each, labels]  # log-probability of the right choice
        self.order = np.argsort(self.confidence, kind="stable")
        self.folded = np.maximum(self.confidence, 1 - self.confidence)
        self.folded_order = np.argsort(self.folded, kind="stable")

    @cached_property
    def classes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each choice, the questions that have it, and these by its probability ascending."""
        members = [np.flatnonzero(present) for present in np.isfinite(self.logprobs).T]
        return [(m, np.argsort(self.probs[m, k], kind="stable")) for k, m in enumerate(members)]


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
        filled = np.maximum(self.count, 1)
        return self.correct_sum / filled - self.confidence_sum / filled

    @property
    def noise(self) -> np.ndarray:
        """s_b² = Σ (y − p − Δ_b)² / (n_b (n_b − 1)), the variance of Δ_b; 0 below two questions."""
        spread = self.square_sum / np.maximum(self.count, 1) - self.gap**2
        return np.where(self.count > 1, spread / np.maximum(self.count - 1, 1), 0)


class Pairs:
    """Probabilities and whether each came true, in R samples of N questions.

    Equal-width bins are matrix products; what needs the order works on cumulative sums over it.
    """

    def __init__(
        self,
        confidence: np.ndarray,  # (N,)
        correct: np.ndarray,  # (N,), or (R, N) where the samples differ in it
        times: np.ndarray,  # (R, N) or (1, N): how often each sample has each question
        order: np.ndarray,  # (N,) places by ascending confidence
    ):
        self.unsorted, self.times, self.n = (confidence, correct), times, len(confidence)
        self.confidence = confidence[order]  # ascending
        self.order, self._times = order, times[:, order]
        self._equal_width: dict[int, Bins] = {}

    def _cumulative(self, values: np.ndarray) -> np.ndarray:
        """Over places by ascending confidence, from 0 on, (R, N + 1)."""
        each = self._times * values[..., self.order]
        total = np.zeros((len(each), self.n + 1))
        np.cumsum(each, axis=1, out=total[:, 1:])
        return total

    @cached_property
    def counts(self) -> np.ndarray:
        """Cumulative counts by ascending confidence, (R or 1, N + 1)."""
        return self._cumulative(np.ones(self.n))

    @cached_property
    def corrects(self) -> np.ndarray:
        """Cumulative number of right answers, (R, N + 1)."""
        return self._cumulative(self.unsorted[1])

    @cached_property
    def residuals(self) -> np.ndarray:
        """Cumulative sum of correct − confidence, (R, N + 1)."""
        return self._cumulative(self.unsorted[1] - self.unsorted[0])

    @cached_property
    def run_start(self) -> np.ndarray:
        """First place of the run of equal confidences that each place is in, (N,)."""
        return np.searchsorted(self.confidence, self.confidence)

    @cached_property
    def run_end(self) -> np.ndarray:
        """Place after the last of the run of equal confidences that each place is in, (N,)."""
        return np.searchsorted(self.confidence, self.confidence, side="right")

    def places(self, at: np.ndarray) -> np.ndarray:
        """Places by ascending confidence of the samples' questions number `at`, (R or 1, A)."""
        rows = zip(self.counts, at, strict=True)
        found = np.stack([np.searchsorted(row, a, side="right") - 1 for row, a in rows])
        return np.minimum(found, self.n - 1)

    def equal_width(self, bins: int) -> Bins:
        """Bins [0, 1/B), …, [1 − 1/B, 1]: a confidence of 1 is in the last."""
        if bins not in self._equal_width:
            confidence, correct = self.unsorted
            index = np.searchsorted(np.arange(1, bins) / bins, confidence, side="right")
            member = np.zeros((self.n, bins))
            member[np.arange(self.n), index] = 1
            p = confidence[:, None]
            count, total, squares = np.hsplit(
                self.times @ np.hstack([member, member * p, member * p**2]), 3
            )
            # (y − p)² = y (1 − 2 p) + p² for y of 0 or 1
            of_right = np.hstack([member, member * (1 - 2 * p)])
            right, rest = np.hsplit(self.times * correct @ of_right, 2)
            self._equal_width[bins] = Bins(count, total, right, rest + squares)
        return self._equal_width[bins]

    def equal_mass_gaps(self, bins: int, above: float = -1.0) -> tuple[np.ndarray, np.ndarray]:
        """(w_b, w_b Δ_b) of bins of nearly equal counts of the confidences above a threshold.

        Equal confidences stay together: the edges are the confidences at the sample's places
        round(i N / B), as in hendrycks/test's calib_tools.
        """
        start = int(np.searchsorted(self.confidence, above, side="right"))
        if start == self.n:
            return np.zeros((1, 1)), np.zeros((len(self.residuals), 1))
        before = self.counts[:, start, None]
        total = np.maximum(self.counts[:, -1:] - before, 1)
        at = np.round(np.arange(1, bins) * total / bins)
        inner = self.run_start[self.places(before + np.minimum(at, total - 1))]
        bounds = np.pad(np.maximum(inner, start), ((0, 0), (1, 1)), constant_values=(start, self.n))
        return _differences(self.counts, bounds) / total, _differences(
            self.residuals, bounds
        ) / total


def _differences(cumulative: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    bounds = np.broadcast_to(bounds, (len(cumulative), bounds.shape[1]))
    return np.diff(np.take_along_axis(cumulative, bounds, axis=1), axis=1)


class Sample:
    """R samples of the scored questions, in the orders that the metrics need."""

    def __init__(
        self,
        scores: Scores,
        times: np.ndarray | None = None,  # (R, N); default: each question once
        labels: np.ndarray | None = None,  # (R, N) labels to use in place of the scores' own
    ):
        self.scores = scores
        self.times = np.ones((1, len(scores.labels))) if times is None else times
        self.labels = scores.labels if labels is None else labels

    @cached_property
    def top(self) -> Pairs:
        """The likeliest choice's probability and whether it was right."""
        s = self.scores
        return Pairs(s.confidence, (self.labels == s.best) * 1.0, self.times, s.order)

    @cached_property
    def folded(self) -> Pairs:
        """`top` with confidences of ½ or less turned into 1 − p of the opposite."""
        s = self.scores
        right = ((self.labels == s.best) != (s.confidence <= 0.5)) * 1.0
        return Pairs(s.folded, right, self.times, s.folded_order)

    @cached_property
    def classes(self) -> list[Pairs]:
        """For each choice k, over the questions that have it, its probability and truth."""
        s = self.scores
        return [
            Pairs(s.probs[m, k], (self.labels[..., m] == k) * 1.0, self.times[:, m], order)
            for k, (m, order) in enumerate(s.classes)
        ]

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
    """Yield `count` samples whose labels are drawn from the stated probabilities.

    They say what a perfectly calibrated model with these confidences reads on as many questions.
    Mass outside the choices draws the label K: none of them.
    """
    rng = np.random.default_rng(SEED)
    edges = of.probs.cumsum(1)
    if np.allclose(edges[:, -1], 1):
        edges /= edges[:, -1:]
    for rows in _chunks(count, len(edges)):
        draws = rng.random((rows, len(edges)))
        yield Sample(of, labels=sum((draws >= edge).astype(int) for edge in edges.T))


def _chunks(count: int, n: int) -> Iterator[int]:
    size = max(1, CELLS // n)
    while count > 0:
        yield min(size, count)
        count -= size

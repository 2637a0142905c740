"""Many weighted samples of the same questions at once: as drawn, resampled, or simulated.

A sample never copies questions; it counts them. R samples of N questions are `times` (R, N).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibeval.metrics.scores import Scores


@dataclass(frozen=True)
class Bins:
    """Per-bin count and sums of R samples, (R, B)."""

    count: np.ndarray
    confidence_sum: np.ndarray
    correct_sum: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """w_b = n_b / N."""
        return self.count / self.count.sum(1, keepdims=True)

    @property
    def accuracy(self) -> np.ndarray:
        """Mean of `correct`; 0 in an empty bin."""
        return self.correct_sum / np.maximum(self.count, 1)

    @property
    def confidence(self) -> np.ndarray:
        """Mean confidence; 0 in an empty bin."""
        return self.confidence_sum / np.maximum(self.count, 1)

    @property
    def gap(self) -> np.ndarray:
        """Δ_b = accuracy_b − confidence_b."""
        return self.accuracy - self.confidence


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
        self.unsorted = confidence, correct
        self.times, self.order, self.n = times, order, len(confidence)

    @cached_property
    def confidence(self) -> np.ndarray:
        """Ascending confidences, (N,)."""
        return self.unsorted[0][self.order]

    @cached_property
    def _times(self) -> np.ndarray:
        return self.times[:, self.order]

    @cached_property
    def counts(self) -> np.ndarray:
        """Cumulative counts by ascending confidence, (R or 1, N + 1)."""
        return _cumulative(self._times)

    @cached_property
    def corrects(self) -> np.ndarray:
        """Cumulative number of right answers, (R, N + 1)."""
        return _cumulative(self._times * self.unsorted[1][..., self.order])

    @cached_property
    def residuals(self) -> np.ndarray:
        """Cumulative sum of correct − confidence, (R, N + 1)."""
        residual = self.unsorted[1][..., self.order] - self.confidence
        return _cumulative(self._times * residual)

    @cached_property
    def run_start(self) -> np.ndarray:
        """First place of the run of equal confidences that each place is in, (N,)."""
        fresh = np.diff(self.confidence, prepend=-1.0) != 0
        return np.maximum.accumulate(np.where(fresh, np.arange(self.n), 0))

    @cached_property
    def run_end(self) -> np.ndarray:
        """Place after the last of the run of equal confidences that each place is in, (N,)."""
        return np.searchsorted(self.confidence, self.confidence, side="right")

    def places(self, at: np.ndarray) -> np.ndarray:
        """Place of the sample's question number `at` (A,) by ascending confidence, (R or 1, A)."""
        found = np.stack([np.searchsorted(row, at, side="right") - 1 for row in self.counts])
        return np.minimum(found, self.n - 1)

    def equal_width(self, bins: int) -> Bins:
        """Bins [0, 1/B), …, [1 − 1/B, 1]: a confidence of 1 is in the last."""
        confidence, correct = self.unsorted
        index = np.searchsorted(np.arange(1, bins) / bins, confidence, side="right")
        member = np.zeros((self.n, bins))
        member[np.arange(self.n), index] = 1
        right = (
            self.times * correct @ member
            if correct.ndim == 2
            else (self.times @ (member * correct[:, None]))
        )
        return Bins(self.times @ member, self.times @ (member * confidence[:, None]), right)

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
        at = before + np.minimum(at, total - 1)
        place = np.stack(
            [np.searchsorted(row, a, "right") - 1 for row, a in zip(self.counts, at, strict=True)]
        )
        inner = self.run_start[np.minimum(place, self.n - 1)]
        ends = np.full((len(inner), 1), start), np.full((len(inner), 1), self.n)
        bounds = np.hstack([ends[0], np.maximum(inner, start), ends[1]])
        weight = _differences(self.counts, bounds) / total
        return weight, _differences(self.residuals, bounds) / total


def _cumulative(values: np.ndarray) -> np.ndarray:
    total = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=total[:, 1:])
    return total


def _differences(cumulative: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    if len(bounds) == 1:
        return np.diff(cumulative[:, bounds[0]], axis=1)
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
        """`top` with confidences below ½ turned into 1 − p of the opposite."""
        s = self.scores
        fold = s.confidence < 0.5
        right = ((self.labels == s.best) != fold) * 1.0
        folded = np.where(fold, 1 - s.confidence, s.confidence)
        return Pairs(folded, right, self.times, s.folded_order)

    @cached_property
    def classes(self) -> list[Pairs]:
        """For each choice k, its probability and whether it was the right one."""
        s = self.scores
        return [
            Pairs(s.probs[:, k], (self.labels == k) * 1.0, self.times, s.class_order[k])
            for k in range(s.probs.shape[1])
        ]

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean over each sample of a figure of every question, (N,) → (R,)."""
        return self.times @ values / self.times.sum(1)

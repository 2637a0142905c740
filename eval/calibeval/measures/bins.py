"""Bins of confidences: which questions lie in each, and sums over them for many samples at once.

A bin holds its lower edge, and the last one 1 as well. Confidences are rounded to `TIE_DECIMALS`
first, so that those which differ by rounding alone lie in one bin. `calibeval.measures` makes the
metrics from them.

For bin b of n_b of the N questions, w_b = n_b / N and Δ_b = accuracy − confidence.
"""

from dataclasses import dataclass

import numpy as np

# Confidences that agree to so many decimals are ties, and lie on the same side of a bin's edge:
# renormalising over the choices leaves equal ones with other last digits.
TIE_DECIMALS = 10


@dataclass(frozen=True)
class Bins:
    """Counts and sums of R samples over B bins.

    Each is (R, B), or (1, B) where it is alike in all samples: simulated answers leave each
    question in its bin, so only the two sums of what came true differ between them.
    """

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


class Segments:
    """Consecutive segments of N places, some of which may be empty.

    Args:
        starts: The first place of each segment, ascending, (B,).
        places: N.
    """

    def __init__(self, starts: np.ndarray, places: int):
        self.sizes = np.diff(starts, append=places)
        self._filled = np.flatnonzero(self.sizes)
        self._filled_starts = starts[self._filled]
        self._segment_of_place = np.repeat(np.arange(len(starts)), self.sizes)
        self._are_single = bool((self.sizes == 1).all())
        # Where most segments are of one place, it is quicker to take the first place of each, and
        # to add the other places one by one. An empty segment has no first place.
        self._is_first: np.ndarray | None = None
        none_is_empty = len(self._filled) == len(starts)
        if none_is_empty and len(starts) > places / 2:
            self._is_first = np.zeros(places, bool)
            self._is_first[starts] = True
            self._segment_of_others = self._segment_of_place[~self._is_first]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sums over segments, (R, B), of values (R, N)."""
        if self._are_single:
            return values
        if self._is_first is not None:
            return np.stack([self._sum_of_row(row, self._is_first) for row in values])
        sums = np.zeros((len(values), len(self.sizes)))
        sums[:, self._filled] = np.add.reduceat(values, self._filled_starts, axis=1)
        return sums

    def _sum_of_row(self, values: np.ndarray, is_first: np.ndarray) -> np.ndarray:
        sums = values[is_first]
        np.add.at(sums, self._segment_of_others, values[~is_first])
        return sums

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return a value for each place, (N,), from one of each segment, (B,)."""
        return values if self._are_single else values.take(self._segment_of_place)


class Binning:
    """Bins [0, e_1), [e_1, e_2), …, [e_B−1, 1] of probabilities p (N,).

    A bin holds its lower edge, and the last one 1 as well; p and edges are compared in TIE_DECIMALS
    decimals.

    Args:
        p: The probabilities, (N,).
        edges: The inner edges, ascending, (B − 1,).
        order: The questions by ascending p, where that is known, (N,).
    """

    def __init__(self, p: np.ndarray, edges: np.ndarray, order: np.ndarray | None = None):
        self.order = np.argsort(p, kind="stable") if order is None else order
        self._ordered_p = p[self.order]
        level = self._ordered_p.round(TIE_DECIMALS)
        starts = np.searchsorted(level, edges.round(TIE_DECIMALS), side="left")
        self._segments = Segments(np.concatenate([[0], starts]), len(p))
        self._sums_of_p = self._segments.sum(self._ordered_p[None])

    def of(self, came_true: np.ndarray, counts: np.ndarray | None = None) -> Bins:
        """Return the bins of R samples, whose questions come in the binning's `order`.

        Args:
            came_true: 1.0 where what has the probability p came true, else 0.0, (R, N) or (1, N).
            counts: How often each sample has each question, (R, N); by default once.
        """
        p = self._ordered_p
        if counts is None:
            return Bins(
                count=self._segments.sizes[None].astype(float),
                confidence_sum=self._sums_of_p,
                correct_sum=self._segments.sum(came_true),
                square_sum=self._segments.sum((came_true - p) ** 2),
            )
        return Bins(
            count=self._segments.sum(counts),
            confidence_sum=self._segments.sum(counts * p),
            correct_sum=self._segments.sum(counts * came_true),
            square_sum=self._segments.sum(counts * (came_true - p) ** 2),
        )

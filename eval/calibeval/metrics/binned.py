"""Binned calibration errors of the top label, for many resamples at once.

For bin b with n_b of N questions: w_b = n_b / N, Δ_b = accuracy_b − confidence_b.
All functions take (R, N) arrays whose rows ascend in confidence, and return (R,).
"""

import numpy as np


class Bins:
    """Per-bin weight, accuracy and confidence from the bins' boundaries in the sorted rows."""

    def __init__(
        self,
        confidence: np.ndarray,  # (R, N) ascending
        correct: np.ndarray,  # (R, N)
        bounds: np.ndarray,  # (R, B + 1) int, from 0 to N
    ):
        self.counts = np.diff(bounds, axis=1)
        self.weight = self.counts / confidence.shape[1]
        safe = np.maximum(self.counts, 1)
        self.confidence = _segment_sums(confidence, bounds) / safe
        self.accuracy = _segment_sums(correct, bounds) / safe

    @property
    def gap(self) -> np.ndarray:
        """Δ_b, (R, B)."""
        return self.accuracy - self.confidence


def _segment_sums(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    total = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=total[:, 1:])
    return np.diff(np.take_along_axis(total, bounds, axis=1), axis=1)


def equal_width(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Boundaries of [0, 1/B), …, [1 − 1/B, 1]: a confidence of 1 is in the last bin."""
    edges = np.arange(1, bins) / bins
    inner = np.stack([np.searchsorted(row, edges) for row in confidence])
    return _with_ends(inner, confidence.shape[1])


def equal_mass(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Boundaries of B bins of nearly equal counts; equal confidences share a bin.

    The edges are the sorted confidences at round(i N / B), as in hendrycks/test's calib_tools.
    """
    n = confidence.shape[1]
    at = np.minimum(np.round(np.linspace(0, n, bins, endpoint=False)).astype(int), n - 1)[1:]
    edges = confidence[:, at]
    inner = np.stack([np.searchsorted(row, e) for row, e in zip(confidence, edges, strict=True)])
    return _with_ends(inner, n)


def _with_ends(inner: np.ndarray, n: int) -> np.ndarray:
    rows = len(inner)
    return np.hstack([np.zeros((rows, 1), int), inner, np.full((rows, 1), n)])


def by_hundred(n: int) -> int:
    """Number of equal-mass bins of about 100 questions."""
    return max(1, n // 100)


def ece(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> np.ndarray:
    """Expected calibration error, Σ w_b |Δ_b| over equal-width bins (Naeini et al. 2015)."""
    b = Bins(confidence, correct, equal_width(confidence, bins))
    return (b.weight * np.abs(b.gap)).sum(1)


def rms(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Root mean square calibration error, sqrt(Σ w_b Δ_b²) over equal-mass bins of 100."""
    b = Bins(confidence, correct, equal_mass(confidence, by_hundred(confidence.shape[1])))
    return np.sqrt((b.weight * b.gap**2).sum(1))


def rms_hendrycks(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """What hendrycks/test's `rmsce` returns: (Σ w_b² Δ_b²)^¼, not a root mean square.

    Confidences below ½ are folded to (1 − p, 1 − correct) first, and the weight is squared with the
    gap. Kept for comparison with published tables; it may lie below the expected error.
    """
    fold = confidence < 0.5
    folded = np.where(fold, 1 - confidence, confidence)
    right = np.where(fold, 1 - correct, correct)
    order = np.argsort(folded, axis=1, kind="stable")
    folded = np.take_along_axis(folded, order, axis=1)
    right = np.take_along_axis(right, order, axis=1)
    b = Bins(folded, right, equal_mass(folded, by_hundred(folded.shape[1])))
    return ((b.weight * b.gap) ** 2).sum(1) ** 0.25

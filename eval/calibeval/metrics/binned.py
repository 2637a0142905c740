"""Binned calibration errors. For bin b: w_b = n_b / N, Δ_b = accuracy_b − confidence_b.

Every function takes R samples and returns (R,).
"""

import math

import numpy as np

from calibeval.metrics.samples import Bins, Pairs, Sample

BINS = 15


def hundreds(pairs: Pairs) -> int:
    """Number of equal-mass bins of about 100 questions."""
    return max(1, pairs.n // 100)


def expected(bins: Bins) -> np.ndarray:
    """Σ w_b |Δ_b|."""
    return (bins.weight * np.abs(bins.gap)).sum(1)


def ece(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Expected calibration error, Σ w_b |Δ_b| over equal-width bins (Naeini et al. 2015)."""
    return expected(sample.top.equal_width(bins))


def ece_equal_mass(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Expected calibration error over equal-mass bins."""
    return np.abs(sample.top.equal_mass_gaps(bins)[1]).sum(1)


def ece_signed(sample: Sample) -> np.ndarray:
    """Mean confidence − accuracy, −Σ w_b Δ_b whatever the bins: above 0 is over-confident."""
    bins = sample.top.equal_width(1)
    return -bins.gap[:, 0]


def mce(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Maximum calibration error, max_b |Δ_b| over filled equal-width bins (Naeini et al. 2015)."""
    b = sample.top.equal_width(bins)
    return np.where(b.count > 0, np.abs(b.gap), 0).max(1)


def rms(sample: Sample) -> np.ndarray:
    """Root mean square calibration error, sqrt(Σ w_b Δ_b²) over equal-mass bins of 100.

    Never below Σ w_b |Δ_b| over the same bins (Hendrycks et al. 2019).
    """
    weight, gap = sample.top.equal_mass_gaps(hundreds(sample.top))
    square = np.divide(gap**2, weight, out=np.zeros_like(gap), where=weight > 0)
    return np.sqrt(square.sum(1))


def rms_hendrycks(sample: Sample) -> np.ndarray:
    """What hendrycks/test's `rmsce` returns: (Σ w_b² Δ_b²)^¼, not a root mean square.

    Confidences below ½ are folded to (1 − p, 1 − correct) first, and the weight is squared with the
    gap. Kept for comparison with published tables; it may lie below the expected error.
    """
    _, gap = sample.folded.equal_mass_gaps(hundreds(sample.folded))
    return (gap**2).sum(1) ** 0.25


def sce(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Static calibration error, mean over choices of Σ w_b |Δ_b| (Nixon et al. 2019)."""
    return np.mean([expected(c.equal_width(bins)) for c in sample.classes], axis=0)


def ace(sample: Sample, bins: int = BINS, above: float = -1.0) -> np.ndarray:
    """Adaptive calibration error: `sce` over equal-mass bins (Nixon et al. 2019)."""
    gaps = [c.equal_mass_gaps(bins, above)[1] for c in sample.classes]
    return sum(np.abs(gap).sum(1) for gap in gaps) / len(gaps)


def tace(sample: Sample, bins: int = BINS, threshold: float = 0.01) -> np.ndarray:
    """Thresholded adaptive calibration error: `ace` of the probabilities above ε = 0.01 only."""
    return ace(sample, bins, above=threshold)


def ece_debiased(sample: Sample, bins: int = BINS) -> np.ndarray:
    """`ece` less its bias from few answers a bin (Kumar et al. 2019, section 5, for the l1 error).

    2 Σ w_b |Δ_b| − Σ w_b E|Δ_b + ε_b|, ε_b ~ N(0, accuracy_b (1 − accuracy_b) / n_b), where the
    expectation of a folded normal is taken in closed form in place of simulation.
    """
    b = sample.top.equal_width(bins)
    gap = np.abs(b.gap)
    sd = np.sqrt(b.accuracy * (1 - b.accuracy) / np.maximum(b.count, 1))
    z = np.divide(gap, sd, out=np.full_like(gap, np.inf), where=sd > 0)
    noisy = sd * math.sqrt(2 / math.pi) * np.exp(-(z**2) / 2) + gap * _erf(z / math.sqrt(2))
    return (b.weight * (2 * gap - noisy)).sum(1)


def _erf(x: np.ndarray) -> np.ndarray:
    # The table has a few thousand entries at most; NumPy has no error function of its own.
    return np.vectorize(math.erf, otypes=[float])(x)


def smece(sample: Sample, cells: int = 400) -> np.ndarray:
    """Smooth ECE (Błasiok & Nakkiran 2023): the fixed point of σ = smECE_σ.

    smECE_σ = ∫₀¹ |1/N Σ_i K_σ(t, p_i) (y_i − p_i)| dt, K_σ a Gaussian reflected at 0 and 1.
    On a grid, reflection makes this a product with exp(−(π k σ)² / 2) in the cosine basis.
    """
    top = sample.top
    edges = np.searchsorted(top.confidence, np.arange(1, cells) / cells)
    bounds = np.concatenate([[0], edges, [top.n]])
    residual = np.diff(top.residuals[:, bounds], axis=1) / top.counts[:, -1:]
    mirrored = np.fft.rfft(np.hstack([residual, residual[:, ::-1]]), axis=1)
    wave = np.pi * np.arange(cells + 1)

    def error(sigma: np.ndarray) -> np.ndarray:
        damping = np.exp(-((wave * sigma[:, None]) ** 2) / 2)
        return np.abs(np.fft.irfft(mirrored * damping, axis=1)[:, :cells]).sum(1)

    low, high = np.zeros(len(residual)), np.ones(len(residual))
    for _ in range(10):  # smECE_σ falls in σ, so the sign of σ − smECE_σ brackets the fixed point
        middle = (low + high) / 2
        above = error(middle) > middle
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return error(high)

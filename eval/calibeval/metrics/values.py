"""What each metric is. For bin b of n_b of N questions: w_b = n_b / N, Δ_b = accuracy − confidence.

Every function takes R samples and returns (R,).
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from calibeval.metrics.samples import Bins, Pairs, Sample

BINS = 15
Metric = Callable[[Sample], np.ndarray]


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
    return -sample.top.equal_width(1).gap[:, 0]


def mce(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Maximum calibration error, max_b |Δ_b| over filled equal-width bins (Naeini et al. 2015)."""
    b = sample.top.equal_width(bins)
    return np.where(b.count > 0, np.abs(b.gap), 0).max(1)


def rms(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Root mean square calibration error, sqrt(Σ w_b Δ_b²) over the bins of `ece`, never below it.

    The definition of Hendrycks et al. 2019; their bins of 100 questions alone read 0.045 at any N.
    """
    b = sample.top.equal_width(bins)
    return np.sqrt((b.weight * b.gap**2).sum(1))


def rms_debiased(sample: Sample, bins: int = BINS) -> np.ndarray:
    """sqrt(max(0, Σ w_b (Δ_b² − s_b²))), s_b² = Σ_b (y − p − Δ_b)² / (n_b (n_b − 1)).

    s_b² estimates the noise of Δ_b without bias, also where confidences differ within a bin; with
    one confidence a bin it is a_b (1 − a_b) / (n_b − 1) (Kumar et al. 2019, section 5). A bin of
    one question does not tell its noise and counts as 0.
    """
    return np.sqrt(np.maximum(squared(sample.top.equal_width(bins)), 0))


def squared(b: Bins) -> np.ndarray:
    """Σ w_b (Δ_b² − s_b²), the debiased squared l2 calibration error; it may be below 0."""
    return np.where(b.count > 1, b.weight * (b.gap**2 - b.noise), 0).sum(1)


def rms_hendrycks(sample: Sample) -> np.ndarray:
    """What hendrycks/test's `rmsce` returns: (Σ w_b² Δ_b²)^¼, not a root mean square.

    Confidences of ½ or less are folded to (1 − p, 1 − correct) first, bins have about 100
    questions, and the weight is squared with the gap. For comparison with published tables; it may
    lie below the expected error.
    """
    _, gap = sample.folded.equal_mass_gaps(max(1, sample.folded.n // 100))
    return (gap**2).sum(1) ** 0.25


def sce(sample: Sample, bins: int = BINS) -> np.ndarray:
    """Static calibration error, mean over choices of Σ w_b |Δ_b| (Nixon et al. 2019).

    A choice weighs as many times as questions have it: all the same where all have K choices.
    """
    return _over_classes(sample, lambda pairs: expected(pairs.equal_width(bins)))


def ace(sample: Sample, bins: int = BINS, above: float = -1.0) -> np.ndarray:
    """Adaptive calibration error: `sce` over equal-mass bins (Nixon et al. 2019)."""
    return _over_classes(sample, lambda p: np.abs(p.equal_mass_gaps(bins, above)[1]).sum(1))


def tace(sample: Sample, bins: int = BINS, threshold: float = 0.01) -> np.ndarray:
    """Thresholded adaptive calibration error: `ace` of the probabilities above ε = 0.01 only."""
    return ace(sample, bins, above=threshold)


def _over_classes(sample: Sample, error: Callable[[Pairs], np.ndarray]) -> np.ndarray:
    classes = [pairs for pairs in sample.classes if pairs.n]
    weights = [pairs.times.sum(1) for pairs in classes]
    return sum(w * error(p) for w, p in zip(weights, classes, strict=True)) / sum(weights)


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


def auroc(sample: Sample) -> np.ndarray:
    """P(confidence right > wrong) + ½ P(equal), over pairs of answers; NaN without such pairs."""
    top = sample.top
    starts = np.unique(top.run_start)
    runs = slice(None) if len(starts) == top.n else np.append(starts, top.n)  # a view is faster
    right = np.diff(top.corrects[:, runs], axis=1)
    wrong = (top.counts - top.corrects)[:, runs]
    below = (wrong[:, :-1] + wrong[:, 1:]) / 2
    pairs = top.corrects[:, -1] * wrong[:, -1]
    return np.einsum("rn,rn->r", right, below) / np.where(pairs > 0, pairs, np.nan)


def accuracy_at_coverage(sample: Sample, coverage: float) -> np.ndarray:
    """Accuracy when only the most confident share of the questions is answered.

    Where the cut falls among equal confidences, they count in proportion.
    """
    top = sample.top
    total = top.counts[0, -1]
    cut = total * (1 - coverage)
    place = top.places(np.full((len(top.counts), 1), cut))
    ends = np.hstack([top.run_start[place], top.run_end[place]])
    counts, corrects = (
        np.take_along_axis(of, ends, 1).T for of in (top.counts, top.corrects)
    )  # (2, R)
    share = (cut - counts[0]) / np.maximum(counts[1] - counts[0], 1)
    below = corrects[0] + share * (corrects[1] - corrects[0])
    return (top.corrects[:, -1] - below) / (total - cut)


# Smooth in the sample, so that plain bootstrap intervals cover.
REGULAR: dict[str, Metric] = {
    "accuracy": accuracy,
    "nll": nll,
    "brier": brier,
    "ece_signed": ece_signed,
    "auroc": auroc,
    "accuracy_at_50": partial(accuracy_at_coverage, coverage=0.5),
    "accuracy_at_80": partial(accuracy_at_coverage, coverage=0.8),
}
# Never below 0: a calibrated model reads more than 0 on few questions.
CALIBRATION: dict[str, Metric] = {
    "ece": ece,
    "rms": rms,
    "rms_debiased": rms_debiased,
    "rms_hendrycks": rms_hendrycks,
    "ece_10": partial(ece, bins=10),
    "ece_30": partial(ece, bins=30),
    "ece_equal_mass": ece_equal_mass,
    "smece": smece,
    "mce": mce,
    "sce": sce,
    "ace": ace,
    "tace": tace,
}
METRICS = REGULAR | CALIBRATION

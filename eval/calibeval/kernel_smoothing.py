"""Gaussian kernel smoothing on the unit interval, for the smooth calibration error.

The estimator is that of Błasiok & Nakkiran (2023) as their package relplot computes it: values at
points of [0, 1] are spread over a fine grid, and convolved by FFT with a Gaussian kernel that is
reflected at 0 and 1. `calibeval.measures` turns samples of questions into such values.

Arrays are named by R samples, N points, G places of a grid and T points of a mesh.
"""

import numpy as np

# relplot's constants: a bandwidth below LEAST_BANDWIDTH has no effect on any probability that is
# printed, the search for one halves its range SEARCH_STEPS times, and an integral over [0, 1] has
# at least MESH_POINTS points.
LEAST_BANDWIDTH = 0.001
SEARCH_STEPS = 10
MESH_POINTS = 200
# Added to a density, so that a mean far from all points is 0 and not 0 / 0.
DENSITY_FLOOR = 1e-4


def smooth_error(
    points: np.ndarray, gaps: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smooth calibration error of R samples and its bandwidth σ, (R,) both.

    The error at a bandwidth is Σ_t |Σ_i K_σ(t, p_i) gap_i| / Σ_t Σ_i K_σ(t, p_i) count_i over a
    mesh of t. The bandwidth is the least σ, by bisection, that is no less than the error at σ.

    Args:
        points: Probabilities p, (N,).
        gaps: (p − y) times how often each point is in a sample, (R, N).
        counts: How often each point is in a sample, (R, N), or (1, N) if alike for all samples.
    """
    spectra_by_size: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def spectra_on(size: int) -> tuple[np.ndarray, np.ndarray]:
        if size not in spectra_by_size:
            of_gaps = spectra(points, gaps, size)
            of_counts = spectra(points, counts, size)
            spectra_by_size[size] = of_gaps, of_counts
        return spectra_by_size[size]

    def error_at(bandwidths: np.ndarray) -> np.ndarray:
        """The error of each sample at its own bandwidth, (R,); 0 below the least bandwidth."""
        errors = np.zeros(len(gaps))
        for bandwidth in np.unique(bandwidths[bandwidths >= LEAST_BANDWIDTH]):
            rows = np.flatnonzero(bandwidths == bandwidth)
            gap_spectra, count_spectra = spectra_on(grid_size(bandwidth))
            if len(count_spectra) > 1:
                count_spectra = count_spectra[rows]
            mesh = np.linspace(0, 1, max(round(10 / bandwidth), MESH_POINTS))
            gap_sums = smoothed(gap_spectra[rows], bandwidth, mesh)
            densities = smoothed(count_spectra, bandwidth, mesh)
            errors[rows] = np.abs(gap_sums).sum(1) / (densities + DENSITY_FLOOR).sum(1)
        return errors

    high: np.ndarray = np.ones(len(gaps))
    low: np.ndarray = np.zeros(len(gaps))
    for _ in range(SEARCH_STEPS):
        middle = (high + low) / 2
        too_small = (middle < LEAST_BANDWIDTH) | (middle < error_at(middle))
        low = np.where(too_small, middle, low)
        high = np.where(too_small, high, middle)
    return error_at(high), high


def smooth_mean(
    points: np.ndarray, values: np.ndarray, counts: np.ndarray, bandwidth: float, mesh: np.ndarray
) -> np.ndarray:
    """Return the kernel mean Σ_i K_σ(t, p_i) value_i / Σ_i K_σ(t, p_i) count_i, (R, T).

    Args:
        points: Probabilities p, (N,).
        values: Values times how often each point is in a sample, (R, N).
        counts: How often each point is in a sample, (R, N) or (1, N).
        bandwidth: σ.
        mesh: The points t in [0, 1], (T,).
    """
    size = grid_size(bandwidth)
    value_sums = smoothed(spectra(points, values, size), bandwidth, mesh)
    densities = smoothed(spectra(points, counts, size), bandwidth, mesh)
    return value_sums / (densities + DENSITY_FLOOR)


def grid_size(bandwidth: float) -> int:
    """Return how many places a grid needs to be fine enough for a bandwidth."""
    return max(2000, round(20 / bandwidth)) // 2 + 1


def spectra(points: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the Fourier transforms (R, G) of values (R, N) at points (N,), reflected at 0 and 1.

    Each value is shared between the two nearest of `size` places of a grid.
    """
    place = (points * (size - 1)).astype(int).clip(0, size - 2)
    share_above = points * (size - 1) - place
    share_below = 1 - share_above
    rows = []
    for value in values:
        below = np.bincount(place, share_below * value, size)
        above = np.bincount(place + 1, share_above * value, size)
        rows.append(below + above)
    grid = np.stack(rows)
    mirrored = grid[:, -2:0:-1]
    return np.fft.rfft(np.hstack([grid, mirrored]))


def smoothed(transforms: np.ndarray, bandwidth: float, mesh: np.ndarray) -> np.ndarray:
    """Return Σ_i K_σ(t, p_i) value_i at each t of a mesh, (R, T), from `spectra` (R, G)."""
    size = transforms.shape[1]
    kernel = np.zeros(2 * size - 2)
    kernel[:size] = np.exp(-((np.linspace(0, 1, size) - 0.5) ** 2) / (2 * bandwidth**2))
    centered = np.roll(kernel, -(size // 2))
    kernel_transform = np.fft.rfft(centered) / (np.sqrt(2 * np.pi) * bandwidth)
    on_grid = np.fft.irfft(transforms * kernel_transform)
    place = (mesh * (size - 1)).astype(int).clip(0, size - 2)
    share_above = mesh * (size - 1) - place
    return on_grid[:, place] * (1 - share_above) + on_grid[:, place + 1] * share_above

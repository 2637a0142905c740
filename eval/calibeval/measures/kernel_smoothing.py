"""Gaussian kernel smoothing on the unit interval, for the smooth calibration error.

The estimator is that of Błasiok & Nakkiran (2023) as their package relplot computes it: values at
points of [0, 1] are spread over a fine grid, and convolved by FFT with a Gaussian kernel that is
reflected at 0 and 1. `calibeval.measures` turns samples of questions into such values.

Arrays are named by R samples, N points, G places of a grid and T points of a mesh.
"""

from functools import lru_cache

import numpy as np

# relplot's constants: a bandwidth below LEAST_BANDWIDTH has no effect on any probability that is
# printed, the search for one halves its range SEARCH_STEPS times, an integral over [0, 1] has at
# least MESH_POINTS points, and a grid with its mirror image LEAST_MIRRORED_PLACES places.
LEAST_BANDWIDTH = 0.001
SEARCH_STEPS = 10
MESH_POINTS = 200
LEAST_MIRRORED_PLACES = 2000
# Added to a density, so that a mean far from all points is 0 and not 0 / 0.
DENSITY_FLOOR = 1e-4


class Smoother:
    """Smooths values at fixed points of [0, 1].

    Args:
        points: The points p, ascending probabilities, (N,).
    """

    def __init__(self, points: np.ndarray):
        self.points = points
        self._grids: dict[int, _Grid] = {}
        self._spectra_of_ones: dict[int, np.ndarray] = {}
        self._densities_of_ones: dict[float, np.ndarray] = {}

    def error(
        self, gaps: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the smooth calibration error of R samples and its bandwidth σ, (R,) both.

        The error at a bandwidth is Σ_t |Σ_i K_σ(t, p_i) gap_i| / Σ_t Σ_i K_σ(t, p_i) count_i over
        a mesh of t. The bandwidth is the least σ, by bisection, that is no less than the error at
        σ.

        Args:
            gaps: (p − y) times how often each point is in a sample, (R, N).
            counts: How often each point is in a sample, (R, N); by default once.
        """
        gap_spectra: dict[int, np.ndarray] = {}
        count_spectra: dict[int, np.ndarray] = {}

        def density_at(bandwidth: float, mesh: np.ndarray, rows: np.ndarray) -> np.ndarray:
            """Σ_i K_σ(t, p_i) count_i of some samples, (rows, T); (1, T) where each is once."""
            if counts is None:
                return self._density_of_ones(bandwidth, mesh)
            size = grid_size(bandwidth)
            if size not in count_spectra:
                count_spectra[size] = self._spectra(counts, size)
            return smoothed(count_spectra[size][rows], bandwidth, mesh)

        def error_at(bandwidths: np.ndarray) -> np.ndarray:
            """The error of each sample at its own bandwidth, (R,); 0 below the least bandwidth."""
            errors = np.zeros(len(gaps))
            for bandwidth in np.unique(bandwidths[bandwidths >= LEAST_BANDWIDTH]):
                rows = np.flatnonzero(bandwidths == bandwidth)
                size = grid_size(bandwidth)
                if size not in gap_spectra:
                    gap_spectra[size] = self._spectra(gaps, size)
                mesh = np.linspace(0, 1, max(round(10 / bandwidth), MESH_POINTS))
                gap_sums = smoothed(gap_spectra[size][rows], bandwidth, mesh)
                densities = density_at(bandwidth, mesh, rows)
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

    def mean(
        self, values: np.ndarray, counts: np.ndarray | None, bandwidth: float, mesh: np.ndarray
    ) -> np.ndarray:
        """Return the kernel mean Σ_i K_σ(t, p_i) value_i / Σ_i K_σ(t, p_i) count_i, (R, T).

        Args:
            values: Values times how often each point is in a sample, (R, N).
            counts: How often each point is in a sample, (R, N), or None for once.
            bandwidth: σ.
            mesh: The points t in [0, 1], (T,).
        """
        size = grid_size(bandwidth)
        value_sums = smoothed(self._spectra(values, size), bandwidth, mesh)
        densities = smoothed(self._count_spectra(counts, size), bandwidth, mesh)
        return value_sums / (densities + DENSITY_FLOOR)

    def _density_of_ones(self, bandwidth: float, mesh: np.ndarray) -> np.ndarray:
        """Σ_i K_σ(t, p_i) at the mesh of a bandwidth, (1, T); the search asks for few of them."""
        if bandwidth not in self._densities_of_ones:
            spectra = self._count_spectra(None, grid_size(bandwidth))
            self._densities_of_ones[bandwidth] = smoothed(spectra, bandwidth, mesh)
        return self._densities_of_ones[bandwidth]

    def _count_spectra(self, counts: np.ndarray | None, size: int) -> np.ndarray:
        """Spectra of how often each point is in a sample, (R, G), or (1, G) where each is once."""
        if counts is not None:
            return self._spectra(counts, size)
        if size not in self._spectra_of_ones:
            ones = np.ones((1, len(self.points)))
            self._spectra_of_ones[size] = self._spectra(ones, size)
        return self._spectra_of_ones[size]

    def _spectra(self, values: np.ndarray, size: int) -> np.ndarray:
        """Spectra (R, G): Fourier transforms of values (R, N) at the points, reflected at 0 and 1.

        Each value is shared between the two nearest of `size` places of a grid.
        """
        if size not in self._grids:
            self._grids[size] = _Grid(self.points, size)
        grid = self._grids[size]
        on_grid = np.zeros((len(values), size))
        above = grid.share_above * values
        on_grid[:, grid.filled] = np.add.reduceat(values - above, grid.starts, axis=1)
        on_grid[:, grid.filled + 1] += np.add.reduceat(above, grid.starts, axis=1)
        mirrored = on_grid[:, -2:0:-1]
        return np.fft.rfft(np.hstack([on_grid, mirrored]))


class _Grid:
    """Where ascending points lie between the places of a grid.

    Attributes:
        share_above: How much of a point belongs to the place above it, and not to that below, (N,).
        filled: The places g of the grid with a point in [g, g + 1), ascending.
        starts: The first point in each of these intervals.
    """

    def __init__(self, points: np.ndarray, size: int):
        place = (points * (size - 1)).astype(int).clip(0, size - 2)
        self.share_above = points * (size - 1) - place
        self.filled, self.starts = np.unique(place, return_index=True)


def grid_size(bandwidth: float) -> int:
    """Return how many places a grid needs to be fine enough for a bandwidth σ."""
    # [0, 1] and its mirror image are 2 long, so that 20 / σ places are 10 to each length of σ.
    places_with_mirror = max(LEAST_MIRRORED_PLACES, round(20 / bandwidth))
    return places_with_mirror // 2 + 1  # one half, with the places at both 0 and 1


def smoothed(spectra: np.ndarray, bandwidth: float, mesh: np.ndarray) -> np.ndarray:
    """Return Σ_i K_σ(t, p_i) value_i at each t of a mesh, (R, T), from their spectra (R, G)."""
    size = spectra.shape[1]
    on_grid = np.fft.irfft(spectra * kernel_transform(size, bandwidth))
    place = (mesh * (size - 1)).astype(int).clip(0, size - 2)
    share_above = mesh * (size - 1) - place
    return on_grid[:, place] * (1 - share_above) + on_grid[:, place + 1] * share_above


@lru_cache(maxsize=32)  # a search asks for the same few bandwidths again and again
def kernel_transform(size: int, bandwidth: float) -> np.ndarray:
    """Fourier transform of the kernel K_σ over a grid of `size` places and its mirror image, (G,).

    As in relplot, the kernel is cut off at a distance of ½, which changes the Gaussian only where
    σ is not small against ½.
    """
    kernel = np.zeros(2 * size - 2)
    kernel[:size] = np.exp(-((np.linspace(0, 1, size) - 0.5) ** 2) / (2 * bandwidth**2))
    centered = np.roll(kernel, -(size // 2))
    return np.fft.rfft(centered) / (np.sqrt(2 * np.pi) * bandwidth)

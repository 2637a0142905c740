"""The squared calibration error without bias, and how it varies over other questions.

For bin b, w_b is its share of the questions, Δ_b = accuracy − confidence its gap, and s_b² an
estimate of the gap's noise. The debiased squared error is

    T = Σ w_b (Δ_b² − s_b²)

**A resample's error.** A resample, marked *, has the gap Δ*_b = Δ_b + G_b, where G_b is noise of
variance s_b². Its squared error, less the noise s*_b² that it would take off, has three parts:

    Σ w*_b (Δ*_b² − s*_b²) = A + B + D
    A = Σ w*_b (G_b² − s*_b²)       what noise alone reads
    B = 2 Σ w*_b Δ_b G_b            noise at the gaps
    D = Σ w*_b Δ_b²                 the gaps, weighted by how often the resample has each bin

The mean of D is Σ w_b Δ_b², which is above T by the noise Σ w_b s_b². That does no harm:
`stats._interval` uses only how the draws vary around their mean.

**Why A is kept apart.** A calibrated model has no gaps, and its errors vary as A does. Where gaps
are larger than their noise, B and D vary more than A, and they do so together: their sum is the
resample's error to first order. But Δ_b is itself observed with the noise s_b², so B is too large.
Let v be A's variance, Σ w_b² 2 s_b⁴ of Gaussian noise, and V that of B + D. The mean of Δ_b²
exceeds the true square by s_b², and the variance of B, 4 Σ w_b² Δ_b² s_b², exceeds the one that it
would have at the true gaps by 4 Σ w_b² s_b⁴, which is 2 v. D's variance, about Σ w_b² Δ_b⁴ / n_b
with n_b questions in the bin, is too large as well. Where Δ_b is about s_b, its excess is of the
order of w_b² s_b⁴ / n_b a bin, beside B's 4 w_b² s_b⁴: 1 / n_b of it. That is left.

**The draws** are therefore A + κ (B + D). κ is one factor before B + D as a whole. (Shrinking each
gap Δ_b in its place would put κ before B, but κ² before D.) That κ also shrinks the mean of B + D
does no harm either, for the same reason. κ takes the excess off the variance of B + D:

    κ² = max(0, V − v min(2, 4 v / V)) / V

Of the excess 2 v only the share min(1, 2 v / V) is taken off: little where V is much larger than v,
and so mostly the gaps' own. The share is not derived. V is noisy, and taking off all of 2 v
everywhere covers 0.92 to 0.98 in simulation, this 0.94 to 0.99 (tests/eval/interval_coverage.py).
In a difference v and V are those of the difference's parts:
where one model is over-confident and the other under-confident, their parts in B add up, and a
factor for each model would lose that.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from calibeval.measures.bins import Bins

ROUNDING = 1e-15  # of a squared error: below this it is 0 but for rounding


def root_of_square(square: np.ndarray | float) -> np.ndarray:
    """sqrt(max(0, T)) of debiased squares T, and 0 where T is 0 but for rounding.

    A root makes 3e-9 of a rounding error of 1e-17, which calibrated models then do not reach.
    """
    return np.sqrt(np.where(np.greater(square, ROUNDING), square, 0.0))


def debiased_square(bins: Bins) -> np.ndarray:
    """T = Σ w_b (Δ_b² − s_b²), the debiased squared l2 calibration error, (R,); may be below 0."""
    terms = bins.weight * (bins.gap**2 - bins.noise)
    return np.where(bins.count > 1, terms, 0).sum(1)


def _array_to_json(values: np.ndarray) -> list[str]:
    """An array as the name of its type and its bytes in base 64, short and quick to read."""
    return [values.dtype.str, base64.b64encode(values.tobytes()).decode()]


def _array_from_json(content: list[str]) -> np.ndarray:
    dtype, text = content
    return np.frombuffer(base64.b64decode(text), dtype)


# An array that `evaluations` keeps as JSON.
Array = Annotated[np.ndarray, PlainValidator(_array_from_json), PlainSerializer(_array_to_json)]


@dataclass(frozen=True)
class SquareDraws:
    """What resamples of the squared error read, in the parts that this module's docstring derives.

    Attributes:
        noise_part: A of each resample, (R,).
        gap_part: B + D of each resample, (R,).
    """

    noise_part: Array
    gap_part: Array


def square_draws(observed: Bins, resampled: Sequence[Bins]) -> SquareDraws:
    """The squared error's draws, from bins (1, B) as they are and resampled ones (R, B).

    The mean of n_b resampled residuals has (n_b − 1) / n_b times the variance that n_b new
    questions would give it. So G_b (`shift`) is multiplied by the root of n_b / (n_b − 1), and
    s*_b² by that ratio.
    """
    gap = observed.gap
    has_noise = observed.count > 1  # a bin of one question does not tell its noise
    widening = np.where(has_noise, observed.count / np.maximum(observed.count - 1, 1), 1)
    noise_parts = []
    gap_parts = []
    for bins in resampled:
        shift = np.where(bins.count > 0, (bins.gap - gap) * np.sqrt(widening), 0)
        weight = np.where(has_noise & (bins.count > 1), bins.weight, 0)
        noise_parts.append((weight * (shift**2 - widening * bins.noise)).sum(1))
        gap_parts.append((weight * (2 * gap * shift + gap**2)).sum(1))
    return SquareDraws(
        noise_part=np.concatenate(noise_parts),
        gap_part=np.concatenate(gap_parts),
    )


def shrinkage(noise_part: np.ndarray, gap_part: np.ndarray) -> float:
    """κ for the parts A (R,) and B + D (R,) of an error, or of a sum or difference of errors.

    It is 0 where B + D does not vary, as of answers that are all right, with one confidence. That
    is the formula's limit as V falls to 0: for every V ≤ 2 v it is κ² = max(0, V − 2 v) / V = 0.
    Without noise either, v = V = 0, the formula has no limit, but any κ gives draws that do not
    vary.
    """
    gap_variance = gap_part.var()  # V
    if gap_variance == 0:
        return 0.0
    ratio = noise_part.var() / gap_variance  # v / V
    return math.sqrt(max(1 - ratio * min(2, 4 * ratio), 0))

"""Prediction sets by split conformal prediction, from records alone.

Every choice of a question gets a nonconformity score s; the threshold q is
the ⌈(n + 1)(1 − α)⌉-th smallest score of the right choices of n calibration questions, and a
question's set is {k: s_k ≤ q}. Where questions are exchangeable, a set holds the right choice with
probability 1 − α to 1 − α + 1/(n + 1) (Vovk et al. 2005).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from calibeval.io import InputError
from calibeval.measures import SEED, scores
from calibeval.records import Records
from calibeval.stats import in_order


@dataclass(frozen=True)
class Sets:
    """Means over splits, and the standard deviations between them."""

    questions: int  # tested in a split
    coverage: float
    coverage_sd: float
    size: float
    size_sd: float


def nonconformity(probs: np.ndarray, score: str, uniform: np.ndarray) -> np.ndarray:
    """Scores (N, K) of probabilities (N, K); `uniform` (N,) in [0, 1) is of aps.

    lac:  1 − p_k, the smallest sets on average (Sadinle et al. 2019)
    aps:  probability of the likelier choices + (1 − u) p_k, one uniform u a question: sets adapt to
          hard questions, and may be empty (Romano et al. 2020)
    """
    if score == "lac":
        return 1 - probs
    order = np.argsort(-probs, axis=1, kind="stable")
    sums = np.take_along_axis(probs, order, 1).cumsum(1)
    found = np.take_along_axis(sums, np.argsort(order, axis=1), 1) - uniform[:, None] * probs
    return found.round(12)  # sums that are 1 in exact arithmetic differ in the last digits


def threshold(right: np.ndarray, alpha: float) -> float:
    """q: the ⌈(n + 1)(1 − α)⌉-th smallest of n scores; ∞ where that is beyond the last."""
    # (n + 1)(1 − α) as computed may lie a rounding above a whole number.
    place = math.ceil((len(right) + 1) * (1 - alpha) - 1e-9)
    return float(np.sort(right)[place - 1]) if place <= len(right) else math.inf


def halves(n: int, splits: int) -> Iterator[list[np.ndarray]]:
    """Random halves of n places, to calibrate and to test; the same in every call."""
    rng = np.random.default_rng(SEED)
    for _ in range(splits):
        yield np.split(rng.permutation(n), [n // 2])


def evaluate(of: Records, *, alpha: float = 0.1, score: str = "lac", splits: int = 100) -> Sets:
    """Coverage and mean size of the prediction sets of a record file's choices.

    Half of the questions, drawn at random `splits` times, calibrates the sets of the other half.
    The random numbers are the same for every run over the same questions. Raises `InputError` for
    one record alone, and an `alpha` that is not in [0, 1).
    """
    if not 0 <= alpha < 1:
        raise InputError(f"alpha is {alpha}, expected a number from 0 to below 1")
    if len(of) < 2:
        raise InputError(f"{of.path}: 1 record, expected 2 or more to split")
    of = in_order(of)
    uniform = np.random.default_rng(SEED + 1).random(len(of))
    found = nonconformity(scores(of, "choices").probs, score, uniform)
    found = np.where(np.isfinite(of.logprobs), found, np.inf)  # of an absent choice
    right = found[np.arange(len(of)), of.labels]
    limits = [(threshold(right[known], alpha), rest) for known, rest in halves(len(of), splits)]
    hits = [(right[rest] <= limit).mean() for limit, rest in limits]
    # ∞ is no choice, and below no threshold but that of too few questions.
    sizes = [(np.isfinite(f := found[rest]) & (f <= limit)).sum(1).mean() for limit, rest in limits]
    figures = (float(x) for of in (hits, sizes) for x in (np.mean(of), np.std(of)))
    return Sets(len(limits[0][1]), *figures)

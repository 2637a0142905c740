"""Prediction sets by split conformal prediction, from records alone.

Every choice of a question gets a nonconformity score s. The threshold q is the
⌈(n + 1)(1 − α)⌉-th smallest score of the right choices of n calibration questions, and a question's
set is {k: s_k ≤ q}. Where questions are exchangeable, a set holds the right choice with
probability 1 − α or more, and where no two scores are equal with at most 1 − α + 1/(n + 1) (Vovk et
al. 2005). Equal scores, as `lac` has of equal probabilities, make sets larger than need be.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from calibeval.io import InputError
from calibeval.measures.evaluations import in_order
from calibeval.measures.samples import SEED, scores_of_records
from calibeval.records import Records

SCORE_DECIMALS = 12  # nonconformity scores that agree to so many are equal
# To add one, compute it in `nonconformity`; `--score` in `__main__` names them too.
SCORE_NAMES = ("lac", "aps")


@dataclass(frozen=True)
class Sets:
    """How prediction sets did: means over splits, and the standard deviations between them.

    The splits are of the same questions, so a deviation divided by the root of their number is no
    standard error of the mean.
    """

    questions: int  # tested in a split
    coverage: float  # share of sets that hold the right choice
    coverage_sd: float
    size: float  # choices in a set
    size_sd: float

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers under their names, for JSON."""
        return asdict(self)


def nonconformity(probs: np.ndarray, score: str, uniform: np.ndarray) -> np.ndarray:
    """Return the nonconformity scores (N, K) of probabilities (N, K).

    lac:  1 − p_k, the smallest sets on average (Sadinle et al. 2019)
    aps:  probability of the likelier choices + (1 − u) p_k, one uniform u a question: sets adapt to
          hard questions, and may be empty (Romano et al. 2020)

    `uniform` are the u in [0, 1) of aps, (N,). Scores are rounded to 12 decimals: those that are
    equal in exact arithmetic differ in the last digits. Another score raises `InputError`.
    """
    if score not in SCORE_NAMES:
        raise InputError(f"score is {score!r}, expected {' or '.join(SCORE_NAMES)}")
    if score == "lac":
        return (1 - probs).round(SCORE_DECIMALS)
    order = np.argsort(-probs, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    cumulated = np.take_along_axis(probs, order, 1).cumsum(1)
    up_to_choice = np.take_along_axis(cumulated, rank, 1)
    return (up_to_choice - uniform[:, None] * probs).round(SCORE_DECIMALS)


def threshold(right: np.ndarray, alpha: float) -> float:
    """Return q, the ⌈(n + 1)(1 − α)⌉-th smallest of n scores; ∞ where that is beyond the last."""
    # (n + 1)(1 − α) as computed may lie a rounding above a whole number.
    rank = math.ceil((len(right) + 1) * (1 - alpha) - 1e-9)
    if rank > len(right):
        return math.inf
    rank = max(rank, 1)  # what is taken off for rounding leaves 0 of an α next to 1
    return float(np.sort(right)[rank - 1])


def halves(n: int, splits: int) -> Iterator[list[np.ndarray]]:
    """Yield random halves of n places, to calibrate and to test; the same in every call."""
    rng = np.random.default_rng(SEED)
    for _ in range(splits):
        yield np.split(rng.permutation(n), [n // 2])


def evaluate(
    records: Records, *, alpha: float = 0.1, score: str = "lac", splits: int = 100
) -> Sets:
    """Return coverage and mean size of the prediction sets of a record file's choices.

    Half of the questions, drawn at random `splits` times, calibrates the sets of the other half.
    The random numbers are the same for every record file of the same questions. Raises
    `InputError` for one record alone, an `alpha` that is not in [0, 1), a `score` that is neither
    "lac" nor "aps", and no splits.
    """
    if not 0 <= alpha < 1:
        raise InputError(f"alpha is {alpha}, expected a number from 0 to below 1")
    if splits < 1:
        raise InputError(f"splits is {splits}, expected 1 or more")
    if records.scoring == "generate":
        raise InputError(f"{records.path}: is of written answers, which have no sets of choices")
    if len(records) < 2:
        raise InputError(f"{records.path}: 1 record, expected 2 or more to split")
    records = in_order(records)
    uniform = np.random.default_rng(SEED + 1).random(len(records))
    choice_scores = nonconformity(scores_of_records(records, "choices").probs, score, uniform)
    # ∞ marks a choice that the question lacks.
    choice_scores = np.where(np.isfinite(records.logprobs), choice_scores, np.inf)
    right_scores = choice_scores[np.arange(len(records)), records.labels]
    coverages = []
    sizes = []
    for calibration, tested in halves(len(records), splits):
        limit = threshold(right_scores[calibration], alpha)
        coverages.append((right_scores[tested] <= limit).mean())
        # An absent choice is below no threshold but the ∞ of too few questions.
        is_choice = np.isfinite(choice_scores[tested])
        in_set = is_choice & (choice_scores[tested] <= limit)
        sizes.append(in_set.sum(1).mean())
    return Sets(
        questions=len(records) - len(records) // 2,
        coverage=float(np.mean(coverages)),
        coverage_sd=float(np.std(coverages)),
        size=float(np.mean(sizes)),
        size_sd=float(np.std(sizes)),
    )

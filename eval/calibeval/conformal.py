"""Prediction sets for multiple choice by split conformal prediction, from records alone.

Every choice of every question gets a nonconformity score s; the threshold q is the
⌈(n + 1)(1 − α)⌉-th smallest score of the right choices of n calibration questions, and a question's
set is {k: s_k ≤ q}. Where questions are exchangeable, a set holds the right choice with probability
1 − α to 1 − α + 1/(n + 1) (Vovk et al. 2005).
"""

import math
from dataclasses import dataclass, field

import numpy as np

from calibeval.io import InputError, counted
from calibeval.metrics import SEED, scores
from calibeval.records import Records
from calibeval.stats import groups, take

SCORES = ("lac", "aps", "raps")


@dataclass(frozen=True)
class Sets:
    """How well prediction sets did, over all test questions of each split and by group.

    Figures are means over splits, `coverage_sd` and `size_sd` the standard deviations between them
    (0 where another file calibrates).
    """

    questions: int  # tested in one split
    coverage: float
    coverage_sd: float
    size: float
    size_sd: float
    by: dict[str, "Sets"] = field(default_factory=dict)


def nonconformity(
    probs: np.ndarray,  # (N, K)
    present: np.ndarray,  # (N, K) whether the question has that choice
    score: str,
    uniform: np.ndarray,  # (N,) in [0, 1), for aps and raps
    penalty: float = 0.01,
    free: int = 1,
) -> np.ndarray:
    """Scores (N, K), +∞ for an absent choice; o_k is its rank by falling probability, from 1.

    lac:  1 − p_k (Sadinle et al. 2019)
    aps:  Σ_{o_j < o_k} p_j + (1 − u) p_k, one uniform u a question (Romano et al. 2020)
    raps: aps + λ max(0, o_k − k_reg), `penalty` λ and `free` k_reg (Angelopoulos et al. 2021)
    """
    if score == "lac":
        return np.where(present, 1 - probs, np.inf)
    order = np.argsort(np.where(present, -probs, np.inf), axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    total = np.take_along_axis(np.take_along_axis(probs, order, 1).cumsum(1), rank, 1)
    found = total - uniform[:, None] * probs
    if score == "raps":
        found = found + penalty * np.maximum(0, rank + 1 - free)
    return np.where(present, found, np.inf)


def threshold(right: np.ndarray, alpha: float) -> float:
    """q: the ⌈(n + 1)(1 − α)⌉-th smallest of n scores; ∞ where that is beyond the last."""
    # (n + 1)(1 − α) as computed may lie a rounding above a whole number.
    place = math.ceil((len(right) + 1) * (1 - alpha) - 1e-9)
    if place > len(right):
        return math.inf
    return float(np.partition(right, place - 1)[place - 1]) if place > 0 else -math.inf


def evaluate(
    of: Records,
    *,
    alpha: float = 0.1,
    score: str = "lac",
    by: str | None = None,
    splits: int = 100,
    calibrate: Records | None = None,
    penalty: float = 0.01,
    free: int = 1,
) -> Sets:
    """Coverage and mean size of the prediction sets of a record file's choices.

    Half of the questions, drawn at random `splits` times, calibrates the sets of the other half; or
    all of `calibrate` does, once. With `by` ("subject" or "category") each group has a threshold of
    its own (Mondrian). The random numbers are the same in every call and for every run over the
    same questions.

    Raises:
        InputError: an option out of its range, or a group with nothing to calibrate it.
    """
    for name, value, valid, expected in (
        ("alpha", alpha, 0 < alpha < 1, "more than 0 and less than 1"),
        ("lambda", penalty, penalty >= 0, "0 or more"),
        ("k-reg", free, free >= 0, "0 or more"),
    ):
        if not valid:
            raise InputError(f"--{name} is {value}, expected {expected}")
    found, places, keys = prepare(of, score, by, penalty, free)
    if calibrate is not None:
        known, labels, known_keys = prepare(calibrate, score, by, penalty, free)
        if missing := sorted(set(keys.tolist()) - set(known_keys.tolist())):
            raise InputError(f"--calibrate: no question of {by} {missing[0]!r} to calibrate it")
        limit = limits(known[np.arange(len(labels)), labels], known_keys, keys, alpha)
        return summarise([(found <= limit[:, None], places, keys)])
    n = len(places)
    if n < 2:
        raise InputError(f"{counted(n, 'question')}: expected 2 or more to split")
    right = found[np.arange(n), places]
    rng = np.random.default_rng(SEED)
    tested = []
    for _ in range(splits):
        known, rest = np.split(rng.permutation(n), [n // 2])
        limit = limits(right[known], keys[known], keys[rest], alpha)
        tested.append((found[rest] <= limit[:, None], places[rest], keys[rest]))
    return summarise(tested)


def prepare(
    of: Records, score: str, by: str | None, penalty: float, free: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores (N, K), right choices (N,) and groups (N,), in the order of the ids."""
    of = take(of, np.argsort(np.array(of.ids), kind="stable"))
    uniform = np.random.default_rng(SEED + 1).random(len(of))
    probs, present = scores(of, "choices").probs, np.isfinite(of.logprobs)
    found = nonconformity(probs, present, score, uniform, penalty, free)
    return found, of.labels, groups(of, by) if by else np.full(len(of), "")


def limits(right: np.ndarray, known: np.ndarray, asked: np.ndarray, alpha: float) -> np.ndarray:
    """The threshold of each question asked, from the right choices' scores of its own group."""
    names, place = np.unique(asked, return_inverse=True)
    return np.array([threshold(right[known == name], alpha) for name in names])[place]


def summarise(splits: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Sets:
    """From each split's sets (M, K), right choices (M,) and groups (M,)."""
    held = [sets[np.arange(len(places)), places].mean() for sets, places, _ in splits]
    sizes = [sets.sum(1).mean() for sets, *_ in splits]
    figures = (float(f(x)) for x in (held, sizes) for f in (np.mean, np.std))
    names = np.unique(np.concatenate([keys for *_, keys in splits])).tolist()
    by = {}
    for name in names if len(names) > 1 else ():
        inside = [[x[split[2] == name] for x in split] for split in splits]
        by[name] = summarise([split for split in inside if len(split[0])])
    return Sets(round(np.mean([len(places) for _, places, _ in splits])), *figures, by)

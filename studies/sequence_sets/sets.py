"""Prediction sets for label sequences such as named entities (Singer et al., arXiv 2601.16999).

The K likeliest labelings of a sentence are its choices, of which split conformal prediction makes
sets; a right one that is not among them has the score +∞. Sets of entities have the scores

    s = 1 − P(entity | x),   P(entity | x) = Σ_r P(y⁽ʳ⁾ | x) 1[y⁽ʳ⁾ has the entity]

with a threshold for each class. To hold all entities of a sentence at once with probability 1 − α,
each needs 1 − α_s = (1 − α)^(1/ŝ) (Šidák), where the likeliest labeling has ŝ entities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from calibeval import conformal

ALL, SIDAK = "all entities", "all entities, Šidák"  # of a sentence
MANY = ": five and more"


@dataclass(frozen=True)
class Sentence:
    """Its right labels (T), and likeliest labelings (K, T), the best first, with log P(y | x)."""

    gold: tuple[str, ...]
    labelings: tuple[tuple[str, ...], ...]
    logprobs: np.ndarray  # (K,)


def k_best(emissions: np.ndarray, transitions: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest labelings of a linear chain, (k, T), and their log-probabilities (k,).

    log P(y | x) = Σ_t e[t, y_t] + Σ_{t > 0} a[y_{t−1}, y_t] − log Z, by a Viterbi search that keeps
    the k best ways to each label. Emissions e (T, L) include what starts and ends a labeling,
    transitions a are (L, L). Impossible labelings (−∞) are left out: there may be fewer than k.
    """
    score, total, back = emissions[0][:, None], emissions[0], []
    for now in emissions[1:]:
        total = np.logaddexp.reduce(total[:, None] + transitions, axis=0) + now
        every = (score[:, :, None] + transitions[:, None]).reshape(-1, len(now))
        best = np.argsort(-every, axis=0, kind="stable")[:k]
        back.append((best, score.shape[1]))
        score = np.take_along_axis(every, best, 0).T + now[:, None]
    order = np.argsort(-score, axis=None, kind="stable")[:k]
    order = order[np.isfinite(score.flat[order])]
    logprobs = score.flat[order] - np.logaddexp.reduce(total)
    label, place = np.divmod(order, score.shape[1])
    found = [label]
    for best, width in reversed(back):
        label, place = np.divmod(best[place, label], width)
        found.append(label)
    return np.array(found[::-1]).T, logprobs


def entities(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first word, word after the last, class) of each entity in IOB1 or IOB2 labels."""
    found, start, name = set(), 0, ""
    for i, label in enumerate([*labels, "O"]):
        if (this := label[2:]) != name or label[0] == "B":
            if name:
                found.add((start, i, name))
            start, name = i, this
    return found


def labeling_sets(
    of: Sequence[Sentence], alpha: float, score: str, splits: int
) -> tuple[float, float]:
    """Coverage and mean size of sets of whole labelings; random halves calibrate."""
    width = max(len(s.labelings) for s in of) + 1  # the last: what is not listed
    logprobs = np.full((len(of), width), -np.inf)
    for row, s in zip(logprobs, of, strict=True):
        row[: len(s.labelings)] = s.logprobs
    right = [s.labelings.index(s.gold) if s.gold in s.labelings else width - 1 for s in of]
    scores = conformal.nonconformity(np.exp(logprobs), score, np.zeros(len(of)))
    scores = np.where(np.isfinite(logprobs), scores, np.inf)
    of_right, tested = scores[np.arange(len(of)), right], []
    for known, rest in conformal.halves(len(of), splits):
        limit = conformal.threshold(of_right[known], alpha)
        size = (scores[rest] <= limit).sum(1).mean() if limit < np.inf else np.inf
        tested.append(((of_right[rest] <= limit).mean(), size))
    return tuple(np.mean(tested, axis=0))


def spans(of: Sequence[Sentence]) -> pd.DataFrame:
    """Entities of any labeling, and right ones (`gold`); `number`: of these in the sentence."""
    found = []
    for i, s in enumerate(of):
        gold, guess, mass = entities(s.gold), len(entities(s.labelings[0])), {}
        for labels, logprob in zip(s.labelings, s.logprobs, strict=True):
            for entity in entities(labels):
                mass[entity] = mass.get(entity, 0.0) + np.exp(logprob)
        for entity in sorted(mass.keys() | gold):
            score = 1 - mass.get(entity, -np.inf)
            found.append((i, entity[2], score, entity in gold, len(gold), guess))
    return pd.DataFrame(found, columns=["sentence", "name", "score", "gold", "number", "guess"])


def entity_sets(of: Sequence[Sentence], alpha: float, splits: int) -> dict[str, np.ndarray]:
    """Coverage and mean size of sets of entities, which are to hold all right ones of a sentence.

    Sentences without right ones are left out. Sentences are exchangeable and entities are not:
    Šidák takes a sentence's for independent.
    """
    asked = spans(of)
    tested = {kind + more: [] for kind in (ALL, SIDAK) for more in ("", MANY)}
    for half, _ in conformal.halves(len(of), splits):
        known = asked.sentence.isin(half)
        right, rest = asked[known & asked.gold], asked[~known]
        for kind in (ALL, SIDAK):
            together = rest.guess.clip(1) if kind == SIDAK else rest.guess.clip(1, 1)
            limits = pd.Series(index=rest.index, dtype=float)
            for (name, n), at in rest.groupby(["name", together]).groups.items():
                level = 1 - (1 - alpha) ** (1 / n)
                limits[at] = conformal.threshold(right.score[right.name == name], level)
            held = rest.score <= limits
            size = held.astype(float).where(limits < np.inf, np.inf)
            sets = rest.assign(hit=held | ~rest.gold, held=size)
            sets = sets.groupby("sentence").agg({"hit": "all", "held": "sum", "number": "first"})
            for more, least in (("", 1), (MANY, 5)):
                chosen = sets[sets.number >= least]
                tested[kind + more].append((chosen.hit.mean(), chosen.held.mean()))
    return {kind: np.mean(means, axis=0) for kind, means in tested.items()}

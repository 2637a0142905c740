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

NUMBERS = ("0", "1", "2", "3", "4", "5+")
ALL, SIDAK = "all entities", "all entities, Šidák"  # of a sentence


def means(tested: pd.DataFrame, by: str) -> pd.DataFrame:
    """How often sets hit and what they hold, means over splits, by what a column says they are.

    Sets without a threshold are `unbounded`, and what is held is of the others.
    """
    tested = tested.assign(unbounded=tested.held.isna())
    columns = tested.groupby([by, "split"], sort=False)[["hit", "held", "unbounded"]]
    return columns.mean().groupby(by, sort=False).mean()


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
    emissions, transitions = np.asarray(emissions, float), np.asarray(transitions, float)
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
    of: Sequence[Sentence], alpha: float, score: str, splits: int = 100
) -> pd.DataFrame:
    """Sets of whole labelings, and whether they hit the right one; random halves calibrate."""
    width = max(len(s.labelings) for s in of) + 1  # the last: what is not listed
    logprobs = np.full((len(of), width), -np.inf)
    for row, s in zip(logprobs, of, strict=True):
        row[: len(s.labelings)] = s.logprobs
    right = [s.labelings.index(s.gold) if s.gold in s.labelings else width - 1 for s in of]
    score = "aps" if score == "cumulative" else score  # without its random number
    scores = conformal.nonconformity(np.exp(logprobs), score, np.zeros(len(of)))
    scores = np.where(np.isfinite(logprobs), scores, np.inf)
    of_right, tested = scores[np.arange(len(of)), right], []
    for split, (known, rest) in enumerate(conformal.halves(len(of), splits)):
        limit = conformal.threshold(of_right[known], alpha)
        held = (scores[rest] <= limit).sum(1) if np.isfinite(limit) else np.nan
        columns = {"split": split, "number": "", "hit": of_right[rest] <= limit, "held": held}
        tested.append(pd.DataFrame(columns))
    return pd.concat(tested)


def spans(of: Sequence[Sentence]) -> np.recarray:
    """Entities of any labeling, and right ones (`gold`); `number`: of these in the sentence."""
    found = []
    for i, s in enumerate(of):
        gold, guess, mass = entities(s.gold), len(entities(s.labelings[0])), {}
        for labels, logprob in zip(s.labelings, s.logprobs, strict=True):
            for entity in entities(labels):
                mass[entity] = mass.get(entity, 0.0) + np.exp(logprob)
        for entity in sorted(mass.keys() | gold):
            score = 1 - mass.get(entity, -np.inf)
            found.append((i, entity[2], score, entity in gold, NUMBERS[min(len(gold), 5)], guess))
    return np.rec.fromrecords(found, names="sentence, name, score, gold, number, guess")


def entity_sets(of: Sequence[Sentence], alpha: float, splits: int = 100) -> dict[str, pd.DataFrame]:
    """Sets of entities, and whether they hit all right ones of a sentence, `number` of them.

    Sentences without right ones are left out. Sentences are exchangeable and entities are not:
    Šidák takes a sentence's for independent.
    """
    asked, tested = spans(of), {ALL: [], SIDAK: []}
    for split, (half, _) in enumerate(conformal.halves(len(of), splits)):
        at = np.isin(asked.sentence, half)
        known, rest = asked[at], asked[~at]
        right, sentence = known[known.gold], rest.sentence
        names, of_class = np.unique(rest.name, return_inverse=True)
        begins = (np.diff(sentence, prepend=-1) > 0) & (rest.number != "0")
        for kind, found in tested.items():
            together = np.maximum(rest.guess if kind == SIDAK else 1, 1) * np.ones(len(rest))
            limit = np.empty(len(rest))
            for n in np.unique(together):
                at, level = together == n, 1 - (1 - alpha) ** (1 / n)
                of_name = [conformal.threshold(right.score[right.name == n], level) for n in names]
                limit[at] = np.array(of_name)[of_class[at]]
            hit = rest.score <= limit
            held = np.where(np.isinf(limit), np.nan, hit)
            columns = {
                "split": split,
                "number": rest.number[begins],
                "hit": (np.bincount(sentence, rest.gold & ~hit)[sentence] == 0)[begins],
                "held": np.bincount(sentence, held)[sentence][begins],
            }
            found.append(pd.DataFrame(columns))
    return {kind: pd.concat(found) for kind, found in tested.items()}

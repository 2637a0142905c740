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

from calibeval.measures import conformal

# For both kinds it is counted whether a set holds all right entities of its sentence. In EACH_ALONE
# each entity by itself is to be held with probability 1 − α. In SIDAK several entities are to be
# held at once with probability 1 − α: as many as the likeliest labeling of the sentence has.
EACH_ALONE = "all entities"
SIDAK = "all entities, Šidák"
MANY = ": five and more"
# Each kind of set has two rows: one of all sentences with a right entity, and one of those with at
# least five. By the suffix of a row's name, how many right entities a sentence needs to be counted.
LEAST_ENTITIES_BY_SUFFIX = {"": 1, MANY: 5}


ENTITY_COLUMNS = [  # of `spans`
    "sentence",
    "entity_class",
    "score",
    "is_right",
    "right_in_sentence",
    "guessed_in_sentence",
]


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
    label_count = emissions.shape[1]
    # (L, W): row = label, column = rank among the W best ways to it; W is 1 at the first word and
    # grows to k.
    scores = emissions[0][:, None]
    log_total = emissions[0]  # (L,): log of the summed exp of all ways to each label
    # For each later word, where its best ways come from, (≤ k, L), and the W of the word before. A
    # way comes from `previous label × W + its rank among the ways to that label`.
    steps_back: list[tuple[np.ndarray, int]] = []
    for emission in emissions[1:]:  # (L,)
        log_total = np.logaddexp.reduce(log_total[:, None] + transitions, axis=0) + emission
        # (L · W, L): row = previous label × W + rank, as in steps_back; column = this word's label.
        extended = (scores[:, :, None] + transitions[:, None]).reshape(-1, label_count)
        origins = np.argsort(-extended, axis=0, kind="stable")[:k]
        ways_before = scores.shape[1]
        steps_back.append((origins, ways_before))
        best_extended = np.take_along_axis(extended, origins, axis=0)  # (≤ k, L)
        # (L, ≤ k) again: row = this word's label, column = rank.
        scores = best_extended.T + emission[:, None]
    order = np.argsort(-scores, axis=None, kind="stable")[:k]
    order = order[np.isfinite(scores.flat[order])]
    logprobs = scores.flat[order] - np.logaddexp.reduce(log_total)
    # The last label of each labeling, and the rank of its way there; then backwards, word by word.
    label, rank = np.divmod(order, scores.shape[1])
    labels_from_the_end = [label]
    for origins, ways_before in reversed(steps_back):
        label, rank = np.divmod(origins[rank, label], ways_before)
        labels_from_the_end.append(label)
    return np.array(labels_from_the_end[::-1]).T, logprobs


def entities(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first word, word after the last, class) of each entity in IOB1 or IOB2 labels."""
    found = set()
    start = 0
    open_class = ""  # of the entity that has begun and not ended; empty without one
    for position, label in enumerate([*labels, "O"]):
        label_class = label[2:]
        if label_class == open_class and label[0] != "B":
            continue
        if open_class:
            found.add((start, position, open_class))
        start = position
        open_class = label_class
    return found


def labeling_sets(
    sentences: Sequence[Sentence], alpha: float, score: str, splits: int
) -> tuple[float, float]:
    """Coverage and mean size of sets of whole labelings; random halves calibrate."""
    width = max(len(sentence.labelings) for sentence in sentences) + 1
    not_listed = width - 1  # the last column, for a right labeling that is none of the likeliest
    logprobs = np.full((len(sentences), width), -np.inf)
    right_columns = []
    for row, sentence in zip(logprobs, sentences, strict=True):
        row[: len(sentence.labelings)] = sentence.logprobs
        if sentence.gold in sentence.labelings:
            right_columns.append(sentence.labelings.index(sentence.gold))
        else:
            right_columns.append(not_listed)
    scores = conformal.nonconformity(np.exp(logprobs), score, np.zeros(len(sentences)))
    scores = np.where(np.isfinite(logprobs), scores, np.inf)
    right_scores = scores[np.arange(len(sentences)), right_columns]
    coverages = []
    sizes = []
    for calibration, test in conformal.halves(len(sentences), splits):
        limit = conformal.threshold(right_scores[calibration], alpha)
        coverages.append((right_scores[test] <= limit).mean())
        if limit < np.inf:
            sizes.append((scores[test] <= limit).sum(1).mean())
        else:  # Every labeling is in the set, also those that are not listed.
            sizes.append(np.inf)
    return float(np.mean(coverages)), float(np.mean(sizes))


def spans(sentences: Sequence[Sentence]) -> pd.DataFrame:
    """A row for each entity that is right or in any listed labeling of its sentence.

    Columns: `sentence`, its place; `entity_class`; `score`, 1 − P(entity | x), which is +∞ for a
    right entity that no labeling has; `is_right`; `right_in_sentence`, how many right ones the
    sentence has; `guessed_in_sentence`, how many its likeliest labeling has.
    """
    rows = []
    for place, sentence in enumerate(sentences):
        right = entities(sentence.gold)
        guessed_in_sentence = len(entities(sentence.labelings[0]))
        probabilities: dict[tuple[int, int, str], float] = {}
        for labels, logprob in zip(sentence.labelings, sentence.logprobs, strict=True):
            for entity in entities(labels):
                probabilities[entity] = probabilities.get(entity, 0.0) + np.exp(logprob)
        for entity in sorted(probabilities.keys() | right):
            rows.append(
                {
                    "sentence": place,
                    "entity_class": entity[2],
                    "score": 1 - probabilities[entity] if entity in probabilities else np.inf,
                    "is_right": entity in right,
                    "right_in_sentence": len(right),
                    "guessed_in_sentence": guessed_in_sentence,
                }
            )
    return pd.DataFrame(rows, columns=ENTITY_COLUMNS)


def entity_sets(
    sentences: Sequence[Sentence], alpha: float, splits: int
) -> dict[str, tuple[float, float]]:
    """Coverage and mean size of sets of entities, which are to hold all right ones of a sentence.

    Sentences without right ones are left out, and so is a half in which no sentence is counted. A
    kind has NaN where that is every half. Sentences are exchangeable and entities are not: Šidák
    takes a sentence's for independent.
    """
    table = spans(sentences)
    names = [kind + suffix for kind in (EACH_ALONE, SIDAK) for suffix in LEAST_ENTITIES_BY_SUFFIX]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for half, _ in conformal.halves(len(sentences), splits):
        calibrates = table.sentence.isin(half)
        right = table[calibrates & table.is_right]
        test = table[~calibrates]
        for kind in (EACH_ALONE, SIDAK):
            thresholds = _thresholds(right, test, alpha, together=kind == SIDAK)
            by_sentence = _sets_of_sentences(test, thresholds)
            for suffix, least in LEAST_ENTITIES_BY_SUFFIX.items():
                counted = by_sentence[by_sentence.right_in_sentence >= least]
                if counted.empty:
                    continue
                result = counted.covered.mean(), counted.set_size.mean()
                results[kind + suffix].append(result)
    means = {}
    for name, result_of_splits in results.items():
        if not result_of_splits:
            means[name] = (np.nan, np.nan)
            continue
        coverage, size = np.mean(result_of_splits, axis=0)
        means[name] = (float(coverage), float(size))
    return means


def _thresholds(right: pd.DataFrame, test: pd.DataFrame, alpha: float, together: bool) -> pd.Series:
    """The largest score in the set, for each entity of `test`, by its class.

    `right` are the right entities that calibrate. With `together`, as many entities as the
    likeliest labeling has, at least one, are to be held at once (Šidák); else each by itself.
    """
    held_at_once = test.guessed_in_sentence.clip(lower=1)
    if not together:
        held_at_once[:] = 1
    thresholds = pd.Series(index=test.index, dtype=float)
    for entity_class, of_class in held_at_once.groupby(test.entity_class):
        scores = right.score[right.entity_class == entity_class].to_numpy()
        for count in of_class.unique():
            alpha_of_each = 1 - (1 - alpha) ** (1 / count)
            threshold = conformal.threshold(scores, alpha_of_each)
            thresholds[of_class.index[of_class == count]] = threshold
    return thresholds


def _sets_of_sentences(test: pd.DataFrame, thresholds: pd.Series) -> pd.DataFrame:
    """For each sentence whether its set holds all right entities (`covered`), how many entities the
    set has (`set_size`), and how many are right (`right_in_sentence`)."""
    held = test.score <= thresholds
    # Where the threshold is ∞ the set has every entity, also those that are not listed.
    size = held.astype(float).where(thresholds < np.inf, np.inf)
    entities_of_sets = test.assign(covered=held | ~test.is_right, set_size=size)
    return entities_of_sets.groupby("sentence").agg(
        {"covered": "all", "set_size": "sum", "right_in_sentence": "first"}
    )

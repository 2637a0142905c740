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

ALL = "all entities"  # of a sentence
SIDAK = "all entities, Šidák"
MANY = ": five and more"
# Each kind of set has two rows: one of all sentences with a right entity, and one of those with at
# least five. By the suffix of a row's name, how many right entities a sentence needs to be counted.
LEAST_ENTITIES_BY_SUFFIX = {"": 1, MANY: 5}


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
    labels = emissions.shape[1]
    scores = emissions[0][:, None]  # (L, W): of the W best ways to each label, the best first
    log_total = emissions[0]  # (L,): log of the summed exp of all ways to each label
    # For each later word, where its best ways come from, (≤ k, L), and the W of the word before. A
    # way comes from `previous label × W + its rank among the ways to that label`.
    steps_back: list[tuple[np.ndarray, int]] = []
    for emission in emissions[1:]:  # (L,)
        log_total = np.logaddexp.reduce(log_total[:, None] + transitions, axis=0) + emission
        extended = (scores[:, :, None] + transitions[:, None]).reshape(-1, labels)  # (L · W, L)
        origins = np.argsort(-extended, axis=0, kind="stable")[:k]
        ways_before = scores.shape[1]
        steps_back.append((origins, ways_before))
        scores = np.take_along_axis(extended, origins, 0).T + emission[:, None]
    order = np.argsort(-scores, axis=None, kind="stable")[:k]
    order = order[np.isfinite(scores.flat[order])]
    logprobs = scores.flat[order] - np.logaddexp.reduce(log_total)
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

    Columns: `sentence`, its number; `name`, the entity's class; `score`, 1 − P(entity | x), which
    is +∞ for a right entity that no labeling has; `gold`, whether it is right; `number`, how many
    right ones the sentence has; `guess`, how many its likeliest labeling has.
    """
    rows = []
    for number, sentence in enumerate(sentences):
        gold = entities(sentence.gold)
        guess = len(entities(sentence.labelings[0]))
        probabilities: dict[tuple[int, int, str], float] = {}
        for labels, logprob in zip(sentence.labelings, sentence.logprobs, strict=True):
            for entity in entities(labels):
                probabilities[entity] = probabilities.get(entity, 0.0) + np.exp(logprob)
        for entity in sorted(probabilities.keys() | gold):
            score = 1 - probabilities.get(entity, -np.inf)
            rows.append((number, entity[2], score, entity in gold, len(gold), guess))
    return pd.DataFrame(rows, columns=["sentence", "name", "score", "gold", "number", "guess"])


def entity_sets(
    sentences: Sequence[Sentence], alpha: float, splits: int
) -> dict[str, tuple[float, float]]:
    """Coverage and mean size of sets of entities, which are to hold all right ones of a sentence.

    Sentences without right ones are left out. Sentences are exchangeable and entities are not:
    Šidák takes a sentence's for independent.
    """
    table = spans(sentences)
    names = [kind + suffix for kind in (ALL, SIDAK) for suffix in LEAST_ENTITIES_BY_SUFFIX]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for half, _ in conformal.halves(len(sentences), splits):
        calibrates = table.sentence.isin(half)
        right = table[calibrates & table.gold]
        test = table[~calibrates]
        for kind in (ALL, SIDAK):
            limits = _limits(right, test, alpha, together=kind == SIDAK)
            by_sentence = _sets_of_sentences(test, limits)
            for suffix, least in LEAST_ENTITIES_BY_SUFFIX.items():
                counted = by_sentence[by_sentence.number >= least]
                result = counted.covered.mean(), counted.set_size.mean()
                results[kind + suffix].append(result)
    means = {}
    for name, result_of_splits in results.items():
        coverage, size = np.mean(result_of_splits, axis=0)
        means[name] = (float(coverage), float(size))
    return means


def _limits(right: pd.DataFrame, test: pd.DataFrame, alpha: float, together: bool) -> pd.Series:
    """The largest score in the set, for each entity of `test`, by its class.

    `right` are the right entities that calibrate. With `together`, as many entities as the
    likeliest labeling has, at least one, are to be held at once (Šidák); else each by itself.
    """
    held_at_once = test.guess.clip(lower=1)
    if not together:
        held_at_once = held_at_once.clip(upper=1)
    limits = pd.Series(index=test.index, dtype=float)
    for name, of_class in held_at_once.groupby(test.name):
        scores = right.score[right.name == name].to_numpy()
        for number in of_class.unique():
            level = 1 - (1 - alpha) ** (1 / number)
            limits[of_class.index[of_class == number]] = conformal.threshold(scores, level)
    return limits


def _sets_of_sentences(test: pd.DataFrame, limits: pd.Series) -> pd.DataFrame:
    """For each sentence whether its set holds all right entities (`covered`), how many entities the
    set has (`set_size`), and how many are right (`number`)."""
    held = test.score <= limits
    # Without a limit the set has every entity, also those that are not listed.
    size = held.astype(float).where(limits < np.inf, np.inf)
    entities_of_sets = test.assign(covered=held | ~test.gold, set_size=size)
    return entities_of_sets.groupby("sentence").agg(
        {"covered": "all", "set_size": "sum", "number": "first"}
    )

"""Prediction sets for label sequences such as named entities (Singer et al., arXiv 2601.16999).

The K likeliest labelings of a sentence are its choices, of which split conformal prediction makes
sets; a right one that is not among them has the score +∞. Sets of entities have the scores

    s = 1 − P(entity | x),   P(entity | x) = Σ_r P(y⁽ʳ⁾ | x) 1[y⁽ʳ⁾ has the entity]

with a threshold for each class. To hold all entities of a sentence at once with probability 1 − α,
each needs 1 − α_s = (1 − α)^(1/ŝ) (Šidák), where the likeliest labeling has ŝ entities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from calibeval import conformal

NUMBERS = ("0", "1", "2", "3", "4", "5+")
ALL, SIDAK = "all entities", "all entities, Šidák"  # of a sentence


@dataclass(frozen=True)
class Sets:
    """Means over splits. Sets without a threshold are `unbounded`, and sizes are of the others."""

    questions: int  # tested in a split
    coverage: float
    size: float
    unbounded: float  # share of the sets
    by: dict[str, "Sets"] = field(default_factory=dict)

    @classmethod
    def of(cls, splits: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> "Sets":
        """From each split's hits, sizes (∞ without a bound) and groups, (M,) each."""
        sizes, keys = (np.concatenate([split[i] for split in splits]) for i in (1, 2))
        bounded = [size[np.isfinite(size)] for _, size, _ in splits]
        means = [size.mean() for size in bounded if len(size)] or [np.inf]
        coverage = np.mean([hit.mean() for hit, *_ in splits])
        unbounded = float(np.isinf(sizes).mean())
        of = cls(len(sizes) // len(splits), float(coverage), float(np.mean(means)), unbounded)
        names = np.unique(keys).tolist()
        for name in names if len(names) > 1 else ():
            inside = [[x[split[2] == name] for x in split] for split in splits]
            of.by[name] = cls.of([split for split in inside if len(split[0])])
        return of


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


def labeling_sets(of: Sequence[Sentence], alpha: float, score: str, splits: int = 100) -> Sets:
    """How sets of whole labelings hold the right one; random halves calibrate."""
    width = max(len(s.labelings) for s in of) + 1  # the last: what is not listed
    logprobs = np.full((len(of), width), -np.inf)
    for row, s in zip(logprobs, of, strict=True):
        row[: len(s.labelings)] = s.logprobs
    right = [s.labelings.index(s.gold) if s.gold in s.labelings else width - 1 for s in of]
    probs, present = np.exp(logprobs), np.isfinite(logprobs)
    score = "aps" if score == "cumulative" else score  # without its random number
    scores = conformal.nonconformity(probs, score, np.zeros(len(of)))
    scores = np.where(present, scores, np.inf)
    of_right, tested = scores[np.arange(len(of)), right], []
    for known, rest in conformal.halves(len(of), splits):
        limit = conformal.threshold(of_right[known], alpha)
        held = ((scores[rest] <= limit) & present[rest]).sum(1)
        sizes = np.where(np.isinf(limit), np.inf, held)
        tested.append((of_right[rest] <= limit, sizes, np.full(len(rest), "")))
    return Sets.of(tested)


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


def entity_sets(of: Sequence[Sentence], alpha: float, splits: int = 100) -> dict[str, Sets]:
    """How sets of entities hold all right ones of a sentence, by their number.

    Sizes are entities held in a sentence; those without right ones are left out. Sentences are
    exchangeable and entities are not: Šidák takes a sentence's for independent.
    """
    asked, tested = spans(of), {ALL: [], SIDAK: []}
    for half, _ in conformal.halves(len(of), splits):
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
            held = np.where(np.isinf(limit), np.inf, hit)
            every = np.bincount(sentence, rest.gold & ~hit)[sentence] == 0
            size = np.bincount(sentence, held)[sentence]
            found.append((every[begins], size[begins], rest.number[begins]))
    return {kind: Sets.of(found) for kind, found in tested.items()}

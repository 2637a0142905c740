"""Prediction sets for label sequences such as named entities (Singer et al., arXiv 2601.16999).

The K likeliest labelings of a sentence are the choices of an ordinary record, from which
`conformal` makes sets of labelings; a right one that is not among them has the score +∞. Sets of
entities are made here, from the same records:

    s = 1 − P(entity | x),   P(entity | x) = Σ_r P(y⁽ʳ⁾ | x) 1[y⁽ʳ⁾ has the entity]

with a threshold for each class. To hold all entities of a sentence at once with probability 1 − α,
each needs 1 − α_s = (1 − α)^(1/ŝ) (Šidák), where the likeliest labeling has ŝ entities.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibeval import conformal
from calibeval.io import InputError, json_lines
from calibeval.records import Records

LENGTHS = {32: "32 words or more", 16: "16 to 31 words", 8: " 8 to 15 words", 1: " 1 to 7 words"}
NUMBERS = ("0", "1", "2", "3", "4", "5+")
EACH, ALL, SIDAK = "each entity", "all entities", "all entities, Šidák"  # of a sentence


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
    """(first word, word after the last, class) of each entity in IOB1, IOB2 or BIOES labels."""
    found, start, name = set(), 0, ""
    for i, label in enumerate([*labels, "O"]):
        prefix, this = (label[0], label[2:]) if label[:2] in ("B-", "I-", "E-", "S-") else ("O", "")
        if this != name or prefix in "BS":
            if name:
                found.add((start, i, name))
            start, name = i, this
    return found


def record(id: str, subject: str, gold: Sequence[str], labelings, logprobs) -> dict:
    """A sentence's record: its right labels (T,); labelings (K, T) with log P(y | x) (K,)."""
    every, right = [" ".join(labels) for labels in labelings], " ".join(gold)
    found = {"id": id, "subject": subject, "scoring": "labelings", "gold": right}
    found |= {"label": [*every, right].index(right), "labelings": every}
    return found | {"logprobs": [float(p) for p in logprobs]}


def lines(of: Records) -> list[dict]:
    """The lines of records of labelings; `InputError` for others."""
    if of.scoring != "labelings":
        raise InputError(f"{of.path}: records of {of.scoring}, expected labelings of sentences")
    return [row for _, row in json_lines(of.path)]


def likeliest(row: dict) -> list[str]:
    """The labels of the likeliest labeling."""
    return row["labelings"][int(np.argmax(row["logprobs"]))].split(" ")


def stratify(of: Records, by: str | None) -> Records:
    """Records whose `subject` is what is known of a sentence before it is labelled.

    length: words; entities: how many the likeliest labeling has. Other groups are there already.
    """
    if by not in ("length", "entities"):
        return of
    found = [likeliest(row) for row in lines(of)]
    if by == "entities":
        strata = [f"entities: {NUMBERS[min(len(entities(labels)), 5)]}" for labels in found]
    else:
        strata = [next(LENGTHS[n] for n in LENGTHS if len(labels) >= n) for labels in found]
    return replace(of, subjects=np.array(strata))


def spans(of: Records) -> np.recarray:
    """Entities of any labeling, and right ones (`gold`); `number`: of these in the sentence."""
    found = []
    for i, row in enumerate(sorted(lines(of), key=lambda row: row["id"])):
        gold, guess, mass = entities(row["gold"].split(" ")), len(entities(likeliest(row))), {}
        for labels, logprob in zip(row["labelings"], row["logprobs"], strict=True):
            for entity in entities(labels.split(" ")):
                mass[entity] = mass.get(entity, 0.0) + np.exp(logprob)
        for entity in sorted(mass.keys() | gold):
            score = 1 - mass.get(entity, -np.inf)
            found.append((i, entity[2], score, entity in gold, NUMBERS[min(len(gold), 5)], guess))
    if not any(row[3] for row in found):
        raise InputError(f"{of.path}: no gold labeling has an entity (B-X, I-X)")
    return np.rec.fromrecords(found, names="sentence, name, score, gold, number, guess")


def entity_sets(
    of: Records, *, alpha: float, splits: int = 100, calibrate: Records | None = None
) -> dict[str, conformal.Sets]:
    """How sets of entities hold the right ones: each, by class; all of a sentence, by their number.

    Sizes are entities held in a sentence: of the class, or in all. Sentences without right ones are
    left out. Calibrated by halves of the sentences or another file, as in `conformal.evaluate`.
    Sentences are exchangeable and entities are not: where a sentence has several of a class,
    coverage is 1 − α as sentences grow many. Šidák takes a sentence's entities for independent.
    """
    asked, tested = spans(of), {EACH: [], ALL: [], SIDAK: []}
    if calibrate:
        parts = [(spans(calibrate), asked)]
    else:
        chosen = (np.isin(asked.sentence, x) for x, _ in conformal.halves(of, splits))
        parts = ((asked[at], asked[~at]) for at in chosen)
    for known, rest in parts:
        right, sentence = known[known.gold], rest.sentence
        names, of_class = np.unique(rest.name, return_inverse=True)
        begins = (np.diff(sentence, prepend=-1) > 0) & (rest.number != "0")
        for kind, found in tested.items():
            together = np.maximum(rest.guess if kind == SIDAK else 1, 1) * np.ones(len(rest))
            limit = np.empty(len(rest))
            for n in np.unique(together):
                at, level = together == n, 1 - (1 - alpha) ** (1 / n)
                limit[at] = conformal.limits(right.score, right.name, rest.name[at], level)
            hit = rest.score <= limit
            held = np.where(np.isinf(limit), np.inf, hit)
            if kind == EACH:
                at, keys, place = rest.gold, rest.name, sentence * len(names) + of_class
            else:
                at, keys, place = begins, rest.number, sentence
                hit = np.bincount(place, rest.gold & ~hit)[place] == 0
            if at.any():
                found.append((hit[at], np.bincount(place, held)[place][at], keys[at]))
    if not tested[EACH]:
        raise InputError(f"{of.path}: no half has a sentence with entities; more --splits")
    return {kind: conformal.summarise(found) for kind, found in tested.items()}

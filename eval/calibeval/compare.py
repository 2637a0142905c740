"""Is one run better than another? Paired bootstrap over the questions that both answered."""

from pathlib import Path

import numpy as np

from calibeval import records
from calibeval.io import InputError
from calibeval.metrics import CONFIDENCES, RESAMPLES, drawn, scores, summary, values
from calibeval.records import Records

HIGHER_IS_BETTER = {"accuracy", "auroc", "accuracy_at_50", "accuracy_at_80"}


def paired(a: Records, b: Records) -> Records:
    """`b` with its questions in the order of `a`; the same questions are required."""
    place = {id: i for i, id in enumerate(b.ids)}
    missing = [id for id in a.ids if id not in place] or sorted(set(b.ids) - set(a.ids))
    if missing:
        raise InputError(
            f"{a.path} and {b.path}: {missing[0]!r} is in one of them only; "
            f"a comparison needs the same questions in both"
        )
    at = np.array([place[id] for id in a.ids])
    wrong = np.flatnonzero(a.labels != b.labels[at])
    if len(wrong):
        raise InputError(f"{a.path} and {b.path}: other answers to {a.ids[wrong[0]]!r}")
    return Records(b.path, a.ids, a.subjects, a.labels, b.logprobs[at], b.letter_mass[at], b.model)


def compare(a: Path, b: Path, count: int = RESAMPLES) -> dict:
    """{confidence: {metric: {a, b, difference, low, high, better}}} with difference = b − a.

    Every resample draws the same questions for both runs, so what they share cancels. `better` is
    "a", "b", or None where the 95 % interval of the difference holds 0. The signed error is judged
    by its distance from 0.
    """
    first = records.read(a)
    second = paired(first, records.read(b))
    result = {}
    for confidence in CONFIDENCES:
        of_a, of_b = scores(first, confidence), scores(second, confidence)
        values_a, values_b = values(of_a), values(of_b)
        drawn_a, drawn_b = drawn(of_a, count), drawn(of_b, count)
        result[confidence] = {
            name: _difference(name, values_a[name], values_b[name], drawn_a[name], drawn_b[name])
            for name in values_a
        }
    return result


def _difference(name: str, a: float, b: float, drawn_a: np.ndarray, drawn_b: np.ndarray) -> dict:
    if name == "ece_signed":
        judged = summary(abs(b) - abs(a), np.abs(drawn_b) - np.abs(drawn_a))
    else:
        judged = summary(b - a, drawn_b - drawn_a)
    low, high, better = judged["low"], judged["high"], None
    if low is not None and high is not None and (low > 0 or high < 0):
        better = "b" if (low > 0) == (name in HIGHER_IS_BETTER) else "a"
    return {"a": a, "b": b, "difference": judged["value"], "low": low, "high": high} | {
        "better": better
    }


def sentence(name: str, found: dict, confidence: str) -> str:
    """One metric's comparison in plain words."""
    if found["difference"] is None:
        return f"{name} ({confidence}): not comparable, {found['a']} and {found['b']}"
    verdict = {"a": "A is better", "b": "B is better", None: "no difference can be told"}
    low, high = (f"{found[k]:+.4f}" if found[k] is not None else "?" for k in ("low", "high"))
    return (
        f"{name} ({confidence}): A {found['a']:.4f}, B {found['b']:.4f}, B − A "
        f"{found['difference']:+.4f} [{low}, {high}]: {verdict[found['better']]}"
    )

"""k-best labelings against enumeration, and their sets against what a hidden Markov model knows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.sequence_sets import __main__ as study
from studies.sequence_sets import sets
from studies.sequence_sets.markov import LABELS, draw, sentences
from studies.sequence_sets.sets import Sentence


def enumerated(emissions, transitions):
    """Every possible labeling and its log-probability, best first."""
    length, labels = emissions.shape
    paths = np.array(list(itertools.product(range(labels), repeat=length)))
    scores = emissions[np.arange(length), paths].sum(1)
    scores = scores + transitions[paths[:, :-1], paths[:, 1:]].sum(1)
    kept = np.flatnonzero(np.isfinite(scores))
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    return paths[kept], scores[kept] - np.logaddexp.reduce(scores[kept])


finite = st.floats(-5, 5, allow_nan=False, width=32)


@st.composite
def chains(draw):
    length, labels = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    entry = st.one_of(finite, st.just(-np.inf))
    emissions = [[draw(finite) for _ in range(labels)] for _ in range(length)]
    transitions = [[draw(entry) for _ in range(labels)] for _ in range(labels)]
    return np.array(emissions), np.array(transitions)


@settings(max_examples=50, deadline=None)
@given(chains(), st.integers(1, 60))
def test_k_best_is_the_head_of_all_labelings(chain, k):
    paths, exact = enumerated(*chain)
    if not len(paths):
        return
    found, logprobs = sets.k_best(*chain, k)
    assert len(found) == len(logprobs) == min(k, len(paths))
    np.testing.assert_allclose(logprobs, exact[:k], atol=1e-9)
    known = dict(zip(map(tuple, paths), exact, strict=True))
    assert len({*map(tuple, found)}) == len(found)
    for path, logprob in zip(found, logprobs, strict=True):  # of equal ones any may come first
        assert logprob == pytest.approx(known[tuple(path)], abs=1e-9)


def test_sets_of_labelings_hold_their_level():
    """Of sentences whose right labelings are nearly all listed."""
    many, error = sentences(2000, 1, 100, 0.35), np.sqrt(0.09 / 1000)
    for score in ("lac", "aps"):
        coverage, _ = sets.labeling_sets(many, 0.1, score, 20)
        assert coverage == pytest.approx(0.9, abs=3 * error)


def test_probability_of_entities_is_the_sum_over_labelings():
    """With every labeling, the exact marginal of the posterior."""
    rng, mass = np.random.default_rng(0), []
    _, emissions, transitions = draw(rng, int(rng.integers(4, 9)), 0.5)
    for path, logprob in zip(*enumerated(emissions[:5], transitions), strict=True):
        labels = tuple(LABELS[j] for j in path)
        mass += [(entity, np.exp(logprob)) for entity in sets.entities(labels)]
    paths, logprobs = sets.k_best(emissions[:5], transitions, 5**5)
    labelings = tuple(tuple(LABELS[j] for j in path) for path in paths)
    found = sets.spans([Sentence(labelings[0], labelings, logprobs)])
    exact = {e: sum(p for other, p in mass if other == e) for e, _ in mass}
    np.testing.assert_allclose(1 - found.score, [exact[e] for e in sorted(exact)], atol=1e-9)
    assert found.entity_class.tolist() == [name for *_, name in sorted(exact)]


def test_the_study_in_small(small, tmp_path, capsys):
    """Bad input is named first."""
    given = {"sentences": 60, "seeds": [0, 1], "splits": 4}
    for wrong in ({"alpha": -1}, {"alpha": 10}, {"alpha": 1}, {"conl": 1}):
        assert small(study, **given, **wrong) == 2
        assert f"config.yaml: {next(iter(wrong))}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert small(study, **given, k=20) == 0
    said = capsys.readouterr().out
    assert "| sets at 1 − α = 0.9" in said and "| all entities, Šidák: five and more |" in said
    assert (tmp_path / "out" / "table.md").read_text().strip() == said.strip()
    assert small(study, **given, k=1) == 0
    printed = capsys.readouterr().out
    assert "| inf  " in printed and "nan" not in printed  # too few are listed

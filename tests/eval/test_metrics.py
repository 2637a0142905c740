"""Metrics against plain loops, known values and their own laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibeval import metrics
from calibeval.metrics import binned
from calibeval.metrics.bootstrap import resamples
from calibeval.metrics.scores import from_probs


def draw(n: int, seed: int = 0, choices: int = 4, calibrated: bool = True):
    """Probabilities and labels; labels follow the probabilities if calibrated."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(choices, 0.7), n)
    if calibrated:
        labels = (rng.random((n, 1)) > probs.cumsum(1)).sum(1).clip(max=choices - 1)
    else:
        labels = rng.integers(0, choices, n)
    return probs, labels


def loop_ece(confidence, correct, bins):
    """Definition, question by question."""
    total = 0.0
    for b in range(bins):
        inside = [
            i
            for i, c in enumerate(confidence)
            if b / bins <= c < (b + 1) / bins or (c == 1 and b == bins - 1)
        ]
        if inside:
            gap = np.mean([correct[i] for i in inside]) - np.mean([confidence[i] for i in inside])
            total += len(inside) / len(confidence) * abs(gap)
    return total


@pytest.mark.parametrize("bins", [1, 10, 15, 30])
@pytest.mark.parametrize("n", [1, 7, 999])
def test_ece_is_its_definition(bins, n):
    sample = from_probs(*draw(n, seed=n, calibrated=False))
    got = binned.ece(sample.confidence[None], sample.correct[None], bins)[0]
    assert got == pytest.approx(loop_ece(sample.confidence, sample.correct, bins), abs=1e-12)


def test_confidence_one_is_in_the_last_bin():
    assert binned.ece(np.ones((1, 4)), np.array([[1, 1, 0, 0]]), 10)[0] == 0.5
    assert binned.equal_width(np.array([[0.0, 0.1, 0.99, 1.0]]), 10).tolist()[0][:3] == [0, 1, 2]


def test_perfect_and_worst():
    probs = np.eye(4)[[0, 1, 2, 3] * 50]
    best = metrics.values(from_probs(probs, np.array([0, 1, 2, 3] * 50)))
    assert best["accuracy"] == 1 and best["nll"] == 0
    assert best["ece"] == best["rms"] == best["brier"] == 0
    worst = metrics.values(from_probs(probs, np.array([1, 2, 3, 0] * 50)))
    assert worst["ece"] == worst["rms"] == 1 and worst["accuracy"] == 0
    assert worst["nll"] == np.inf and worst["brier"] == 2


def plain_hendrycks(confidence, correct):
    """The published formula, bin by bin over a plain list."""
    folded = sorted(
        (c, r) if c >= 0.5 else (1 - c, 1 - r) for c, r in zip(confidence, correct, strict=True)
    )
    n = len(folded)
    bins = max(1, n // 100)
    edges = [folded[round(n * b / bins)][0] for b in range(1, bins)]
    groups = [[] for _ in range(bins)]
    for c, r in folded:
        groups[sum(edge <= c for edge in edges)].append((c, r))
    total = 0.0
    for group in filter(None, groups):
        c, r = np.mean(group, axis=0)
        total += (len(group) / n * (r - c)) ** 2
    return total**0.25


@pytest.mark.parametrize("n", [50, 100, 1000, 1500])
def test_rms_hendrycks_is_the_published_formula(n):
    sample = from_probs(*draw(n, seed=n, calibrated=False))
    got = binned.rms_hendrycks(sample.confidence[None], sample.correct[None])[0]
    assert got == pytest.approx(plain_hendrycks(sample.confidence, sample.correct), abs=1e-12)


def test_rms_hendrycks_reads_less_than_the_error_it_is_named_for():
    """Why it is never shown without its name: 14,042 answers that are all 35 points too sure."""
    confidence = np.full((1, 14042), 0.9) + np.linspace(0, 1e-3, 14042)
    correct = (np.arange(14042) % 20 < 11).astype(float)[None]
    ece, rms = binned.ece(confidence, correct)[0], binned.rms(confidence, correct)[0]
    assert ece == pytest.approx(0.35, abs=1e-3) and rms >= ece
    assert binned.rms_hendrycks(confidence, correct)[0] < 0.6 * ece


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.integers(0, 10**6), st.integers(2, 6), st.booleans())
def test_laws(n, seed, choices, ties):
    probs, labels = draw(n, seed, choices, calibrated=bool(seed % 2))
    if ties:
        probs = probs.round(1)
        probs /= probs.sum(1, keepdims=True)
    sample = from_probs(probs, labels)
    confidence, correct = sample.confidence[None], sample.correct[None]
    found = metrics.values(sample)
    overall = abs(correct.mean() - confidence.mean())
    assert overall - 1e-9 <= found["ece"] <= 1 and 0 <= found["brier"] <= 2
    bounds = binned.equal_mass(confidence, binned.by_hundred(n))
    bins = binned.Bins(confidence, correct, bounds)
    assert found["rms"] >= (bins.weight * np.abs(bins.gap)).sum() - 1e-12
    assert bins.counts.sum() == n
    shuffled = np.random.default_rng(seed).permutation(n)
    again = metrics.values(from_probs(probs[shuffled], labels[shuffled]))
    for name, value in found.items():
        assert again[name] == pytest.approx(value, abs=1e-9), name


def test_full_vocabulary_brier_counts_the_rest_as_an_outcome():
    probs, labels = np.array([[0.3, 0.2]]), np.array([0])
    expected = (1 - 0.3) ** 2 + 0.2**2 + 0.5**2
    assert metrics.values(from_probs(probs, labels))["brier"] == pytest.approx(expected)


def test_resamples_are_paired_and_unbiased():
    a, b = (from_probs(*draw(400, seed)) for seed in (1, 2))
    drawn_a = np.vstack(list(resamples(a.order, 200)))
    drawn_b = np.vstack(list(resamples(b.order, 200)))
    assert drawn_a.shape == (200, 400) and (np.diff(drawn_a, axis=1) >= 0).all()
    for row_a, row_b in zip(drawn_a, drawn_b, strict=True):
        assert (np.sort(a.order[row_a]) == np.sort(b.order[row_b])).all()
    counts = np.bincount(drawn_a.ravel(), minlength=400)
    assert counts.mean() == 200 and abs(counts.std() - np.sqrt(200)) < 2


def test_bootstrap_interval_matches_theory(tmp_path):
    """Accuracy's bootstrap standard error is that of a share."""
    sample = from_probs(*draw(900, 5))
    drawn = np.concatenate([metrics.accuracy(sample, at) for at in resamples(sample.order, 1000)])
    p = sample.correct.mean()
    assert drawn.std() == pytest.approx(np.sqrt(p * (1 - p) / 900), rel=0.1)

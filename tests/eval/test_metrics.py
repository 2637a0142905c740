"""Metrics against plain loops, known values and their own laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibeval import metrics
from calibeval.metrics import binned, proper, ranking
from calibeval.metrics.bootstrap import resamples
from calibeval.metrics.samples import Sample
from calibeval.metrics.scores import Scores


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
    of = Scores(*draw(n, seed=n, calibrated=False))
    expected = loop_ece(of.confidence, of.correct, bins)
    assert binned.ece(Sample(of), bins)[0] == pytest.approx(expected, abs=1e-12)


def test_confidence_one_is_in_the_last_bin():
    sure = Scores(np.array([[1.0, 0.0]] * 4), np.array([0, 0, 1, 1]))
    assert binned.ece(Sample(sure), 10)[0] == 0.5
    assert Sample(sure).top.equal_width(10).count[0].tolist() == [0] * 9 + [4]


def test_perfect_and_worst():
    probs = np.eye(4)[[0, 1, 2, 3] * 50]
    best = metrics.values(Scores(probs, np.array([0, 1, 2, 3] * 50)))
    assert best["accuracy"] == 1 and best["nll"] == 0
    assert best["ece"] == best["rms"] == best["brier"] == 0
    worst = metrics.values(Scores(probs, np.array([1, 2, 3, 0] * 50)))
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
    of = Scores(*draw(n, seed=n, calibrated=False))
    expected = plain_hendrycks(of.confidence, of.correct)
    assert binned.rms_hendrycks(Sample(of))[0] == pytest.approx(expected, abs=1e-12)


def plain_class_errors(probs, labels, bins, adaptive, threshold=-1.0):
    """Nixon et al. 2019, choice by choice and bin by bin over plain lists."""
    total = 0.0
    for k in range(probs.shape[1]):
        pairs = sorted(
            (p, y) for p, y in zip(probs[:, k], labels == k, strict=True) if p > threshold
        )
        n = len(pairs)
        if adaptive:
            edges = [pairs[round(n * b / bins)][0] for b in range(1, bins)] if n >= bins else None
        else:
            edges = [b / bins for b in range(1, bins)]
        groups = [[] for _ in range(bins)]
        for p, y in pairs:
            groups[sum(edge <= p for edge in edges)].append((p, y))
        total += sum(abs(sum(y - p for p, y in group)) / n for group in groups)
    return total / probs.shape[1]


@pytest.mark.parametrize("n", [200, 1300])
def test_class_wise_errors_are_their_definitions(n):
    probs, labels = draw(n, seed=n, calibrated=False)
    sample = Sample(Scores(probs, labels))
    for metric, options in (
        (binned.sce, {"adaptive": False}),
        (binned.ace, {"adaptive": True}),
        (binned.tace, {"adaptive": True, "threshold": 0.01}),
    ):
        expected = plain_class_errors(probs, labels, 15, **options)
        assert metric(sample)[0] == pytest.approx(expected, abs=1e-12)


def test_rms_hendrycks_reads_less_than_the_error_it_is_named_for():
    """Why it is never shown without its name: 14,042 answers that are all 35 points too sure."""
    sure = 0.9 + np.linspace(0, 1e-3, 14042)
    labels = (np.arange(14042) % 20 >= 11).astype(int)
    found = metrics.values(Scores(np.stack([sure, 1 - sure], axis=1), labels))
    assert found["ece"] == pytest.approx(0.35, abs=1e-3) and found["rms"] >= found["ece"]
    assert found["rms_hendrycks"] < 0.6 * found["ece"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.integers(0, 10**6), st.integers(2, 6), st.booleans())
def test_laws(n, seed, choices, ties):
    probs, labels = draw(n, seed, choices, calibrated=bool(seed % 2))
    if ties:
        probs = (probs + 0.05).round(1)
        probs /= probs.sum(1, keepdims=True)
    of = Scores(probs, labels)
    found = metrics.values(of)
    overall = abs(of.correct.mean() - of.confidence.mean())
    for name in ("ece", "ece_10", "ece_30", "ece_equal_mass", "mce"):
        assert overall - 1e-9 <= found[name] <= 1 + 1e-9, name
    assert 0 <= found["brier"] <= 2 and found["mce"] >= found["ece"] - 1e-9
    assert abs(found["ece_signed"]) == pytest.approx(overall)
    assert found["ece_debiased"] <= found["ece"] + 1e-9
    weight, gap = Sample(of).top.equal_mass_gaps(binned.hundreds(Sample(of).top))
    assert weight.sum() == pytest.approx(1)
    assert found["rms"] >= np.abs(gap).sum() - 1e-9
    shuffled = np.random.default_rng(seed).permutation(n)
    again = metrics.values(Scores(probs[shuffled], labels[shuffled]))
    for name, value in found.items():
        assert again[name] == pytest.approx(value, abs=1e-9, nan_ok=True), name


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 10**6), st.booleans())
def test_a_resample_is_a_sample_of_copied_questions(n, seed, ties):
    """Counting questions gives what copying them gives, for every metric."""
    probs, labels = draw(n, seed, calibrated=bool(seed % 2))
    if ties:
        probs = (probs + 0.05).round(1)
        probs /= probs.sum(1, keepdims=True)
    times = next(resamples(n, 3))
    sample = Sample(Scores(probs, labels), times)
    for r, row in enumerate(times.astype(int)):
        copied = np.repeat(np.arange(n), row)
        plain = metrics.values(Scores(probs[copied], labels[copied]))
        for name, metric in metrics.METRICS.items():
            assert metric(sample)[r] == pytest.approx(plain[name], abs=1e-9, nan_ok=True), name


def test_simulated_labels_are_samples_with_those_labels():
    probs, labels = draw(250, 3)
    other = np.stack([labels, draw(250, 4)[1]])
    sample = Sample(Scores(probs, labels), labels=other)
    for r in range(2):
        plain = metrics.values(Scores(probs, other[r]))
        for name, metric in metrics.CALIBRATION.items():
            assert metric(sample)[r] == pytest.approx(plain[name], abs=1e-9), name


def test_no_probability_above_the_threshold_of_tace():
    of = Scores(np.full((6, 2), 0.004), np.array([0, 1] * 3))
    for sample in (Sample(of, np.ones((3, 6))), Sample(of, labels=np.zeros((3, 6), int))):
        assert binned.tace(sample).tolist() == [0, 0, 0]


def test_noise_floor_is_what_calibrated_models_read():
    floor = metrics.noise_floor(Scores(*draw(2000, 0)))
    read = [metrics.values(Scores(*draw(2000, seed))) for seed in range(1, 120)]
    for name in ("ece", "rms", "sce", "ace", "smece", "ece_equal_mass"):
        mean = np.mean([r[name] for r in read])
        assert floor[name] == pytest.approx(mean, rel=0.12), name
    assert abs(floor["ece_signed"]) < 2e-3


def test_ranking():
    of = Scores(*draw(301, 8, calibrated=True))
    right, wrong = (of.confidence[of.correct == c] for c in (1, 0))
    pairs = (right[:, None] > wrong).mean() + (right[:, None] == wrong).mean() / 2
    assert ranking.auroc(Sample(of))[0] == pytest.approx(pairs)
    top = of.correct[of.order][-150:]
    assert ranking.accuracy_at_coverage(Sample(of), 150 / 301)[0] == pytest.approx(top.mean())
    alike = Scores(np.full((10, 2), 0.5), np.array([0, 1] * 5))
    assert ranking.auroc(Sample(alike))[0] == 0.5
    assert ranking.accuracy_at_coverage(Sample(alike), 0.3)[0] == pytest.approx(0.5)


def test_debiasing_removes_the_noise_floor():
    """Over many calibrated models the debiased error is nearer 0 than the plain one."""
    read = [metrics.values(Scores(*draw(500, seed))) for seed in range(60)]
    plain, debiased = (np.mean([r[k] for r in read]) for k in ("ece", "ece_debiased"))
    assert debiased < 0.75 * plain


def test_full_vocabulary_brier_counts_the_rest_as_an_outcome():
    probs, labels = np.array([[0.3, 0.2]]), np.array([0])
    expected = (1 - 0.3) ** 2 + 0.2**2 + 0.5**2
    assert metrics.values(Scores(probs, labels))["brier"] == pytest.approx(expected)


def test_resamples_draw_as_many_questions_and_repeat():
    drawn = np.vstack(list(resamples(400, 200)))
    assert drawn.shape == (200, 400) and (drawn.sum(1) == 400).all()
    assert abs(drawn.var() - 1) < 0.05
    assert (drawn == np.vstack(list(resamples(400, 200)))).all()


def test_bootstrap_interval_matches_theory():
    """Accuracy's bootstrap standard error is that of a share."""
    of = Scores(*draw(900, 5))
    drawn = np.concatenate([proper.accuracy(Sample(of, times)) for times in resamples(900, 1000)])
    p = of.correct.mean()
    assert drawn.std() == pytest.approx(np.sqrt(p * (1 - p) / 900), rel=0.1)

"""Metrics against plain loops, known values and their own laws."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibeval import measures, stats
from calibeval.measures import CALIBRATION, METRICS, REGULAR, Sample, Scores, resamples


def draw(n: int, seed: int = 0, choices: int = 4, calibrated: bool = True, ties: bool = False):
    """Probabilities and labels; labels follow the probabilities if calibrated."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(choices, 0.7), n)
    if ties:
        probs = (probs + 0.05).round(1)
        probs /= probs.sum(1, keepdims=True)
    if calibrated:
        labels = (rng.random((n, 1)) > probs.cumsum(1)).sum(1).clip(max=choices - 1)
    else:
        labels = rng.integers(0, choices, n)
    return probs, labels


def scored(probs, labels) -> Scores:
    """Probabilities as scores; 0 stands for a choice that is there and has none."""
    return Scores(np.log(np.maximum(probs, 1e-300)), labels)


def figures(of: Scores) -> dict[str, float]:
    """Every metric of the questions as they are."""
    return {name: float(metric(Sample(of))[0]) for name, metric in METRICS.items()}


@pytest.mark.parametrize("n", [1, 7, 999])
def test_ece_is_its_definition(n):
    probs, labels = draw(n, seed=n, calibrated=False)
    probs[0] = np.eye(4)[0]
    of = scored(probs, labels)
    place = np.minimum((of.confidence * 15).astype(int), 14)  # 1 is in the last bin
    gaps = [(of.correct - of.confidence)[place == b].sum() for b in range(15)]
    assert measures.ece(Sample(of))[0] == pytest.approx(np.abs(gaps).sum() / n, abs=1e-12)


@settings(max_examples=60, deadline=None)
@example(3, 10082, 3, True)
@given(st.integers(1, 600), st.integers(0, 10**6), st.integers(2, 6), st.booleans())
def test_laws(n, seed, choices, ties):
    probs, labels = draw(n, seed, choices, bool(seed % 2), ties)
    of = scored(probs, labels)
    found = figures(of)
    overall = abs(of.correct.mean() - of.confidence.mean())
    assert overall - 1e-9 <= found["ece"] <= 1 + 1e-9
    assert 0 <= found["brier"] <= 2
    assert abs(found["ece_signed"]) == pytest.approx(overall)
    assert found["rms"] >= found["ece"] - 1e-9 and found["rms"] >= found["rms_debiased"] - 1e-9
    shuffled = np.random.default_rng(seed).permutation(n)
    again = figures(scored(probs[shuffled], labels[shuffled]))
    for name, value in found.items():
        near = 1e-7 if "rms" in name else 1e-9  # the root of a rounding error of 1e-16
        assert again[name] == pytest.approx(value, abs=near, nan_ok=True), name


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 10**6), st.booleans())
def test_a_resample_is_a_sample_of_copied_questions(n, seed, ties):
    """Counting questions gives what copying them gives, for every metric that is resampled."""
    probs, labels = draw(n, seed, calibrated=bool(seed % 2), ties=ties)
    times = next(resamples(n, 3))
    sample = Sample(scored(probs, labels), times)
    for r, row in enumerate(times.astype(int)):
        copied = np.repeat(np.arange(n), row)
        plain = figures(scored(probs[copied], labels[copied]))
        for name in (*REGULAR, "ece", "rms", "rms_debiased", "mcb", "dsc"):
            found = METRICS[name](sample)[r]
            assert found == pytest.approx(plain[name], abs=1e-9, nan_ok=True), name


def test_floor_and_p_are_what_calibrated_models_read(monkeypatch):
    """A calibrated model's p is uniform, and it is below the 95 % floor 19 times in 20."""
    monkeypatch.setattr(stats, "SIMULATIONS", 99)
    names = [*CALIBRATION]
    found = [stats.consistency(Sample(scored(*draw(200, s))), names) for s in range(60)]
    for name in names:
        p = np.array([f[name][1] for f in found])
        assert abs(p.mean() - 0.5) < 0.15 and (p <= 0.05).mean() < 0.15 and p.min() >= 0.01, name
    floors = [f["ece"][0] for f in found]
    read = [figures(scored(*draw(200, s)))["ece"] for s in range(100, 220)]
    assert np.mean(floors) == pytest.approx(np.quantile(read, 0.95), rel=0.15)
    over = stats.consistency(Sample(scored(*draw(300, 1, calibrated=False))), names)
    assert all(p == 0.01 for _, p in over.values())


def test_ranking():
    of = scored(*draw(301, 8, calibrated=True))
    right, wrong = (of.confidence[of.correct == c] for c in (1, 0))
    pairs = (right[:, None] > wrong).mean() + (right[:, None] == wrong).mean() / 2
    assert measures.auroc(Sample(of))[0] == pytest.approx(pairs)
    alike = scored(np.full((10, 2), 0.5), np.array([0, 1] * 5))
    assert measures.auroc(Sample(alike))[0] == 0.5


def test_debiased_square_is_right_in_the_mean_also_where_confidences_differ_in_a_bin():
    """Over calibrated models it is 0 in the mean; variances of y alone would leave a bias."""
    rng = np.random.default_rng(0)
    read = []
    for _ in range(3000):
        top = rng.uniform(0.67, 0.73, 20)  # of one bin
        labels = (rng.random(20) > top).astype(int)
        bins = Sample(scored(np.stack([top, 1 - top], 1), labels)).top
        read.append(measures.squared(bins)[0])
    assert abs(np.mean(read)) < 4 * np.std(read) / np.sqrt(3000)


def test_a_bin_of_one_question_counts_as_nothing():
    one = scored(np.array([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]]), np.array([1, 0, 1]))
    assert measures.rms_debiased(Sample(one))[0] == 0 < measures.rms(Sample(one))[0]


def test_nll_of_a_probability_below_the_smallest_number():
    of = Scores(np.array([[-800.0, 0.0], [0.0, -800.0]]), np.array([0, 0]))
    assert measures.nll(Sample(of))[0] == 400 and np.isfinite(measures.brier(Sample(of))[0])


def test_resamples_draw_as_many_questions_and_repeat():
    drawn = np.vstack(list(resamples(400, 200)))
    assert drawn.shape == (200, 400) and (drawn.sum(1) == 400).all()
    assert abs(drawn.var() - 1) < 0.05
    assert (drawn == np.vstack(list(resamples(400, 200)))).all()


def brute_aurc(of: Scores) -> float:
    """The mean over many random orders of equally sure answers."""
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        order = np.lexsort((rng.random(len(of.labels)), -of.confidence))
        wrong = 1 - of.correct[order]
        found.append((wrong.cumsum() / np.arange(1, len(wrong) + 1)).mean())
    return float(np.mean(found))


def test_aurc_is_its_definition():
    probs, labels = draw(300)
    of = scored(probs, labels)
    wrong = 1 - of.correct[np.argsort(-of.confidence)]
    risks = wrong.cumsum() / np.arange(1, 301)
    assert measures.aurc(Sample(of))[0] == pytest.approx(risks.mean(), abs=1e-12)
    rounded = scored(np.round(probs, 1) / np.round(probs, 1).sum(1, keepdims=True), labels)
    assert measures.aurc(Sample(rounded))[0] == pytest.approx(brute_aurc(rounded), abs=2e-3)


def test_murphys_parts_add_up_to_the_brier_score():
    probs, labels = draw(500, calibrated=False)
    of = Sample(scored(probs, labels))
    score = ((of.scores.confidence - of.correct) ** 2).mean()
    share = of.correct.mean()
    mcb, dsc = measures.murphy(of)
    parts = mcb[0] - dsc[0] + share * (1 - share)
    assert parts == pytest.approx(score, abs=1e-12)
    assert (np.diff(measures.recalibrated(of)[0][np.argsort(of.scores.confidence)]) >= 0).all()

"""Metrics against plain loops, known values and their own laws."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibeval.measures import definitions, evaluations, samples, squared_error
from calibeval.measures.definitions import METRICS, WITH_FLOOR, WITH_INTERVAL
from calibeval.measures.samples import Sample, Scores, resamples


def draw(
    n: int, seed: int = 0, choices: int = 4, calibrated: bool = True, ties: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and labels; labels follow the probabilities if calibrated."""
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


def scored(probs: np.ndarray, labels: np.ndarray) -> Scores:
    """Return probabilities as scores; 0 stands for a choice that is there and has none."""
    return Scores(np.log(np.maximum(probs, 1e-300)), labels)


def values_of(scores: Scores) -> dict[str, float]:
    """Return every metric of the questions as they are."""
    return {name: float(metric(Sample.observed(scores))[0]) for name, metric in METRICS.items()}


any_questions = given(st.integers(1, 600), st.integers(0, 10**6), st.integers(2, 6), st.booleans())


@settings(max_examples=60, deadline=None)
@example(3, 10082, 3, True)
@any_questions
def test_metrics_do_not_depend_on_the_order_of_questions(n, seed, choices, ties):
    probs, labels = draw(n, seed, choices, bool(seed % 2), ties)
    values = values_of(scored(probs, labels))
    shuffled = np.random.default_rng(seed).permutation(n)
    values_shuffled = values_of(scored(probs[shuffled], labels[shuffled]))
    for name, value in values.items():
        tolerance = 1e-7 if "rms" in name else 1e-9  # the root of a rounding error of 1e-16
        assert values_shuffled[name] == pytest.approx(value, abs=tolerance, nan_ok=True), name


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 10**6), st.booleans())
def test_a_resample_is_a_sample_of_copied_questions(n, seed, ties):
    """Counting questions gives what copying them gives, for every metric that is resampled."""
    probs, labels = draw(n, seed, calibrated=bool(seed % 2), ties=ties)
    counts = next(resamples(n, 3))
    sample = Sample.resampled(scored(probs, labels), counts)
    for row, counts_of_row in enumerate(counts.astype(int)):
        copied = np.repeat(np.arange(n), counts_of_row)
        expected = values_of(scored(probs[copied], labels[copied]))
        for name in (*WITH_INTERVAL, "ece", "ece_classwise", "rms", "rms_debiased", "mcb", "dsc"):
            value = METRICS[name](sample)[row]
            assert value == pytest.approx(expected[name], abs=1e-9, nan_ok=True), name


def test_the_floor_is_the_95th_percentile_of_calibrated_models():
    floors = []
    for seed in range(60):
        sample = Sample.observed(scored(*draw(200, seed)))
        floors.append(evaluations.floor_tests(sample, ["ece"], simulations=99)["ece"].floor)
    read = [values_of(scored(*draw(200, seed)))["ece"] for seed in range(100, 220)]
    assert np.mean(floors) == pytest.approx(np.quantile(read, 0.95), rel=0.15)


def test_a_miscalibrated_model_reads_more_than_all_calibrated_ones():
    sample = Sample.observed(scored(*draw(300, 1, calibrated=False)))
    tests = evaluations.floor_tests(sample, [*WITH_FLOOR], simulations=99)
    assert all(test.p == 0.01 for test in tests.values())


def test_debiased_square_is_right_in_the_mean_also_where_confidences_differ_in_a_bin():
    """Over calibrated models it is 0 in the mean; variances of y alone would leave a bias."""
    rng = np.random.default_rng(0)
    read = []
    for _ in range(3000):
        confidence = rng.uniform(0.67, 0.73, 20)  # of one bin
        labels = (rng.random(20) > confidence).astype(int)
        bins = Sample.observed(scored(np.stack([confidence, 1 - confidence], 1), labels)).bins
        read.append(squared_error.debiased_square(bins)[0])
    assert abs(np.mean(read)) < 4 * np.std(read) / np.sqrt(3000)


def test_nll_of_a_probability_below_the_smallest_number():
    scores = Scores(np.array([[-800.0, 0.0], [0.0, -800.0]]), np.array([0, 0]))
    assert definitions.nll(Sample.observed(scores))[0] == 400
    assert np.isfinite(definitions.brier(Sample.observed(scores))[0])


def test_resamples_draw_as_many_questions_and_repeat():
    drawn = np.vstack(list(resamples(400, 200)))
    assert drawn.shape == (200, 400)
    assert (drawn.sum(1) == 400).all()
    assert abs(drawn.var() - 1) < 0.05
    assert (drawn == np.vstack(list(resamples(400, 200)))).all()


def aurc_over_random_orders(scores: Scores) -> float:
    """Return the mean over many random orders of equally sure answers."""
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(400):
        order = np.lexsort((rng.random(len(scores.labels)), -scores.confidence))
        wrong = 1 - scores.correct[order]
        areas.append((wrong.cumsum() / np.arange(1, len(wrong) + 1)).mean())
    return float(np.mean(areas))


def test_aurc_of_equal_confidences_is_the_mean_over_their_orders():
    probs, labels = draw(300)
    rounded = np.round(probs, 1)
    scores = scored(rounded / rounded.sum(1, keepdims=True), labels)
    expected = aurc_over_random_orders(scores)
    assert definitions.aurc(Sample.observed(scores))[0] == pytest.approx(expected, abs=2e-3)


def test_murphys_parts_add_up_to_the_brier_score():
    sample = Sample.observed(scored(*draw(500, calibrated=False)))
    score = ((sample.scores.confidence - sample.correct) ** 2).mean()
    share = sample.correct.mean()
    parts = definitions.mcb(sample)[0] - definitions.dsc(sample)[0]
    assert parts + share * (1 - share) == pytest.approx(score, abs=1e-12)


def renormalised(probs: np.ndarray, labels: np.ndarray, mass: np.ndarray) -> Scores:
    """Return scores as `scores_of_records` makes them of letters that have `mass` of everything."""
    logprobs = np.log(probs * mass[:, None])
    return Scores(logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True), labels)


def test_equal_choices_are_ties_whatever_rounding_leaves():
    """Five equal choices: renormalising put them on both sides of the edge at 1/5, and AUROC at
    0.498."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 1000)
    scores = renormalised(np.full((1000, 5), 0.2), labels, rng.uniform(0.3, 1, 1000))
    assert len(np.unique(scores.confidence)) > 1
    sample = Sample.observed(scores)
    assert definitions.auroc(sample)[0] == 0.5
    assert (sample.bins.count[0] > 0).sum() == 1
    assert definitions.rms(sample)[0] == pytest.approx(abs(scores.correct.mean() - 0.2))
    assert definitions.aurc(sample)[0] == pytest.approx(1 - scores.correct.mean())
    assert np.ptp(definitions.isotonic_fit(sample)) == 0


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.is_mean])
def test_a_mean_is_that_of_the_questions_own_values(name):
    """By them `stats` counts the questions that make up a value or a difference."""
    sample = Sample.observed(scored(*draw(150, 5)))
    own = evaluations.unit_values(sample)[name]
    assert own.mean() == pytest.approx(METRICS[name](sample)[0], abs=1e-6)
    subjects = np.arange(150) // 15
    of_subjects = evaluations.unit_values(sample, subjects)[name]
    assert of_subjects == pytest.approx(own.reshape(10, 15).mean(1), abs=1e-6)


def test_very_many_questions_are_drawn_and_answered_as_many_are(monkeypatch):
    scores = scored(*draw(20_000))
    draws = {}
    floors = {}
    for many in (20_000, 20_001):
        monkeypatch.setattr(samples, "MANY_QUESTIONS", many)
        observed = {"choices": Sample.observed(scores)}
        found, squares = evaluations.resampled_metrics(observed)
        draws[many] = {**found["choices"], "square": squares["choices"]["rms_debiased"].gap_part}
        floors[many] = evaluations.floor_tests(observed["choices"], tuple(WITH_FLOOR))
    for name, few in draws[20_001].items():
        assert draws[20_000][name].std() == pytest.approx(few.std(), rel=0.12), name
    for name, test in floors[20_001].items():
        assert floors[20_000][name].floor == pytest.approx(test.floor, rel=0.08), name


def test_hendrycks_bins_do_not_split_equal_confidences():
    """Folding at one half and edges between equal confidences are no matter of last digits."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 1000)
    exact = scored(np.full((1000, 2), 0.5), labels)
    rounded = renormalised(np.full((1000, 2), 0.5), labels, rng.uniform(0.3, 1, 1000))
    expected = definitions.rms_hendrycks(Sample.observed(exact))[0]
    assert definitions.rms_hendrycks(Sample.observed(rounded))[0] == pytest.approx(
        expected, abs=1e-9
    )


def test_auroc_is_its_definition():
    scores = scored(*draw(301, 8, calibrated=True))
    right = scores.confidence[scores.correct == 1][:, None]
    wrong = scores.confidence[scores.correct == 0]
    expected = (right > wrong).mean() + (right == wrong).mean() / 2
    assert definitions.auroc(Sample.observed(scores))[0] == pytest.approx(expected)


@pytest.mark.parametrize("choices", [2, 3, 4, 5, 6, 10, 15])
def test_a_bin_holds_its_lower_edge(choices):
    """A confidence of 1/K that is an edge belongs above it, whatever its last digits."""
    below = np.full((1, choices), 1 / choices)
    for nudge in (-2e-16, 0, 2e-16):
        logprobs = np.log(below + nudge)
        count = Sample.observed(Scores(logprobs, np.array([0]))).bins.count[0]
        assert count.argmax() == 15 // choices

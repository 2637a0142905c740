"""`calibeval.metrics`: metrics of arrays and tensors, and what used to be called by its name."""

import numpy as np
import pytest
import torch
from made_records import draw, write_records

import calibeval
from calibeval import metrics
from calibeval.io import InputError
from calibeval.measures import definitions
from calibeval.measures.samples import Sample, Scores

MEANS = ["accuracy", "nll", "brier", "ece_signed", "auroc", "aurc"]
ERRORS = ["ece", "ece_equal_mass", "rms", "rms_debiased", "smooth_ece"]


@pytest.fixture(scope="module")
def answers():
    """Probabilities (600, 4) of an over-confident model, and labels."""
    stated, labels = draw(600, 1.5, 0)
    return np.exp(stated), labels


@pytest.mark.parametrize("name", [*MEANS, *ERRORS])
def test_arrays_tensors_and_lists_read_what_records_read(answers, name):
    probabilities, labels = answers
    expected = definitions.METRICS[name](Sample.observed(Scores(np.log(probabilities), labels)))[0]
    metric = getattr(metrics, name)
    for given in (
        answers,
        (torch.tensor(probabilities, requires_grad=True), torch.tensor(labels)),
        (probabilities.tolist(), labels.tolist()),
    ):
        found = metric(*given)
        assert type(found) is float
        assert found == pytest.approx(expected, abs=1e-12)
    half = torch.tensor(probabilities).bfloat16()
    assert metric(half, labels) == pytest.approx(expected, abs=0.02)


def test_bins_are_as_many_as_asked_for(answers):
    probabilities, labels = answers
    confidence = probabilities.max(1)
    correct = probabilities.argmax(1) == labels
    for bins in (1, 10, 15, 100):
        bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
        gaps = np.array([(correct - confidence)[bin_of == b].sum() for b in range(bins)])
        assert metrics.ece(*answers, bins=bins) == pytest.approx(np.abs(gaps).sum() / 600)
        counts = np.bincount(bin_of, minlength=bins)
        square = (gaps**2 / np.maximum(counts, 1)).sum() / 600
        assert metrics.rms(*answers, bins) == pytest.approx(np.sqrt(square))


@pytest.mark.parametrize("name", ["ece", "rms", "auroc", "aurc", "ece_signed", "smooth_ece"])
def test_confidences_and_whether_they_were_right_are_enough(answers, name):
    probabilities, labels = answers
    correct = probabilities.argmax(1) == labels
    metric = getattr(metrics, name)
    for right in (correct, correct.astype(int), torch.tensor(correct)):
        found = metric(probabilities.max(1), right)
        assert found == pytest.approx(metric(*answers), abs=1e-12)


def test_scores_of_a_probability_that_something_is_so():
    p = np.array([0.9, 0.2, 0.5, 1.0])
    came_true = np.array([1, 0, 1, 1])
    assert metrics.brier(p, came_true) == pytest.approx((0.1**2 + 0.2**2 + 0.5**2) / 4)
    assert metrics.nll(p, came_true) == pytest.approx(-np.log([0.9, 0.8, 0.5, 1.0]).mean())
    assert metrics.accuracy(p, came_true) == 0.75


@pytest.fixture(scope="module")
def of_file(answers, tmp_path_factory):
    """The figures of the same answers from a record file."""
    path = write_records(tmp_path_factory.mktemp("file") / "a.jsonl", 600, 1.5, mass=1.0)
    return calibeval.summarize(path)["choices"]


@pytest.mark.parametrize("name", [*MEANS, *ERRORS])
def test_uncertainty_is_that_of_files(answers, of_file, name):
    """The interval is over other draws: a file's questions are sorted by their ids."""
    found = getattr(metrics, name)(*answers, interval=True)
    expected = of_file[name]
    assert found.value == pytest.approx(expected.value, abs=1e-9)
    for key in ("low", "high", "floor"):
        known = getattr(expected, key)
        assert (getattr(found, key) is None) == (known is None), key
        if known is not None:
            assert getattr(found, key) == pytest.approx(known, rel=0.25, abs=0.005), key


def test_clusters_of_answers_are_resampled_whole(answers):
    """Subjects that are all right or all wrong: each question by itself knows far too much."""
    rng = np.random.default_rng(0)
    subjects = np.repeat(np.arange(20), 30)
    right = rng.random(20)[subjects] < 0.5
    confidence = np.full(600, 0.5)
    single = metrics.accuracy(confidence, right, interval=True)
    whole = metrics.accuracy(confidence, right, interval=True, clusters=subjects)
    assert whole.value == single.value
    assert whole.high - whole.low > 4 * (single.high - single.low)
    names = [f"subject {number:02}" for number in subjects]
    assert metrics.accuracy(confidence, right, interval=True, clusters=names) == whole
    tensor = torch.tensor(subjects)
    assert metrics.accuracy(confidence, right, interval=True, clusters=tensor) == whole


def test_reliability_has_bars_and_curves(answers):
    diagram = metrics.reliability(*answers, bins=10)
    assert sum(diagram["count"]) == 600
    assert diagram["accuracy"][0] is None  # the likeliest of four has more than 0.25
    filled = [place for place, count in enumerate(diagram["count"]) if count]
    gaps = [
        diagram["count"][b] * abs(diagram["accuracy"][b] - diagram["confidence"][b]) for b in filled
    ]
    assert sum(gaps) / 600 == pytest.approx(metrics.ece(*answers, bins=10))
    for name in ("at", "smooth", "smooth_low", "isotonic_high"):
        assert len(diagram[name]) == 101


LOGITS = np.array([[1.5, -0.3], [0.2, 0.1]])
HALVES = np.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("probabilities", "labels", "options", "expected"),
    [
        (LOGITS, [0, 1], {}, r"row 0 is \[1.5, -0.3\]; .* Of logits take the softmax"),
        ([[0.5, np.nan]], [0], {}, "row 0 is"),
        (HALVES, [0, 2], {}, "labels: row 1 is 2; expected 0 to 1"),
        ([0.5, 0.5], [0, 2], {}, "labels: row 1 is 2; expected 0 or 1, whether it came true"),
        (HALVES, [0], {}, r"labels: shape \(1,\) beside probabilities of shape \(2, 2\)"),
        (np.zeros((0, 2)), [], {}, r"shape \(0, 2\); expected \(N, K\)"),
        (HALVES, [0, 1], {"bins": 0}, "bins: 0; expected a whole number from 1"),
    ],
)
def test_what_is_no_probability_is_refused(probabilities, labels, options, expected):
    with pytest.raises(InputError, match=expected):
        metrics.ece(probabilities, labels, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clusters": [0, 1]}, "give interval=True as well"),
        ({"interval": True, "clusters": [0, 1]}, "clusters: 2 of them; expected 10 or more"),
        ({"interval": True, "clusters": [0]}, r"clusters: shape \(1,\); expected \(2,\)"),
    ],
)
def test_clusters_that_cannot_be_are_refused(options, expected):
    with pytest.raises(InputError, match=expected):
        metrics.nll(HALVES, [0, 1], **options)


def test_an_interval_holds_its_value_where_probabilities_are_rounded():
    """It was −0.0040 [0.0000, −0.0030]: sums up to 1.01 are taken, so a logarithm was above 0."""
    probabilities = np.array([[1.009, 0]] * 40 + [[0.999, 0.001]] * 40)
    found = metrics.nll(probabilities, np.zeros(80), interval=True)
    assert 0 <= found.low <= found.value <= found.high
    assert found.value == pytest.approx(-np.log(0.999) / 2)


def test_equal_mass_and_class_wise_errors_are_those_of_their_bins(answers):
    probabilities, labels = answers
    order = probabilities.max(1).argsort()
    correct = (probabilities.argmax(1) == labels)[order]
    parts = np.split(correct - probabilities.max(1)[order], 15)  # 600 answers, 40 in each
    expected = sum(abs(part.sum()) for part in parts) / 600
    assert metrics.ece_equal_mass(*answers) == pytest.approx(expected)
    of_choices = [metrics.ece(probabilities[:, k], labels == k) for k in range(4)]
    assert metrics.ece_classwise(*answers) == pytest.approx(np.mean(of_choices))


def test_a_right_choice_of_probability_0_costs_everything():
    probabilities = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert metrics.nll(probabilities, np.array([1, 0])) == np.inf
    assert metrics.brier(probabilities, np.array([1, 0])) == pytest.approx(1.25)
    assert metrics.nll(probabilities, np.array([1, 0]), interval=True).value is None

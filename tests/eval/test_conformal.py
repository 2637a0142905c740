"""Prediction sets against plain loops and the beta-binomial."""

import math

import numpy as np
import pytest
from made_records import draw, write_records
from scipy.stats import betabinom

from calibeval import records
from calibeval.io import InputError
from calibeval.measures import conformal


@pytest.mark.parametrize("score", ("lac", "aps"))
def test_equal_answers_are_ties_whatever_rounding_leaves(score):
    """Renormalising left other last digits in scores that one threshold is to hold together."""
    mass = np.random.default_rng(0).uniform(0.3, 1, (1000, 1))
    logprobs = np.log(np.array([[0.6, 0.25, 0.15]]) * mass)
    probs = np.exp(logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True))
    scores = conformal.nonconformity(probs, score, np.zeros(1000))
    assert len(np.unique(scores)) == 3


def test_aps_scores_are_their_definition():
    probs = np.exp(draw(200, 1.0, 0)[0])
    uniform = np.random.default_rng(0).random(200)
    scores = conformal.nonconformity(probs, "aps", uniform)
    for i, k in np.ndindex(200, 4):
        likelier = sum(probs[i, j] for j in range(4) if probs[i, j] > probs[i, k])
        assert scores[i, k] == pytest.approx(likelier + (1 - uniform[i]) * probs[i, k])


def test_sums_of_1_are_not_decided_by_rounding():
    """Three choices in ten decimals: sizes were 3.25 and coverage 0.92 for sets of everything."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), 500)
    probs[:, 3] = 1 - probs[:, :3].sum(1)
    sums = (-np.sort(-probs, 1)).cumsum(1)[:, 3]
    assert len(set(sums.tolist())) > 1
    scores = conformal.nonconformity(probs, "aps", np.zeros(500))
    of_least_likely = np.take_along_axis(scores, probs.argmin(1)[:, None], 1)
    assert (of_least_likely == 1).all()


@pytest.mark.parametrize("score", ("lac", "aps"))
def test_coverage_over_splits_is_beta_binomial(tmp_path, score):
    """Mean and sd within 0.002 over 2,000 splits, whatever the model's calibration."""
    made = records.read(write_records(tmp_path / "a.jsonl", sharpness=3.0))
    sets = conformal.evaluate(made, score=score, splits=2000)
    k = math.ceil(301 * 0.9)
    expected = betabinom(300, k, 301 - k)
    assert sets.coverage == pytest.approx(expected.mean() / 300, abs=0.002)
    assert sets.coverage_sd == pytest.approx(expected.std() / 300, abs=0.002)


def test_every_call_gives_the_same_whatever_the_order(tmp_path):
    path = write_records(tmp_path / "a.jsonl")
    reversed_path = tmp_path / "b.jsonl"
    reversed_path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    sets = conformal.evaluate(records.read(path), score="aps", splits=20)
    assert sets == conformal.evaluate(records.read(reversed_path), score="aps", splits=20)


def test_a_set_without_threshold_has_the_choices_that_there_are(tmp_path):
    made = records.read(write_records(tmp_path / "a.jsonl", 20))
    made.labels[:] = 0
    made.logprobs[:10, 2:] = -np.inf
    assert conformal.evaluate(made, alpha=0.01).size == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize(
    ("count", "options", "key"),
    [
        (20, {"score": "nonsense"}, "score is 'nonsense'"),
        (20, {"alpha": 1.0}, "alpha is 1.0"),
        (20, {"splits": 0}, "splits is 0"),
        (1, {}, r"a\.jsonl: 1 record"),
    ],
)
def test_what_has_no_prediction_sets_is_refused(tmp_path, count, options, key):
    made = records.read(write_records(tmp_path / "a.jsonl", count))
    with pytest.raises(InputError, match=key):
        conformal.evaluate(made, **options)


def test_lac_scores_are_their_definition():
    probs = np.exp(draw(200, 1.0, 0)[0])
    scores = conformal.nonconformity(probs, "lac", np.zeros(200))
    assert scores == pytest.approx(1 - probs, abs=1e-12)


def test_an_alpha_next_to_1_has_the_least_threshold():
    """It had the largest: place 0 was read as the last one."""
    assert conformal.threshold(np.array([0.3, 0.1, 0.2]), 1 - 1e-12) == 0.1

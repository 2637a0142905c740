"""Prediction sets against plain loops and the beta-binomial."""

import math

import numpy as np
import pytest
from made_records import draw, write_records
from scipy.stats import betabinom

from calibeval import conformal, records
from calibeval.io import InputError


def test_scores_are_their_definitions():
    probs, uniform = np.exp(draw(200, 1.0, 0)[0]), np.random.default_rng(0).random(200)
    lac, aps = (conformal.nonconformity(probs, score, uniform) for score in ("lac", "aps"))
    assert (lac == 1 - probs).all()
    for i, k in np.ndindex(200, 4):
        above = sum(probs[i, j] for j in range(4) if probs[i, j] > probs[i, k])
        assert aps[i, k] == pytest.approx(above + (1 - uniform[i]) * probs[i, k])


def test_sums_of_1_are_not_decided_by_rounding():
    """Three choices in ten decimals: sizes were 3.25 and coverage 0.92 for sets of everything."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), 500)
    probs[:, 3] = 1 - probs[:, :3].sum(1)
    found = conformal.nonconformity(probs, "aps", np.zeros(500))
    last = np.take_along_axis(found, probs.argmin(1)[:, None], 1)
    assert len({*(-np.sort(-probs, 1)).cumsum(1)[:, 3].tolist()}) > 1 and (last == 1).all()


@pytest.mark.parametrize("score", ("lac", "aps"))
def test_coverage_over_splits_is_beta_binomial(tmp_path, run, score):
    """Mean and sd within 0.002 over 2,000 splits, whatever the model's calibration."""
    of = records.read(write_records(tmp_path / "a.jsonl", sharpness=3.0))
    found = conformal.evaluate(of, score=score, splits=2000)
    k = math.ceil(301 * 0.9)
    expected = betabinom(300, k, 301 - k)
    assert found.coverage == pytest.approx(expected.mean() / 300, abs=0.002)
    assert found.coverage_sd == pytest.approx(expected.std() / 300, abs=0.002)
    few = conformal.evaluate(of, score=score)
    said = run("conformal", tmp_path / "a.jsonl", "--score", score).out
    assert f": coverage {few.coverage:.3f}" in said


def test_every_call_gives_the_same_whatever_the_order(tmp_path):
    of = records.read(write_records(tmp_path / "a.jsonl"))
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(reversed(lines)))
    turned = records.read(tmp_path / "b.jsonl")
    found = conformal.evaluate(of, score="aps", splits=20)
    assert found == conformal.evaluate(turned, score="aps", splits=20)


def test_a_set_without_threshold_has_the_choices_that_there_are(tmp_path):
    of = records.read(write_records(tmp_path / "a.jsonl", 20))
    of.labels[:] = 0
    of.logprobs[:10, 2:] = -np.inf
    assert conformal.evaluate(of, alpha=0.01).size == pytest.approx(3, abs=0.2)


def test_bad_input_is_refused(tmp_path, refused):
    said = refused("conformal", write_records(tmp_path / "a.jsonl", 20), "--alpha", "1")
    assert "alpha is 1.0, expected a number from 0 to below 1" in said
    with pytest.raises(InputError, match=r"one\.jsonl: 1 record, expected 2 or more to split"):
        conformal.evaluate(records.read(write_records(tmp_path / "one.jsonl", 1)))

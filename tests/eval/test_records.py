"""Records as arrays, by every normalisation, and choices that are not there."""

import numpy as np
import pytest
from made_records import write_lines

from calibeval import records

LETTERS = {"id": "a/0", "subject": "a", "label": 1, "logprobs": [-1.0, -2.0], "letter_mass": 0.5}
TEXTS = {
    "id": "b/0",
    "subject": "b",
    "label": 2,
    "scoring": "continuation",
    "normalise": "characters",
    "logprobs": [-6.0, -4.0, -9.0],
    "bytes": [3, 4, 9],
    "characters": [3, 2, 9],
}


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [
        ("sum", [-6, -4, -9]),
        ("bytes", [-2, -1, -1]),
        ("characters", [-2, -2, -1]),
        (None, [-2, -2, -1]),
    ],
)
def test_normalisations(tmp_path, normalise, expected):
    found = records.read(write_lines(tmp_path / "r.jsonl", [TEXTS]), normalise)
    assert found.logprobs.tolist() == [expected]
    assert found.scoring == "continuation" and found.normalise == (normalise or "characters")
    assert np.isnan(found.letter_mass).all()


def test_texts_may_begin_alike(tmp_path):
    """ "Yes" and "Yes, sir": probabilities of texts sum to more than 1, and are no letter mass."""
    twice = TEXTS | {"logprobs": [-0.1, -0.2, -0.3], "letter_mass": 2.46}
    found = records.read(write_lines(tmp_path / "r.jsonl", [twice]), "sum")
    assert found.logprobs.tolist() == [[-0.1, -0.2, -0.3]] and np.isnan(found.letter_mass[0])


def test_absent_choices_are_told_from_unlikely_ones(tmp_path):
    five = LETTERS | {"id": "a/1", "logprobs": [-800.0, -0.1, -3.0, -4.0, -5.0]}
    five["letter_mass"] = 0.98
    found = records.read(write_lines(tmp_path / "r.jsonl", [LETTERS, five]))
    assert np.isneginf(found.logprobs).tolist() == [[False] * 2 + [True] * 3, [False] * 5]
    assert found.logprobs[1].tolist() == five["logprobs"]

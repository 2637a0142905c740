"""Records as arrays: texts, and choices that are not there."""

import json

import numpy as np
import pytest
from made_records import LETTERS_RECORD, write_lines

from calibeval import records
from calibeval.io import InputError


def test_texts_may_begin_alike(tmp_path):
    """ "Yes" and "Yes, sir": probabilities of texts sum to more than 1, and are no letter mass."""
    twice = LETTERS_RECORD | {
        "scoring": "continuation",
        "logprobs": [-0.1, -0.2],
        "letter_mass": 1.72,
    }
    found = records.read(write_lines(tmp_path / "r.jsonl", [twice]))
    assert found.logprobs.tolist() == [[-0.1, -0.2]] and np.isnan(found.letter_mass[0])


def test_absent_choices_are_told_from_unlikely_ones(tmp_path):
    five = LETTERS_RECORD | {"id": "a/1", "logprobs": [-800.0, -0.1, -3.0, -4.0, -5.0]}
    five["letter_mass"] = 0.98
    found = records.read(write_lines(tmp_path / "r.jsonl", [LETTERS_RECORD, five]))
    assert np.isneginf(found.logprobs).tolist() == [[False] * 2 + [True] * 3, [False] * 5]
    assert found.logprobs[1].tolist() == five["logprobs"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"letter_mass": 2.0},
            "line 1: letter_mass is 2, but the probabilities of logprobs sum to",
        ),
        ({"letter_mass": 0.2, "logprobs": [-0.02, -5.0]}, "letter_mass is 0.2, but .* to 0.987"),
        ({"logprobs": [-0.1, -1e300], "letter_mass": None}, "logprobs.1 is -1e.300: expected"),
    ],
)
def test_probabilities_that_cannot_be(tmp_path, changes, expected):
    file = write_lines(tmp_path / "r.jsonl", [LETTERS_RECORD | changes])
    with pytest.raises(InputError, match=expected):
        records.read(file)


def test_what_pydantic_does_not_parse_is_read_all_the_same(tmp_path):
    """A key of another program holds half of a surrogate pair, which JSON can spell."""
    line = json.dumps(LETTERS_RECORD | {"comment": "\ud800"})
    file = tmp_path / "r.jsonl"
    file.write_text(f"{line}\n")
    assert records.read(file).ids == [LETTERS_RECORD["id"]]


def test_ties_are_counted(tmp_path, run):
    """Records of equal log-probabilities read an accuracy of 1, since the first choice counts."""
    rows = []
    for number in range(100):
        row = {"id": str(number), "subject": "s", "label": 0, "logprobs": [-2.0, -2.0, -3.0]}
        rows.append({**row, "logprobs": [-1.0, -2.0, -3.0]} if number < 40 else row)
    file = write_lines(tmp_path / "r.jsonl", rows)
    printed = run("metrics", file, "--json")
    assert "warning: " in printed.err and json.loads(printed.out)["tied"] == 60
    distinct = write_lines(tmp_path / "d.jsonl", rows[:40])
    assert "warning: " not in run("metrics", distinct).err

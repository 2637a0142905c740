"""Files of a sweep's folder that are somebody else's end in one line, in time."""

import pytest

from calibeval.io import InputError
from sweeps.runs.files import read_rows
from sweeps.runs.yaml_io import parse

DEEP = "[" * 200_000
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_a_row_that_is_nested_without_end_is_a_damaged_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{DEEP}\n")
    assert read_rows(file) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIASES, "is used again by an alias"),
        ("? [x, x]\n: 1\n", "expected a word as a key"),
        (f"a: {DEEP}", "not YAML: .*(nest|deep)"),
        (f"a: {'[' * 900}{']' * 900}", "not YAML: nested too deep"),
        (f"a: {'9' * 5000}", "not YAML: "),
        ("a: !!bool x", "not YAML: "),
    ],
    ids=["aliases", "nested keys", "deep", "lists", "a number", "a tag"],
)
def test_yaml_without_end_is_refused_in_time(text, problem):
    with pytest.raises(InputError, match=rf"sweep\.yaml.*: {problem}"):
        parse(text, "sweep.yaml")

"""Record files are compared only where their questions were asked and read alike."""

import json

import pytest
from made_records import read_lines, write_lines, write_records

import calibeval
from calibeval.io import InputError
from calibeval.measures import evaluations
from calibeval.report import index


@pytest.fixture
def written(tmp_path):
    """written(name, **keys) → a file of the same questions, each record with these keys too."""
    rows = read_lines(write_records(tmp_path / "source.jsonl", n=60))

    def write(name: str, **keys: object):
        return write_lines(tmp_path / f"{name}.jsonl", [{**row, **keys} for row in rows])

    return write


@pytest.fixture
def index_of(tmp_path):
    """index_of(*files) → an index with a line for each, of one data set by two models."""

    def write(*files):
        lines = []
        for number, file in enumerate(files):
            line = {"records": file.name, "dataset": "toy", "label_smoothing": 0}
            lines.append({**line, "model": f"m{number}"})
        return write_lines(tmp_path / "index.jsonl", lines)

    return write


CONTINUATION = {
    "scoring": "continuation",
    "letter_mass": None,
    "bytes": [1, 2, 3, 4],
    "characters": [1, 2, 3, 4],
    "prompt_sha256": "ab",
}


def test_other_normalisers_are_refused(written, index_of):
    """A difference would be the normaliser's: one model moved from −0.230 to +0.532 by it."""
    by_sum = written("sum", **CONTINUATION, normalise="sum")
    by_characters = written("characters", **CONTINUATION, normalise="characters")
    expected = "normalise 'sum' and 'characters'.*alone; "
    for different_prompts in (False, True):
        with pytest.raises(InputError, match=f"{expected}`--normalise sum` of `compare`"):
            calibeval.compare(by_sum, by_characters, different_prompts=different_prompts)
    with pytest.raises(InputError, match=f"{expected}.*another 'dataset' in the index"):
        index.read(index_of(by_sum, by_characters))
    with pytest.raises(InputError, match=f"{expected}score both with the same options"):
        calibeval.check(by_sum, by_characters)
    read_alike = evaluations.load(by_characters, "sum")
    compared = calibeval.compare(by_sum, read_alike)
    assert compared["choices"]["ece"]["difference"] == 0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"shots": 0}, {"shots": 5}, "asked with shots 0 and 5"),
        ({}, {"scoring": "continuation"}, "asked with scoring 'letters' and 'continuation'"),
        ({"chat_template": "ab"}, {}, "asked with chat template 'ab' and 'none'"),
        ({"prompt_sha256": "a"}, {"prompt_sha256": "b"}, "asked with prompts '"),
    ],
)
def test_what_was_asked_otherwise_is_not_compared(written, index_of, run, a, b, expected):
    """The difference would be the prompt's."""
    files = [written("a", **a), written("b", **b)]
    with pytest.raises(InputError, match=f"{expected}.*--different-prompts"):
        calibeval.compare(*files)
    run("compare", "--different-prompts", *files)
    of_two_models = index_of(*files)
    if "prompts" in expected:  # a model with a shorter context is asked with fewer examples
        index.read(of_two_models)
    else:
        with pytest.raises(InputError, match=f"{expected}.*another 'dataset' in the index"):
            index.read(of_two_models)
    if "shots" in a:
        calibeval.compare(files[0], written("unknown"))  # nobody knows how many these had


def test_a_sidecar_says_what_shots_were_wanted(written, index_of, tmp_path):
    """Fewer examples stand before the questions of a model with a shorter context."""
    long_context = written("long", shots=5)
    short_context = written("short", shots=3)
    for file in (long_context, short_context):
        sidecar = tmp_path / f"{file.name}.meta.json"
        sidecar.write_text(json.dumps({"settings": {"shots": 5}}))
    assert len(index.read(index_of(long_context, short_context)).rows) == 2


@pytest.fixture
def two_question_sets(written):
    """Files of 60 questions: the second lacks two, has one more and one with another answer."""
    first = written("first")
    rows = read_lines(first)
    rows[2] = {**rows[2], "label": (rows[2]["label"] + 1) % 4}
    second = write_lines(first.with_name("second.jsonl"), [*rows[2:], {**rows[0], "id": "new"}])
    return first, second


def test_common_questions_are_compared(two_question_sets, run, refused):
    first, second = two_question_sets
    printed = run("compare", first, second, "--common", "--json")
    assert "57 questions of 60 and 59 are common" in printed.err
    nll = json.loads(printed.out)["comparison"]["choices"]["nll"]
    assert nll["difference"] == 0
    common = {row["id"] for row in read_lines(first)[3:]}
    part = write_lines(
        first.with_name("part.jsonl"), [row for row in read_lines(first) if row["id"] in common]
    )
    assert nll["a"] == evaluations.load(part).values["choices"]["nll"]
    other = write_lines(first.with_name("other.jsonl"), [{**read_lines(first)[0], "id": "new"}])
    assert "no question in common" in refused("compare", first, other, "--common")


def test_prompts_that_were_cut_are_not_those_that_were_not(written, index_of):
    """The digest of a prompt is of its whole text, also where a model has not read all of it."""
    whole = written("whole", prompt_sha256="ab")
    cut = written("cut", prompt_sha256="ab", truncated=7)
    expected = "asked with truncated prompts 0 and 60, so a difference is not the models' alone"
    with pytest.raises(InputError, match=expected):
        calibeval.compare(whole, cut)
    calibeval.compare(whole, cut, different_prompts=True)
    calibeval.compare(cut, written("cut_too", prompt_sha256="ab", truncated=3))
    assert len(index.read(index_of(whole, cut)).rows) == 2  # of models that differ in context

"""One temperature fitted on some records: what it finds, what it leaves alone, what it refuses."""

import numpy as np
import pytest
from made_records import mmlu_rows, read_lines, scored, write_csv, write_lines, write_records
from scipy.special import log_softmax

import calibeval
from calibeval import records
from calibeval.io import InputError


@pytest.fixture(scope="module")
def sharpened(tmp_path_factory):
    """A folder with val.jsonl and test.jsonl of a model three times too sharp, and out.jsonl.

    Also what `temperature` returned for them.
    """
    folder = tmp_path_factory.mktemp("sharpened")
    val, test, out = (folder / f"{name}.jsonl" for name in ("val", "test", "out"))
    write_records(val, 6000, 3.0, seed=1)
    write_records(test, 3000, 3.0, seed=2)
    return folder, calibeval.temperature(val, test, out)


def test_it_finds_the_sharpness(sharpened):
    _, report = sharpened
    assert report["temperature"] == pytest.approx(3, rel=0.08)
    assert report["answers"] == 6000


def test_it_is_where_the_nll_is_least(sharpened):
    folder, report = sharpened
    validation = records.read(folder / "val.jsonl")
    right = np.arange(6000), validation.labels

    def nll(tau: float) -> float:
        return -log_softmax(validation.logprobs / tau, 1)[right].mean()

    grid = [nll(tau) for tau in np.linspace(1, 6, 101)]
    before, after = report["nll"]
    assert before == pytest.approx(grid[0])
    assert after <= min(grid) + 1e-6
    assert after == pytest.approx(nll(report["temperature"]))


def test_it_divides_the_logits_of_the_tested_answers(sharpened):
    folder, report = sharpened
    before = records.read(folder / "test.jsonl")
    after = records.read(folder / "out.jsonl")
    assert np.allclose(after.logprobs, log_softmax(before.logprobs / report["temperature"], 1))
    assert (after.logprobs.argsort() == before.logprobs.argsort()).all()
    # Among all tokens nobody knows: that would take the logits of them all.
    assert np.isnan(after.letter_mass).all()


def test_texts_are_read_by_their_convention(tmp_path):
    write_records(tmp_path / "letters.jsonl", 800, 2.0, seed=3)
    lengths = [3, 5, 7, 11]
    by_length = {"scoring": "continuation", "normalise": "characters", "characters": lengths}
    rows = []
    for row in read_lines(tmp_path / "letters.jsonl"):
        sums = [score * length for score, length in zip(row["logprobs"], lengths, strict=True)]
        rows.append({**row, **by_length, "logprobs": sums})
    val = write_lines(tmp_path / "val.jsonl", rows[:400])
    test = write_lines(tmp_path / "test.jsonl", rows[400:])
    tau = calibeval.temperature(val, test, tmp_path / "out.jsonl")["temperature"]
    assert tau == pytest.approx(2, rel=0.2)
    before = records.read(test)
    after = records.read(tmp_path / "out.jsonl")
    assert after.normalise == "characters"
    assert np.allclose(after.logprobs, before.logprobs / tau)
    # By another convention nobody fitted it.
    with pytest.raises(InputError, match="its temperature was fitted by 'characters'"):
        records.read(tmp_path / "out.jsonl", "sum")


@pytest.fixture
def overlapping(mmlu, tiny_model, tmp_path):
    """Scored val.jsonl and test.jsonl with two questions in common, and the options of `score`."""
    for subject, place in (("old_kings", 1100), ("light", 2100)):
        rows = [*mmlu_rows(25, seed=7), mmlu_rows(1, place)[0]]
        write_csv(mmlu / "val" / f"{subject}_val.csv", rows)
    options = ["--model", tiny_model, "--task", "mmlu", "--data", mmlu]
    scored(tmp_path / "val.jsonl", *options, "--split", "val")
    scored(tmp_path / "test.jsonl", *options)
    return options


def test_questions_that_are_tested_are_not_fitted_on(overlapping, tmp_path, run):
    """MMLU has 27 of its validation questions in its test split too."""
    val, test, out = (tmp_path / f"{name}.jsonl" for name in ("val", "test", "out"))
    printed = run("temperature", val, test, "--out", out, "--json").out
    assert '"answers": 50, "left_out": 2' in printed


def test_records_say_what_the_temperature_was_fitted_on(overlapping, tmp_path, run):
    val, test, out = (tmp_path / f"{name}.jsonl" for name in ("val", "test", "out"))
    run("temperature", val, test, "--out", out)
    prompts = [row["prompt_sha256"] for row in read_lines(test)]
    assert [row["prompt_sha256"] for row in read_lines(out)] == prompts
    sidecar = records.meta(out)
    assert sidecar["temperature"]["records"] == str(val)
    assert sidecar["settings"] == records.meta(test)["settings"]


def test_records_at_a_temperature_are_no_models_answers(overlapping, tmp_path, run, refused):
    val, test, out = (tmp_path / f"{name}.jsonl" for name in ("val", "test", "out"))
    run("temperature", val, test, "--out", out)
    for command in (
        ["temperature", val, out, "--out", test],
        ["score", *overlapping, "--out", out],
    ):
        assert "is what a temperature made of a model's answers" in refused(*command)


@pytest.fixture
def refused_fit(tmp_path, refused):
    """refused_fit(val, test, out="out") → the message of a fit of files that must be refused.

    There are val.jsonl of 100 records and test.jsonl of 50.
    """
    write_records(tmp_path / "val.jsonl", 100, 1.0, seed=100)
    write_records(tmp_path / "test.jsonl", 50, 1.0, seed=50)

    def fit(val: str, test: str, out: str = "out") -> str:
        files = [tmp_path / f"{name}.jsonl" for name in (val, test, out)]
        message = refused("temperature", files[0], files[1], "--out", files[2])
        assert not (tmp_path / "out.jsonl").exists()
        return message

    return fit


def keys(**values):
    """A change of every record: these keys."""
    return lambda row: {**row, **values}


def prompt(words):
    """A change of every record: its prompt's digest."""
    return lambda row: {**row, "prompt_sha256": f"{words} {row['id']}"}


def answer_at(rank):
    """A change of every record: the right choice is that of this rank, by probability."""
    return lambda row: {**row, "label": int(np.argsort(row["logprobs"])[rank])}


def sure(margin):
    """A change of every record: the right choice has all probability, by so many nats."""

    def change(row):
        logprobs = [-margin] * 4
        logprobs[row["label"]] = 0.0
        return {**row, "logprobs": logprobs, "letter_mass": 1.0}

    return change


def equal(row):
    """All choices have the same probability; some questions have three of them, some four."""
    choices = 3 + len(row["id"]) % 2
    mass = choices * np.exp(-1.5)
    return {**row, "label": 0, "logprobs": [-1.5] * choices, "letter_mass": mass}


ALL_RIGHT = "NLL falls on towards 0 (100 of 100 answers are right)"


@pytest.mark.parametrize(
    ("val", "of_val", "of_test", "expected"),
    [
        ("few", keys(), keys(), "19 answers that"),
        # Five examples before val's and none before test's: other prompts, and 0 were left out.
        ("test", prompt("five"), prompt("none"), "0 answers that"),
        ("val", answer_at(-1), keys(), ALL_RIGHT),
        ("val", answer_at(0), keys(), "towards infinity (0 of 100 answers are right)"),
        ("val", sure(1000.0), keys(), ALL_RIGHT),  # it spoke of equal probabilities
        # A missing choice's −∞ counted as a probability.
        ("val", equal, keys(), "any temperature fits"),
        ("val", keys(scoring="continuation"), keys(), "scoring 'continuation', but"),
    ],
)
def test_what_has_no_temperature_is_refused(tmp_path, refused_fit, val, of_val, of_test, expected):
    """The temperature of answers that are all right, or all wrong, was the end of the search."""
    write_records(tmp_path / "few.jsonl", 19, 1.0, seed=19)
    for name, source, change in (("changed", val, of_val), ("tested", "test", of_test)):
        rows = [change(row) for row in read_lines(tmp_path / f"{source}.jsonl")]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    assert expected in refused_fit("changed", "tested")


def test_splits_that_are_numbered_alike_are_fitted_on(tmp_path, run):
    """MMLU's val and test both begin with subject/0."""
    files = [tmp_path / f"{name}.jsonl" for name in ("val", "test", "out")]
    for seed, file in enumerate(files[:2]):
        write_records(file, 200, 2.0, seed)
        rows = read_lines(file)
        write_lines(file, [{**row, "id": f"s/{number}"} for number, row in enumerate(rows)])
    val, test, out = files
    printed = run("temperature", val, test, "--out", out, "--json").out
    assert '"answers": 200, "left_out": 0' in printed


def test_another_checkpoints_answers_are_refused(tmp_path, refused_fit):
    for name in ("val", "test"):
        settings = f'{{"settings": {{"model_digest": "{name}"}}}}'
        records.sidecar(tmp_path / f"{name}.jsonl").write_text(settings)
    assert "is of another model than" in refused_fit("val", "test")


def test_a_file_that_is_there_already_is_kept(refused_fit):
    assert "is there already" in refused_fit("val", "test", "val")

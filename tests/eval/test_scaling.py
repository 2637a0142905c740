"""One temperature fitted on some records: what it finds, what it leaves alone, what it refuses."""

import numpy as np
import pytest
from made_records import read_lines, scored, table, write_lines, write_records, write_rows
from scipy.special import log_softmax

import calibeval
from calibeval import records


def test_it_finds_the_sharpness_and_takes_it_off_other_answers(tmp_path, run):
    val, test, out = (tmp_path / f"{name}.jsonl" for name in ("val", "test", "out"))
    write_records(val, 6000, 3.0, seed=1)
    write_records(test, 3000, 3.0, seed=2)
    found = calibeval.temperature(val, test, out)
    tau = found["temperature"]
    assert tau == pytest.approx(3, rel=0.08) and found["answers"] == 6000
    of = records.read(val)
    right = np.arange(6000), of.labels
    grid = [-log_softmax(of.logprobs / t, 1)[right].mean() for t in np.linspace(1, 6, 101)]
    before, after = found["nll"]
    assert before == pytest.approx(grid[0]) and after <= min(grid) + 1e-6
    assert after == pytest.approx(-log_softmax(of.logprobs / tau, 1)[right].mean())
    one, other = records.read(test), records.read(out)
    assert np.allclose(other.logprobs, log_softmax(one.logprobs / tau, 1))
    assert (other.logprobs.argsort() == one.logprobs.argsort()).all()
    one, other = calibeval.metrics(test), calibeval.metrics(out)
    # Among all tokens nobody knows: that would take the logits of them all.
    assert set(one) == {"choices", "vocabulary"} and set(other) == {"choices"}
    gap = calibeval.compare(test, out)["choices"]["ece_signed"]
    assert gap["high"] < 0 and run("compare", test, out)
    one, other = one["choices"], other["choices"]
    assert other["accuracy"] == one["accuracy"]
    assert other["ece"].value < 0.03 < 0.1 < one["ece"].value


def test_texts_are_read_by_their_convention(tmp_path):
    write_records(tmp_path / "letters.jsonl", 800, 2.0, seed=3)
    rows = []
    for row in read_lines(tmp_path / "letters.jsonl"):
        lengths = [3, 5, 7, 11]
        by_length = {"scoring": "continuation", "normalise": "characters", "characters": lengths}
        texts = [s * n for s, n in zip(row["logprobs"], lengths, strict=True)]
        rows.append(row | by_length | {"logprobs": texts})
    val = write_lines(tmp_path / "val.jsonl", rows[:400])
    test = write_lines(tmp_path / "test.jsonl", rows[400:])
    tau = calibeval.temperature(val, test, tmp_path / "out.jsonl")["temperature"]
    assert tau == pytest.approx(2, rel=0.2)
    one, other = records.read(test), records.read(tmp_path / "out.jsonl")
    assert np.allclose(other.logprobs, one.logprobs / tau) and other.normalise == "characters"


def test_questions_that_are_tested_are_not_fitted_on(mmlu, tiny_model, tmp_path, run, refused):
    """MMLU has 27 of its validation questions in its test split too."""
    for subject in ("old_kings", "light"):
        rows = [*table(25, seed=7), table(1, 1100 if subject == "old_kings" else 2100)[0]]
        write_rows(mmlu / "val" / f"{subject}_val.csv", rows)
    common = ["--model", tiny_model, "--task", "mmlu", "--data", mmlu]
    scored(tmp_path / "val.jsonl", *common, "--split", "val")
    plain = scored(tmp_path / "test.jsonl", *common)
    val, test, out = (tmp_path / f"{name}.jsonl" for name in ("val", "test", "out"))
    command = ["temperature", val, test, "--out", out, "--json"]
    assert '"answers": 50, "left_out": 2' in run(*command).out
    after, about = read_lines(tmp_path / "out.jsonl"), records.meta(tmp_path / "out.jsonl")
    assert [row["prompt_sha256"] for row in after] == [row["prompt_sha256"] for row in plain]
    assert about["temperature"]["records"] == str(tmp_path / "val.jsonl")
    assert about["settings"] == records.meta(tmp_path / "test.jsonl")["settings"]
    for command in (["temperature", val, out, "--out", test], ["score", *common, "--out", out]):
        assert "is what a temperature made of a model's answers" in refused(*command)


def test_what_cannot_be_fitted_is_refused(tmp_path, refused):
    def said(val, test, out="out.jsonl") -> str:
        return refused("temperature", tmp_path / val, tmp_path / test, "--out", tmp_path / out)

    for name, n in (("val", 100), ("few", 19), ("test", 50)):
        write_records(tmp_path / f"{name}.jsonl", n, 1.0, seed=n)
    assert "19 answers that" in said("few.jsonl", "test.jsonl")
    assert "is there already" in said("val.jsonl", "test.jsonl", "few.jsonl")
    rows = [row | {"prompt_sha256": row["id"]} for row in read_lines(tmp_path / "val.jsonl")]
    write_lines(tmp_path / "asked.jsonl", rows)
    assert "0 answers that" in said("asked.jsonl", "asked.jsonl")
    texts = [row | {"scoring": "continuation"} for row in rows]
    write_lines(tmp_path / "texts.jsonl", texts)
    assert "scoring 'continuation', but" in said("texts.jsonl", "test.jsonl")
    write_lines(tmp_path / "other.jsonl", [row | {"model": "other"} for row in rows])
    assert "is of another model than" in said("val.jsonl", "other.jsonl")
    for name in ("val", "test"):
        about = f'{{"settings": {{"model_digest": "{name}"}}}}'
        records.sidecar(tmp_path / f"{name}.jsonl").write_text(about)
    assert "is of another model than" in said("val.jsonl", "test.jsonl")
    assert not (tmp_path / "out.jsonl").exists()

"""lm-evaluation-harness's own output becomes records, to the last metric.

lm_eval_samples/ is what lm-eval 0.4.13 wrote for the real model of stories260k.py on questions of
MMLU and HellaSwag (both MIT): `lm_eval --model hf --tasks mmlu_abstract_algebra,hellaswag
--num_fewshot 0 --samples … --log_samples`, with its mmlu template and its acc_bytes and
acc_mutual_info beside HellaSwag's acc and acc_norm, on local files.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_records import read_lines, write_lines

from calibeval import records

# Which choice each of lm-eval's metrics takes: the greatest by this normalisation.
METRICS = {"acc": "sum", "acc_norm": "characters", "acc_bytes": "bytes"}
SAMPLES = Path(__file__).parent / "lm_eval_samples"
MMLU, HELLASWAG = (next(SAMPLES.glob(f"samples_{t}_*")) for t in ("mmlu_abstract_algebra", "hel*"))


def test_letters(tmp_path, run):
    said = run("import", MMLU, "--out", tmp_path / "r.jsonl")
    found = records.read(tmp_path / "r.jsonl")
    given = read_lines(MMLU)
    assert found.scoring == "letters" and found.model == "model"
    assert found.ids == [f"abstract_algebra/{s['doc_id']}" for s in given]
    assert found.labels.tolist() == [int(s["target"]) for s in given]
    sums = [[float(score) for score, _ in s["filtered_resps"]] for s in given]
    assert found.logprobs.tolist() == sums
    assert found.letter_mass == pytest.approx([sum(map(math.exp, row)) for row in sums])
    right = found.logprobs.argmax(1) == found.labels
    assert right.tolist() == [s["acc"] == 1 for s in given]
    row = json.loads((tmp_path / "r.jsonl").read_text().split("\n")[0])
    assert row["shots"] == 0 and row["prompt_sha256"] == given[0]["prompt_hash"]
    assert row["versions"] == {"lm_eval": "0.4.13", "transformers": "5.19.0"}
    assert "6 questions, letters by sum" in said.err
    run("metrics", tmp_path / "r.jsonl")


def test_texts_by_every_normalisation(tmp_path, run):
    run("import", HELLASWAG, "--out", tmp_path)
    given = sorted(read_lines(HELLASWAG), key=lambda s: s["doc_id"])
    for metric, normalise in METRICS.items():
        found = records.read(tmp_path / "hellaswag.jsonl", normalise)
        right = found.logprobs.argmax(1) == found.labels
        assert right.tolist() == [s[metric] == 1 for s in given], metric
    found = records.read(tmp_path / "hellaswag.jsonl")
    assert found.scoring == "continuation" and found.normalise == "characters"
    rows = read_lines(tmp_path / "hellaswag.jsonl")
    for row, sample in zip(rows, given, strict=True):
        assert row["characters"] == [len(c) for c in sample["doc"]["choices"]]
        assert row["bytes"] == [len(c.encode()) for c in sample["doc"]["choices"]]
    assert any(row["bytes"] != row["characters"] for row in rows)
    by_bytes = [np.divide(row["logprobs"], row["bytes"]).tolist() for row in rows]
    assert records.read(tmp_path / "hellaswag.jsonl", "bytes").logprobs.tolist() == by_bytes


def test_a_run_becomes_a_file_a_data_set(tmp_path, run, refused):
    """In any order of the lines, and with another filter's lines between them."""
    folder = tmp_path / "org__model"
    folder.mkdir()
    lines = [s | more for s in reversed(read_lines(MMLU)) for more in ({}, {"filter": "other"})]
    for task in ("mmlu_anatomy", "mmlu_abstract_algebra"):
        write_lines(folder / f"samples_{task}_2025-01-01T00-00-00.0.jsonl", lines)
    shutil.copy(HELLASWAG, folder / "samples_hellaswag.jsonl")
    command = ["import", *folder.iterdir(), "--out"]
    run(*command, tmp_path / "out")
    mmlu = records.read(tmp_path / "out" / "mmlu.jsonl")
    assert {row["subject"] for row in read_lines(mmlu.path)} == {"anatomy", "abstract_algebra"}
    assert len(mmlu) == 12 and mmlu.model == "org__model"
    assert [i for i in mmlu.ids if "an" in i] == [f"anatomy/{i}" for i in (0, 8, 12, 17, 21, 31)]
    assert len(records.read(tmp_path / "out" / "hellaswag.jsonl")) == 8
    assert "exists; give another --out" in refused(*command, tmp_path / "out")
    assert "; expected the same" in refused(*command, tmp_path / "all.jsonl")


def winograd(sample):
    for i, pair in enumerate(sample["arguments"].values()):
        pair.update(arg_0=f"context {i}", arg_1=" same")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.update(acc=1.0 - s["acc"]), "acc is 1.0, but 0.0 by log-probabilities"),
        (lambda s: s.update(target="4"), "label is 4, expected 0 to 3"),
        (lambda s: s.update(filtered_resps=["some text"]), "expected a multiple-choice sample"),
        (lambda s: s.update(doc_id=0), "id 'abstract_algebra/0' is on "),
        (winograd, "its choices do not continue one prompt"),
        (lambda s: s.update(acc=1.0, filtered_resps=[["nan", ""]] * 4), "expected a finite number"),
    ],
)
def test_bad_samples_are_named_by_line(tmp_path, refused, change, expected):
    rows = read_lines(MMLU)
    change(rows[2])
    path = write_lines(tmp_path / MMLU.name, rows)
    err = refused("import", path, "--out", tmp_path / "out")
    assert f"error: {path}, line 3: " in err and expected in err
    assert not (tmp_path / "out").exists()


def test_bad_files(tmp_path, refused):
    command = ["import", "--out", tmp_path / "all.jsonl"]
    named, other = tmp_path / "samples_x.jsonl", tmp_path / "r.jsonl"
    other.touch()
    assert "expected a name like samples_<task>_<time>.jsonl" in refused(*command, other)
    named.touch()
    assert "samples_x.jsonl: no samples" in refused(*command, named)
    (tmp_path / "results.json").write_text("[]")
    assert "results.json: not lm-eval's results" in refused(*command, named)
    assert "scoring 'continuation' after 'letters'" in refused(*command, MMLU, HELLASWAG)
    assert not (tmp_path / "all.jsonl").exists()


def inspect_sample(number: int, target: str, *answers: tuple[str, list[tuple[str, float]]]) -> dict:
    """A sample of Inspect's log; `answers` are tokens with the top ones at their places."""
    content = [
        {"token": token, "logprob": top[0][1], "top_logprobs": [
            {"token": t, "logprob": p} for t, p in top]}
        for token, top in answers
    ]  # fmt: skip
    output = {"choices": [{"logprobs": {"content": content}}]}
    about = {"id": number, "epoch": 1, "input": f"Which {number}?", "choices": ["x", "y", "z"]}
    return about | {"target": target, "output": output, "metadata": {"subject": "light"}}


TOP = [("B", -0.5), (" B", -3.0), ("A", -1.5), ("ANSWER", -4.0), ("the", -6.0)]


def test_inspects_logs(tmp_path, run):
    header = {"status": "success", "eval": {"task": "inspect_evals/arc", "model": "openai/m"}}
    header["eval"]["packages"] = {"inspect_ai": "0.3.285"}
    first = inspect_sample(1, "B", ("ANSWER", TOP), (":", TOP), (" B", TOP), (".", TOP))
    again = inspect_sample(1, "B", ("B", TOP)) | {"epoch": 2}
    first["scores"] = {"choice": {"answer": "B"}, "other": {"answer": "I say B"}, "third": {}}
    samples = [first, again, inspect_sample(2, "A", ("A", TOP))]
    log = tmp_path / "log.json"
    log.write_text(json.dumps(header | {"samples": samples}))
    made = tmp_path / "out" / "arc.jsonl"
    assert json.loads(run("import", log, "--out", made.parent, "--json").out) == {str(made): 2}
    found = records.read(made)
    assert found.ids == ["1", "2"] and found.labels.tolist() == [1, 0]
    assert found.model == "openai/m" and read_lines(made)[0]["subject"] == "light"
    both = math.log(math.exp(-0.5) + math.exp(-3.0))
    assert found.logprobs.tolist() == [pytest.approx([-1.5, both, -6.0])] * 2


def test_inspects_samples_that_are_no_multiple_choice(tmp_path, refused):
    header, log = {"status": "success", "eval": {"task": "t", "model": "m"}}, tmp_path / "log.json"
    command = ["import", log, "--out", tmp_path / "r.jsonl"]
    shuffled = inspect_sample(1, "A", (" B", TOP)) | {"scores": {"choice": {"answer": "C"}}}
    for sample, expected in (
        (inspect_sample(1, "E", ("A", TOP)), "substring not found"),
        (inspect_sample(1, "A", ("yes", TOP)), "list index out of range"),
        (inspect_sample(1, "A") | {"choices": None}, "sample 1: TypeError"),
        (shuffled, "answers B, C by its score: were the choices shuffled?"),
    ):
        log.write_text(json.dumps(header | {"samples": [sample]}))
        err = refused(*command)
        assert expected in err and "top log-probabilities where it answers" in err
    for text in ("[]", json.dumps(header | {"samples": None})):
        log.write_text(text)
        assert "`inspect log convert --to json` makes one" in refused(*command)
    log.write_text(json.dumps(header | {"samples": [], "status": "cancelled"}))
    assert "status is 'cancelled', expected 'success'" in refused(*command)

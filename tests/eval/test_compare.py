"""Paired comparison of two runs, and metrics by subject and category."""

import json

import numpy as np
import pytest

from calibeval import records
from calibeval.__main__ import main
from calibeval.breakdown import CATEGORIES, breakdown
from calibeval.compare import compare
from calibeval.metrics import battery, values
from calibeval.metrics.scores import scores


def write(path, n=600, sharpness=1.0, seed=0, subjects=("astronomy", "sociology", "new")):
    """Answers of one model stated with some sharpness; the same seed asks the same questions."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (n, 4))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(max=3)
    said = logits * sharpness
    said -= np.log(np.exp(said).sum(1, keepdims=True))
    with open(path, "w") as file:
        for i in range(n):
            row = {"id": f"q{i}", "subject": subjects[i % len(subjects)], "label": int(labels[i])}
            row |= {"logprobs": said[i].tolist(), "letter_mass": 1.0}
            file.write(json.dumps(row) + "\n")
    return path


def test_a_sharpened_run_is_worse_calibrated_and_as_accurate(tmp_path, capsys):
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", sharpness=2.5)
    found = compare(a, b)["choices"]
    assert found["ece"]["better"] == found["nll"]["better"] == "a" and found["ece"]["low"] > 0
    assert found["ece_signed"]["better"] == "a"
    accuracy = found["accuracy"]
    assert accuracy["difference"] == accuracy["low"] == accuracy["high"] == 0
    assert accuracy["better"] is None
    other = compare(b, a)["choices"]["ece"]
    assert other["better"] == "b" and other["difference"] == -found["ece"]["difference"]
    assert main(["compare", str(a), str(b)]) == 0
    assert "ece (choices): A 0.0" in (out := capsys.readouterr().out) and "A is better" in out
    assert main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"]["choices"]["ece"] == found["ece"]


def test_pairing_ignores_the_order_and_is_narrower(tmp_path):
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", sharpness=1.2)
    shuffled = tmp_path / "s.jsonl"
    lines = b.read_text().splitlines(keepends=True)
    shuffled.write_text("".join(reversed(lines)))
    found, again = compare(a, b)["choices"], compare(a, shuffled)["choices"]
    assert found["nll"] == pytest.approx(again["nll"], nan_ok=True)
    nll = [m["nll"] for m in (values(scores(records.read(p), "choices")) for p in (a, b))]
    assert found["nll"]["difference"] == pytest.approx(nll[1] - nll[0])
    single = battery(records.read(b))["choices"]["nll"]
    assert found["nll"]["high"] - found["nll"]["low"] < 0.5 * (single["high"] - single["low"])


def test_other_questions_or_answers_are_refused(tmp_path, capsys):
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", n=599)
    assert main(["compare", str(a), str(b)]) == 2
    assert "'q599' is in one of them only" in capsys.readouterr().err
    lines = [json.loads(line) for line in a.read_text().splitlines()]
    lines[3]["label"] = (lines[3]["label"] + 1) % 4
    b.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(a), str(b)]) == 2
    assert "other answers to 'q3'" in capsys.readouterr().err


def test_breakdown(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl")
    of = records.read(path)
    found = breakdown(of, "subject", 200)
    assert list(found) == ["astronomy", "new", "sociology"]
    member = of.subjects == "new"
    whole = scores(of, "choices")
    expected = whole.correct[member].mean()
    new = found["new"]
    assert new["questions"] == 200
    assert new["metrics"]["choices"]["accuracy"]["value"] == pytest.approx(expected)
    assert list(breakdown(of, "category", 50)) == ["STEM", "social sciences", "uncategorised"]
    assert main(["metrics", str(path), "--by", "category"]) == 0
    assert "social sciences: 200 questions" in capsys.readouterr().out


def test_categories_are_the_57_subjects(shared_data):
    subjects = [name for names in CATEGORIES.values() for name in names.split()]
    data = shared_data("mmlu.tar.xz") / "test"
    assert sorted(subjects) == sorted(p.name.removesuffix("_test.csv") for p in data.iterdir())

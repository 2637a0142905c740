"""The study of written answers: its runs, its records, and tables that are made from them."""

import pandas as pd
import pytest
from studies.written import tables, training

from calibeval import summarize
from calibeval.io import json_lines, write_rows


def test_a_model_has_nine_runs_and_one_before_fine_tuning():
    plan, _ = training.plan_of("qwen2.5-coder-0.5b")
    settings = [
        (training.beta_of(run), run.config().train.get("seed"))
        for run in (*plan.baselines, *plan.runs)
    ]
    expected = [(beta, seed) for seed in range(3) for beta in (0.0, 0.1, 0.2)]
    assert settings[0][0] is None
    assert sorted(settings[1:]) == sorted(expected)
    assert all(run.config().train["learning_rate"] == 2e-5 for run in plan.runs)
    heads = {training.beta_of(run): len(training.heads_of(run)) for run in plan.runs}
    assert heads == {0.0: 2, 0.1: 2, 0.2: 0}
    assert training.heads_of(plan.baselines[0]) == ("transformer", "linear")


def test_packed_records_read_as_they_were_scored(tmp_path, monkeypatch):
    """A count of tokens or a missing agreement must not come back as another type."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "RECORDS", tmp_path / "records")
    plan, _ = training.plan_of("qwen2.5-coder-0.5b")
    run = plan.runs[0]
    rows = []
    for number in range(60):
        row = {"id": f"q{number}", "subject": "nq_open", "label": number % 3 % 2, "shots": 5}
        row.update(scoring="generate", normalise="tokens", prompt_sha256=f"{number:064}")
        row.update(logprobs=[-0.1 * (number % 7) - 0.1], tokens=[1 + number % 4], p_true=0.25)
        rows.append({**row, "model": run.name, "answer": "not published"})
    run.scores.mkdir(parents=True)
    write_rows(run.scores / "nq_open.jsonl", rows)
    training.pack("qwen2.5-coder-0.5b")
    count = len(rows)
    del rows[count // 2 :]
    rows[0]["prompt_sha256"] = "0" * 63 + "f"
    write_rows(run.scores / "nq_open.jsonl", rows)
    training.pack("qwen2.5-coder-0.5b")  # The questions of other records stay, once.
    answers = pd.read_parquet(tmp_path / "records" / "qwen2.5-coder-0.5b.parquet")
    questions = pd.read_parquet(tmp_path / "records" / "questions.parquet")
    assert len(questions) == count
    unpacked = tables.records_of("0.5B", answers.merge(questions, on=["task", "question"]))
    write_rows(tmp_path / "unpacked.jsonl", unpacked)
    for (_, row), scored in zip(json_lines(tmp_path / "unpacked.jsonl"), rows, strict=True):
        del scored["answer"]
        assert row == {**scored, "model": "0.5B"}
    found = summarize(tmp_path / "unpacked.jsonl")["choices"]
    assert found == summarize(run.scores / "nq_open.jsonl")["choices"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tables_of_two_tasks_are_what_the_records_say(tmp_path, monkeypatch):
    """Of the smaller model. Which cells are bold depends on the whole table, and is not compared;
    `python -m studies.written` makes all tables."""
    monkeypatch.setattr(tables, "OUT", tmp_path)
    model = "qwen2.5-coder-0.5b"
    answers = pd.read_parquet(training.RECORDS / f"{model}.parquet")
    some = answers[answers.task.isin(["nq_open", "truthfulqa_mc1"])]
    questions = pd.read_parquet(training.RECORDS / "questions.parquet")
    lines = tables.tables_of(model, some.merge(questions, on=["task", "question"]))
    published = tables.PAGE.read_text().split(f"## {model}: answers")[1].replace("**", "")
    rows = [line.replace("**", "") for line in lines if line.startswith("|")]
    assert [row for row in rows if row not in published] == []
    assert sum(row.startswith("| NQ-open") for row in rows) == 20
    assert sum(row.startswith("| TruthfulQA") for row in rows) == 8

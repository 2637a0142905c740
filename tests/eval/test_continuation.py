"""Choices by their own text, as lm-evaluation-harness asks them, against whole prompts."""

import json
import shutil

import pytest
from made_records import plain, scored, write_lines
from transformers import AutoTokenizer

from calibeval import prompts, scoring, tasks
from calibeval.io import InputError
from calibeval.prompts import Prompt
from calibeval.request import Task

ARC = [
    ("Which of the light mass is a force?", ["true cells", "the kings", "a law", "following"], "2"),
    ("Is the café true?", ["é", "statement about cells", "kings"], "1"),
    ("Which mass?", ["light light", "light force", "light", "kings law", "true"], "5"),
]


@pytest.fixture
def arc(tmp_path):
    """Items of 3, 4 and 5 choices, among them one that begins another, and two examples."""
    rows = []
    for i, (text, choices, answer) in enumerate(ARC * 4):
        listed = [{"text": t, "label": str(j + 1)} for j, t in enumerate(choices)]
        question = {"stem": f"{text} {i}", "choices": listed}
        rows.append({"id": f"q{i}", "question": question, "answerKey": answer})
    for split, part in (("Test", rows), ("Train", rows[:2])):
        renamed = [row | {"id": f"{split}/{row['id']}"} for row in part]
        write_lines(tmp_path / f"ARC-Easy-{split}.jsonl", renamed)
    return tmp_path


@pytest.fixture
def score(tiny_model, tmp_path):
    """score(*options) → records of the command, in r.jsonl."""
    return lambda *options: scored(tmp_path / "r.jsonl", "--model", tiny_model, *options)


@pytest.mark.parametrize("shots", [0, 2])
def test_equals_whole_prompts(arc, score, tiny_model, shots):
    rows = score("--task", "arc_easy", "--data", arc, *(["--shots", shots] * bool(shots)))
    assert len(rows) == 12
    for i, ((text, choices, answer), row) in enumerate(zip(ARC * 4, rows, strict=True)):
        context = "".join(
            f"Question: {text} {i}\nAnswer: {choices[int(answer) - 1]}\n\n"
            for i, (text, choices, answer) in enumerate(ARC[:shots])
        )
        context += f"Question: {text} {i}\nAnswer:"
        expected = [plain(tiny_model, context, f" {c}") for c in choices]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert row["characters"] == list(map(len, choices))
        assert row["bytes"] == [len(c.encode()) for c in choices]
        assert (row["scoring"], row["normalise"]) == ("continuation", "characters")
        assert row["shots"] == shots


def test_hellaswag_is_the_hubs_text(score, tmp_path, tiny_model):
    row = {"activity_label": "Ski", "ctx_a": "A man [title] sits.", "ctx_b": "he and THE", "ind": 3}
    row |= {"ctx": "A man [title] sits. he and THE", "endings": ["falls", "[x] goes", "is é", "up"]}
    rest = {k: v for k, v in row.items() if k not in ("ctx_a", "ctx_b")} | {"ind": 4}
    labelled = [one | {"label": "2"} for one in (row, rest)]
    data = write_lines(tmp_path / "hellaswag_val.jsonl", labelled)
    rows = score("--task", "hellaswag", "--data", data)
    endings = ["falls", " goes", "is é", "up"]
    for context, found in zip(("sits. He and the", "sits. he and THE"), rows, strict=True):
        expected = [plain(tiny_model, f"Ski: A man. {context}", f" {e}") for e in endings]
        assert found["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert found["characters"] == [5, 5, 4, 2] and found["bytes"] == [5, 5, 5, 2]


def test_the_tasks_conventions(arc, mmlu, score):
    for task, asked, how, normalise, shots in (
        ("arc_challenge", None, "continuation", "characters", 0),
        ("hellaswag", "letters", "letters", "sum", 5),
        ("mmlu", None, "letters", "sum", 5),
        ("jsonl", None, "letters", "sum", 5),
        ("mmlu", "continuation", "continuation", "sum", 0),
    ):
        of = Task(task=task, data="d", scoring=asked)
        assert tasks.resolved(of).scoring == how and tasks.resolved(of).shots == shots
        assert tasks.normalisation(of) == normalise
    rows = score("--task", "arc_easy", "--data", arc, "--scoring", "letters", "--shots", "2")
    assert "scoring" not in rows[0] and rows[0]["shots"] == 2
    (subject,) = tasks.load(Task(task="arc_easy", data=str(arc), shots=2))
    assert rows[5]["prompt_sha256"] == prompts.build(subject, subject.questions[5], 2).sha256
    subject = tasks.load(Task(task="mmlu", data=str(mmlu), shots=1))[1]
    shot = subject.shots[0]
    assert prompts.build(subject, subject.questions[0], 1, "continuation").text == (
        f"The following are questions (with answers) about old kings.\n\nQuestion: {shot.text}\n"
        f"Answer: {shot.choices[shot.label]}\n\nQuestion: {subject.questions[0].text}\nAnswer:"
    )


def test_spaces_at_the_contexts_end_go_to_the_choice(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    asked = Prompt(None, "light  ", 0, ("mass", "cells"))
    ((context, branches),) = prompts.continuations(tokenizer, [asked])
    assert context == tokenizer("light")["input_ids"]
    whole = tokenizer("light   mass")["input_ids"]
    assert branches[0] == tuple(whole[len(context) :])


def test_what_does_not_fit_is_cut(tiny_model, tmp_path, capsys):
    small = shutil.copytree(tiny_model, tmp_path / "small")
    config = json.loads((small / "config.json").read_text()) | {"max_position_embeddings": 121}
    (small / "config.json").write_text(json.dumps(config))
    rows = [
        {"question": "which " * n + "?", "choices": ["cells mass", "kings"], "answer": 0}
        for n in (3, 150, 5)
    ]
    data = write_lines(tmp_path / "q.jsonl", rows)
    options = ["--model", small, "--task", "jsonl", "--data", data, "--shots", "0"]
    for how in ("letters", "continuation"):
        found = scored(tmp_path / f"{how}.jsonl", *options, "--scoring", how)
        assert "warning: 1 of 3 questions do not fit in 120 tokens" in capsys.readouterr().err
        (cut,) = (row.get("truncated") for row in found if "truncated" in row)
        assert cut > 0 and [row["id"][-1] for row in found] == ["0", "1", "2"]
        (subject,) = tasks.load(Task(task="jsonl", data=str(data), shots=0))
        text = prompts.build(subject, subject.questions[1], 0, scoring=how).text
        choices = rows[1]["choices"] if how == "continuation" else ("A", "B")
        expected = [plain(tiny_model, text, f" {choice}", cut) for choice in choices]
        assert found[1]["logprobs"] == pytest.approx(expected, abs=1e-4)
    task, tokenizer = Task(task="jsonl", data=""), AutoTokenizer.from_pretrained(tiny_model)
    task = task.model_copy(update={"scoring": "continuation"})
    with pytest.raises(InputError, match="question general_knowledge/0: its choices take"):
        scoring.fit_prompts([subject], task, tokenizer, 2)

"""Choices by their own text, as lm-evaluation-harness asks them, against whole prompts."""

import json
import shutil

import pytest
from made_records import log_probability, scored, write_lines
from transformers import AutoTokenizer

from calibeval.ask import prompts, scoring, tasks
from calibeval.ask.prompts import ContinuationScoring, Prompt
from calibeval.ask.questions import Headers, Question, Subject
from calibeval.ask.request import Task
from calibeval.io import InputError

ARC = [
    ("Which of the light mass is a force?", ["true cells", "the kings", "a law", "following"], "2"),
    ("Is the café true?", ["é", "statement about cells", "kings"], "1"),
    ("Which mass?", ["light light", "light force", "light", "kings law", "true"], "5"),
]


@pytest.fixture
def arc(tmp_path):
    """Items of 3, 4 and 5 choices, among them one that begins another, and two examples."""
    rows = []
    for number, (text, choices, answer) in enumerate(ARC * 4):
        labeled = [
            {"text": choice, "label": str(label)} for label, choice in enumerate(choices, start=1)
        ]
        question = {"stem": f"{text} {number}", "choices": labeled}
        rows.append({"id": f"q{number}", "question": question, "answerKey": answer})
    for split, part in (("Test", rows), ("Train", rows[:2])):
        renamed = [{**row, "id": f"{split}/{row['id']}"} for row in part]
        write_lines(tmp_path / f"ARC-Easy-{split}.jsonl", renamed)
    return tmp_path


@pytest.fixture
def score(tiny_model, tmp_path):
    """score(*options) → records of the command, in r.jsonl."""
    return lambda *options: scored(tmp_path / "r.jsonl", "--model", tiny_model, *options)


@pytest.mark.parametrize("shots", [0, 2])
def test_equals_whole_prompts(arc, score, tiny_model, shots):
    rows = score("--task", "arc_easy", "--data", arc, "--shots", shots)
    examples = ""
    for number, (text, choices, answer) in enumerate(ARC[:shots]):
        examples += f"Question: {text} {number}\nAnswer: {choices[int(answer) - 1]}\n\n"
    assert len(rows) == 12
    for number, ((text, choices, _), row) in enumerate(zip(ARC * 4, rows, strict=True)):
        context = f"{examples}Question: {text} {number}\nAnswer:"
        expected = [log_probability(tiny_model, context, f" {choice}") for choice in choices]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert row["characters"] == [len(choice) for choice in choices]
        assert row["bytes"] == [len(choice.encode()) for choice in choices]
        assert (row["scoring"], row["normalise"]) == ("continuation", "characters")
        assert row["shots"] == shots


def test_hellaswag_is_the_hubs_text(tmp_path):
    row = {"activity_label": "Ski", "endings": ["falls", "[x] goes"], "label": "1"}
    whole = {**row, "ctx": "A man [title] sits. he and THE"}
    in_parts = {**whole, "ctx_a": "A man [title] sits.", "ctx_b": "he and THE"}
    rows = [{**in_parts, "ind": 3}, {**whole, "ind": 4}]
    data = write_lines(tmp_path / "hellaswag_val.jsonl", rows)
    (subject,) = tasks.load(Task(task="hellaswag", data=str(data), shots=0))
    built = [
        prompts.ContinuationScoring.build(subject, question, 0) for question in subject.questions
    ]
    contexts = ["Ski: A man. sits. He and the", "Ski: A man. sits. he and THE"]
    assert [prompt.text for prompt in built] == contexts
    assert built[0].endings == ("falls", " goes")


@pytest.mark.parametrize(
    ("task", "asked", "scoring_mode", "normalise", "shots"),
    [
        ("arc_challenge", None, "continuation", "characters", 0),
        ("hellaswag", "letters", "letters", "sum", 5),
        ("mmlu", None, "letters", "sum", 5),
        ("jsonl", None, "letters", "sum", 5),
        ("mmlu", "continuation", "continuation", "sum", 0),
    ],
)
def test_the_tasks_conventions(task, asked, scoring_mode, normalise, shots):
    task = Task(task=task, data="d", scoring=asked)
    assert tasks.resolved(task).scoring == scoring_mode
    assert tasks.resolved(task).shots == shots
    assert tasks.normaliser_of(task) == normalise


@pytest.mark.parametrize(
    ("keys", "context", "texts"),
    [
        ("", "light ", [" mass", " cells"]),  # two spaces were scored
        ("", "light", [" mass", " cells"]),
        ("delimiter: ''", "光:", ["质", "量"]),
        ("delimiter: ' '", "light ", ["  mass", "  cells"]),  # lm-evaluation-harness's
    ],
)
def test_what_stands_between_context_and_choice(score, tiny_model, tmp_path, keys, context, texts):
    task = tmp_path / "task.yaml"
    task.write_text(f"scoring: continuation\n{keys}\n")
    row = {"question": "?", "choices": [text.strip() for text in texts], "answer": 0}
    data = write_lines(tmp_path / "q.jsonl", [{**row, "context": context}])
    (record,) = score("--task", task, "--data", data)
    expected = [log_probability(tiny_model, context.rstrip(), text) for text in texts]
    assert record["logprobs"] == pytest.approx(expected, abs=1e-4)
    (subject,) = tasks.load(Task(task=str(task), data=str(data)))
    # Which questions were asked alike is told by this digest.
    with_space = Prompt(subject.questions[0], context, 0, subject.questions[0].endings)
    scores_space = texts == [f"{context[5:]} mass", f"{context[5:]} cells"]
    assert (record["prompt_sha256"] == with_space.sha256) == scores_space


def test_the_delimiter_stands_in_examples_too(tmp_path):
    task = tmp_path / "task.yaml"
    task.write_text("delimiter: ''\nshots: 1\nheaders: {letters: ''}\n")
    row = {"question": "光?", "choices": ["质", "量"], "answer": 1}
    examples = write_lines(tmp_path / "e.jsonl", [{**row, "id": "e"}])
    data = write_lines(tmp_path / "q.jsonl", [{**row, "question": "质?"}])
    (subject,) = tasks.load(Task(task=str(task), data=str(data), examples=str(examples)))
    letters = prompts.LetterScoring.build(subject, subject.questions[0], 1)
    assert letters.text.startswith("光?\nA. 质\nB. 量\nAnswer:B\n\n质?")
    assert letters.separator == ""
    texts = prompts.ContinuationScoring.build(subject, subject.questions[0], 1)
    assert texts.text.startswith("Question: 光?\nAnswer:量\n\nQuestion: 质?")


@pytest.mark.parametrize(
    ("context", "separator", "endings"),
    [
        ("the li", "", ("ght", "tter", "x")),  # the context's end and a choice are one token
        ("the light", "", ("s", " mass")),
        ("the light", " ", ("mass", "cells")),
        ("the light ", "", ("mass", "cells")),
    ],
)
def test_all_of_a_choice_is_scored(tiny_model, context, separator, endings):
    """The characters that were one token with the context's end were neither read nor scored."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    question = Question("id", "subject", "light", endings, 0, context, endings)
    prompt = Prompt(question, context, 0, endings, separator)
    (tokenized,) = ContinuationScoring(tokenizer).tokenize([prompt])
    for ending, branch in zip(endings, tokenized.branches, strict=True):
        whole = tokenizer(context + separator + ending)["input_ids"]
        assert [*tokenized.context, *branch] == whole


LONG_SECOND_QUESTION = [
    {"question": "which " * words + "?", "choices": ["cells mass", "kings"], "answer": 0}
    for words in (3, 150, 5)
]


@pytest.mark.parametrize(
    ("scoring_mode", "scored_texts"),
    [("letters", ["A", "B"]), ("continuation", ["cells mass", "kings"])],
)
def test_what_does_not_fit_is_cut(tiny_model, tmp_path, capsys, scoring_mode, scored_texts):
    small = shutil.copytree(tiny_model, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    config["max_position_embeddings"] = 121
    (small / "config.json").write_text(json.dumps(config))
    data = write_lines(tmp_path / "q.jsonl", LONG_SECOND_QUESTION)
    options = ["--task", "jsonl", "--data", data, "--shots", "0", "--scoring", scoring_mode]
    rows = scored(tmp_path / "r.jsonl", "--model", small, *options)
    assert "warning: 1 of 3 questions do not fit in 120 tokens" in capsys.readouterr().err
    assert [row["id"][-1] for row in rows] == ["0", "1", "2"]
    assert ["truncated" in row for row in rows] == [False, True, False]
    cut = rows[1]["truncated"]
    assert cut > 0
    (subject,) = tasks.load(Task(task="jsonl", data=str(data), shots=0))
    context = prompts.SCORING_MODES[scoring_mode].build(subject, subject.questions[1], 0).text
    expected = [log_probability(tiny_model, context, f" {text}", cut) for text in scored_texts]
    assert rows[1]["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_choices_that_do_not_fit_by_themselves_are_refused(tiny_model, tmp_path):
    data = write_lines(tmp_path / "q.jsonl", LONG_SECOND_QUESTION)
    task = Task(task="jsonl", data=str(data), shots=0, scoring="continuation")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(InputError, match="question general_knowledge/0: its choices take"):
        scoring.fit_prompts(tasks.load(task), task, tokenizer, 2)


def test_a_context_without_tokens_is_named(tiny_model):
    """Nothing is there that the first token of a choice could follow."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)  # adds no start token
    endings = ("mass", "cells")
    question = Question("q0", "s", "light", endings, 0, " ", endings)
    subject = Subject("s", (), (question,), Headers("", "", ""))
    task = Task(task="jsonl", data="d", scoring="continuation", shots=0)
    with pytest.raises(InputError, match="question q0: no token stands before its choices: "):
        scoring.fit_prompts([subject], task, tokenizer, None)

"""The engine against the plain way: one whole prompt, one forward, all logits."""

import json
import math

import pytest
import torch
import transformers
from made_records import plain, scored

from calibeval import prompts, scoring, tasks
from calibeval.engines import context_length
from calibeval.request import Task


@pytest.fixture
def score(mmlu, tiny_model, tmp_path):
    """score(*options) → records of the command, in r.jsonl."""
    given = ["--model", tiny_model, "--task", "mmlu", "--data", mmlu]
    return lambda *options: scored(tmp_path / "r.jsonl", *given, *options)


@pytest.mark.parametrize("options", [(), ("--shots", "0"), ("--batch-size", "1")])
def test_equals_the_plain_way(mmlu, tiny_model, score, options):
    rows = score(*options)
    shots = int(options[1]) if "--shots" in options else 5
    subjects = tasks.load(Task(task="mmlu", data=str(mmlu), shots=shots))
    questions = [(s, q) for s in subjects for q in s.questions]
    assert [row["id"] for row in rows] == [q.id for _, q in questions]
    for (subject, question), row in list(zip(questions, rows, strict=True))[::9]:
        prompt = prompts.build(subject, question, shots)
        expected = [plain(tiny_model, prompt.text, f" {letter}") for letter in "ABCD"]
        assert row["logprobs"] == pytest.approx(expected, abs=2e-5)
        assert row["letter_mass"] == pytest.approx(sum(map(math.exp, expected)), abs=1e-5)
        assert row["prompt_sha256"] == prompt.sha256 and row["label"] == question.label
        assert row["model"] == str(tiny_model) and row["versions"]["torch"] == torch.__version__


def test_shots_are_dropped_until_the_prompt_fits(mmlu, tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    task = Task(task="mmlu", data=str(mmlu))
    subjects = tasks.load(task)
    lengths = [
        [len(tokenizer(prompts.build(s, q, k).text)["input_ids"]) for k in range(6)]
        for s in subjects
        for q in s.questions
    ]
    limit = sorted(row[3] for row in lengths)[len(lengths) // 2]
    items = scoring.fit_prompts(subjects, task, tokenizer, limit)
    expected = [max(k for k in range(6) if row[k] <= limit) for row in lengths]
    assert [item.prompt.shots for item in items] == expected and len(set(expected)) > 1
    questions = [(s, q) for s in subjects for q in s.questions]
    for (s, q), item, k in zip(questions, items, expected, strict=True):
        assert item.prompt == prompts.build(s, q, k)


def test_bfloat16_keeps_logits_in_float32(score, tmp_path):
    """bfloat16 logits near 20 are 0.125 apart: only the layers below stay in bfloat16."""
    rows = score("--dtype", "bfloat16", "--limit", "3")
    settings = json.loads((tmp_path / "r.jsonl.meta.json").read_text())["settings"]
    made = settings["engine_settings"]
    assert made["dtype"] == "bfloat16" and made["head_dtype"] == "float32"
    gaps = [row["logprobs"][i] - row["logprobs"][0] for row in rows for i in (1, 2, 3)]
    assert any(abs(gap * 256 - round(gap * 256)) > 0.01 for gap in gaps)


def test_context_length_of_configs_with_parts():
    small = {"max_position_embeddings": 512}
    assert context_length(transformers.Gemma3Config(text_config=small)) == 511
    assert context_length(transformers.Mistral3Config(text_config=small)) == 511
    assert context_length(transformers.Qwen2VLConfig(text_config=small)) == 511
    assert context_length(transformers.GPT2Config(n_positions=300)) == 299
    assert context_length(transformers.BloomConfig()) is None

"""The engine against the plain way: one whole prompt, one forward, all logits."""

import json
import math
import shutil

import pytest
import torch
import transformers
from made_records import log_probability, scored

from calibeval.ask import prompts, scoring, tasks
from calibeval.ask.engines import load_config, load_tokenizer, prompt_limit
from calibeval.ask.engines.hf_model import load_model
from calibeval.ask.request import Task
from calibeval.io import InputError


@pytest.fixture
def score(mmlu, tiny_model, tmp_path):
    """score(*options) → records of the command, in r.jsonl."""
    given = ["--model", tiny_model, "--task", "mmlu", "--data", mmlu]
    return lambda *options: scored(tmp_path / "r.jsonl", *given, *options)


def load_questions(data, shots: int) -> list[tuple]:
    """(subject, question) of all questions of MMLU's data."""
    subjects = tasks.load(Task(task="mmlu", data=str(data), shots=shots))
    return [(subject, question) for subject in subjects for question in subject.questions]


@pytest.mark.parametrize(
    ("shots", "options"), [(5, []), (0, ["--shots", "0"]), (5, ["--batch-size", "1"])]
)
def test_equals_the_plain_way(mmlu, tiny_model, score, shots, options):
    rows = score(*options)
    questions = load_questions(mmlu, shots)
    assert [row["id"] for row in rows] == [question.id for _, question in questions]
    for (subject, question), row in list(zip(questions, rows, strict=True))[::9]:
        prompt = prompts.LetterScoring.build(subject, question, shots)
        expected = [log_probability(tiny_model, prompt.text, f" {letter}") for letter in "ABCD"]
        assert row["logprobs"] == pytest.approx(expected, abs=2e-5)
        assert row["letter_mass"] == pytest.approx(sum(map(math.exp, expected)), abs=1e-5)
        assert row["prompt_sha256"] == prompt.sha256
        assert row["label"] == question.label
        assert row["model"] == str(tiny_model)
        assert row["versions"]["torch"] == torch.__version__


def test_shots_are_dropped_until_the_prompt_fits(mmlu, tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    task = Task(task="mmlu", data=str(mmlu))
    questions = load_questions(mmlu, shots=5)

    def length(subject, question, shots: int) -> int:
        return len(
            tokenizer(prompts.LetterScoring.build(subject, question, shots).text)["input_ids"]
        )

    # Half of the questions fit with three examples.
    lengths_with_three = sorted(length(*question, 3) for question in questions)
    limit = lengths_with_three[len(questions) // 2]
    expected = []
    for subject, question in questions:
        most = max(shots for shots in range(6) if length(subject, question, shots) <= limit)
        expected.append(prompts.LetterScoring.build(subject, question, most))
    items = scoring.fit_prompts(tasks.load(task), task, tokenizer, limit)
    assert [item.prompt for item in items] == expected
    assert len({item.prompt.shots for item in items}) > 1


def test_bfloat16_keeps_logits_in_float32(score, tmp_path):
    """bfloat16 logits near 20 are 0.125 apart: only the layers below stay in bfloat16."""
    rows = score("--dtype", "bfloat16", "--limit", "3")
    settings = json.loads((tmp_path / "r.jsonl.meta.json").read_text())["settings"]
    assert settings["engine_settings"]["dtype"] == "bfloat16"
    assert settings["engine_settings"]["head_dtype"] == "float32"
    differences = []
    for row in rows:
        first, *others = row["logprobs"]
        differences += [other - first for other in others]
    # Differences of bfloat16 logits would be multiples of 1 / 256.
    assert any(abs(gap * 256 - round(gap * 256)) > 0.01 for gap in differences)


def test_prompt_limit_of_configs_with_parts():
    small = {"max_position_embeddings": 512}
    assert prompt_limit(transformers.Gemma3Config(text_config=small)) == 511
    assert prompt_limit(transformers.Mistral3Config(text_config=small)) == 511
    assert prompt_limit(transformers.Qwen2VLConfig(text_config=small)) == 511
    assert prompt_limit(transformers.GPT2Config(n_positions=300)) == 299
    assert prompt_limit(transformers.BloomConfig()) is None


@pytest.mark.parametrize(
    "part",
    [load_config, load_tokenizer, lambda model: load_model(model, "auto", None)],
    ids=["config", "tokenizer", "model"],
)
def test_a_models_own_code_is_not_run_whatever_is_typed(tiny_model, tmp_path, monkeypatch, part):
    """transformers asks "[y/N]", and ran it where a pipe held a y."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    own_classes = {
        "config.json": {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["planted.Tokenizer", None]},
    }
    for name, auto_map in own_classes.items():
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": auto_map, "tokenizer_class": "Planted", "model_type": "planted"}
        (folder / name).write_text(json.dumps(content))
    mark = tmp_path / "ran"
    (folder / "planted.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(InputError, match=f"{folder}: brings code of its own"):
        part(str(folder))
    assert not mark.exists()

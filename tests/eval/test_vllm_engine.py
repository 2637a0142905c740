"""Real vLLM on CPU against the transformers engine: same records, cached prefixes.

Runs in an environment with vLLM; tests/eval/vllm_env.sh makes one.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_records import read_lines, write_lines

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

ENVIRONMENT = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}


def run_command(model: Path, data: Path, out: Path, *options: object):
    """The command, run as a user runs it; a later option counts."""
    command = [sys.executable, "-m", "calibeval", "score", "--task", "mmlu"]
    command += ["--model", model, "--data", data, "--out", out, *options]
    words = [str(word) for word in command]
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.fixture
def score_with_both(tmp_path):
    """score_with_both(model, data, *options) → the records of vLLM and of transformers."""

    def score(model: Path, data: Path, *options: object) -> tuple[list[dict], list[dict]]:
        records = []
        for engine in ("vllm", "transformers"):
            out = tmp_path / f"{engine}.jsonl"
            done = run_command(model, data, out, "--engine", engine, *options)
            assert done.returncode == 0, done.stderr[-3000:]
            records.append(read_lines(out))
        return records[0], records[1]

    return score


def assert_equal(ours: list[dict], theirs: list[dict], *keys: str, within: float = 1e-3) -> None:
    """Same questions in the same order, and probabilities within so much."""
    for one, other in zip(ours, theirs, strict=True):
        for key in ("id", "subject", "label", "prompt_sha256", "shots", *keys):
            assert one[key] == other[key]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=within)
        assert one.keys() == other.keys()
        if "letter_mass" in one:  # texts have none
            assert one["letter_mass"] == pytest.approx(other["letter_mass"], abs=within)


def test_same_records(tiny_model, mmlu, tmp_path, score_with_both):
    vllm, transformers = score_with_both(tiny_model, mmlu)
    assert_equal(vllm, transformers)
    assert len(vllm) == 60
    assert vllm[0]["versions"]["vllm"]
    sidecar = json.loads((tmp_path / "vllm.jsonl.meta.json").read_text())
    settings = sidecar["settings"]["engine_settings"]
    assert settings["engine"] == "vllm"
    assert settings["head_dtype"] == "float32"


@pytest.fixture
def model_with_split_letters(tiny_model, tmp_path):
    """The model with a tokenizer that spells " A" and " C" as two tokens: "Ġ", "A"."""
    folder = tmp_path / "split"
    shutil.copytree(tiny_model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    kept = [merge for merge in merges if merge not in (["Ġ", "A"], ["Ġ", "C"])]
    assert len(merges) - len(kept) == 2
    tokenizer["model"]["merges"] = kept
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_letters_of_two_tokens(model_with_split_letters, tmp_path, score_with_both):
    """Questions of two subjects in shuffled order, with 2 to 5 choices."""
    rng = random.Random(0)
    rows = []
    for number in range(30):
        choices = [str(number + step) for step in range(rng.randint(2, 5))]
        row = {"question": f"Which number is {number}?", "choices": choices, "answer": 0}
        rows.append({**row, "subject": rng.choice(["sums", "kings"])})
    data = write_lines(tmp_path / "q.jsonl", rows)
    options = ["--task", "jsonl", "--shots", "0"]
    vllm, transformers = score_with_both(model_with_split_letters, data, *options)
    assert_equal(vllm, transformers)
    assert {len(row["logprobs"]) for row in vllm} == {2, 3, 4, 5}


def test_continuation(tiny_model, tmp_path, score_with_both):
    """Choices of one to many tokens, some beginning alike, with contexts around the two blocks of
    128 tokens that vLLM caches on a CPU."""
    rng = random.Random(1)
    words = ("which", "true", "statement", "about", "force", "mass", "light")

    def sentence(length: int) -> str:
        return " ".join(rng.choices(words, k=length))

    rows = []
    for number in range(40):
        question = sentence(235 + number) + "?"
        choices = [sentence(length) for length in (1, 7, 20, 18)]
        choices.append(choices[3] + " and light")
        rows.append({"question": question, "choices": choices, "answer": 0})
    data = write_lines(tmp_path / "q.jsonl", rows)
    options = ["--task", "jsonl", "--scoring", "continuation"]
    vllm, transformers = score_with_both(tiny_model, data, *options)
    assert_equal(vllm, transformers, "bytes", "characters", "normalise", within=2e-3)


@pytest.mark.parametrize("kind", ["letters", "split letters", "continuation"])
def test_prompts_as_long_as_the_model_takes(
    kind, tiny_model, model_with_split_letters, tmp_path, score_with_both
):
    """Every prompt is cut to the model's context, so none leaves room to spare."""
    model = model_with_split_letters if kind == "split letters" else tiny_model
    short = tmp_path / "short"
    shutil.copytree(model, short)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 64
    (short / "config.json").write_text(json.dumps(config))
    rows = []
    for number in range(3):
        question = " ".join(["which true statement about light"] * (30 + number))
        choices = ["force", "mass and light", "light"]
        rows.append({"question": question, "choices": choices, "answer": 0})
    data = write_lines(tmp_path / "q.jsonl", rows)
    scoring = "continuation" if kind == "continuation" else "letters"
    options = ["--task", "jsonl", "--shots", "0", "--scoring", scoring]
    vllm, transformers = score_with_both(short, data, *options)
    assert all(row["truncated"] > 60 for row in vllm)
    assert_equal(vllm, transformers, "truncated", within=2e-3)


# Its end becomes part of the letter's token: the tiny model has " A", but no letter alone.
CHAT = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("scoring", ["letters", "continuation"])
def test_chats(tiny_model, mmlu, tmp_path, score_with_both, scoring):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    options = ["--chat-template", template, "--system", "Answer.", "--scoring", scoring]
    vllm, transformers = score_with_both(tiny_model, mmlu, *options, "--shots", "2")
    assert_equal(vllm, transformers, "chat_template", within=2e-3)
    assert len({row["chat_template"] for row in vllm}) == 1


# Contexts share more than two blocks of vLLM's cache, and letters, which read it, stand between the
# texts; the second time everything was there before.
ORDER_SCRIPT = """
import random
import sys
from calibeval.ask.engines import Job
from calibeval.ask.engines.vllm import VllmEngine

def main(model):
    rng = random.Random(2)
    shared = tuple(rng.choices(range(20, 300), k=300))
    jobs = []
    for index in range(8):
        context = shared + tuple(rng.choices(range(20, 300), k=40 * index))
        texts = tuple(tuple(rng.choices(range(20, 300), k=length)) for length in (1, 9, 140))
        jobs.append(Job(2 * index, context, texts))
        jobs.append(Job(2 * index + 1, context, ((8,), (9,))))
    engine = VllmEngine(model, max_model_length=900)
    forwards = dict(engine.score([jobs]))
    backwards = dict(engine.score([jobs[::-1]]))
    engine.close()
    # What vLLM reads together depends on time, and the last digits of a sum on that.
    for index in range(0, 16, 2):
        for one, other in zip(forwards[index], backwards[index], strict=True):
            assert abs(one - other) < 1e-4, (index, forwards[index], backwards[index])
    print("done")

if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_scores_of_texts_do_not_depend_on_their_order(tiny_model, tmp_path):
    """Whatever the prefix cache holds: the same texts, backwards, in the same process."""
    script = tmp_path / "order.py"
    script.write_text(ORDER_SCRIPT)
    command = [sys.executable, str(script), str(tiny_model)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout


# vLLM's workers use Intel's AMX unasked, and may die of SIGILL: the first line asks.
BFLOAT16_SCRIPT = """
import torch; torch.cpu._init_amx()
import sys
from calibeval.ask.engines import Job
from calibeval.ask.engines.hf import TransformersEngine
from calibeval.ask.engines.vllm import VllmEngine

def main(model):
    branches = ((8,), (9,), (10, 11), (12, 9))
    jobs = [Job(index, (5, 6 + index, 7), branches) for index in range(9)]
    expected = dict(TransformersEngine(model, dtype="bfloat16").score([jobs]))
    engine = VllmEngine(model, dtype="bfloat16", max_model_length=20)
    scores = dict(engine.score([jobs]))
    assert engine.describe()["head_dtype"] == "float32", engine.describe()
    # Differences of bfloat16 logits would be multiples of 1 / 256.
    gaps = [scores[index][1] - scores[index][0] for index in range(9)]
    assert any(abs(gap * 256 - round(gap * 256)) > 0.01 for gap in gaps), gaps
    for index in range(9):
        for score, other in zip(scores[index], expected[index], strict=True):
            assert abs(score - other) < 0.2, (index, score, other)
    engine.close()
    print("done")

if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_logits_of_a_bfloat16_model_are_float32(tiny_model, tmp_path):
    script = tmp_path / "head.py"
    script.write_text(BFLOAT16_SCRIPT)
    command = [sys.executable, str(script), str(tiny_model)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout


def test_written_answers_are_the_same(tiny_model, tmp_path, score_with_both):
    """Greedy answers, their likelihood and p(True); samples are other draws."""
    questions = [{"question": f"Which force {n}?", "aliases": ["a law"]} for n in range(6)]
    write_lines(tmp_path / "questions.jsonl", questions)
    task = tmp_path / "own.yaml"
    task.write_text(
        "data: {path: questions.jsonl}\nscoring: generate\nnormalise: tokens\n"
        'stop: ["e"]\nmax_tokens: 12\nshots: 0\n'
    )
    options = ("--task", task, "--samples", "3")
    vllm, transformers = score_with_both(tiny_model, tmp_path / "questions.jsonl", *options)
    assert_equal(vllm, transformers, "answer", "tokens")
    for one, other in zip(vllm, transformers, strict=True):
        assert one["p_true"] == pytest.approx(other["p_true"], abs=1e-3)
        assert one.get("cut") == other.get("cut")
        assert len(one["samples"]) == 3
    assert any(len(set(one["samples"])) > 1 for one in vllm)

"""Real vLLM on CPU against the transformers engine: same records, cached prefixes.

Runs in an environment with vLLM; tests/eval/vllm_env.sh makes one. Starting vLLM takes longer than
all that it is asked here, so that each test starts it once.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from made_records import read_lines, write_lines

import calibeval
from calibeval.ask.engines import Job
from calibeval.ask.engines.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture
def score_with_both(tmp_path):
    """score_with_both(model, *tasks) → of each task, the records of vLLM and of transformers."""

    def score(model: Path, *tasks: dict) -> list[tuple[list[dict], list[dict]]]:
        folders = [tmp_path / "vllm", tmp_path / "transformers"]
        for folder in folders:
            engine = folder.name
            calibeval.score(model, tasks=tasks, out=folder, engine=engine, progress=False)
        records = []
        for task in tasks:
            vllm, transformers = (
                read_lines(folder / f"{task['name']}.jsonl") for folder in folders
            )
            records.append((vllm, transformers))
        return records

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


def test_the_command_writes_the_same_records(tiny_model, mmlu, tmp_path):
    """As a user runs it, in a process of its own that ends by itself."""
    records = []
    for engine in ("vllm", "transformers"):
        out = tmp_path / f"{engine}.jsonl"
        command = [sys.executable, "-m", "calibeval", "score", "--task", "mmlu", "--engine", engine]
        command += ["--model", tiny_model, "--data", mmlu, "--out", out]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        records.append(read_lines(out))
    vllm, transformers = records
    assert_equal(vllm, transformers)
    assert len(vllm) == 60
    assert vllm[0]["versions"]["vllm"]
    sidecar = json.loads((tmp_path / "vllm.jsonl.meta.json").read_text())
    settings = sidecar["settings"]["engine_settings"]
    assert settings["engine"] == "vllm"
    assert settings["head_dtype"] == "float32"


def long_texts(folder: Path) -> dict:
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
    data = write_lines(folder / "texts.jsonl", rows)
    return {"task": "jsonl", "name": "texts", "data": str(data), "scoring": "continuation"}


def answers_to_write(folder: Path) -> dict:
    """Questions that the model answers in words, with three samples of each answer."""
    questions = [{"question": f"Which force {n}?", "aliases": ["a law"]} for n in range(6)]
    write_lines(folder / "questions.jsonl", questions)
    task = folder / "written.yaml"
    task.write_text(
        "data: {path: questions.jsonl}\nscoring: generate\nnormalise: tokens\n"
        'stop: ["e"]\nmax_tokens: 12\nshots: 0\n'
    )
    data = folder / "questions.jsonl"
    return {"task": str(task), "name": "written", "data": str(data), "samples": 3}


# Its end becomes part of the letter's token: the tiny model has " A", but no letter alone.
CHAT = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_texts_chats_and_written_answers(tiny_model, mmlu, tmp_path, score_with_both):
    """Answers are written greedily, with their likelihood and p(True); samples are other draws."""
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    chat = {"task": "mmlu", "name": "chat", "data": str(mmlu), "shots": 2}
    chat.update(chat_template=str(template), system="Answer.")
    tasks = (long_texts(tmp_path), chat, answers_to_write(tmp_path))
    texts, chats, written = score_with_both(tiny_model, *tasks)
    assert_equal(*texts, "bytes", "characters", "normalise", within=2e-3)
    assert_equal(*chats, "chat_template", within=2e-3)
    assert_equal(*written, "answer", "tokens")
    for one, other in zip(*written, strict=True):
        assert one["p_true"] == pytest.approx(other["p_true"], abs=1e-3)
        assert one.get("cut") == other.get("cut")
        assert len(one["samples"]) == 3
    assert any(len(set(one["samples"])) > 1 for one in written[0])


def with_split_letters(folder: Path) -> None:
    """Give a model a tokenizer that spells " A" and " C" as two tokens: "Ġ", "A"."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    kept = [merge for merge in merges if merge not in (["Ġ", "A"], ["Ġ", "C"])]
    assert len(merges) - len(kept) == 2
    tokenizer["model"]["merges"] = kept
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_short_context(folder: Path) -> None:
    """Let a model take no more than 128 tokens."""
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 128
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("letters_are_split", [False, True])
def test_prompts_as_long_as_the_model_takes(
    letters_are_split, tiny_model, tmp_path, score_with_both
):
    """Every long prompt is cut to the model's context, so none leaves room to spare. The others
    have 2 to 5 choices."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with_short_context(model)
    if letters_are_split:
        with_split_letters(model)
    rng = random.Random(0)
    rows = []
    for number in range(33):
        question = f"Which number is {number}?"
        if number >= 30:
            question = " ".join(["which true statement about light"] * number)
        choices = [str(number + step) for step in range(rng.randint(2, 5))]
        row = {"question": question, "choices": choices, "answer": 0}
        rows.append({**row, "subject": rng.choice(["sums", "kings"])})
    data = write_lines(tmp_path / "q.jsonl", rows)
    task = {"task": "jsonl", "data": str(data), "shots": 0}
    letters = {**task, "name": "letters", "scoring": "letters"}
    texts = {**task, "name": "texts", "scoring": "continuation"}
    for vllm, transformers in score_with_both(model, letters, texts):
        assert_equal(vllm, transformers, within=2e-3)
        cut = [row["truncated"] for row in vllm if "truncated" in row]
        assert cut == [row["truncated"] for row in transformers if "truncated" in row]
        assert len(cut) == 3
        assert min(cut) > 60
        assert {len(row["logprobs"]) for row in vllm} == {2, 3, 4, 5}


def test_scores_of_texts_do_not_depend_on_their_order(tiny_model):
    """Whatever the prefix cache holds: the same texts, backwards, by the same engine.

    Contexts share more than two blocks of vLLM's cache, and letters, which read it, stand between
    the texts; the second time everything was there before.
    """
    rng = random.Random(2)
    shared = tuple(rng.choices(range(20, 300), k=300))
    jobs = []
    for index in range(8):
        context = shared + tuple(rng.choices(range(20, 300), k=40 * index))
        texts = tuple(tuple(rng.choices(range(20, 300), k=length)) for length in (1, 9, 140))
        jobs.append(Job(2 * index, context, texts))
        jobs.append(Job(2 * index + 1, context, ((8,), (9,))))
    engine = VllmEngine(str(tiny_model), max_model_length=900)
    forwards = dict(engine.score([jobs]))
    backwards = dict(engine.score([jobs[::-1]]))
    engine.close()
    # What vLLM reads together depends on time, and the last digits of a sum on that.
    for index in range(0, 16, 2):
        assert backwards[index] == pytest.approx(forwards[index], abs=1e-4)


# vLLM's workers use Intel's AMX unasked, and may die of SIGILL where a process has not asked Linux
# for it. They are spawned, and so read the script's first line too, which asks.
BFLOAT16_SCRIPT = """
import torch; torch.cpu._init_amx()
import json
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
    engine.close()
    print(json.dumps([[expected[index], scores[index]] for index in range(9)]))

if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_logits_of_a_bfloat16_model_are_float32(tiny_model, tmp_path):
    script = tmp_path / "head.py"
    script.write_text(BFLOAT16_SCRIPT)
    command = [sys.executable, str(script), str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    fine_gaps = 0
    for expected, scores in json.loads(done.stdout.splitlines()[-1]):
        assert scores == pytest.approx(expected, abs=0.2)
        # The difference of two bfloat16 logits above 0.5 is a multiple of 1 / 256.
        steps = (scores[1] - scores[0]) * 256
        fine_gaps += abs(steps - round(steps)) > 0.01
    assert fine_gaps >= 6

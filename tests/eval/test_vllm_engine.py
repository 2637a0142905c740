"""Real vLLM on CPU against the transformers engine: same records, cached prefixes.

Runs in an environment with vLLM; tests/eval/vllm_env.sh makes one.
"""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
from made_records import read_lines, write_lines

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")


def score(model, data, out, *options) -> list[dict]:
    """Records of the command, run as a user runs it."""
    command = [sys.executable, "-m", "calibeval", "score", "--task", "mmlu"]
    command += ["--model", model, "--data", data, "--out", out, *options]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [str(c) for c in command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_lines(out)


def assert_equal(ours: list[dict], theirs: list[dict], *keys: str, within: float = 1e-3) -> None:
    """Same questions in the same order, and probabilities within so much."""
    for a, b in zip(ours, theirs, strict=True):
        for key in ("id", "subject", "label", "prompt_sha256", "shots", *keys):
            assert a[key] == b[key]
        for key in ("logprobs", "letter_mass"):
            assert a[key] == pytest.approx(b[key], abs=within)


def test_same_records(tiny_model, mmlu, tmp_path):
    vllm = score(tiny_model, mmlu, tmp_path / "v.jsonl", "--engine", "vllm")
    transformers = score(tiny_model, mmlu, tmp_path / "t.jsonl")
    assert_equal(vllm, transformers)
    assert len(vllm) == 60 and vllm[0]["versions"]["vllm"]
    meta = json.loads((tmp_path / "v.jsonl.meta.json").read_text())
    settings = meta["settings"]["engine_settings"]
    assert settings["engine"] == "vllm" and settings["head_dtype"] == "float32"


def test_a_model_that_vllm_cannot_run(tiny_model, mmlu, tmp_path):
    """One line, where an engine's start fails in a process of its own."""
    path = tmp_path / "unknown"
    shutil.copytree(tiny_model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    command = ["score", "--task", "mmlu", "--data", mmlu, "--model", path, "--engine", "vllm"]
    done = subprocess.run(
        [sys.executable, "-m", "calibeval", *map(str, command), "--out", str(tmp_path / "r.jsonl")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"error: {path}: vLLM " in done.stderr.splitlines()[-1]


def test_letters_of_two_tokens(tiny_model, tmp_path):
    """A tokenizer that spells " A" as "Ġ", "A", asked in shuffled order about 2 to 5 choices."""
    path = tmp_path / "split"
    shutil.copytree(tiny_model, path)
    raw = json.loads((path / "tokenizer.json").read_text())
    merges = raw["model"]["merges"]
    raw["model"]["merges"] = [m for m in merges if m not in (["Ġ", "A"], ["Ġ", "C"])]
    assert len(merges) - len(raw["model"]["merges"]) == 2
    (path / "tokenizer.json").write_text(json.dumps(raw))
    rng, rows = random.Random(0), []
    for i in range(30):
        choices = [str(i + j) for j in range(rng.randint(2, 5))]
        row = {"question": f"Which number is {i}?", "choices": choices, "answer": 0}
        rows.append(row | {"subject": rng.choice(["sums", "kings"])})
    data = write_lines(tmp_path / "q.jsonl", rows)
    options = ["--task", "jsonl", "--shots", "0"]
    vllm = score(path, data, tmp_path / "v.jsonl", "--engine", "vllm", *options)
    assert_equal(vllm, score(path, data, tmp_path / "t.jsonl", *options))
    assert {len(row["logprobs"]) for row in vllm} == {2, 3, 4, 5}


def test_continuation(tiny_model, tmp_path):
    """Choices of one to many tokens, some beginning alike, with contexts around the two blocks of
    128 tokens that vLLM caches on a CPU.
    """
    rng = random.Random(1)
    words = ("which", "true", "statement", "about", "force", "mass", "light")

    def some(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    rows = [
        {"question": some(235 + i) + "?", "choices": [*map(some, (1, 7, 20, 18))], "answer": 0}
        for i in range(40)
    ]
    for row in rows:
        row["choices"].append(row["choices"][3] + " and light")
    path = write_lines(tmp_path / "q.jsonl", rows)
    options = ["--task", "jsonl", "--scoring", "continuation"]
    vllm = score(tiny_model, path, tmp_path / "v.jsonl", "--engine", "vllm", *options)
    transformers = score(tiny_model, path, tmp_path / "t.jsonl", *options)
    assert_equal(vllm, transformers, "bytes", "characters", "normalise", within=2e-3)


def test_logits_of_a_bfloat16_model_are_float32(tiny_model, tmp_path):
    """vLLM's workers use Intel's AMX unasked, and may die of SIGILL: the first line asks."""
    script = tmp_path / "head.py"
    script.write_text(f"""
import torch; torch.cpu._init_amx()
from calibeval.engines import Job
from calibeval.engines.hf import TransformersEngine
from calibeval.engines.vllm import VllmEngine

if __name__ == "__main__":
    path, jobs = {str(tiny_model)!r}, [[Job(i, (5, 6 + i, 7), ((8,), (9,), (10, 11), (12, 9))) for i in range(9)]]
    ours = dict(TransformersEngine(path, dtype="bfloat16").score(jobs))
    engine = VllmEngine(path, dtype="bfloat16", longest=20)
    found = dict(engine.score(jobs))
    assert engine.describe()["head_dtype"] == "float32", engine.describe()
    gaps = [found[i][1] - found[i][0] for i in range(9)]
    assert any(abs(gap * 256 - round(gap * 256)) > 0.01 for gap in gaps), gaps
    worst = max(abs(a - b) for i in range(9) for a, b in zip(found[i], ours[i]))
    assert worst < 0.2, worst
    engine.close()
    print("done")
""")  # noqa: E501
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True)
    assert done.returncode == 0 and b"done" in done.stdout, done.stderr[-3000:]

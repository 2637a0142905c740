"""A tiny model with a real byte-level BPE, and MMLU-layout data to ask it."""

import csv
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what is made, made_records and others

WORDS = "which of the following is a true statement about force mass light cells kings law"


def write_rows(path: Path, rows: list[list[str]]) -> None:
    """One headerless CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def question(rng: random.Random) -> list[str]:
    """A row of the official layout."""
    text = " ".join(rng.choices(WORDS.split(), k=rng.randint(4, 12))) + "?"
    return [
        text,
        *(" ".join(rng.choices(WORDS.split(), k=3)) for _ in range(4)),
        rng.choice("ABCD"),
    ]


@pytest.fixture
def table():
    """table(n) → n rows of the official layout."""
    return lambda count: [question(random.Random(i)) for i in range(count)]


@pytest.fixture(name="write_rows")
def write_rows_fixture():
    """write_rows(path, rows) writes one headerless CSV."""
    return write_rows


@pytest.fixture
def mmlu(tmp_path) -> Path:
    """Two subjects of 30 questions with five examples each."""
    rng = random.Random(0)
    for subject in ("old_kings", "light"):
        for split, count in (("dev", 5), ("test", 30)):
            rows = [question(rng) for _ in range(count)]
            write_rows(tmp_path / "data" / split / f"{subject}_{split}.csv", rows)
    return tmp_path / "data"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Llama whose byte-level BPE has tokens " A" to " D"."""
    import torch
    from made_tokenizer import write_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    rng, out = random.Random(1), tmp_path_factory.mktemp("tiny")
    text = [
        f"{' '.join(rng.choices(WORDS.split(), k=9))}\nAnswer: {rng.choice('ABCD')}"
        for _ in range(500)
    ]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=write_tokenizer(out, text, 400),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    return out

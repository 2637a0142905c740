"""A tiny model with a real byte-level BPE, MMLU-layout data to ask it, and the command line."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from made_records import WORDS, mmlu_rows, write_csv

from calibeval.__main__ import main


class Printed(NamedTuple):
    """What a command has written to its two streams."""

    out: str
    err: str


@pytest.fixture
def run(capsys) -> Callable[..., Printed]:
    """run(*command) → what a command that succeeds prints: `.out` and `.err`."""

    def succeed(*command: object) -> Printed:
        capsys.readouterr()
        assert main([str(word) for word in command]) == 0
        return Printed(*capsys.readouterr())

    return succeed


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """refused(*command) → the one line of a command that must fail with status 2."""

    def fail(*command: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in command]) == 2
        printed = Printed(*capsys.readouterr())
        lines = [line for line in printed.err.splitlines() if line and "question/s]" not in line]
        (message,) = lines
        assert message.startswith("error: ")
        assert not printed.out
        return message

    return fail


@pytest.fixture
def mmlu(tmp_path) -> Path:
    """Two subjects of 30 questions with five examples each."""
    data = tmp_path / "data"
    for subject, seed in (("old_kings", 1000), ("light", 2000)):
        write_csv(data / "dev" / f"{subject}_dev.csv", mmlu_rows(5, seed))
        write_csv(data / "test" / f"{subject}_test.csv", mmlu_rows(30, seed + 100))
    return data


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Llama whose byte-level BPE has tokens " A" to " D"."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    rng = random.Random(1)
    sentences = [" ".join(rng.choices(WORDS.split(), k=9)) for _ in range(500)]
    texts = [f"{sentence}\nAnswer: {rng.choice('ABCD')}" for sentence in sentences]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 400, show_progress=False, special_tokens=["<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def command(mmlu, tiny_model, tmp_path) -> list:
    """A command that scores; an option that a test appends counts, not the one here."""
    out = tmp_path / "r.jsonl"
    return ["score", "--task", "mmlu", "--data", mmlu, "--model", tiny_model, "--out", out]

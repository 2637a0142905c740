"""A tiny model with a real byte-level BPE, and MMLU-layout data to ask it."""

import random
from pathlib import Path

import pytest
from made_records import WORDS, table, write_rows

from calibeval.__main__ import main


@pytest.fixture
def run(capsys):
    """run(*command) → what a command that succeeds prints: `.out` and `.err`."""

    def succeed(*command) -> tuple[str, str]:
        capsys.readouterr()
        assert main([str(part) for part in command]) == 0
        return capsys.readouterr()

    return succeed


@pytest.fixture
def refused(capsys):
    """refused(*command) → the one line of a command that must fail with status 2."""

    def fail(*command) -> str:
        capsys.readouterr()
        assert main([str(part) for part in command]) == 2
        out, err = capsys.readouterr()
        (said,) = (line for line in err.splitlines() if line and "question/s]" not in line)
        assert said.startswith("error: ") and not out
        return said

    return fail


@pytest.fixture
def mmlu(tmp_path) -> Path:
    """Two subjects of 30 questions with five examples each."""
    for i, subject in enumerate(("old_kings", "light")):
        for j, (split, count) in enumerate((("dev", 5), ("test", 30))):
            path = tmp_path / "data" / split / f"{subject}_{split}.csv"
            write_rows(path, table(count, 1000 * (i + 1) + 100 * j))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Llama whose byte-level BPE has tokens " A" to " D"."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rng, out = random.Random(1), tmp_path_factory.mktemp("tiny")
    words = (" ".join(rng.choices(WORDS.split(), k=9)) for _ in range(500))
    text = [f"{some}\nAnswer: {rng.choice('ABCD')}" for some in words]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(text, 400, show_progress=False, special_tokens=["<s>"])
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>").save_pretrained(out)
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
    LlamaForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture
def command(mmlu, tiny_model, tmp_path) -> list:
    """A command that scores; an option that a test appends counts, not the one here."""
    out = tmp_path / "r.jsonl"
    return ["score", "--task", "mmlu", "--data", mmlu, "--model", tiny_model, "--out", out]

"""What the tests of training share: conversations, some of known lengths, options, and runs."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from sweep_tools import prepare
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sweeps.runs.files import read_rows
from sweeps.runs.run import Run
from sweeps.training import fit
from sweeps.training.micro_batches import Updates
from sweeps.training.options import TrainOptions
from sweeps.training.tokenization import IGNORE


def own_token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of tokenized files for one test module and its processes; a fixture's body."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("datasets"))
        patch.setenv("HF_DATASETS_CACHE", folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield


def write_conversations(path: Path, *conversations: list[dict]) -> Path:
    lines = [json.dumps({"messages": messages}) + "\n" for messages in conversations]
    path.write_text("".join(lines))
    return path


def turns(*texts: str) -> list[dict]:
    """A conversation in which a user and the assistant speak in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def tiny_options(tiny: Path, **options: Any) -> TrainOptions:
    """Options for the tiny model and its conversations, unless `options` say otherwise."""
    given = {"model_name_or_path": str(tiny / "model"), "train_file": str(tiny / "chat.jsonl")}
    given.update(options)
    return TrainOptions.model_validate(given)


def updates_of_lengths(lengths: list[int], ranks: int = 1, **options: Any) -> Updates:
    """One epoch of made-up conversations of these lengths; each has a target."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(1, 60, (length,), generator=generator)
        learned = torch.rand(length, generator=generator) < 0.6
        learned[:1] = False
        learned[1:2] = True
        row = {
            "input_ids": ids.tolist(),
            "labels": torch.where(learned, ids, IGNORE).tolist(),
            "length": length,
            "targets": int(learned.sum()),
        }
        rows.append(row)
    given = {"model_name_or_path": "m", "train_file": "f", "num_train_epochs": 1}
    given.update(options)
    return Updates(TrainOptions.model_validate(given), datasets.Dataset.from_list(rows), ranks)


def collated(
    data: Updates, conversations: Iterable[int], packed: bool = False
) -> dict[str, Tensor]:
    """Some conversations as TRL collates them, in rows that token 0 pads, or end to end."""
    rows = data.tokens.__getitems__([int(conversation) for conversation in conversations])
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)(rows)


def windowed_gemma() -> Gemma3ForCausalLM:
    """Two layers that see 5 tokens, one that sees all; queries scaled by other than 1/√d."""
    config = Gemma3TextConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        head_dim=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=5,
        query_pre_attn_scalar=3,
        bos_token_id=2,
    )
    return Gemma3ForCausalLM(config)


def finished_run(sweep_file: Path, *overrides: str) -> Run:
    """The first run of a sweep, trained in this process."""
    run = prepare(sweep_file, *overrides)
    fit.fit(run)
    return run


def logged(run: Run, key: str = "loss") -> list[float]:
    """The values of a key in metrics.jsonl, in order."""
    return [row[key] for row in read_rows(run.metrics) if key in row]

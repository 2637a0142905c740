"""What updates are made of, and that packed rows compute what each conversation alone does."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from training_runs import dataset_of_lengths, windowed_gemma
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

from smoothce import patch_model
from sweeps.training.global_batches import GlobalBatchDataset


def expected_divisors(dataset: GlobalBatchDataset, step: int) -> dict[int, float]:
    """What each conversation of an update is divided by, by the definitions of `reduce_loss`."""
    options = dataset.train_options
    conversations = dataset.conversations_of(step)
    targets = dataset.target_counts
    if options.reduce_loss == "sum":
        return dict.fromkeys(conversations, options.gradient_accumulation_steps)
    if options.reduce_loss == "token_mean":
        return dict.fromkeys(conversations, targets[conversations].sum() / dataset.ranks)
    divisors = {}
    size = options.per_device_train_batch_size
    for start in range(0, len(conversations), size):
        block = conversations[start : start + size]
        for conversation in block:
            divisors[conversation] = options.gradient_accumulation_steps * targets[block].sum()
    return divisors


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40),
    size=st.integers(1, 4),
    ranks=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    reduce_loss=st.sampled_from(["mean", "sum", "token_mean"]),
    packed=st.booleans(),
    max_tokens=st.integers(1, 80),
)
def test_updates_do_not_depend_on_how_they_are_computed(
    lengths, size, ranks, accumulation, reduce_loss, packed, max_tokens
):
    """An epoch visits each conversation once. Each update has those of one rank without
    accumulation, and divides its loss as it should."""
    dataset = dataset_of_lengths(
        lengths,
        ranks,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        reduce_loss=reduce_loss,
        max_tokens=max_tokens,
    )
    if packed:
        dataset.use_packing(row_multiple=1)
    undivided = dataset_of_lengths(lengths, per_device_train_batch_size=size * ranks * accumulation)
    assert len(dataset) == len(undivided)
    visited = []
    for step in range(len(dataset)):
        by_rank = dataset.plan_update(step)
        assert len(by_rank) == ranks
        assert len({len(micro_batches) for micro_batches in by_rank}) == 1
        divisors = {}
        for micro_batch in itertools.chain.from_iterable(by_rank):
            row = micro_batch.conversations
            visited += row
            if packed and len(row) > 1:
                assert sum(lengths[conversation] for conversation in row) <= max_tokens
            for conversation in row:
                divisors[conversation] = micro_batch.divisor
        assert sorted(divisors) == sorted(undivided.conversations_of(step))
        assert divisors == pytest.approx(expected_divisors(dataset, step))
    assert sorted(visited) == list(range(len(lengths)))


def loss_and_gradients(
    model: nn.Module, batches: list[dict[str, Any]]
) -> tuple[float, dict[str, Tensor]]:
    """The sum of the batches' losses, and its gradients by parameter."""
    model.zero_grad()
    losses = [model(**batch, use_cache=False).loss for batch in batches]
    sum(losses).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return sum(loss.item() for loss in losses), gradients


def test_packed_loss_and_gradients_are_those_of_each_conversation_alone():
    """With windows, and rows that are filled up as on a GPU."""
    torch.manual_seed(0)
    model = patch_model(windowed_gemma(), label_smoothing=0.1, reduction="sum").train()
    dataset = dataset_of_lengths([7, 3, 12, 2, 9, 2])
    one_by_one = [dataset.collate([conversation]) for conversation in range(6)]
    expected_loss, expected_gradients = loss_and_gradients(model, one_by_one)

    dataset.use_packing(row_multiple=64)
    packed = [dataset.collate(row) for row in ([4, 0, 3], [2, 5, 1], [])]
    assert all(batch["input_ids"].shape[1] % 64 == 0 for batch in packed)
    loss, gradients = loss_and_gradients(model, packed)

    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected_gradients.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_packed_batches_have_what_flash_attention_asks_for():
    dataset = dataset_of_lengths([7, 3, 12])
    dataset.use_packing(row_multiple=1)
    assert FlashAttentionKwargs.__annotations__.keys() <= dataset.collate([1, 0]).keys()

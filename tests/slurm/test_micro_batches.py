"""What updates are made of, and that packed rows compute what each conversation alone does."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from training_runs import collated, updates_of_lengths, windowed_gemma

from smoothce import patch_model
from sweeps.training.micro_batches import MicroBatches, Updates


def expected_divisors(data: Updates, step: int) -> dict[int, float]:
    """What each conversation of an update is divided by, by the definitions of `reduce_loss`."""
    options = data.train_options
    conversations = data.conversations_of(step)
    targets = data.target_counts
    if options.reduce_loss == "sum":
        return dict.fromkeys(conversations, options.gradient_accumulation_steps)
    if options.reduce_loss == "token_mean":
        return dict.fromkeys(conversations, targets[conversations].sum() / data.ranks)
    divisors = {}
    size = options.per_device_train_batch_size
    for start in range(0, len(conversations), size):
        block = conversations[start : start + size]
        for conversation in block:
            divisors[conversation] = options.gradient_accumulation_steps * targets[block].sum()
    return divisors


@settings(deadline=None)  # A loaded machine is no fault.
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
    data = updates_of_lengths(
        lengths,
        ranks,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        reduce_loss=reduce_loss,
        max_tokens=max_tokens,
    )
    micro_batches = MicroBatches(data, data, rank=0, packed=packed)
    undivided = updates_of_lengths(lengths, per_device_train_batch_size=size * ranks * accumulation)
    assert len(data) == len(undivided)
    visited = []
    for step in range(len(data)):
        by_rank = [micro_batches.of_update(step, rank) for rank in range(ranks)]
        assert all(len(own) == micro_batches.per_update for own in by_rank)
        divisors = {}
        for row, divisor in itertools.chain.from_iterable(by_rank):
            visited += row
            if packed and len(row) > 1:
                assert sum(lengths[conversation] for conversation in row) <= max_tokens
            if not packed:
                assert len(row) <= size
            for conversation in row:
                divisors[conversation] = divisor
        assert sorted(divisors) == sorted(undivided.conversations_of(step))
        assert divisors == pytest.approx(expected_divisors(data, step))
    assert sorted(visited) == list(range(len(lengths)))


def test_rows_of_two_ranks_have_about_equally_many_tokens():
    lengths = [50, 3, 40, 8, 9, 30, 2, 25, 1, 12]
    data = updates_of_lengths(
        lengths, 2, per_device_train_batch_size=5, reduce_loss="token_mean", max_tokens=60
    )
    micro_batches = MicroBatches(data, data, rank=0, packed=True)
    assert micro_batches.per_update == 2  # Of 179 tokens, of which three rows could hold all.
    sums = [
        sum(lengths[conversation] for conversation in row)
        for rank in range(2)
        for row, _ in micro_batches.of_update(0, rank)
    ]
    assert sorted(sums) == [42, 42, 45, 50]


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
    """With windows."""
    torch.manual_seed(0)
    model = patch_model(windowed_gemma(), label_smoothing=0.1, reduction="sum").train()
    data = updates_of_lengths([7, 3, 12, 2, 9, 2])
    one_by_one = [collated(data, [conversation]) for conversation in range(6)]
    expected_loss, expected_gradients = loss_and_gradients(model, one_by_one)

    packed = [collated(data, row, packed=True) for row in ([4, 0, 3], [2, 5, 1])]
    loss, gradients = loss_and_gradients(model, packed)

    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected_gradients.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=2e-5, msg=name)

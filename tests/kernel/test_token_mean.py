"""The factor in one process; tests/kernel/triton/test_vocab_parallel.py has it over ranks."""

import pytest
import torch

from smoothce import token_mean_factor

TWO_TARGETS = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])  # 6 and 7: no row's first


@pytest.mark.parametrize(
    ("labels", "options", "factor"),
    [
        ([TWO_TARGETS], {}, 1 / 2),
        ([TWO_TARGETS, TWO_TARGETS], {}, 2 / 4),  # undoes what accumulation divides by
        ([TWO_TARGETS, TWO_TARGETS], {"steps": 4}, 4 / 4),
        ([TWO_TARGETS.where(TWO_TARGETS == 5, 9)], {"ignore_index": 9}, 1),  # no target, no 0 / 0
    ],
)
def test_a_factor_counts_valid_labels_without_each_rows_first(labels, options, factor):
    assert token_mean_factor(labels, **options) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("labels", "steps", "error", "message"),
    [
        ([], 1, ValueError, "micro-batches"),
        (TWO_TARGETS, 1, TypeError, "list of tensors, one a micro-batch"),
        ([[1, 2]], 1, TypeError, "list of tensors, one a micro-batch"),
        ([TWO_TARGETS], 0, ValueError, "steps must be 1 or more, not 0"),
    ],
)
def test_mistakes_are_named(labels, steps, error, message):
    with pytest.raises(error, match=message):
        token_mean_factor(labels, steps=steps)

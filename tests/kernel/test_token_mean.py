"""The factor in one process; tests/kernel/test_zero.py has it over ranks."""

import pytest
import torch

from smoothce import token_mean_factor


def test_counts_shifted_valid_labels():
    labels = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])  # two targets: 6 and 7
    assert token_mean_factor([labels]) == pytest.approx(1 / 2)
    assert token_mean_factor([labels, labels]) == pytest.approx(2 / 4)
    assert token_mean_factor([labels], steps=4) == pytest.approx(4 / 2)
    assert (
        token_mean_factor([labels.where(labels == 5, 9)], ignore_index=9) == 1
    )  # none: 1/max(0, 1)


def test_no_micro_batch_is_an_error():
    with pytest.raises(ValueError, match="micro-batches"):
        token_mean_factor([])


def test_one_tensor_is_not_a_list_of_micro_batches():
    for wrong in (torch.zeros(2, 4, dtype=torch.long), [[1, 2]]):
        with pytest.raises(TypeError, match="list of tensors, one a micro-batch"):
            token_mean_factor(wrong)


def test_no_accumulation_step_is_an_error():
    with pytest.raises(ValueError, match="steps must be 1 or more, not 0"):
        token_mean_factor([torch.zeros(2, 4, dtype=torch.long)], steps=0)

"""The factor in one process; tests/kernel/triton/test_ranks.py has it over ranks."""

import pytest
import torch

from smoothce import token_mean_factor


def test_counts_shifted_valid_labels():
    labels = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])  # two targets: 6 and 7
    assert token_mean_factor([labels]) == pytest.approx(1 / 2)
    assert token_mean_factor([labels, labels], steps=4) == pytest.approx(4 / 4)
    none = labels.where(labels == 5, 9)
    assert token_mean_factor([none], ignore_index=9) == 1  # 1 / max(0, 1)


def test_mistakes_are_named():
    labels = torch.zeros(2, 4, dtype=torch.long)
    for given, steps, error, said in (
        ([], 1, ValueError, "micro-batches"),
        (labels, 1, TypeError, "list of tensors, one a micro-batch"),
        ([[1, 2]], 1, TypeError, "list of tensors, one a micro-batch"),
        ([labels], 0, ValueError, "steps must be 1 or more, not 0"),
    ):
        with pytest.raises(error, match=said):
            token_mean_factor(given, steps=steps)

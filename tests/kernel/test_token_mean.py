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


@pytest.mark.parametrize(
    ("given", "steps", "error", "message"),
    [
        ([], 1, ValueError, "micro-batches"),
        (torch.zeros(2, 4, dtype=torch.long), 1, TypeError, "list of tensors, one a micro-batch"),
        ([[1, 2]], 1, TypeError, "list of tensors, one a micro-batch"),
        ([torch.zeros(2, 4, dtype=torch.long)], 0, ValueError, "steps must be 1 or more, not 0"),
    ],
)
def test_mistakes_are_named(given, steps, error, message):
    with pytest.raises(error, match=message):
        token_mean_factor(given, steps=steps)

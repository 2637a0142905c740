"""Does a loss smooth labels as it says? Put your own in the place of `loss`, and run this file.

It looks for the three ways in which label smoothing goes wrong in silence: β does not reach the
loss, the gradient is another one, or it depends on how a batch is split.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy

IGNORED = -100

# loss(hidden (N, D), weight (V, D), labels (N,), β, number of an update's tokens) → ()
Loss = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


def loss(hidden: Tensor, weight: Tensor, labels: Tensor, beta: float, tokens: int) -> Tensor:
    """The sum over labels that are not -100, by the number of an update's tokens."""
    summed = linear_cross_entropy(hidden, weight, labels, label_smoothing=beta, reduction="sum")
    return summed / tokens


def check(loss: Loss, beta: float = 0.3) -> dict[str, bool]:
    """What must hold of a loss, and whether it does."""
    torch.manual_seed(0)
    hidden = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(32, 16, requires_grad=True)
    labels = torch.randint(32, (8,))
    labels[:3] = IGNORED
    tokens = 5

    def gradient(value: Tensor) -> Tensor:
        parts = torch.autograd.grad(value, (hidden, weight), materialize_grads=True)
        return torch.cat(parts)

    smoothed = loss(hidden, weight, labels, beta, tokens)
    if not isinstance(smoothed, Tensor) or smoothed.shape or not smoothed.requires_grad:
        raise SystemExit(
            f"loss must return a tensor of shape () that has a gradient, not {smoothed}"
        )
    unsmoothed = loss(hidden, weight, labels, 0.0, tokens)
    first_half = loss(hidden[:4], weight, labels[:4], beta, tokens)
    second_half = loss(hidden[4:], weight, labels[4:], beta, tokens)
    dense = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=beta)

    found = gradient(smoothed)
    return {
        "smoothing reaches the loss": not torch.allclose(smoothed, unsmoothed),
        "its gradient is cross-entropy's, masked labels out": torch.allclose(
            found, gradient(dense), atol=1e-5
        ),
        "a batch in two parts has the same gradient": torch.allclose(
            found, gradient(first_half + second_half), atol=1e-5
        ),
    }


def main() -> None:
    for claim, holds in check(loss).items():
        print("ok   " if holds else "WRONG", claim)


if __name__ == "__main__":
    main()

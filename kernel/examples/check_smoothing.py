"""Does a loss smooth labels as it says? Put your own in the place of `loss`, and run this file."""

import torch
import torch.nn.functional as F

from smoothce import linear_cross_entropy


def loss(hidden, weight, labels, beta, tokens):
    """The sum over labels that are not -100, by the number of an update's tokens."""
    options = {"label_smoothing": beta, "reduction": "sum"}
    return linear_cross_entropy(hidden, weight, labels, **options) / tokens


def check(loss, beta=0.3):
    torch.manual_seed(0)
    e, c, y = torch.randn(8, 16), torch.randn(32, 16), torch.randint(32, (8,))
    y[:3] = -100
    leaves = e.requires_grad_(), c.requires_grad_()
    found = loss(e, c, y, beta, 5)
    if not isinstance(found, torch.Tensor) or found.shape or not found.requires_grad:
        raise SystemExit(f"loss must return a tensor of shape () that has a gradient, not {found}")
    parts = sum(loss(e[i], c, y[i], beta, 5) for i in (slice(4), slice(4, 8)))
    wanted = F.cross_entropy(e @ c.T, y, label_smoothing=beta)
    grad, split, want = (
        torch.cat(torch.autograd.grad(x, leaves, materialize_grads=True))
        for x in (found, parts, wanted)
    )
    return {
        "smoothing reaches the loss": not torch.allclose(found, loss(e, c, y, 0.0, 5)),
        "its gradient is cross-entropy's, masked labels out": torch.allclose(grad, want, atol=1e-5),
        "a batch in two parts has the same gradient": torch.allclose(grad, split, atol=1e-5),
    }


if __name__ == "__main__":
    for what, fine in check(loss).items():
        print("ok   " if fine else "WRONG", what)

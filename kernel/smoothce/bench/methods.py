"""What the benchmark measures: this package's loss, PyTorch's, and the least work of an exact
gradient. Losses of other libraries are in kernel/benchmarks/peers.py."""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy

IGNORE_INDEX = -100  # the label of a masked token


class Loss(Protocol):
    """The mean loss of the tokens that are not masked, a tensor of shape ().

    A loss that knows no softcap may lack that parameter. Then a problem with a softcap is a row
    that says so."""

    def __call__(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (N,)
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> Tensor: ...


class Method(NamedTuple):
    """A row of the table."""

    name: str
    loss: Loss
    is_bound: bool = False  # whether it is no loss, but the matrix products alone


def dense(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The loss as one writes it in PyTorch: all logits, then cross-entropy in fp32."""
    logits = (hidden @ weight.T).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def ours(
    *,
    filter_eps: float | str | None = None,
    workspace: int | str = "auto",
    impl: str = "auto",
) -> Loss:
    """This package's loss with these settings."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            label_smoothing=label_smoothing,
            softcap=softcap,
            filter_eps=filter_eps,
            workspace=workspace,
            impl=impl,
        )

    return loss


class MatrixProducts(torch.autograd.Function):
    """The least work of an exact gradient: three matrix products, or two where the classifier is
    frozen. Masked tokens are left out.

    The forward computes the logits E Cᵀ and returns a zero, since it is no loss. The backward uses
    the logits in the place of their gradient, which has the same shape, so that its products for
    dE and dC take as long as any exact ones."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        valid = (labels != IGNORE_INDEX).nonzero()[:, 0]
        rows = hidden[valid]
        logits = rows @ weight.T
        ctx.shape = hidden.shape
        ctx.save_for_backward(rows, weight, valid, logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, valid, logits = ctx.saved_tensors
        d_hidden = rows.new_zeros(ctx.shape).index_copy_(0, valid, logits @ weight)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = logits.T @ rows
        return d_hidden, d_weight, None


def matrix_products(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Not a loss: the products that every exact gradient takes. Smoothing and cap cost nothing."""
    return MatrixProducts.apply(hidden, weight, labels)


BOUND = Method("the products alone (bound)", matrix_products, is_bound=True)
METHODS = {
    "cpu": [
        Method("ours, chunked", ours(impl="chunked")),
        Method("torch", dense),
        BOUND,
    ],
    "cuda": [
        Method("ours", ours()),
        Method("ours, workspace 0", ours(workspace=0)),
        Method("ours, filtered", ours(filter_eps="auto")),
        Method("torch", dense),
        Method("torch.compile", torch.compile(dense, dynamic=False)),
        BOUND,
    ],
}

"""What the autograd functions of several implementations share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable) -> Callable:
    """Make a function's backward raise RuntimeError where a second derivative goes through it.

    PyTorch's decorator of the same name raises only where that derivative reaches an upstream
    gradient, and autograd leaves out what does not lead to the tensors that it is asked about: a
    second derivative in the classifier would lack the loss's part in silence. Here it raises on
    the way to every tensor that the function has saved, so a function has to save what it
    differentiates in.
    """

    @functools.wraps(backward)
    def without_graph(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not torch.is_grad_enabled():  # it is under create_graph=True
            return gradients
        sources = (*ctx.saved_tensors, *upstream)
        return tuple(
            None if gradient is None else _RefuseDerivative.apply(gradient, *sources)
            for gradient in gradients
        )

    return without_graph


class _RefuseDerivative(torch.autograd.Function):
    """The gradient as it is, which cannot be differentiated in its sources."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "linear_cross_entropy has no second derivative here; "
            "impl='reference' has, outside torch.compile"
        )


def graph_is_kept() -> bool:
    """Tell whether another backward through this graph may follow; True where torch cannot tell."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return query is None or query()

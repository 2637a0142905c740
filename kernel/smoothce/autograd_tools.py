"""What the autograd functions of several implementations share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function


def once_differentiable(backward: Callable) -> Callable:
    """PyTorch's decorator of the same name, made to raise RuntimeError for every second derivative.

    PyTorch's own raises only where some upstream gradient requires grad. The one that
    `loss.backward(create_graph=True)` brings does not, so that a second derivative would lack the
    loss's part in silence. Here the upstream gradients are made to require grad wherever a graph of
    the backward is asked for.
    """
    guarded = function.once_differentiable(backward)

    def always_guarded(ctx: Any, *upstream: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            upstream = tuple(
                None if gradient is None else gradient.detach().requires_grad_()
                for gradient in upstream
            )
        return guarded(ctx, *upstream)

    return always_guarded


def graph_is_kept() -> bool:
    """Whether another backward through this graph may follow; True where torch cannot tell."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return query is None or query()

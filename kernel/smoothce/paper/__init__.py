"""The paper's algorithm, for comparison: `impl="paper"`. Not what one should train with.

Algorithm 1 of "Calibrated Language Models and How to Find Them with Label Smoothing": tiles of
logits update the log-sum-exp, the target and the smoothing term under a lock; the backward
recomputes every tile, skips it where no |gradient| reaches 2^-12, and adds to dE and dC under
locks. Sorting the vocabulary by mean logit gathers small gradients into tiles that can be skipped.
A skipped tile takes its softmax mass and its share of −β/V with it, so gradients are biased.
"""

import torch
from torch import Tensor

from smoothce.chunked import once_differentiable
from smoothce.options import Options
from smoothce.paper.kernels import backward, forward

AUTO_EPS = 2.0**-12


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # must be None
    options: Options,
    *,
    sort: bool = True,
) -> Tensor:  # () or (N,)
    """The loss of `reference.loss` as the paper computes it.

    `sort` orders the vocabulary by mean logit for the backward; `options.filter_eps` None keeps
    every tile."""
    return _Paper.apply(*(x.contiguous() for x in (hidden, weight, labels)), options, sort)


def unsupported(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> str | None:
    """Why these inputs cannot be served, or None."""
    if not hidden.is_cuda:
        return f"the inputs are on {hidden.device.type}, not on a CUDA device"
    if bias is not None or options.softcap is not None or options.logit_scale is not None:
        return "the paper's kernels know no bias, softcap or logit_scale"
    if options.return_lse:
        return "the paper's kernels do not return log-sum-exps"
    return None


class _Paper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, options, sort):
        losses, lse, mean_logit = forward(hidden, weight, labels, options)
        ctx.options = options
        order = mean_logit.argsort().int() if sort else None
        ctx.save_for_backward(hidden, weight, labels, lse, order)
        if options.reduction == "none":
            return losses
        return losses.sum() * options.token_weight(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, labels, lse, order = ctx.saved_tensors
        options = ctx.options
        g = (upstream.float() * options.token_weight(labels)).expand(labels.shape)
        found = backward(hidden, weight, labels, lse, g, order, _eps(options), options)
        return *found, None, None, None


def _eps(options: Options) -> float:
    if options.filter_eps is None:
        return 0.0
    return AUTO_EPS if options.filter_eps == "auto" else options.filter_eps

"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics."""

from dataclasses import replace

import torch
from torch import Tensor

from smoothce.options import Options
from smoothce.triton import filtered, stored
from smoothce.triton.exact import Exact
from smoothce.triton.filtered import Filtered
from smoothce.triton.forward import forward
from smoothce.triton.tiles import tiles_for
from smoothce.triton.tokens import Inputs, gather, valid_first

__all__ = ["filter_statistics", "loss", "token_statistics", "unsupported"]

# filter_eps="auto" is AUTO · V^(-1/4): 2^-8.3 at 256,000 entries and 2^-7.6 at 32,768, which gives
# about the same error for all. It was still faster than the exact gradient at 8,192 entries.
AUTO = 2.0**-8.3 * 256000**0.25
SMALL = 8192  # entries under which there is too little to skip: "auto" is exact


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of `reference.loss`; gradients are filtered as `options.filter_eps` says.

    Nothing waits for the device but the exact gradient, for the number of valid tokens alone: it is
    counted before the forward's product, which keeps the device busy meanwhile."""
    inputs = inputs_for(hidden, weight, labels, bias, options)
    eps = threshold(options, len(weight)) if any(inputs.needs) else None
    found, lse = Exact.apply(*inputs) if eps is None else Filtered.apply(*inputs, eps)
    return (found, lse) if options.return_lse else found


def inputs_for(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, options: Options
) -> Inputs:
    hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    bias = None if bias is None else bias.contiguous()
    needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    return Inputs(hidden, weight, bias, labels, options, needs, tiles_for(hidden, weight))


def threshold(options: Options, vocabulary: int) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact.

    The filter adds with atomics, in an order that depends on timing, and knows no upstream gradient
    of the log-sum-exps."""
    if options.return_lse or torch.are_deterministic_algorithms_enabled():
        return None
    if options.filter_eps == "auto":
        return AUTO * vocabulary**-0.25 if vocabulary >= SMALL else None
    return options.filter_eps


@torch.compiler.disable
def token_statistics(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, log-sum-exp and argmax of each token, (N,), in one forward.

    The temperature goes into what makes logits of products: z / τ is a softcap of c / τ applied to
    products times s / τ, with a bias of b / τ."""
    cap, scale = options.softcap, options.logit_scale
    options = replace(
        options,
        softcap=None if cap is None else cap / temperature,
        logit_scale=(1.0 if scale is None else scale) / temperature,
    )
    bias = bias if bias is None or temperature == 1 else bias.float() / temperature
    inputs = inputs_for(hidden, weight, labels, bias, options)
    losses, lse, entropy = hidden.new_empty(3, len(labels), dtype=torch.float32)
    argmax = torch.empty_like(labels)
    with torch.cuda.device_of(hidden):
        for start in range(0, len(labels), stored.TOKENS):
            part = slice(start, start + stored.TOKENS)
            mine = inputs.part(part)
            order, _, count, _ = valid_first(mine.labels, options.ignore_index)
            tokens, packed = gather(mine, order, count)
            found = losses[part], lse[part]
            forward(mine, packed, tokens, *found, entropies=entropy[part], argmaxes=argmax[part])
    return -losses, entropy, lse, argmax


def filter_statistics(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> tuple[Tensor, Tensor]:
    """What the filter does to these inputs: the share of (token, block) pairs whose gradient is
    computed, kept or drawn, and the mean over valid tokens of the softmax mass in the others, which
    the profiles stand in for. 0-d, on the device."""
    eps = threshold(options, len(weight))
    if eps is None:
        return hidden.new_ones((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
    return filtered.filter_statistics(inputs_for(hidden, weight, labels, bias, options), eps)


def unsupported(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> str | None:
    """Why these inputs cannot be served, or None."""
    if not hidden.is_cuda:
        return f"the inputs are on {hidden.device.type}, not on a CUDA device"
    if torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if hidden.dtype not in (torch.float32, torch.bfloat16):
        return f"the inputs are {hidden.dtype}"  # fp16 has not the range of dlogits
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return "the bias needs a gradient"
    if len(weight) < 2:
        return "the vocabulary has fewer than 2 entries"
    if hidden.shape[1] < 1:
        return "hidden states have no dimensions"
    if options.logit_scale == 0:
        return "logit_scale is 0"
    return None

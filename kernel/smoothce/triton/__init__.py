"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics."""

from dataclasses import replace

import torch
from torch import Tensor

from smoothce.chunked import graph_is_kept, once_differentiable
from smoothce.options import Options
from smoothce.triton import exact, filtered, stored
from smoothce.triton.forward import forward
from smoothce.triton.tiles import tiles_for
from smoothce.triton.tokens import Inputs, Made, gather, scale, valid_first

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
    found, lse = Loss.apply(*inputs_for(hidden, weight, labels, bias, options))
    return (found, lse) if options.return_lse else found


class Loss(torch.autograd.Function):
    """The loss and the log-sum-exps, differentiable once in hidden and weight."""

    @staticmethod
    def forward(ctx, *inputs):
        inputs = Inputs(*inputs)
        # a filter is for gradients
        ctx.mode = filtered if inputs.eps is not None and any(inputs.needs) else exact
        with torch.cuda.device_of(inputs.hidden):
            losses, lse, token_weight, ctx.state = ctx.mode.forward_all(inputs)
        ctx.save_for_backward(*inputs[:4], token_weight)
        ctx.settings = inputs[4:]
        ctx.set_materialize_grads(False)
        if not inputs.options.return_lse:
            ctx.mark_non_differentiable(lse)
        reduced = inputs.options.reduction != "none"
        return losses.sum() * token_weight if reduced else losses, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, of_loss, of_lse):
        if of_loss is None and of_lse is None:
            return (None,) * len(Inputs._fields)
        *tensors, token_weight = ctx.saved_tensors
        inputs, state, device = Inputs(*tensors, *ctx.settings), ctx.state, tensors[0].device
        with torch.cuda.device_of(inputs.hidden), torch.autocast(device.type, enabled=False):
            of_loss = torch.zeros((), device=device) if of_loss is None else of_loss.float()
            if isinstance(state, Made):
                # the first backward takes what there is, another makes it again
                made = state.gradients or ctx.mode.forward_all(inputs)[3].gradients
                state.gradients = None
                scale(made, of_loss)
            else:
                made = ctx.mode.backward_all(inputs, state, of_loss, of_lse, token_weight)
        if not graph_is_kept():
            ctx.state = None
        return *made, *[None] * (len(Inputs._fields) - 2)


def inputs_for(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, options: Options
) -> Inputs:
    hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    bias = None if bias is None else bias.contiguous()
    needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    tiles, eps = tiles_for(hidden, weight), threshold(options, len(weight))
    return Inputs(hidden, weight, bias, labels, options, needs, tiles, eps)


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
        for part in stored.super_blocks(inputs):
            mine = inputs.part(part)
            order, _, count, _ = valid_first(mine)
            tokens, packed = gather(mine, order, count)
            found = losses[part], lse[part]
            forward(mine, packed, tokens, *found, entropies=entropy[part], argmaxes=argmax[part])
    return -losses, entropy, lse, argmax


@torch.no_grad()
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
    inputs = inputs_for(hidden, weight, labels, bias, options)
    share, mass = hidden.new_zeros(2, dtype=torch.float32)
    if inputs.eps is None:
        return share + 1, mass
    with torch.cuda.device_of(hidden):
        losses, lse = hidden.new_empty(2, len(labels), dtype=torch.float32)
        order, _, count, _ = valid_first(inputs)
        for _, pairs in filtered.walk(inputs, losses, lse, order, count):
            share += pairs.listed.sum()
            mass += pairs.coefficient.clamp(min=0).sum(dtype=torch.float32)
        valid = count.clamp(min=1)[0]
        return share / (valid * inputs.blocks), mass / valid


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

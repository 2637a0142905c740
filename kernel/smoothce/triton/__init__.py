"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics."""

import torch
from torch import Tensor

from smoothce.chunked import graph_is_kept, once_differentiable
from smoothce.options import Inputs, LossOutput, Options
from smoothce.triton import filtered, grad_in_forward, plan, recompute_backward
from smoothce.triton.forward import Results
from smoothce.triton.tiles import INTERPRETED, tiles_for
from smoothce.triton.tokens import ForwardGradients, LossCall, scale, valid_first

__all__ = ["describe", "filter_statistics", "loss", "unsupported"]

# filter_eps="auto" is AUTO · V^(-1/4): 2^-8.3 at 256,000 entries and 2^-7.6 at 32,768, which gives
# about the same error for all. It was still faster than the exact gradient at 8,192 entries.
AUTO = 2.0**-8.3 * 256000**0.25
SMALL = 8192  # entries under which there is too little to skip: "auto" is exact


def loss(inputs: Inputs) -> LossOutput:
    """The loss of `reference.loss`; gradients are filtered as `options.filter_eps` says.

    Nothing waits for the device but the exact gradient, for the number of valid tokens alone: it is
    counted before the forward's product, which keeps the device busy meanwhile."""
    call = call_for(inputs)
    tensors = call.inputs[:6]
    return LossOutput(*Loss.apply(*tensors, call._replace(inputs=call.inputs[6:])))


class Loss(torch.autograd.Function):
    """The loss, the log-sum-exps and statistics, differentiable once in hidden, weight and bias."""

    @staticmethod
    def forward(ctx, *given):
        ctx.call = given[-1]
        call = ctx.call._replace(inputs=Inputs(*given[:6], *given[-1].inputs))
        with torch.cuda.device_of(call.inputs.hidden):
            found, loss_scale, ctx.state = forward_all(call)
        ctx.save_for_backward(*given[:6], loss_scale)
        ctx.set_materialize_grads(False)
        losses, lse, *statistics = vars(found).values()
        options = call.inputs.options
        fixed = statistics if options.return_lse else [lse, *statistics]
        ctx.mark_non_differentiable(*[x for x in fixed if x is not None])
        total = losses if options.reduction == "none" else losses.sum() * loss_scale
        return total, lse, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx, of_loss, of_lse, *_):
        if of_loss is None and of_lse is None:
            return (None,) * 7
        *tensors, loss_scale = ctx.saved_tensors
        call = ctx.call._replace(inputs=Inputs(*tensors, *ctx.call.inputs))
        device, state = tensors[0].device, ctx.state
        with torch.cuda.device_of(tensors[0]), torch.autocast(device.type, enabled=False):
            of_loss = torch.zeros((), device=device) if of_loss is None else of_loss.float()
            if isinstance(state, ForwardGradients):
                # the first backward takes what there is, another makes it again
                made = state.gradients or forward_all(call)[2].gradients
                state.gradients = None
                scale(made, of_loss)
            else:
                mode = filtered if isinstance(state, list) else recompute_backward
                made = mode.backward_all(call, state, of_loss, of_lse, loss_scale)
        if not graph_is_kept():
            ctx.state = None
        hidden, weight, bias = made
        return hidden, weight, None, bias, None, None, None


def forward_all(call: LossCall) -> tuple[Results, Tensor, object]:
    """What is found of each token, 1 / tokens, and what the backward needs."""
    results, chosen = Results(call), plan.plan_for(call)
    if chosen.how == "filtered":
        state = filtered.forward_all(call, results)
    elif chosen.how == "grad_in_forward":
        state = grad_in_forward.forward_all(call, results, chosen.tokens, chosen.wide)
    else:
        state = recompute_backward.forward_all(call, results)
    return results, call.inputs.loss_scale(), state


def call_for(inputs: Inputs) -> LossCall:
    """The call with contiguous tensors, as the kernels take it."""
    tensors = [x if x is None else x.contiguous() for x in inputs[:6]]
    inputs, grad = Inputs(*tensors, *inputs[6:]), torch.is_grad_enabled()
    leaves = inputs.hidden, inputs.weight, inputs.bias
    needs = tuple(grad and x is not None and x.requires_grad for x in leaves)
    eps = threshold(inputs.options, len(inputs.weight)) if any(needs) else None
    if needs[2] or inputs.hidden.dtype == torch.float16:
        eps = None
    return LossCall(inputs, needs, tiles_for(inputs.hidden, inputs.weight), eps)


def describe(inputs: Inputs) -> str:
    """How the gradient of these inputs is made."""
    return plan.describe(call_for(inputs))


def threshold(options: Options, vocabulary: int) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact.

    The filter adds with atomics, in an order that depends on timing, and knows no upstream gradient
    of the log-sum-exps."""
    if options.return_lse or torch.are_deterministic_algorithms_enabled():
        return None
    if options.filter_eps == "auto":
        return AUTO * vocabulary**-0.25 if vocabulary >= SMALL else None
    return options.filter_eps


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
    call = call_for(Inputs(hidden, weight, labels, bias, None, None, options))
    eps = threshold(options, len(weight))
    share, mass = hidden.new_zeros(2, dtype=torch.float32)
    if eps is None:
        return share + 1, mass
    call = call._replace(eps=eps)
    with torch.cuda.device_of(hidden):
        order, count = valid_first(call)
        for _, pairs in filtered.plan_super_blocks(call, Results(call), order, count):
            share += pairs.listed.sum()
            mass += pairs.coefficient.clamp(min=0).sum(dtype=torch.float32)
        valid = count.clamp(min=1)[0]
        return share / (valid * call.blocks), mass / valid


def unsupported(inputs: Inputs) -> str | None:
    """Why these inputs cannot be served, or None."""
    hidden = inputs.hidden
    if not hidden.is_cuda and not INTERPRETED:
        return f"the inputs are on {hidden.device.type}, not on a CUDA device"
    if hidden.is_cuda and torch.version.hip is not None:
        return "the kernels have not been run on AMD GPUs"
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the inputs are {hidden.dtype}"
    if len(inputs.weight) < 2:
        return "the vocabulary has fewer than 2 entries"
    if hidden.shape[1] < 1:
        return "hidden states have no dimensions"
    if inputs.options.logit_scale == 0:
        return "logit_scale is 0"
    return None

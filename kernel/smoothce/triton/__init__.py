"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics.

`loss` is an autograd function around three ways to make gradients, of which `plan` chooses one:

    grad_in_forward     exact, from probabilities that the forward saves
    recompute_backward  exact, in little memory: logits are computed a second time
    filtered            some blocks are computed, drawn at random (filter_kernels, filter_plan)

All share the walk over the vocabulary (`forward`), the packing of valid tokens (`tokens`) and the
tile shapes (`tiles`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from smoothce.chunked import graph_is_kept, once_differentiable
from smoothce.options import Inputs, LossOutput, Options
from smoothce.triton import filtered, grad_in_forward, plan, recompute_backward
from smoothce.triton.forward import Results
from smoothce.triton.tiles import INTERPRETED, Tiles, tiles_for
from smoothce.triton.tokens import (
    ForwardGradients,
    LossCall,
    NeededGradients,
    scale_gradients,
    valid_first,
)
from smoothce.vocab_parallel import Shard

__all__ = ["describe", "filter_statistics", "loss", "unsupported"]

# filter_eps="auto" is AUTO_EPS · V^(-1/4): 2^-8.3 at 256,000 entries and 2^-7.6 at 32,768, which
# gives about the same error for all. It was still faster than the exact gradient at 8,192 entries.
AUTO_EPS = 2.0**-8.3 * 256000**0.25
LEAST_FILTERED_ENTRIES = 8192  # with fewer there is too little to skip: "auto" is exact

Gradients = tuple[Tensor | None, ...]  # of hidden, weight and bias


def loss(inputs: Inputs) -> LossOutput:
    """The loss of `reference.loss`; gradients are filtered as `options.filter_eps` says.

    Nothing waits for the device but the exact gradient, for the number of valid tokens alone: it is
    counted before the forward's product, which keeps the device busy meanwhile."""
    call = call_for(inputs)
    tensors = call.inputs
    total, lse, log_probability, entropy, argmax = TritonLoss.apply(
        tensors.hidden,
        tensors.weight,
        tensors.labels,
        tensors.bias,
        tensors.smoothing_target,
        tensors.token_weights,
        CallSettings.of(call),
    )
    return LossOutput(total, lse, log_probability, entropy, argmax)


class CallSettings(NamedTuple):
    """A call without its tensors, which autograd must see one by one: it saves them for the
    backward, and must notice where one is changed in between."""

    options: Options
    shard: Shard | None
    needs: NeededGradients
    tiles: Tiles
    eps: float | None

    @classmethod
    def of(cls, call: LossCall) -> "CallSettings":
        return cls(
            options=call.inputs.options,
            shard=call.inputs.shard,
            needs=call.needs,
            tiles=call.tiles,
            eps=call.eps,
        )

    def call_with(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        smoothing_target: Tensor | None,
        token_weights: Tensor | None,
    ) -> LossCall:
        """The call of these settings with these tensors."""
        inputs = Inputs(
            hidden=hidden,
            weight=weight,
            labels=labels,
            bias=bias,
            smoothing_target=smoothing_target,
            token_weights=token_weights,
            options=self.options,
            shard=self.shard,
        )
        return LossCall(inputs, self.needs, self.tiles, self.eps)


class TritonLoss(torch.autograd.Function):
    """The loss, the log-sum-exps and statistics, differentiable once in hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        smoothing_target: Tensor | None,
        token_weights: Tensor | None,
        settings: CallSettings,
    ) -> tuple[Tensor | None, ...]:
        tensors = (hidden, weight, labels, bias, smoothing_target, token_weights)
        call = settings.call_with(*tensors)
        with torch.cuda.device_of(hidden):
            found = forward_all(call)
        ctx.settings = settings
        ctx.mode = found.mode
        ctx.state = found.state
        ctx.save_for_backward(*tensors, found.loss_scale)
        ctx.set_materialize_grads(False)

        results = found.results
        statistics = (results.log_probability, results.entropy, results.argmax)
        without_gradient = [x for x in statistics if x is not None]
        if not settings.options.return_lse:
            without_gradient.append(results.lse)
        ctx.mark_non_differentiable(*without_gradient)
        if settings.options.reduction == "none":
            total = results.losses
        else:
            total = results.losses.sum() * found.loss_scale
        return total, results.lse, *statistics

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, loss_gradient: Tensor | None, lse_gradient: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if loss_gradient is None and lse_gradient is None:
            return (None,) * 7
        *tensors, loss_scale = ctx.saved_tensors
        call = ctx.settings.call_with(*tensors)
        device = call.inputs.hidden.device
        if loss_gradient is None:
            loss_gradient = torch.zeros((), device=device)
        loss_gradient = loss_gradient.float()
        with (
            torch.cuda.device_of(call.inputs.hidden),
            torch.autocast(device.type, enabled=False),
        ):
            gradients: Gradients
            if isinstance(ctx.state, ForwardGradients):
                gradients = take_gradients(call, ctx.state)
                scale_gradients(gradients, loss_gradient)
            elif ctx.mode == "filtered":
                # `threshold` leaves calls whose log-sum-exps have a gradient to the exact ways.
                gradients = filtered.backward_all(call, ctx.state, loss_gradient, None, loss_scale)
            else:
                gradients = recompute_backward.backward_all(
                    call, ctx.state, loss_gradient, lse_gradient, loss_scale
                )
        if not graph_is_kept():
            ctx.state = None
        d_hidden, d_weight, d_bias = gradients
        return d_hidden, d_weight, None, d_bias, None, None, None


class ForwardOutput(NamedTuple):
    """What the forward finds, and leaves for the backward."""

    results: Results
    loss_scale: Tensor  # (), what the reduction multiplies the losses' sum by
    mode: str  # the plan's
    state: Any  # `ForwardGradients`, or what the mode's module takes in its `backward_all`


def forward_all(call: LossCall) -> ForwardOutput:
    """Run the forward in the way that the plan chooses."""
    results = Results.allocate(call)
    chosen = plan.plan_for(call)
    state: Any
    if chosen.mode == "filtered":
        state = filtered.forward_all(call, results)
    elif chosen.mode == "grad_in_forward":
        state = grad_in_forward.forward_all(call, results, chosen.part_tokens, chosen.sum_in_fp32)
    else:
        state = recompute_backward.forward_all(call, results)
    return ForwardOutput(results, call.inputs.loss_scale(), chosen.mode, state)


def take_gradients(call: LossCall, state: ForwardGradients) -> Gradients:
    """The gradients that the forward has made; a second backward makes them again, since the first
    has given them away."""
    gradients = state.gradients
    state.gradients = None
    if gradients is None:
        return forward_all(call).state.gradients
    return gradients


def call_for(inputs: Inputs) -> LossCall:
    """The call with contiguous tensors, as the kernels take it."""
    inputs = inputs._replace(
        hidden=inputs.hidden.contiguous(),
        weight=inputs.weight.contiguous(),
        labels=inputs.labels.contiguous(),
        bias=contiguous(inputs.bias),
        smoothing_target=contiguous(inputs.smoothing_target),
        token_weights=contiguous(inputs.token_weights),
    )
    needs = NeededGradients(
        hidden=needs_gradient(inputs.hidden),
        weight=needs_gradient(inputs.weight),
        bias=needs_gradient(inputs.bias),
    )
    eps = None
    if any(needs) and not needs.bias and inputs.hidden.dtype != torch.float16:
        eps = threshold(inputs.options, len(inputs.weight))
    return LossCall(inputs, needs, tiles_for(inputs.hidden, inputs.weight), eps)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def needs_gradient(tensor: Tensor | None) -> bool:
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


def describe(inputs: Inputs) -> str:
    """How the gradient of these inputs is made."""
    return plan.describe(call_for(inputs))


def threshold(options: Options, vocabulary: int) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact.

    The filter adds with atomics, in an order that depends on timing, and knows no upstream gradient
    of the log-sum-exps."""
    if options.return_lse or torch.are_deterministic_algorithms_enabled():
        return None
    eps = options.filter_eps
    if isinstance(eps, str):  # "auto"
        return AUTO_EPS * vocabulary**-0.25 if vocabulary >= LEAST_FILTERED_ENTRIES else None
    return eps


@torch.no_grad()
def filter_statistics(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> tuple[Tensor, Tensor]:
    """What the filter does to these inputs.

    Returns the share of (token, block) pairs whose gradient is computed, kept or drawn, and the
    mean over valid tokens of the softmax mass in the others, which the profiles stand in for. Both
    are 0-d, on the device."""
    inputs = Inputs(
        hidden=hidden,
        weight=weight,
        labels=labels,
        bias=bias,
        smoothing_target=None,
        token_weights=None,
        options=options,
    )
    call = call_for(inputs)
    listed_pairs = hidden.new_zeros((), dtype=torch.float32)
    dropped_mass = hidden.new_zeros((), dtype=torch.float32)
    eps = threshold(options, len(weight))
    if eps is None:
        return listed_pairs + 1, dropped_mass
    call = call._replace(eps=eps)
    with torch.cuda.device_of(hidden):
        order, count = valid_first(call)
        for _, pairs in filtered.plan_super_blocks(call, Results.allocate(call), order, count):
            listed_pairs += pairs.listed.sum()
            dropped_mass += pairs.coefficient.clamp(min=0).sum(dtype=torch.float32)
        n_valid = count.clamp(min=1)[0]
        return listed_pairs / (n_valid * call.blocks), dropped_mass / n_valid


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

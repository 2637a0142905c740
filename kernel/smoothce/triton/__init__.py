"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics.

`loss` is an autograd function around three ways to make gradients, of which `plan` chooses one:

    grad_in_forward     exact, from probabilities that the forward saves
    recompute_backward  exact, in little memory: logits are computed a second time
    filtered            blocks of large probabilities are computed and some others, drawn at random
                        (`filter_plan` chooses them, `filter_kernels` computes them)

All share the walk over the vocabulary (`forward`), the packing of valid tokens (`tokens`) and the
tile shapes (`tiles`).

E are the hidden states, C is the classifier, dE and dC are their gradients, here and in every
docstring of this package. `tokens.Coefficients` defines S (`dproduct` in code) and the coefficients
a and b, `tokens` û and κ, `grad_in_forward` p̃ and ê, `filter_plan` P and ε_j, and `filtered` R, m,
W and H. Pieces of the N tokens and V entries are

    tile         tokens by entries that a program works on at a time; a token tile is its tokens
    block        of the vocabulary: the entries of a tile; what the filter computes or leaves out
    group        of the forward: token tiles whose hidden states stay in the cache together
    part         of the tokens in `grad_in_forward`: those whose probabilities the workspace holds
    super-block  of the tokens in the other two ways: those that are packed and worked on together.
                 `recompute_backward` cuts the caller's tokens, and in each super-block puts valid
                 ones first. `filtered` puts all valid tokens first and then cuts, so that its last
                 super-blocks may have none
    chunk        of the vocabulary: entries whose S is in memory at a time (`recompute_backward`);
                 in smoothce.chunked: tokens whose logits are in memory at a time
    slice        of D: the columns of a gradient's tile (`filter_kernels`)
    step         of a loop in a kernel: the tokens or blocks that one turn of it takes
    share        of a block's dC: an item of the filter's queue, of one or more slices

How gradients are summed, and in which dtypes:

    S, p̃ or R            in the input dtype, in every way; `filtered` rounds m, W and H to it too
    dE                   in fp32; each row is rounded to the input dtype once
    dC, grad_in_forward  in the input dtype, rounded after each of about 8 parts of the tokens at
                         most (whole tiles may make a few more); or in fp32 over the parts and
                         rounded once, where `plan` says so
    dC, others           in fp32 within a super-block of tokens, rounded after each
    bias's gradient      in fp32, and so it is returned: autograd casts it to the bias's dtype. In
                         `grad_in_forward` without a softcap the tokens' factors w are rounded to
                         the input dtype first

"In fp32" holds where PyTorch has products of 16-bit factors in fp32 (`dproduct.HAS_FP32_OUT`). An
older one rounds each product to the input dtype before it is added.

Gradients made in the forward are multiplied by the upstream factor in the backward and rounded a
second time, unless that is 1. Where ranks share a vocabulary, dE is summed over them in the input
dtype.
"""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import assert_never  # not yet in Python 3.10's typing

from smoothce.autograd_tools import graph_is_kept, once_differentiable
from smoothce.options import Gradients, Inputs, InputTensors, LossOutput, Needs, Options
from smoothce.triton import filtered, grad_in_forward, plan, recompute_backward
from smoothce.triton.filtered import FilterState
from smoothce.triton.forward import Results
from smoothce.triton.made_gradients import MadeGradients, scale_gradients
from smoothce.triton.recompute_backward import RecomputeState
from smoothce.triton.tiles import INTERPRETED, Tiles, tiles_for
from smoothce.triton.tokens import LossCall, valid_first
from smoothce.vocab_parallel import Shard

__all__ = ["describe", "filter_statistics", "loss", "unsupported"]

# What a forward leaves for the backward: the way in which that makes gradients. None where no
# gradient is wanted.
State: TypeAlias = MadeGradients | FilterState | RecomputeState | None


def loss(inputs: Inputs) -> LossOutput:
    """The loss of `reference.loss`; gradients are filtered as `options.filter_eps` says.

    The host waits for the device once, where the exact gradient is wanted: for the number of valid
    tokens. It asks when the forward's large kernel is launched already, which keeps the device busy
    meanwhile (`tokens.ValidCounts`)."""
    call = call_for(inputs)
    return LossOutput(*TritonLoss.apply(*call.inputs.tensors, CallSettings.of(call)))


class CallSettings(NamedTuple):
    """A call without its tensors, which autograd must see one by one: it saves them for the
    backward, and must notice where one is changed in between."""

    options: Options
    shard: Shard | None
    needs: Needs
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

    def call_with(self, tensors: InputTensors) -> LossCall:
        """The call of these settings with these tensors."""
        inputs = tensors.with_options(self.options, self.shard)
        return LossCall(inputs, self.needs, self.tiles, self.eps)


class TritonLoss(torch.autograd.Function):
    """The loss, the log-sum-exps and token statistics. The first two are differentiable once in
    hidden, weight and bias."""

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
        tensors = InputTensors(hidden, weight, labels, bias, smoothing_target, token_weights)
        call = settings.call_with(tensors)
        with torch.cuda.device_of(hidden):
            output = run_planned_forward(call)
        ctx.settings = settings
        ctx.state = output.state
        ctx.save_for_backward(*tensors, output.loss_scale)
        ctx.set_materialize_grads(False)

        results = output.results
        token_statistics = (results.log_probability, results.entropy, results.argmax)
        without_gradient = [x for x in token_statistics if x is not None]
        if not settings.options.return_lse:
            without_gradient.append(results.lse)
        ctx.mark_non_differentiable(*without_gradient)
        loss = results.losses
        if settings.options.reduction != "none":
            loss = loss.sum() * output.loss_scale
        return loss, results.lse, *token_statistics

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, upstream_loss: Tensor | None, upstream_lse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        gradients = Gradients()
        if upstream_loss is not None or upstream_lse is not None:
            *tensors, loss_scale = ctx.saved_tensors
            call = ctx.settings.call_with(InputTensors(*tensors))
            device = call.inputs.hidden.device
            if upstream_loss is None:
                upstream_loss = torch.zeros((), device=device)
            with (
                torch.cuda.device_of(call.inputs.hidden),
                torch.autocast(device.type, enabled=False),
            ):
                gradients = run_prepared_backward(
                    call, ctx.state, upstream_loss.float(), upstream_lse, loss_scale
                )
            if not graph_is_kept():
                ctx.state = None
        return gradients.hidden, gradients.weight, None, gradients.bias, None, None, None


class ForwardOutput(NamedTuple):
    """What the forward finds, and leaves for the backward."""

    results: Results
    loss_scale: Tensor  # (), what the reduction multiplies the losses' sum by
    state: State


def run_planned_forward(call: LossCall) -> ForwardOutput:
    """Run the forward in the way that the plan chooses."""
    results = Results.allocate(call)
    chosen = plan.plan_for(call)
    state: State
    match chosen.mode:
        case "none":
            # The forward that takes least; what it leaves for a backward is not kept.
            recompute_backward.forward_without_gradients(call, results)
            state = None
        case "filtered":
            state = filtered.filtered_forward(call, results)
        case "grad_in_forward":
            state = grad_in_forward.forward_with_gradients(
                call, results, chosen.part_tokens, chosen.sum_in_fp32
            )
        case "recompute_backward":
            state = recompute_backward.forward_without_gradients(call, results)
        case _:
            assert_never(chosen.mode)
    return ForwardOutput(results, call.inputs.loss_scale(), state)


def run_prepared_backward(
    call: LossCall,
    state: State,
    upstream_loss: Tensor,  # fp32, () or (N,)
    upstream_lse: Tensor | None,  # (N,)
    loss_scale: Tensor,  # ()
) -> Gradients:
    """The gradients that are wanted, in the way that the forward has prepared."""
    match state:
        case MadeGradients():
            gradients = take_gradients(call, state)
            scale_gradients(gradients, upstream_loss)
            return gradients
        case FilterState():
            # `plan.threshold` leaves calls whose log-sum-exps have a gradient to the exact ways.
            assert upstream_lse is None
            return filtered.filtered_backward(call, state, upstream_loss, loss_scale)
        case RecomputeState():
            return recompute_backward.recompute_gradients(
                call, state, upstream_loss, upstream_lse, loss_scale
            )
        case None:
            raise AssertionError("a forward that was asked for no gradient has a backward")
        case _:
            assert_never(state)


def take_gradients(call: LossCall, state: MadeGradients) -> Gradients:
    """The gradients that the forward has made; a second backward makes them again, since the first
    has given them away."""
    gradients = state.gradients
    state.gradients = None
    if gradients is not None:
        return gradients
    made_again = run_planned_forward(call).state
    assert isinstance(made_again, MadeGradients)
    assert made_again.gradients is not None
    return made_again.gradients


def call_for(inputs: Inputs) -> LossCall:
    """The call with contiguous tensors, as the kernels take it."""
    tensors = inputs.tensors
    tensors = InputTensors(
        hidden=tensors.hidden.contiguous(),
        weight=tensors.weight.contiguous(),
        labels=tensors.labels.contiguous(),
        bias=contiguous(tensors.bias),
        smoothing_target=contiguous(tensors.smoothing_target),
        token_weights=contiguous(tensors.token_weights),
    )
    inputs = inputs._replace(tensors=tensors)
    needs = tensors.needs()
    eps = plan.threshold(inputs, needs) if any(needs) else None
    return LossCall(inputs, needs, tiles_for(tensors.hidden, tensors.weight), eps)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def describe(inputs: Inputs) -> str:
    """How the gradient of these inputs is made."""
    return plan.describe(call_for(inputs))


@torch.no_grad()
def filter_statistics(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> tuple[Tensor, Tensor]:
    """What the filter does to these inputs in a step that wants the gradients of hidden and weight.

    Returns the share of (token, block) pairs whose gradient is computed, kept or drawn, and the
    mean over valid tokens of the softmax mass in the others, which the profiles stand in for. Both
    are 0-d, on the device."""
    tensors = InputTensors(hidden, weight, labels, bias, smoothing_target=None, token_weights=None)
    call = call_for(tensors.with_options(options))
    needs = Needs(hidden=True, weight=True, bias=False)
    listed_pairs = hidden.new_zeros((), dtype=torch.float32)
    dropped_mass = hidden.new_zeros((), dtype=torch.float32)
    eps = plan.threshold(call.inputs, needs)
    if eps is None:
        return listed_pairs + 1, dropped_mass
    call = call._replace(eps=eps)
    with torch.cuda.device_of(hidden):
        order, valid_count = valid_first(call)
        for _, pairs in filtered.plan_super_blocks(
            call, Results.allocate(call), order, valid_count
        ):
            listed_pairs += pairs.listed.sum()
            # Coefficients of dropped pairs are positive, those of the others 0 or negative.
            dropped_mass += pairs.pair_coefficients.clamp(min=0).sum(dtype=torch.float32)
        n_valid = valid_count.clamp(min=1)[0]
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
    # Triton makes a constant of an argument that is 1. Kernels take V as a number, and were never
    # compiled for such a vocabulary.
    if inputs.least_rows < 2:
        if inputs.shard is None:
            return "the vocabulary has fewer than 2 entries"
        return "a rank of process_group has fewer than 2 entries of the vocabulary"
    # The bias's gradient is S divided by the scale (`GradientSums.add_products`).
    if inputs.options.logit_scale == 0:
        return "logit_scale is 0"
    return None

"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics.

`loss` is an autograd function around three ways to make gradients, of which `plan` chooses one. The
default is `grad_in_forward`: start there.

    grad_in_forward     exact, from probabilities that the forward saves
    recompute_backward  exact, in little memory: logits are computed a second time
    filter              blocks of large probabilities are computed and some others, drawn at random

All share the walk over the vocabulary (`forward`), the packing of valid tokens (`tokens`) and the
tile shapes (`tiles`).

E are the hidden states, C is the classifier, dE and dC are their gradients, here and in every
docstring of this package. `tokens.Coefficients` defines S (`dproduct` in code) and the coefficients
a and b, `tokens` û and κ, `grad_in_forward` p̃ and ê, `filter.pairs` P and ε_j, and `filter` R,
m, W and H. Pieces of the N tokens and V entries are

    tile         tokens by entries that a program works on at a time; a token tile is its tokens
    block        of the vocabulary: the entries of a tile; what the filter computes or leaves out
    group        of the forward: token tiles whose hidden states stay in the cache together
    part         of the tokens in `grad_in_forward`: those whose probabilities the workspace holds
    super-block  of the tokens in the other two ways: those that are packed and worked on together.
                 `recompute_backward` cuts the caller's tokens, and in each super-block puts valid
                 ones first. `filter` puts all valid tokens first and then cuts, so that its last
                 super-blocks may have none
    chunk        of the vocabulary: entries whose S is in memory at a time (`recompute_backward`);
                 in smoothce.chunked: tokens whose logits are in memory at a time
    slice        of D: the columns of a gradient's tile (`filter.kernels`)
    step         of a loop in a kernel: the tokens or blocks that one turn of it takes
    share        of a block's dC: an item of the filter's queue, of one or more slices

How gradients are summed, and in which dtypes:

    S, p̃ or R            in the input dtype, in every way; `filter` rounds m, W and H to it too
    dE                   in fp32; each row is rounded to the input dtype once
    dC, grad_in_forward  in the input dtype, rounded after each of about 8 parts of the tokens at
                         most (whole tiles may make a few more); or in fp32 over the parts and
                         rounded once, where `plan` says so
    dC, others           in fp32 within a super-block of tokens, rounded after each
    bias's gradient      in fp32, and so it is returned: autograd casts it to the bias's dtype. In
                         `grad_in_forward` without a softcap the tokens' factors w are rounded to
                         the input dtype first

"In fp32" holds where PyTorch has products of 16-bit factors in fp32 (`tiles.HAS_FP32_OUT`). An
older one rounds each product to the input dtype before it is added.

Gradients made in the forward are multiplied by the upstream factor in the backward and rounded a
second time, unless that is 1. Where ranks share a vocabulary, dE is summed over them in the input
dtype.
"""

from typing import Any

import torch
from torch import Tensor

from smoothce.autograd_tools import graph_is_kept, once_differentiable
from smoothce.options import Gradients, LossCall, LossOutput
from smoothce.triton import grad_in_forward, plan, recompute_backward
from smoothce.triton.forward import empty_output
from smoothce.triton.recompute_backward import RecomputeState
from smoothce.triton.tiles import INTERPRETED, tiles_for
from smoothce.triton.tokens import KernelCall


def loss(call: LossCall) -> LossOutput:
    """Compute the loss of `reference.loss`; gradients are filtered as `options.filter_eps` says.

    The host waits for the device once, where the exact gradient is wanted: for the number of valid
    tokens. It asks when the forward's large kernel is launched already, which keeps the device busy
    meanwhile (`tokens.ValidCounts`)."""
    call = kernel_call(call)
    return LossOutput(*TritonLoss.apply(call.hidden, call.weight, call.bias, call))


def kernel_call(call: LossCall) -> KernelCall:
    """Return the call as the kernels take it, with contiguous tensors."""
    tensors: dict[str, Any] = {}
    for name, tensor in call.tensors().items():
        tensors[name] = None if tensor is None else tensor.contiguous()
    tiles = tiles_for(tensors["hidden"], tensors["weight"])
    kernel_call = KernelCall(**tensors, **call.settings(), tiles=tiles)
    if call.options.filter_eps is not None and any(call.needs):
        from smoothce.triton import filter

        kernel_call.eps = filter.threshold(call)
    return kernel_call


class TritonLoss(torch.autograd.Function):
    """The loss, the log-sum-exps and token statistics. The first two are differentiable once in
    hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: KernelCall,  # has the three too, but autograd sees only tensors that are arguments
    ) -> tuple[Tensor | None, ...]:
        output = empty_output(call)
        # What the forward leaves for the backward: gradients up to the upstream factor, or what
        # they are made of. None where none is wanted.
        ctx.state = None
        chosen = plan.plan_for(call)
        with torch.cuda.device_of(hidden):
            if chosen.mode == "grad_in_forward":
                ctx.state = grad_in_forward.forward_with_gradients(
                    call, output, chosen.part_tokens, chosen.sum_in_fp32
                )
            elif chosen.mode == "filtered":
                from smoothce.triton import filter

                ctx.state = filter.filtered_forward(call, output)
            else:
                state = recompute_backward.forward_without_gradients(call, output)
                if chosen.mode == "recompute_backward":
                    ctx.state = state
            loss_scale = call.loss_scale()
        ctx.settings = call.settings()
        ctx.save_for_backward(*call.tensors().values(), loss_scale)
        ctx.set_materialize_grads(False)

        without_gradient = [output.log_probability, output.entropy, output.argmax]
        if not call.options.return_lse:
            without_gradient.append(output.lse)
        ctx.mark_non_differentiable(*[x for x in without_gradient if x is not None])
        if call.options.reduction != "none":
            output = output._replace(loss=output.loss.sum() * loss_scale)
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, upstream_loss: Tensor | None, upstream_lse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if upstream_loss is None and upstream_lse is None:
            return None, None, None, None
        *tensors, loss_scale = ctx.saved_tensors
        call = KernelCall(*tensors, **ctx.settings)
        device = call.hidden.device
        if upstream_loss is None:
            upstream_loss = torch.zeros((), device=device)
        upstream_loss = upstream_loss.float()
        state = ctx.state
        with torch.cuda.device_of(call.hidden), torch.autocast(device.type, enabled=False):
            if isinstance(state, Gradients):
                gradients = state
                if graph_is_kept():  # a later backward needs them as they are
                    gradients = Gradients(*(None if x is None else x.clone() for x in state))
                grad_in_forward.scale_gradients(gradients, upstream_loss)
            elif isinstance(state, RecomputeState):
                gradients = recompute_backward.recompute_gradients(
                    call, state, upstream_loss, upstream_lse, loss_scale
                )
            else:
                from smoothce.triton import filter

                # `filter.threshold` leaves calls whose log-sum-exps have a gradient to the others.
                assert upstream_lse is None
                gradients = filter.filtered_backward(call, state, upstream_loss, loss_scale)
        if not graph_is_kept():
            ctx.state = None
        return *gradients, None


def describe(call: LossCall) -> str:
    """Say how the gradient is made."""
    return plan.describe(kernel_call(call))


def unsupported(call: LossCall) -> str | None:
    """Say why this call cannot be served, or None."""
    hidden = call.hidden
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
    if call.least_rows < 2:
        if call.shard is None:
            return "the vocabulary has fewer than 2 entries"
        return "a rank of process_group has fewer than 2 entries of the vocabulary"
    # The bias's gradient is S divided by the scale (`GradientSums.add_products`).
    if call.options.logit_scale == 0:
        return "logit_scale is 0"
    return None

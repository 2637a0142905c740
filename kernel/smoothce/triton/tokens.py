"""What one call of the loss works on, and its tokens with the valid ones first.

Masked tokens cost nothing because the kernels see the others alone: `valid_first` orders them,
`gather` packs their hidden states and computes their targets' logits, and `coefficients` says what
each counts in the gradients. Nothing here waits for the device, which alone knows how many tokens
are valid.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.options import Inputs
from smoothce.triton.tiles import LOG2E, Tiles


class NeededGradients(NamedTuple):
    """Which inputs' gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class LossCall(NamedTuple):
    """One call, as every step of it takes it: contiguous tensors, and how they are worked on."""

    inputs: Inputs
    needs: NeededGradients
    tiles: Tiles
    eps: float | None  # the filter's threshold; None where gradients are exact

    @property
    def blocks(self) -> int:
        """How many blocks the vocabulary has, of `tiles.width` entries each."""
        return cdiv(len(self.inputs.weight), self.tiles.width)

    @property
    def share(self) -> float:
        """β u_v of each entry where u is uniform."""
        return self.inputs.options.label_smoothing / self.inputs.vocabulary

    def part(self, tokens: slice) -> "LossCall":
        """The call with the hidden states and labels of these tokens alone.

        Token weights stay those of all tokens: who reads them knows which tokens these are."""
        inputs = self.inputs
        hidden = inputs.hidden[tokens]
        labels = inputs.labels[tokens]
        return self._replace(inputs=inputs._replace(hidden=hidden, labels=labels))


class PackedTokens(NamedTuple):
    """Tokens that are worked on together, valid ones first.

    "padded" is their number rounded up to whole tiles; what stands behind the valid tokens says
    that there is none. `gather` fills in the labels and targets and leaves memory for `lse` and
    `offset`, which `forward.lse_forward` writes."""

    order: Tensor  # (n,) int32, each one's position in the caller's order
    count: Tensor  # type: ignore[assignment]  # (1,) int32, how many are valid; hides tuple.count
    labels: Tensor  # (padded,) int32, the target's row of C; -1 where this rank has none
    target: Tensor  # (padded,) fp32, the target's logit in nats
    lse: Tensor  # (padded,) fp32 base 2, +inf where there is no valid token
    offset: Tensor  # (padded,) fp32 base 2, what exponents are relative to
    # The filter's alone.
    total: Tensor | None = None  # (D,) fp32, Σ E_i over valid tokens
    mean: Tensor | None = None  # (D,) the mean hidden state in the inputs' dtype


@triton.jit(do_not_specialize=["n_tokens"])
def order_kernel(labels, order, valid_count, ignore_index, n_tokens, BLOCK: tl.constexpr):
    """One program counts the valid tokens, then gives each token its place."""
    n_valid = 0
    for start in range(0, n_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        label = tl.load(labels + token, mask=token < n_tokens, other=0)
        n_valid += tl.sum(((token < n_tokens) & (label != ignore_index)).to(tl.int32), 0)
    tl.store(valid_count, n_valid)
    n_before = 0  # valid tokens before this block of tokens
    for start in range(0, n_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        label = tl.load(labels + token, mask=token < n_tokens, other=0)
        is_valid = ((token < n_tokens) & (label != ignore_index)).to(tl.int32)
        n_until = n_before + tl.cumsum(is_valid, 0)  # valid tokens up to each one
        place = tl.where(is_valid > 0, n_until - 1, n_valid + token - n_until)
        tl.store(order + place, token, mask=token < n_tokens)
        n_before += tl.sum(is_valid, 0)


def valid_first(call: LossCall) -> tuple[Tensor, Tensor]:
    """The stable order that puts valid tokens first, (N,) int32, and their number, (1,) int32."""
    labels = call.inputs.labels
    order = torch.empty(len(labels), device=labels.device, dtype=torch.int32)
    count = torch.empty(1, device=labels.device, dtype=torch.int32)
    order_kernel[(1,)](
        labels=labels,
        order=order,
        valid_count=count,
        ignore_index=call.inputs.options.ignore_index,
        n_tokens=len(labels),
        BLOCK=4096,
    )
    return order, count


@triton.jit(do_not_specialize=["first_entry"])
def gather_kernel(
    hidden, weight, bias, labels, order, valid_count,
    packed, packed_labels, target_logits,  # written, at the token's place
    first_entry, V, scale, softcap, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: copy its hidden state to its place and take the product with its target's row,
    where that is one of the V rows here, which begin at `first_entry`."""
    place = tl.program_id(0)
    valid = place < tl.load(valid_count)
    source = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    label = tl.load(labels + source, mask=valid, other=-1) - first_entry
    is_here = valid & (label >= 0) & (label < V)
    weight_row = tl.where(is_here, label, 0).to(tl.int64)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < tl.where(valid, D, 0)
        state = tl.load(hidden + source * D + columns, mask=mask, other=0.0)
        weights = tl.load(weight + weight_row * D + columns, mask=mask, other=0.0)
        products += state.to(tl.float32) * weights.to(tl.float32)
        tl.store(packed + place.to(tl.int64) * D + columns, state, mask=columns < D)
    logit = tl.sum(products, 0) * scale
    if bias is not None:
        logit += tl.load(bias + weight_row).to(tl.float32)
    if softcap is not None:
        logit = softcap * (1.0 - 2.0 / (tl.exp2(logit * (2.0 * LOG2E / softcap)) + 1.0))
    tl.store(target_logits + place, tl.where(is_here, logit, 0.0))
    tl.store(packed_labels + place, tl.where(is_here, label, -1).to(tl.int32))


def gather(
    call: LossCall,
    order: Tensor,  # (n,) the part of the order that belongs to these tokens
    count: Tensor,  # (1,)
) -> tuple[PackedTokens, Tensor]:
    """These tokens, packed, and their hidden states, (padded, D)."""
    inputs = call.inputs
    shard = inputs.shard
    hidden = inputs.hidden
    d = hidden.shape[1]
    padded = cdiv(len(order), call.tiles.rows) * call.tiles.rows
    packed = hidden.new_empty(padded, d)
    tokens = PackedTokens(
        order=order,
        count=count,
        labels=torch.empty(padded, device=hidden.device, dtype=torch.int32),
        target=torch.empty(padded, device=hidden.device, dtype=torch.float32),
        lse=torch.empty(padded, device=hidden.device, dtype=torch.float32),
        offset=torch.empty(padded, device=hidden.device, dtype=torch.float32),
    )
    gather_kernel[(padded,)](
        hidden=hidden,
        weight=inputs.weight,
        bias=inputs.bias,
        labels=inputs.labels,
        order=order,
        valid_count=count,
        packed=packed,
        packed_labels=tokens.labels,
        target_logits=tokens.target,
        first_entry=0 if shard is None else shard.offset,
        V=len(inputs.weight),
        scale=inputs.scale,
        softcap=inputs.options.softcap,
        D=d,
        BLOCK=min(1024, triton.next_power_of_2(d)),
        num_warps=4,
    )
    if shard is not None:
        dist.all_reduce(tokens.target, group=shard.group)
    return tokens, packed


class Coefficients(NamedTuple):
    """What a token's softmax (a_i) and its target distribution (b_i) count in the gradient
    S_iv = (a_i p_iv − b_i ((1−β) [v = y_i] + β u_v)) · ∂logit/∂product."""

    softmax: Tensor  # a: (padded,) fp32, 0 where there is no valid token
    target: Tensor  # b: (padded,) fp32, likewise


@triton.jit
def coefficients_kernel(
    order, valid_count, lse,  # (n,), (1,), (padded,) base 2
    loss_gradient, loss_scale, token_weights, lse_gradient,  # () or (N,), (), and (N,) or None
    softmax_coefficients, target_coefficients,  # (padded,) written
    padded, z_loss, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Coefficients` of BLOCK tokens; PER_TOKEN where each loss has an upstream gradient of its
    own."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = place < tl.load(valid_count)
    source = tl.load(order + place, mask=valid, other=0)
    if PER_TOKEN:
        upstream = tl.load(loss_gradient + source, mask=valid, other=0.0)
    else:
        upstream = tl.load(loss_gradient)
    target = tl.where(valid, upstream * tl.load(loss_scale), 0.0)
    if token_weights is not None:
        target *= tl.load(token_weights + source, mask=valid, other=0.0)
    # the z-loss ζ lse² adds 2ζ lse to the softmax's coefficient
    lift = 1.0 + 2.0 * z_loss * (tl.load(lse + place, mask=valid, other=0.0) / LOG2E)
    # the softmax's coefficient divides the target's: not by 0
    lift = tl.where(tl.abs(lift) < 1e-6, 1e-6, lift)
    tl.store(target_coefficients + place, target, mask=place < padded)
    if lse_gradient is None:
        softmax_more = 0.0
    else:
        softmax_more = tl.load(lse_gradient + source, mask=valid, other=0.0)
    tl.store(softmax_coefficients + place, target * lift + softmax_more, mask=place < padded)


def coefficients(
    call: LossCall,
    tokens: PackedTokens,
    loss_gradient: Tensor,  # fp32, upstream gradient of the losses: (N,), or () where all are alike
    loss_scale: Tensor,  # ()
    where: slice,  # which of the caller's tokens these are
    lse_gradient: Tensor | None = None,  # (N,) upstream gradient of the log-sum-exps
) -> Coefficients:
    """What each of these tokens counts in the gradients."""
    per_token = loss_gradient.dim() > 0
    if per_token:
        loss_gradient = loss_gradient[where].contiguous()
    if lse_gradient is not None:  # contiguous, for the gradient of a sum is one number repeated
        lse_gradient = lse_gradient[where].contiguous()
    token_weights = call.inputs.token_weights
    if token_weights is not None:
        token_weights = token_weights[where]
    padded = len(tokens.lse)
    softmax, target = torch.empty(2, padded, device=tokens.lse.device, dtype=torch.float32).unbind()
    coefficients_kernel[(cdiv(padded, 1024),)](
        order=tokens.order,
        valid_count=tokens.count,
        lse=tokens.lse,
        loss_gradient=loss_gradient,
        loss_scale=loss_scale,
        token_weights=token_weights,
        lse_gradient=lse_gradient,
        softmax_coefficients=softmax,
        target_coefficients=target,
        padded=padded,
        z_loss=call.inputs.options.z_loss,
        PER_TOKEN=per_token,
        BLOCK=1024,
    )
    return Coefficients(softmax, target)


@dataclass
class ForwardGradients:
    """Gradients of hidden, weight and bias made in the forward, up to the upstream factor."""

    gradients: tuple[Tensor | None, ...] | None  # None once a backward has taken them


@triton.jit
def scale_kernel(values, factors, size, D: tl.constexpr, BLOCK: tl.constexpr):
    """The values times one factor, or where D is given times one for each row of D numbers."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if D is not None:
        factor = tl.load(factors + places // D, mask=places < size, other=0.0)
        scaled = tl.load(values + places, mask=places < size, other=0.0).to(tl.float32) * factor
        tl.store(values + places, scaled.to(values.dtype.element_ty), mask=places < size)
    else:
        factor = tl.load(factors)
        if factor != 1.0:  # as it is in `loss.backward()`: then nothing is read
            scaled = tl.load(values + places, mask=places < size, other=0.0).to(tl.float32) * factor
            tl.store(values + places, scaled.to(values.dtype.element_ty), mask=places < size)


def scale_gradients(
    gradients: tuple[Tensor | None, ...],  # contiguous, multiplied in place
    factor: Tensor,  # fp32 (), or (N,) where there is a gradient of hidden alone
) -> None:
    """Multiply gradients made in the forward by the upstream factor that the backward brings."""
    factor = factor.contiguous()
    for gradient in gradients:
        if gradient is None or gradient.numel() == 0:
            continue
        scale_kernel[(cdiv(gradient.numel(), 4096),)](
            values=gradient,
            factors=factor,
            size=gradient.numel(),
            D=gradient.shape[1] if factor.dim() else None,
            BLOCK=4096,
            num_warps=8,
        )

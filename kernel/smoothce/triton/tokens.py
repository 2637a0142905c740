"""What a call works on; its valid tokens first: their order, hidden states, targets."""

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


class LossCall(NamedTuple):
    """One call, as every step of it takes it: contiguous tensors, and how they are worked on."""

    inputs: Inputs
    needs: tuple[bool, bool, bool]  # gradients of hidden, weight and bias
    tiles: Tiles
    eps: float | None  # the filter's threshold; None: exact gradients

    @property
    def blocks(self) -> int:
        """Of the vocabulary, `tiles.width` entries each."""
        return cdiv(len(self.inputs.weight), self.tiles.width)

    @property
    def share(self) -> float:
        """β u_v of each entry where u is uniform."""
        return self.inputs.options.label_smoothing / self.inputs.vocabulary

    def part(self, tokens: slice) -> "LossCall":
        inputs = self.inputs
        hidden, labels = inputs.hidden[tokens], inputs.labels[tokens]
        return self._replace(inputs=inputs._replace(hidden=hidden, labels=labels))


class PackedTokens(NamedTuple):
    """A super-block of tokens, valid ones first; tensors are padded to a multiple of a tile."""

    order: Tensor  # (n,) int32, position in the caller's order
    count: Tensor  # (1,) int32, how many are valid
    labels: Tensor  # (padded,) int32, the target's row of C; -1 where this rank has none
    target: Tensor  # (padded,) fp32, the target's logit in nats
    lse: Tensor | None = None  # (padded,) fp32 base 2, +inf where there is no valid token
    offset: Tensor | None = None  # (padded,) fp32 base 2, what exponents are relative to
    total: Tensor | None = None  # (D,) fp32, Σ E_i over valid tokens
    mean: Tensor | None = None  # (D,) the mean hidden state in the inputs' dtype


@triton.jit(do_not_specialize=["N"])
def order_kernel(labels, order, count, ignore, N, BLOCK: tl.constexpr):
    """One program counts the valid tokens, then gives each token its place."""
    n = 0
    for i in range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        y = tl.load(labels + o, mask=o < N, other=0)
        n += tl.sum(((o < N) & (y != ignore)).to(tl.int32), 0)
    tl.store(count, n)
    done = 0
    for i in range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        y = tl.load(labels + o, mask=o < N, other=0)
        valid = ((o < N) & (y != ignore)).to(tl.int32)
        rank = done + tl.cumsum(valid, 0)
        place = tl.where(valid > 0, rank - 1, n + o - rank)
        tl.store(order + place, o, mask=o < N)
        done += tl.sum(valid, 0)


def valid_first(call: LossCall) -> tuple[Tensor, Tensor]:
    """The stable order that puts valid tokens first, (N,) int32, and their number, (1,) int32."""
    labels, ignore = call.inputs.labels, call.inputs.options.ignore_index
    order = torch.empty(len(labels), device=labels.device, dtype=torch.int32)
    count = torch.empty(1, device=labels.device, dtype=torch.int32)
    order_kernel[(1,)](labels, order, count, ignore, len(labels), BLOCK=4096)
    return order, count


@triton.jit(do_not_specialize=["begin"])
def gather_kernel(
    hidden, weight, bias, labels, order, count,
    packed, out_labels, target,  # written, at the token's place
    begin, V, scale, softcap, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: copy its hidden state to its place and take the product with its target's row,
    where that is one of the V rows here, which begin at entry `begin`."""
    i = tl.program_id(0)
    valid = i < tl.load(count)
    source = tl.load(order + i, mask=valid, other=0).to(tl.int64)
    y = tl.load(labels + source, mask=valid, other=-1) - begin
    here = valid & (y >= 0) & (y < V)
    row = tl.where(here, y, 0).to(tl.int64)
    z = tl.zeros((BLOCK,), tl.float32)
    for d in range(0, D, BLOCK):
        o_d = d + tl.arange(0, BLOCK)
        m_d = o_d < tl.where(valid, D, 0)
        e = tl.load(hidden + source * D + o_d, mask=m_d, other=0.0)
        c = tl.load(weight + row * D + o_d, mask=m_d, other=0.0)
        z += e.to(tl.float32) * c.to(tl.float32)
        tl.store(packed + i.to(tl.int64) * D + o_d, e, mask=o_d < D)
    x = tl.sum(z, 0) * scale
    if bias is not None:
        x += tl.load(bias + row).to(tl.float32)
    if softcap is not None:
        x = softcap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0))
    tl.store(target + i, tl.where(here, x, 0.0))
    tl.store(out_labels + i, tl.where(here, y, -1).to(tl.int32))


def gather(
    call: LossCall,
    order: Tensor,  # (n,) this super-block's slice of the order
    count: Tensor,  # (1,)
) -> tuple[PackedTokens, Tensor]:
    """The super-block's `Tokens` and its packed hidden states, (padded, D)."""
    inputs, rows = call.inputs, call.tiles.rows
    hidden, d, shard = inputs.hidden, inputs.hidden.shape[1], inputs.shard
    padded = cdiv(len(order), rows) * rows
    packed = hidden.new_empty(padded, d)
    labels = torch.empty(padded, device=hidden.device, dtype=torch.int32)
    target = torch.empty(padded, device=hidden.device, dtype=torch.float32)
    gather_kernel[(padded,)](
        hidden, inputs.weight, inputs.bias, inputs.labels, order, count,
        packed, labels, target,
        0 if shard is None else shard.offset, len(inputs.weight),
        inputs.scale, inputs.options.softcap, D=d, BLOCK=min(1024, triton.next_power_of_2(d)),
        num_warps=4,
    )  # fmt: skip
    if shard is not None:
        dist.all_reduce(target, group=shard.group)
    return PackedTokens(order, count, labels, target), packed


class Coefficients(NamedTuple):
    """What a token's softmax and its target distribution count in S:
    S_iv = (a_i p_iv − b_i ((1−β) [v = y_i] + β u_v)) · ∂logit/∂product."""

    a: Tensor  # (padded,) fp32, 0 where there is no valid token
    b: Tensor  # (padded,) fp32, likewise


@triton.jit
def coefficients_kernel(
    order, count, lse,  # (n,), (1,), (padded,) base 2
    of_loss, loss_scale, weights, of_lse,  # () or (N,), (), (N,) or None, (N,) or None
    a, b,  # (padded,) written
    padded, zeta, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < tl.load(count)
    source = tl.load(order + i, mask=valid, other=0)
    g = tl.load(of_loss + source, mask=valid, other=0.0) if EACH else tl.load(of_loss)
    g = tl.where(valid, g * tl.load(loss_scale), 0.0)
    if weights is not None:
        g *= tl.load(weights + source, mask=valid, other=0.0)
    lift = 1.0 + 2.0 * zeta * (tl.load(lse + i, mask=valid, other=0.0) / LOG2E)
    # the softmax's coefficient divides the target's: not by 0
    lift = tl.where(tl.abs(lift) < 1e-6, 1e-6, lift)
    tl.store(b + i, g, mask=i < padded)
    h = 0.0 if of_lse is None else tl.load(of_lse + source, mask=valid, other=0.0)
    tl.store(a + i, g * lift + h, mask=i < padded)


def coefficients(
    call: LossCall,
    tokens: PackedTokens,
    of_loss: Tensor,  # fp32, upstream gradient of the losses; () where all are alike
    loss_scale: Tensor,  # ()
    where: slice,  # of the caller's tokens
    of_lse: Tensor | None = None,  # (N,) of the log-sum-exps
) -> Coefficients:
    omega, each = call.inputs.token_weights, of_loss.dim() > 0
    of_lse = of_lse if of_lse is None else of_lse[where].contiguous()  # a sum's is one number
    a, b = torch.empty(2, len(tokens.lse), device=tokens.lse.device, dtype=torch.float32)
    coefficients_kernel[(cdiv(len(a), 1024),)](
        tokens.order, tokens.count, tokens.lse,
        of_loss[where].contiguous() if each else of_loss, loss_scale,
        omega if omega is None else omega[where], of_lse,
        a, b,
        len(a), call.inputs.options.z_loss, EACH=each, BLOCK=1024,
    )  # fmt: skip
    return Coefficients(a, b)


@triton.jit
def scale_kernel(x, factor, size, D: tl.constexpr, BLOCK: tl.constexpr):
    """x times a factor, or where D is given times one for each row of D numbers."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if D is not None:
        f = tl.load(factor + o // D, mask=o < size, other=0.0)
        value = tl.load(x + o, mask=o < size, other=0.0).to(tl.float32) * f
        tl.store(x + o, value.to(x.dtype.element_ty), mask=o < size)
    else:
        f = tl.load(factor)
        if f != 1.0:  # as it is in `loss.backward()`: then nothing is read
            value = tl.load(x + o, mask=o < size, other=0.0).to(tl.float32) * f
            tl.store(x + o, value.to(x.dtype.element_ty), mask=o < size)


@dataclass
class ForwardGradients:
    """Gradients of hidden, weight and bias made in the forward, up to the upstream factor."""

    gradients: tuple[Tensor | None, ...] | None  # None once a backward has taken them


def scale(
    gradients: tuple[Tensor | None, ...],  # contiguous, multiplied in place
    factor: Tensor,  # fp32 (), or (N,) where there is that of hidden alone
) -> None:
    """Gradients made in the forward, times the upstream factor that the backward brings."""
    for x in gradients:
        if x is not None and x.numel():
            each = x.shape[1] if factor.dim() else None
            factor = factor.contiguous()
            scale_kernel[(cdiv(x.numel(), 4096),)](
                x, factor, x.numel(), D=each, BLOCK=4096, num_warps=8
            )

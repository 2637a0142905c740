"""What a call works on; its valid tokens first: their order, hidden states, mean."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.options import Options
from smoothce.triton.tiles import LOG2E, Tiles


class Inputs(NamedTuple):
    """One call's tensors and settings, as every step of it takes them."""

    hidden: Tensor  # (N, D) contiguous
    weight: Tensor  # (V, D) contiguous
    bias: Tensor | None  # (V,)
    labels: Tensor  # (N,)
    options: Options
    needs: tuple[bool, bool]  # gradients of hidden and weight
    tiles: Tiles
    eps: float | None  # the filter's threshold; None: exact gradients

    @property
    def scale(self) -> float:
        return 1.0 if self.options.logit_scale is None else self.options.logit_scale

    @property
    def blocks(self) -> int:
        return cdiv(len(self.weight), self.tiles.width)

    def part(self, tokens: slice) -> "Inputs":
        return self._replace(hidden=self.hidden[tokens], labels=self.labels[tokens])


class Tokens(NamedTuple):
    """A super-block of tokens, valid ones first; tensors are padded to a multiple of a tile."""

    order: Tensor  # (n,) int32, position in the caller's order
    count: Tensor  # (1,) int32, how many are valid
    labels: Tensor  # (padded,) int32, -1 where there is no valid token
    target: Tensor  # (padded,) fp32, the target's logit in nats
    lse: Tensor | None = None  # (padded,) fp32 base 2, +inf where there is no valid token
    rank: Tensor | None = None  # (n,) int32, a token's place in the order, -1 where it is masked
    total: Tensor | None = None  # (D,) fp32, Σ E_i over valid tokens
    mean: Tensor | None = None  # (D,) the mean hidden state in the inputs' dtype


@triton.jit(do_not_specialize=["N"])
def order_kernel(labels, order, ranks, count, weight, ignore, N, BLOCK: tl.constexpr):
    """One program counts the valid tokens, then gives each token its place."""
    n = 0
    for i in range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        y = tl.load(labels + o, mask=o < N, other=0)
        n += tl.sum(((o < N) & (y != ignore)).to(tl.int32), 0)
    tl.store(count, n)
    tl.store(weight, 1.0 / tl.maximum(n, 1).to(tl.float32))
    done = 0
    for i in range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        y = tl.load(labels + o, mask=o < N, other=0)
        valid = ((o < N) & (y != ignore)).to(tl.int32)
        rank = done + tl.cumsum(valid, 0)
        place = tl.where(valid > 0, rank - 1, n + o - rank)
        tl.store(order + place, o, mask=o < N)
        tl.store(ranks + o, tl.where(valid > 0, rank - 1, -1), mask=o < N)
        done += tl.sum(valid, 0)


def valid_first(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stable order that puts valid tokens first, (N,) int32; each token's place in it, -1 where
    it is masked; the number of valid ones, (1,) int32; what the reduction multiplies each loss by:
    1 / max(number, 1) for a mean, else 1, 0-d fp32."""
    labels, ignore = inputs.labels, inputs.options.ignore_index
    order = torch.empty(len(labels), device=labels.device, dtype=torch.int32)
    rank = torch.empty_like(order)
    count = torch.empty(1, device=labels.device, dtype=torch.int32)
    weight = torch.empty((), device=labels.device, dtype=torch.float32)
    order_kernel[(1,)](labels, order, rank, count, weight, ignore, len(labels), BLOCK=4096)
    return order, rank, count, weight if inputs.options.reduction == "mean" else weight.fill_(1.0)


@triton.jit
def gather_kernel(
    hidden, weight, bias, labels, order, count,
    packed, out_labels, target,  # written, at the token's place
    scale, softcap, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: copy its hidden state to its place and take the product with its target's row."""
    i = tl.program_id(0)
    valid = i < tl.load(count)
    source = tl.load(order + i, mask=valid, other=0).to(tl.int64)
    y = tl.load(labels + source, mask=valid, other=-1)
    row = tl.maximum(y, 0).to(tl.int64)
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
    tl.store(target + i, tl.where(valid, x, 0.0))
    tl.store(out_labels + i, y.to(tl.int32))


def gather(
    inputs: Inputs,
    order: Tensor,  # (n,) this super-block's slice of the order
    count: Tensor,  # (1,)
) -> tuple[Tokens, Tensor]:
    """The super-block's `Tokens` and its packed hidden states, (padded, D)."""
    hidden, d = inputs.hidden, inputs.hidden.shape[1]
    padded = cdiv(len(order), inputs.tiles.rows) * inputs.tiles.rows
    packed = hidden.new_empty(padded, d)
    labels = torch.empty(padded, device=hidden.device, dtype=torch.int32)
    target = torch.empty(padded, device=hidden.device, dtype=torch.float32)
    gather_kernel[(padded,)](
        hidden, inputs.weight, inputs.bias, inputs.labels, order, count,
        packed, labels, target,
        inputs.scale, inputs.options.softcap, D=d, BLOCK=min(1024, triton.next_power_of_2(d)),
        num_warps=4,
    )  # fmt: skip
    return Tokens(order, count, labels, target), packed


@triton.jit
def scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    f = tl.load(factor)
    if f != 1.0:  # as it is in `loss.backward()`: then nothing is read
        o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + o, mask=o < size, other=0.0).to(tl.float32) * f
        tl.store(x + o, value.to(x.dtype.element_ty), mask=o < size)


@dataclass
class Made:
    """Gradients of hidden and weight made in the forward, up to the upstream factor."""

    gradients: tuple[Tensor | None, Tensor | None] | None  # None once a backward has taken them


def scale(
    gradients: tuple[Tensor | None, Tensor | None],  # contiguous, multiplied in place
    factor: Tensor,  # () fp32
) -> None:
    """Gradients made in the forward, times the upstream factor that the backward brings."""
    for x in gradients:
        if x is not None and x.numel():
            scale_kernel[(cdiv(x.numel(), 4096),)](x, factor, x.numel(), BLOCK=4096, num_warps=8)

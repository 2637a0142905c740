"""Valid tokens first: the order, the gathered hidden states, their mean and the target logits."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.options import Options
from smoothce.triton.logits import LOG2E
from smoothce.triton.tiles import Tiles, cdiv


class Tokens(NamedTuple):
    """A super-block of tokens, valid ones first; tensors are padded to a multiple of a tile."""

    order: Tensor  # (n,) int32, position in the caller's order
    count: Tensor  # (1,) int32, how many are valid
    labels: Tensor  # (padded,) int32, -1 where there is no valid token
    target: Tensor  # (padded,) fp32, the target's logit in nats
    total: Tensor | None = None  # (D,) fp32, Σ E_i over valid tokens
    mean: Tensor | None = None  # (D,) the mean hidden state in the inputs' dtype

    def with_mean(self, packed: Tensor, tiles: Tiles) -> "Tokens":
        """The same with `total` and `mean`, from the packed hidden states, (padded, D)."""
        # in two steps: torch's reduction of many rows to few sums takes 100 MB of its own
        blocks = packed.view(-1, tiles.rows, packed.shape[1])
        total = blocks.sum(1, dtype=torch.float32).sum(0)
        mean = (total / self.count.clamp(min=1)).to(packed.dtype)
        return self._replace(total=total, mean=mean)


@triton.jit(do_not_specialize=["N"])
def order_kernel(labels, order, ranks, count, weight, ignore, N, BLOCK: tl.constexpr):
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


def valid_first(
    labels: Tensor,  # (N,)
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stable order that puts valid tokens first, (N,) int32; each token's place in it, -1 where
    it is masked; the number of valid ones, (1,) int32, and 1 / max(number, 1), 0-d fp32."""
    order = torch.empty(len(labels), device=labels.device, dtype=torch.int32)
    rank = torch.empty_like(order)
    count = torch.empty(1, device=labels.device, dtype=torch.int32)
    weight = torch.empty((), device=labels.device, dtype=torch.float32)
    order_kernel[(1,)](labels, order, rank, count, weight, ignore_index, len(labels), BLOCK=4096)
    return order, rank, count, weight


@triton.jit
def gather_kernel(
    hidden,
    weight,
    bias,
    labels,
    order,
    count,
    packed,
    out_labels,
    target,
    stride_n,
    stride_d,
    stride_c,
    scale,
    cap,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
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
        e = tl.load(hidden + source * stride_n + o_d * stride_d, mask=m_d, other=0.0)
        c = tl.load(weight + row * stride_c + o_d, mask=m_d, other=0.0)
        z += e.to(tl.float32) * c.to(tl.float32)
        tl.store(packed + i.to(tl.int64) * D + o_d, e, mask=o_d < D)
    x = tl.sum(z, 0) * scale
    if HAS_BIAS:
        x += tl.load(bias + row).to(tl.float32)
    if SOFTCAP:
        x = cap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / cap)) + 1.0))
    tl.store(target + i, tl.where(valid, x, 0.0))
    tl.store(out_labels + i, y.to(tl.int32))


def gather(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,
    labels: Tensor,  # (N,)
    order: Tensor,  # (n,) this super-block's slice of the order
    count: Tensor,  # (1,)
    options: Options,
    tiles: Tiles,
) -> tuple[Tokens, Tensor]:
    """The super-block's `Tokens` and its packed hidden states, (padded, D)."""
    d = hidden.shape[1]
    padded = cdiv(len(order), tiles.rows) * tiles.rows
    packed = hidden.new_empty(padded, d)
    out_labels = torch.empty(padded, device=hidden.device, dtype=torch.int32)
    target = torch.empty(padded, device=hidden.device, dtype=torch.float32)
    gather_kernel[(padded,)](
        hidden,
        weight,
        bias,
        labels,
        order,
        count,
        packed,
        out_labels,
        target,
        hidden.stride(0),
        hidden.stride(1),
        weight.stride(0),
        options.logit_scale if options.logit_scale is not None else 1.0,
        options.softcap or 1.0,
        D=d,
        BLOCK=min(1024, triton.next_power_of_2(d)),
        HAS_BIAS=bias is not None,
        SOFTCAP=options.softcap is not None,
        num_warps=4,
    )
    return Tokens(order, count, out_labels, target), packed

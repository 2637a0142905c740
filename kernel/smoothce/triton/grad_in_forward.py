"""Exact gradients made in the forward, some of the tokens at a time: no logit is computed twice.

The walk keeps p̃_iv = 2^(z_iv − o_i), relative to the target's logit (o_i = z_iy) and so 1 for the
target, which is exact in 16 bits. With w_i = a_i 2^(o_i − lse_i) and the token's coefficients a, b

    dE_i = scale (w_i Σ_v p̃_iv C_v − b_i ((1−β) C_y + β Σ_v u_v C_v))
    dC_v = scale (Σ_i p̃_iv w_i E_i − (1−β) Σ_{i: y_i = v} b_i E_i − β u_v Σ_i b_i E_i)

are two products with p̃ itself. dE's other terms are added in fp32 when its row is rounded. For dC
the target's p̃ becomes p̃ − (1−β) b_i / w_i, one number a token. u lies in rows before the first
token's, as if it were some tokens' p̃, which gives Σ_v u_v C_v in the one product and takes
−β Σ_i b_i E_i in the other, each as a sum of two 16-bit numbers. So no pass turns probabilities
into dlogits.

Under a softcap ∂logit/∂product differs from logit to logit: there such a pass makes S, in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.dlogits import add_times, convert, times, write_hidden
from smoothce.triton.forward import Results, SavedProbabilities, lse_forward
from smoothce.triton.recompute_backward import Counts, super_blocks
from smoothce.triton.tiles import LOG2E
from smoothce.triton.tokens import (
    Coefficients,
    ForwardGradients,
    LossCall,
    PackedTokens,
    coefficients,
    gather,
    valid_first,
)
from smoothce.vocab_parallel import all_reduce_gradient

LEAD = 8  # rows before the first token's: u, what 16 bits leave of it, and zeros
SPAN = 16  # vocabulary blocks that one program of `repair_kernel` looks at


@triton.jit
def repair_kernel(
    memory, tops, offset, count,  # p̃ (rows, stride), (blocks, padded), (padded,), (1,)
    rows, blocks, padded, stride, CLEAR: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Where a tile's probabilities are not relative to their tokens' offsets: make them so."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = r < tl.load(count)
    o = tl.load(offset + r, mask=valid, other=0.0)
    for block in range(tl.program_id(0) * SPAN, tl.minimum((tl.program_id(0) + 1) * SPAN, blocks)):
        own = tl.load(tops + block * padded + r, mask=valid, other=0.0)
        # CLEAR where how many tokens are valid is not known to who reads this
        wrong = (own != o) | (valid == 0) if CLEAR else own != o
        if tl.max(wrong.to(tl.int32), 0) > 0:
            at = memory + r.to(tl.int64)[:, None] * stride + block * WIDTH
            at += tl.arange(0, WIDTH)[None, :]
            m = (wrong & (r < rows))[:, None]
            p = tl.load(at, mask=m & valid[:, None], other=0.0).to(tl.float32)
            p *= tl.exp2(own - o)[:, None]
            tl.store(at, p.to(memory.dtype.element_ty), mask=m)


@triton.jit
def weigh_kernel(
    packed, labels, target, lse, offset, a, b, count,  # of packed tokens
    memory, stride,  # p̃, whose targets' are changed
    weighed, weights,  # (n, D) w_i scale E_i, (n,) w_i, written
    smoothing, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: its hidden state as dC takes it, and of the target what is left of p̃."""
    i = tl.program_id(0)
    valid = i < tl.load(count)
    total = tl.load(lse + i)
    o = tl.load(offset + i)
    a_i = tl.load(a + i)
    w = tl.where(valid, a_i * tl.exp2(o - total), 0.0)
    tl.store(weights + i, w)
    y = tl.load(labels + i)
    if y >= 0:
        ratio = tl.where(a_i != 0, tl.load(b + i) / a_i, 0.0)
        rest = tl.exp2(tl.load(target + i) * LOG2E - o)
        rest -= (1.0 - smoothing) * ratio * tl.exp2(total - o)
        at = memory + i.to(tl.int64) * stride + y
        tl.store(at, rest.to(memory.dtype.element_ty), mask=valid)
    for d in range(0, D, BLOCK):
        o_d = d + tl.arange(0, BLOCK)
        at = i.to(tl.int64) * D + o_d
        e = tl.load(packed + at, mask=o_d < D, other=0.0).to(tl.float32)
        tl.store(weighed + at, (e * (w * scale)).to(weighed.dtype.element_ty), mask=o_d < D)


def forward_all(call: LossCall, results: Results, size: int, wide: bool) -> ForwardGradients:
    """Fill in the results and make the gradients, `size` tokens at a time; `wide`: sum dC in fp32,
    else it is rounded after each part."""
    inputs = call.inputs
    parts = super_blocks(len(inputs.labels), size)
    orders = [valid_first(call.part(part)) for part in parts]
    counts = Counts([count for _, count in orders])
    gradients = Gradients(call, size, wide)
    for i, (part, (order, count)) in enumerate(zip(parts, orders, strict=True)):
        mine = call.part(part)
        tokens, packed = gather(mine, order, count)
        tokens = lse_forward(mine, packed, tokens, results, part, kept=gradients.kept)
        # asked for after the large kernel's launch, so that the device is busy meanwhile
        gradients.add(mine, tokens, packed, counts.values()[i], part)
    return ForwardGradients(gradients.result())


class Gradients:
    """The gradients that are wanted, up to the upstream factor, filled part by part."""

    def __init__(self, call: LossCall, size: int, wide: bool) -> None:
        self.call, inputs = call, call.inputs
        hidden, weight, tiles = inputs.hidden, inputs.weight, call.tiles
        fp32 = {"device": hidden.device, "dtype": torch.float32}
        self.sloped, self.begun = inputs.options.softcap is not None, False
        self.one, self.loss_scale = torch.ones((), **fp32), inputs.loss_scale()
        self.hidden = torch.empty_like(hidden) if call.needs[0] else None
        self.weight = self.bias = None
        if call.needs[1]:
            self.weight = torch.empty_like(weight, dtype=torch.float32 if wide else None)
        if call.needs[2]:
            self.bias = torch.zeros(len(weight), **fp32)
        width = call.blocks * tiles.width
        self.memory = weight.new_empty(LEAD + size, width)
        padded = cdiv(size, tiles.rows) * tiles.rows
        self.kept = SavedProbabilities(self.memory[LEAD:], torch.empty(call.blocks, padded, **fp32))
        # of the smoothing term, without a softcap: β u_v = unit · (the first rows of the memory)
        self.unit = inputs.options.label_smoothing if not self.sloped else 0.0
        self.mean, self.sums, self.total = None, torch.zeros(hidden.shape[1], **fp32), self.one * 0
        if self.unit:
            u = inputs.smoothing_target
            if u is None:
                u, self.unit = torch.ones(len(weight), **fp32), self.unit / inputs.vocabulary
            high = u.to(weight.dtype)
            self.memory[:LEAD].zero_()
            self.memory[:2, : len(weight)] = high
            self.memory[2, : len(weight)] = u - high.float()

    def add(
        self,
        mine: LossCall,  # the part's
        tokens: PackedTokens,
        packed: Tensor,  # (padded, D)
        count: int | None,  # valid tokens; None: as many as there may be
        where: slice,  # of the caller's tokens
    ) -> None:
        """Write dE of these tokens; write dC and the bias's gradient, or add to them."""
        size, v = where.stop - where.start, len(self.call.inputs.weight)
        n = size if count is None else count
        of = coefficients(self.call, tokens, self.one, self.loss_scale, where)
        out = None if self.hidden is None else self.hidden[where]
        p = self.memory[LEAD : LEAD + n, :v]
        if self.sloped:
            convert(mine, tokens, of, self.kept, n)
            self.add_products(p, packed[:n], torch.ones_like(of.a[:n]) / mine.inputs.scale)
            if out is not None:
                write_hidden(mine, tokens, times(p, mine.inputs.weight), out)
            return
        self.repair(tokens, n, clear=count is None)
        if out is not None:
            if self.unit and self.mean is None:
                acc = times(self.memory[: LEAD + n, :v], mine.inputs.weight)
                self.mean, acc = self.unit * (acc[0] + acc[2]), acc[LEAD:]
            else:
                acc = times(p, mine.inputs.weight)
            write_hidden(mine, tokens, acc, out, of, self.mean)
            del acc
        if self.weight is not None or self.bias is not None:
            last = where.stop == len(self.call.inputs.labels)
            self.add_products(*self.weighed(mine, tokens, packed, of, n, last))

    def repair(self, tokens: PackedTokens, n: int, clear: bool) -> None:
        tiles, blocks = self.call.tiles, self.call.blocks
        thin = max(tiles.rows // 4, 1)
        if n:
            repair_kernel[(cdiv(blocks, SPAN), cdiv(n, thin))](
                self.kept.memory, self.kept.tops, tokens.offset, tokens.count,
                n, blocks, len(tokens.offset), self.memory.stride(0),
                CLEAR=clear, SPAN=SPAN, ROWS=thin, WIDTH=tiles.width,
            )  # fmt: skip

    def weighed(
        self,
        mine: LossCall,
        tokens: PackedTokens,
        packed: Tensor,
        of: Coefficients,
        n: int,
        last: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The factors of dC's product, (n, V) and (n, D), and those of the bias, (n,)."""
        inputs, d = mine.inputs, packed.shape[1]
        e = packed.new_zeros(LEAD + n, d)
        w = torch.zeros(LEAD + n, device=e.device, dtype=torch.float32)
        if n:
            weigh_kernel[(n,)](
                packed, tokens.labels, tokens.target, tokens.lse, tokens.offset, *of, tokens.count,
                self.memory[LEAD:], self.memory.stride(0),
                e[LEAD:], w[LEAD:],
                inputs.options.label_smoothing, inputs.scale,
                D=d, BLOCK=min(1024, triton.next_power_of_2(d)),
            )  # fmt: skip
        first = LEAD
        if self.unit:
            self.sums += of.b[:n] @ packed[:n].float()
            self.total += of.b[:n].sum()
        if self.unit and last:
            sums, first = -self.unit * inputs.scale * self.sums, 0
            e[0] = e[2] = sums
            e[1] = sums - e[0].float()
            w[0] = w[2] = -self.unit * self.total
        return self.memory[first : LEAD + n, : len(inputs.weight)], e[first:], w[first:]

    def add_products(self, p: Tensor, e: Tensor, w: Tensor) -> None:
        if not len(p):
            return
        if self.weight is None:
            pass
        elif self.weight.dtype != p.dtype:
            if not self.begun:
                self.weight.zero_()
            add_times(self.weight, p.T, e)
        elif self.begun:
            self.weight.addmm_(p.T, e)
        else:
            torch.mm(p.T, e, out=self.weight)
        if self.bias is not None:
            self.bias += times(w.to(p.dtype)[None], p)[0]
        self.begun = True

    def result(self) -> tuple[Tensor | None, ...]:
        shard, weight = self.call.inputs.shard, self.weight
        if weight is not None and not self.begun:
            weight.zero_()
        if weight is not None:
            weight = weight.to(self.memory.dtype)
        return all_reduce_gradient(self.hidden, shard), weight, self.bias

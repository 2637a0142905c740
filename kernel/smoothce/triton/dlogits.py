"""What both exact gradients are made of: S from probabilities that were kept, or from the product
again; products in fp32; and dE's rows from their sums.

    S_iv = (a_i p_iv − b_i ((1−β) [v = y_i] + β u_v)) · ∂logit/∂product
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.chunked import MIXED
from smoothce.triton.forward import SavedProbabilities
from smoothce.triton.tiles import base2_logits, descriptor, product, programs, slope
from smoothce.triton.tokens import Coefficients, LossCall, PackedTokens

THIN = 16  # programs of `convert_kernel` to a tile's rows


@triton.jit
def store_dlogits(
    p, x, v, r, columns,  # probabilities and base-2 logits of entries v, tokens r; where those go
    labels, a, b, mixture,
    out, stride_out,
    N, V, share, smoothing, scale, softcap,
):  # fmt: skip
    """S of these; 0 for tokens without a label, whose a and b are 0."""
    known = r < N
    y = tl.load(labels + r, mask=known, other=-1)
    b_r = tl.load(b + r, mask=known, other=0.0)[:, None]
    s = p * tl.load(a + r, mask=known, other=0.0)[:, None]
    if mixture is not None:
        s -= b_r * (smoothing * tl.load(mixture + v, mask=v < V, other=0.0))[None, :]
    else:
        s -= b_r * share
    s = tl.where(y[:, None] == v[None, :], s - b_r * (1.0 - smoothing), s)
    s *= scale if softcap is None else slope(x, scale, softcap)
    # entries past the chunk are never read
    at = out + r.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(at, s.to(out.dtype.element_ty), mask=known[:, None])


@triton.jit(do_not_specialize=["N", "width"])
def recompute_kernel(
    hidden, weight, bias, mixture, labels, lse, a, b,  # (N, D), (V, D), (V,) or None, (N,) each
    out, N, V, vocab, width, stride_out,  # S of entries [vocab, vocab + width)
    share, smoothing, scale, softcap, D: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S of all tokens and of the chunk of the vocabulary that starts at `vocab`."""
    n_rows = tl.cdiv(N, ROWS)
    n_tiles = n_rows * tl.cdiv(width, WIDTH)
    workers = tl.num_programs(0)
    # flattened, so that the next tile's loads start while this one is written
    for tile in (tl.range if FLATTEN else range)(tl.program_id(0), n_tiles, workers, flatten=True):
        row = (tile % n_rows) * ROWS
        o_v = (tile // n_rows) * WIDTH
        acc = product(hidden, weight, row, vocab + o_v, N, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION)
        v = vocab + o_v + tl.arange(0, WIDTH)
        x = base2_logits(acc, bias, v, V, scale, softcap)
        r = row + tl.arange(0, ROWS)
        p = tl.exp2(x - tl.load(lse + r, mask=r < N, other=float("inf"))[:, None])
        store_dlogits(
            p, x, v, r, o_v + tl.arange(0, WIDTH),
            labels, a, b, mixture, out, stride_out, N, V, share, smoothing, scale, softcap,
        )  # fmt: skip


@triton.jit
def convert_kernel(
    memory, tops, labels, lse, a, b, mixture, count,
    N, V, padded, stride,
    share, smoothing, scale, softcap, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """S from kept probabilities, in the same memory."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    v = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    valid = r < tl.minimum(N, tl.load(count))  # the other tokens have none
    at = memory + r.to(tl.int64)[:, None] * stride + v[None, :]
    p = tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)
    top = tl.load(tops + tl.program_id(0) * padded + r, mask=valid, other=0.0)
    x = tl.log2(tl.maximum(p, 1e-38)) + top[:, None]
    p *= tl.exp2(top - tl.load(lse + r, mask=valid, other=0.0))[:, None]
    store_dlogits(
        p, x, v, r, v,
        labels, a, b, mixture, memory, stride, N, V, share, smoothing, scale, softcap,
    )  # fmt: skip


def convert(
    call: LossCall, tokens: PackedTokens, of: Coefficients, kept: SavedProbabilities, n: int
) -> None:
    """The first n tokens' probabilities become their S, in place."""
    inputs, thin = call.inputs, max(call.tiles.rows // THIN, 1)
    if n:
        convert_kernel[(call.blocks, cdiv(n, thin))](
            kept.memory, kept.tops, tokens.labels, tokens.lse, *of, inputs.smoothing_target,
            tokens.count,
            n, len(inputs.weight), len(tokens.lse), kept.memory.stride(0),
            call.share, inputs.options.label_smoothing, inputs.scale, inputs.options.softcap,
            ROWS=thin, WIDTH=call.tiles.width,
        )  # fmt: skip


def recompute(
    call: LossCall,
    hidden: Tensor,  # (n, D) packed
    tokens: PackedTokens,
    of: Coefficients,
    out: Tensor,  # (n, ·)
    start: int,
    stop: int,
) -> Tensor:  # (n, stop − start)
    """S of entries [start, stop), from the product."""
    inputs, tiles = call.inputs, call.tiles
    recompute_kernel[(programs(hidden.device),)](
        descriptor(hidden, [tiles.rows, tiles.depth], tiles.tma),
        descriptor(inputs.weight, [tiles.width, tiles.depth], tiles.tma),
        inputs.bias, inputs.smoothing_target, tokens.labels, tokens.lse, *of,
        out, len(hidden), len(inputs.weight), start, stop - start, out.stride(0),
        call.share, inputs.options.label_smoothing, inputs.scale, inputs.options.softcap,
        D=hidden.shape[1], **tiles.product,
    )  # fmt: skip
    return out[:, : stop - start]


def times(a: Tensor, b: Tensor) -> Tensor:
    """a · b in fp32, summed in it where this PyTorch can."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32) if MIXED else (a @ b).float()


def add_times(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a · b, in fp32."""
    if a.dtype != torch.float32 and a.is_cuda and MIXED:
        torch.ops.aten.addmm.dtype_out(acc, a, b, torch.float32, out=acc)
    else:
        acc += times(a, b)


@triton.jit
def hidden_kernel(
    acc,  # (·, D) fp32 sums of packed tokens
    order, count,
    labels, lse, offset, a, b, weight, mean,  # where sums are of p̃; else all None
    out,  # (n, D) in the caller's order, 0 where a token is masked
    smoothing, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's dE: its sum, or w_i times it less b_i times target and `mean` (β Σ_v u_v C_v)."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(order + i).to(tl.int64)
    here = tl.where(i < tl.load(count), D, 0)
    if lse is not None:
        w = tl.load(a + i) * tl.exp2(tl.load(offset + i) - tl.load(lse + i)) * scale
        b_i = tl.load(b + i) * scale
        y = tl.load(labels + i).to(tl.int64)
        target = tl.where(y >= 0, here, 0)
    for d in range(0, D, BLOCK):
        o = d + tl.arange(0, BLOCK)
        x = tl.load(acc + i * D + o, mask=o < here, other=0.0)
        if lse is not None:
            c = tl.load(weight + tl.maximum(y, 0) * D + o, mask=o < target, other=0.0)
            x = x * w - b_i * (1.0 - smoothing) * c.to(tl.float32)
            if mean is not None:
                x -= b_i * tl.load(mean + o, mask=o < here, other=0.0)
            x = tl.where(o < here, x, 0.0)
        tl.store(out + row * D + o, x.to(out.dtype.element_ty), mask=o < D)


def write_hidden(
    call: LossCall,
    tokens: PackedTokens,
    acc: Tensor,  # (n or more, D) fp32
    out: Tensor,  # (n, D)
    of: Coefficients | None = None,  # where sums are of p̃
    mean: Tensor | None = None,  # (D,) fp32
) -> None:
    inputs, d = call.inputs, out.shape[1]
    direct = (None,) * 6
    if of is not None:
        direct = tokens.labels, tokens.lse, tokens.offset, *of, inputs.weight
    hidden_kernel[(len(out),)](
        acc, tokens.order, tokens.count, *direct, mean, out,
        inputs.options.label_smoothing, inputs.scale,
        D=d, BLOCK=min(1024, triton.next_power_of_2(d)),
    )  # fmt: skip

"""The exact backward: every dlogit, recomputed by vocabulary chunks into a bounded workspace.

    S_iv = g_i (p_iv − (1−β) [v = y_i] − β/V) · ∂logit/∂product,   dC = Sᵀ E,   dE = S C

No atomics and no order that depends on timing, so equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.options import Options
from smoothce.triton.accumulator import accumulator
from smoothce.triton.logits import base2_logits, product, slope
from smoothce.triton.tiles import Tiles, aligned, cdiv, descriptor, programs

WORKSPACE = 112 * 2**20  # bytes of dlogits at a time, and of the sum of dE where it has its own


@triton.jit
def dlogits_tile(
    tile,
    n_rows,
    e_desc,
    c_desc,
    bias,
    labels,
    lse,
    token,
    out,
    d_bias,
    N,
    V,
    vocab,
    width,
    stride_e,
    stride_c,
    chunk,
    smoothing,
    scale,
    cap,
    gain,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S of one tile of the chunk of the vocabulary that starts at `vocab`."""
    row = (tile % n_rows) * ROWS
    o_v = (tile // n_rows) * WIDTH
    acc = product(
        e_desc,
        c_desc,
        stride_e,
        stride_c,
        row,
        vocab + o_v,
        N,
        V,
        D,
        ROWS,
        WIDTH,
        DEPTH,
        TMA,
        PRECISION,
    )
    r = row + tl.arange(0, ROWS)
    v = vocab + o_v + tl.arange(0, WIDTH)
    x = base2_logits(acc, bias, v, V, scale, cap, HAS_BIAS, SOFTCAP)
    known = r < N
    total = tl.load(lse + r, mask=known, other=float("inf"))
    y = tl.load(labels + r, mask=known, other=-1)
    g = tl.load(token + r, mask=known, other=0.0)
    s = tl.exp2(x - total[:, None]) - smoothing / V
    s = tl.where(y[:, None] == v[None, :], s - (1.0 - smoothing), s)
    # tokens without a label have g = 0 and p = 0; entries past the chunk are never read
    s *= slope(x, scale, cap, SOFTCAP) * g[:, None] if SOFTCAP else (g * scale)[:, None]
    if NEED_BIAS:
        # one partial sum a token block: no atomics, so that the order is fixed
        p_b = d_bias + (row // ROWS) * chunk + o_v + tl.arange(0, WIDTH)
        tl.store(p_b, tl.sum(s, 0))
    p_o = out + r.to(tl.int64)[:, None] * chunk + (o_v + tl.arange(0, WIDTH))[None, :]
    tl.store(p_o, (s * gain).to(out.dtype.element_ty), mask=known[:, None])


@triton.jit
def dlogits_kernel(
    e_desc,
    c_desc,
    bias,
    labels,
    lse,
    token,
    out,
    d_bias,
    N,
    V,
    vocab,
    width,
    stride_e,
    stride_c,
    chunk,
    smoothing,
    scale,
    cap,
    gain,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S of all tokens and of the chunk of the vocabulary that starts at `vocab`."""
    n_rows = tl.cdiv(N, ROWS)
    n_tiles = n_rows * tl.cdiv(width, WIDTH)
    if TMA:
        # flattened, so that the next tile's loads start while this one is written
        for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
            dlogits_tile(
                tile,
                n_rows,
                e_desc,
                c_desc,
                bias,
                labels,
                lse,
                token,
                out,
                d_bias,
                N,
                V,
                vocab,
                width,
                stride_e,
                stride_c,
                chunk,
                smoothing,
                scale,
                cap,
                gain,
                D,
                ROWS,
                WIDTH,
                DEPTH,
                HAS_BIAS,
                SOFTCAP,
                NEED_BIAS,
                TMA,
                PRECISION,
            )
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            dlogits_tile(
                tile,
                n_rows,
                e_desc,
                c_desc,
                bias,
                labels,
                lse,
                token,
                out,
                d_bias,
                N,
                V,
                vocab,
                width,
                stride_e,
                stride_c,
                chunk,
                smoothing,
                scale,
                cap,
                gain,
                D,
                ROWS,
                WIDTH,
                DEPTH,
                HAS_BIAS,
                SOFTCAP,
                NEED_BIAS,
                TMA,
                PRECISION,
            )


def backward(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,
    labels: Tensor,  # (N,) int32, -1 where there is no valid token
    lse: Tensor,  # (N,) fp32, base 2
    token: Tensor,  # (N,) fp32, g_i, 0 where there is no valid token
    options: Options,
    tiles: Tiles,
    d_hidden: Tensor | None,  # (N, D)
    d_weight: Tensor | None,  # (V, D), written, or added to
    d_bias: Tensor | None,  # (V,) fp32, added to
    accumulate: bool,
) -> None:
    """Gradients of one super-block, whose tokens are in the caller's order."""
    n, d = hidden.shape
    v = len(weight)
    unit = tiles.width
    half = hidden.dtype == torch.float16
    # S of fp16 inputs needs more range than fp16 has; bf16 and fp32 take g as it is
    top = token.abs().amax().clamp(min=1e-30) if half else None
    gain = 256.0 if half else 1.0
    if half:
        token = token / top
    acc, head = None, v
    workspace = WORKSPACE
    if d_hidden is not None:
        blocks = cdiv(v, unit)
        borrow = None if accumulate else d_weight
        acc, head = accumulator((n, d), borrow, blocks, tiles, hidden.device)
        if head == blocks:
            workspace = max(WORKSPACE - acc.numel() * 4, WORKSPACE // 4)
        head = min(head * unit, v)
    chunk = max(workspace // (n * hidden.element_size()) // unit, 1) * unit
    chunk = min(chunk, cdiv(v, unit) * unit)
    s = hidden.new_empty(n, chunk)
    partial = None
    if d_bias is not None:
        partial = torch.empty(cdiv(n, tiles.rows), chunk, device=hidden.device)
    tma = tiles.tma and aligned(hidden)

    def dlogits(start: int, stop: int) -> Tensor:
        dlogits_kernel[(programs(hidden.device),)](
            descriptor(hidden, [tiles.rows, tiles.depth], tma),
            descriptor(weight, [tiles.width, tiles.depth], tma),
            bias,
            labels,
            lse,
            token,
            s,
            partial,
            n,
            v,
            start,
            stop - start,
            hidden.stride(0),
            weight.stride(0),
            chunk,
            options.label_smoothing,
            options.logit_scale if options.logit_scale is not None else 1.0,
            options.softcap or 1.0,
            gain,
            D=d,
            ROWS=tiles.rows,
            WIDTH=tiles.width,
            DEPTH=tiles.depth,
            HAS_BIAS=bias is not None,
            SOFTCAP=options.softcap is not None,
            NEED_BIAS=d_bias is not None,
            TMA=tma,
            PRECISION=tiles.precision,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return s[:, : stop - start]

    def into_weight(part: Tensor, start: int, stop: int) -> None:
        out = d_weight[start:stop]
        if half:
            full = product_fp32(part.T, hidden) * (top / gain)
            out.copy_(full + out if accumulate else full)
        elif accumulate:
            out.addmm_(part.T, hidden)
        else:
            torch.mm(part.T, hidden, out=out)

    for start, stop in chunks(0, head, chunk) + chunks(head, v, chunk):
        part = dlogits(start, stop)
        if d_weight is not None and start < head:
            into_weight(part, start, stop)
        if acc is not None:
            add_product(acc, part, weight[start:stop])
        if d_bias is not None:
            column = partial[:, : stop - start].sum(0) / (options.logit_scale or 1.0)
            d_bias[start:stop] += column * top if half else column
    if d_hidden is not None:
        d_hidden.copy_(acc * (top / gain) if half else acc)
    if d_weight is not None:
        for start, stop in chunks(head, v, chunk):
            into_weight(dlogits(start, stop), start, stop)


def chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(i, min(i + size, stop)) for i in range(start, stop, size)]


def product_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a · b in fp32, also from half-precision factors where this PyTorch can."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda and MIXED:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float() if a.dtype == torch.float16 else (a @ b).float()


def add_product(
    acc: Tensor,  # (N, D) fp32
    a: Tensor,  # (N, K)
    b: Tensor,  # (K, D)
) -> None:
    """acc += a · b, summed in fp32 where this PyTorch can."""
    if a.dtype != torch.float32 and a.is_cuda and MIXED:
        torch.ops.aten.addmm.dtype_out(acc, a, b, torch.float32, out=acc)
    else:
        acc += product_fp32(a, b)


MIXED = "dtype_out" in torch.ops.aten.addmm.overloads()

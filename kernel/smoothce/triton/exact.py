"""The exact backward: every dlogit, from a stored logit or recomputed, chunk by chunk.

    S_iv = g_i (p_iv − (1−β) [v = y_i] − β/V) · ∂logit/∂product,   dC = Sᵀ E,   dE = S C

No atomics and no order that depends on timing, so equal inputs give equal bits.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.options import Options
from smoothce.triton.logits import base2_logits, product, slope
from smoothce.triton.stored import Regions, Stored, bounded
from smoothce.triton.tiles import INTERPRETED, Tiles, aligned, cdiv, descriptor, programs


@triton.jit
def dlogits(
    x,  # base-2 logits, (rows, entries)
    r,
    v,
    known,
    labels,
    lse,
    token,
    V,
    smoothing,
    scale,
    cap,
    SOFTCAP: tl.constexpr,
):
    """S of these logits; 0 for tokens without a label, whose g is 0 and whose lse is +inf."""
    total = tl.load(lse + r, mask=known, other=float("inf"))
    y = tl.load(labels + r, mask=known, other=-1)
    g = tl.load(token + r, mask=known, other=0.0)
    s = tl.exp2(x - total[:, None]) - smoothing / V
    s = tl.where(y[:, None] == v[None, :], s - (1.0 - smoothing), s)
    if SOFTCAP:
        s *= slope(x, scale, cap, SOFTCAP) * g[:, None]
    else:
        s *= (g * scale)[:, None]
    return s


@triton.jit
def write(
    s,
    out,
    d_bias,
    r,
    known,
    row_block,
    o_v,
    stride,
    chunk,
    gain,
    WIDTH: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    """Store a tile of S, and its column sums for the bias."""
    columns = o_v + tl.arange(0, WIDTH)
    if NEED_BIAS:
        # one partial sum a token block: no atomics, so that the order is fixed
        tl.store(d_bias + row_block * chunk + columns, tl.sum(s, 0))
    p_o = out + r.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(p_o, (s * gain).to(out.dtype.element_ty), mask=known[:, None])


@triton.jit
def recompute_kernel(
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
    stride_out,
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
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S of all tokens and of the chunk of the vocabulary that starts at `vocab`."""
    n_rows = tl.cdiv(N, ROWS)
    n_tiles = n_rows * tl.cdiv(width, WIDTH)
    workers = tl.num_programs(0)
    # flattened, so that the next tile's loads start while this one is written
    for tile in (tl.range if FLATTEN else range)(tl.program_id(0), n_tiles, workers, flatten=True):
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
        known = r < N
        x = base2_logits(acc, bias, v, V, scale, cap, HAS_BIAS, SOFTCAP)
        s = dlogits(x, r, v, known, labels, lse, token, V, smoothing, scale, cap, SOFTCAP)
        # entries past the chunk are never read
        block = row // ROWS
        write(s, out, d_bias, r, known, block, o_v, stride_out, chunk, gain, WIDTH, NEED_BIAS)


@triton.jit
def convert_kernel(
    stored,
    target,
    labels,
    lse,
    token,
    out,  # may be the same memory as `stored`
    d_bias,
    N,
    V,
    vocab,
    stride_in,
    stride_out,
    chunk,
    smoothing,
    scale,
    cap,
    gain,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    """S from stored logits, for the chunk of the vocabulary that starts at `vocab`."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_v = tl.program_id(0) * WIDTH
    v = vocab + o_v + tl.arange(0, WIDTH)
    known = r < N
    # tokens without a label have no stored logits
    valid = known & (tl.load(labels + r, mask=known, other=-1) >= 0)
    p_x = stored + r.to(tl.int64)[:, None] * stride_in + (o_v + tl.arange(0, WIDTH))[None, :]
    x = tl.load(p_x, mask=valid[:, None], other=0.0).to(tl.float32)
    x += tl.load(target + r, mask=known, other=0.0)[:, None]
    s = dlogits(x, r, v, known, labels, lse, token, V, smoothing, scale, cap, SOFTCAP)
    block = tl.program_id(1)
    write(s, out, d_bias, r, known, block, o_v, stride_out, chunk, gain, WIDTH, NEED_BIAS)


class Exact:
    """The gradients of one super-block, whose tokens are in the caller's order."""

    def __init__(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,
        labels: Tensor,  # (N,) int32, -1 where there is no valid token
        lse: Tensor,  # (N,) fp32, base 2
        token: Tensor,  # (N,) fp32, g_i, 0 where there is no valid token
        options: Options,
        tiles: Tiles,
        needs: tuple[bool, bool, bool],  # gradients of hidden, weight and bias
        regions: Regions,
        stored: Stored | None,  # `far` and `target` of these tokens
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.labels, self.lse, self.options, self.tiles = labels, lse, options, tiles
        self.regions, self.stored = regions, stored
        self.bounded = bounded(hidden, needs)
        self.half = hidden.dtype == torch.float16
        # S of fp16 inputs needs more range than fp16 has; bf16 and fp32 take g as it is
        self.gain = 256.0 if self.half else 1.0
        self.top = token.abs().amax().clamp(min=1e-30) if self.half else None
        self.token = token / self.top if self.half else token
        self.thin = max(tiles.rows // 4, 1)  # tokens a tile of the conversion
        needed = regions.near + regions.far < len(weight) or regions.near
        self.space = hidden.new_empty(len(hidden), regions.chunk if needed else 0)
        self.partial = None

    def backward(
        self,
        d_hidden: Tensor | None,  # (N, D), or (2 N, D), of which half is for the sum: `with_sum`
        d_weight: Tensor | None,  # (V, D), written, or added to
        d_bias: Tensor | None,  # (V,) fp32, added to
        accumulate: bool,
    ) -> None:
        if d_hidden is not None:
            acc = d_hidden.view(-1).view(torch.float32).view(self.hidden.shape).zero_()
        if d_bias is not None:
            blocks = cdiv(len(self.hidden), self.thin)
            self.partial = torch.empty(blocks, self.regions.chunk, device=d_bias.device)
        idle = None if accumulate or self.bounded else d_weight
        for start, stop, part, sums in self.parts(idle):
            if d_weight is not None:
                self.into_weight(d_weight[start:stop], part, accumulate)
            if d_hidden is not None:
                add_product(acc, part, self.weight[start:stop])
            if d_bias is not None:
                column = sums[:, : stop - start].sum(0) / (self.options.logit_scale or 1.0)
                d_bias[start:stop] += column * self.top if self.half else column
        if d_hidden is not None:
            if self.half:
                acc *= self.top / self.gain
            narrow(acc, d_hidden)

    def parts(self, idle: Tensor | None) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
        """S by chunks [start, stop), each until the next is asked for, with its column sums.

        `idle` is the weight gradient, in whose memory logits and S may lie where rows are not yet
        written. Logits take up N numbers an entry and gradients D, so stored logits are consumed
        from that end from which a piece and those before it make room for their gradients."""
        regions, v, kept = self.regions, len(self.weight), self.stored
        n, d = self.hidden.shape
        near, done = min(regions.near, v), 0
        if kept is not None and kept.near is not None:
            done = near
            for first, last in regions.pieces() if n >= d else reversed(regions.pieces()):
                logits = kept.near[n * first : n * last].view(n, last - first)
                stays = last * d <= first * n or first * d >= last * n
                out = logits.view(self.hidden.dtype) if stays else self.space
                stop = min(last, v)
                yield first, stop, self.convert(logits, out, first, stop), self.partial
        far = near if kept is None or kept.far is None else min(near + regions.far, v)
        size = regions.chunk if self.bounded else max(regions.far, 1)
        for start, stop in chunks(near, far, size):
            logits = kept.far[:, start - near : stop - near]
            part = self.convert(logits, logits.view(self.hidden.dtype), start, stop)
            yield start, stop, part, self.partial
        sums = None if self.partial is None else self.partial[: cdiv(n, self.tiles.rows)]
        for start, stop in chunks(done, near, regions.chunk):
            yield start, stop, self.recompute(start, stop, self.space), sums
        while far < v:
            out = self.space if idle is None else self.end(idle, far)
            stop = min(far + out.shape[1], v)
            yield far, stop, self.recompute(far, stop, out), sums
            far = stop

    def end(self, idle: Tensor, done: int) -> Tensor:
        """Memory for S of the entries that follow: at the end of dC, so that its rows up to theirs
        are free, or the workspace where that holds more."""
        n, d = self.hidden.shape
        size, chunk = idle.numel(), self.regions.chunk
        entries = (size - done * d - 8) // (n + d) // chunk * chunk
        if entries <= chunk:
            return self.space
        start = (size - entries * n) // 8 * 8
        return idle.view(-1)[start : start + entries * n].view(n, entries)

    def convert(self, logits: Tensor, out: Tensor, start: int, stop: int) -> Tensor:
        """S of entries [start, stop) from their stored logits, which may be in the same memory."""
        wide = min(self.tiles.width, 256)
        convert_kernel[(cdiv(stop - start, wide), cdiv(len(self.hidden), self.thin))](
            logits,
            self.stored.target,
            self.labels,
            self.lse,
            self.token,
            out,
            self.partial,
            len(self.hidden),
            len(self.weight),
            start,
            logits.stride(0),
            out.stride(0),
            self.regions.chunk,
            *self.numbers(),
            ROWS=self.thin,
            WIDTH=wide,
            SOFTCAP=self.options.softcap is not None,
            NEED_BIAS=self.partial is not None,
        )
        return out[:, : stop - start]

    def recompute(self, start: int, stop: int, out: Tensor) -> Tensor:
        """S of entries [start, stop), from the product."""
        hidden, weight, tiles = self.hidden, self.weight, self.tiles
        tma = tiles.tma and aligned(hidden)
        recompute_kernel[(programs(hidden.device),)](
            descriptor(hidden, [tiles.rows, tiles.depth], tma),
            descriptor(weight, [tiles.width, tiles.depth], tma),
            self.bias,
            self.labels,
            self.lse,
            self.token,
            out,
            self.partial,
            len(hidden),
            len(weight),
            start,
            stop - start,
            hidden.stride(0),
            weight.stride(0),
            out.stride(0),
            self.regions.chunk,
            *self.numbers(),
            D=hidden.shape[1],
            ROWS=tiles.rows,
            WIDTH=tiles.width,
            DEPTH=tiles.depth,
            HAS_BIAS=self.bias is not None,
            SOFTCAP=self.options.softcap is not None,
            NEED_BIAS=self.partial is not None,
            TMA=tma,
            FLATTEN=tma or INTERPRETED,
            PRECISION=tiles.precision,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out[:, : stop - start]

    def numbers(self) -> tuple[float, float, float, float]:
        """Smoothing, logit scale, softcap and gain, as the kernels take them."""
        o = self.options
        scale = 1.0 if o.logit_scale is None else o.logit_scale
        return o.label_smoothing, scale, o.softcap or 1.0, self.gain

    def into_weight(self, out: Tensor, part: Tensor, accumulate: bool) -> None:
        """out = Sᵀ E of these entries, or out += Sᵀ E."""
        if self.half:
            full = product_fp32(part.T, self.hidden) * (self.top / self.gain)
            out.copy_(full + out if accumulate else full)
        elif accumulate:
            out.addmm_(part.T, self.hidden)
        else:
            torch.mm(part.T, self.hidden, out=out)


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


def with_sum(like: Tensor, rows: int) -> Tensor:
    """Memory for a gradient (N, D), its first N rows, in which `rows` tokens at a time are summed
    in fp32: twice their own size, so that each super-block reaches into the next one's rows."""
    n = len(like)
    return like.new_empty(n if like.dtype == torch.float32 else n + min(n, rows), like.shape[1])


def narrow(
    acc: Tensor,  # (N, D) fp32
    out: Tensor,  # the same memory; its first (N, D) are written
) -> None:
    """Round the sum in place: rows in ever larger pieces, each into memory that is read out."""
    if out.dtype == torch.float32:
        return
    n = len(acc)
    done = min(n, 64)
    out[:done] = acc[:done].to(out.dtype)
    while done < n:
        stop = min(2 * done, n)
        out[done:stop] = acc[done:stop]
        done = stop


MIXED = "dtype_out" in torch.ops.aten.addmm.overloads()

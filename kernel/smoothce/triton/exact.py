"""The exact backward: every dlogit, from a stored logit or recomputed, chunk by chunk.

    S_iv = (g_i (p_iv − (1−β) [v = y_i] − β/V) + h_i p_iv) · ∂logit/∂product,  dC = Sᵀ E,  dE = S C

with the upstream gradients g of the losses and h of the log-sum-exps.

Only valid tokens are in E and S: they are packed before and spread out again afterwards. No atomics
and no order that depends on timing, so a first backward on equal inputs gives equal bits.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.chunked import MIXED
from smoothce.options import Options
from smoothce.triton.logits import LOG2E, base2_logits, product, slope
from smoothce.triton.stored import Regions, Stored
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
    of_lse,
    V,
    smoothing,
    scale,
    cap,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """S of these logits; 0 for tokens without a label, whose g is 0 and whose lse is +inf."""
    total = tl.load(lse + r, mask=known, other=float("inf"))
    y = tl.load(labels + r, mask=known, other=-1)
    g = tl.load(token + r, mask=known, other=0.0)
    p = tl.exp2(x - total[:, None])
    s = p - smoothing / V
    s = tl.where(y[:, None] == v[None, :], s - (1.0 - smoothing), s)
    f = slope(x, scale, cap, SOFTCAP) if SOFTCAP else scale
    if HAS_LSE:
        h = tl.load(of_lse + r, mask=known, other=0.0)
        s = (s * g[:, None] + p * h[:, None]) * f
    elif SOFTCAP:
        s *= f * g[:, None]
    else:
        s *= (g * f)[:, None]
    return s


@triton.jit(do_not_specialize=["N", "width"])
def recompute_kernel(
    e_desc,
    c_desc,
    bias,
    labels,
    lse,
    token,
    of_lse,
    out,
    N,
    V,
    vocab,
    width,
    stride_e,
    stride_c,
    stride_out,
    smoothing,
    scale,
    cap,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
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
        s = dlogits(
            x, r, v, known, labels, lse, token, of_lse, V, smoothing, scale, cap, SOFTCAP, HAS_LSE
        )
        # entries past the chunk are never read
        p_o = out + r.to(tl.int64)[:, None] * stride_out + (o_v + tl.arange(0, WIDTH))[None, :]
        tl.store(p_o, s.to(out.dtype.element_ty), mask=known[:, None])


@triton.jit(do_not_specialize=["N"])
def convert_kernel(
    stored,
    target,
    labels,
    lse,
    token,
    of_lse,
    out,  # may be the same memory as `stored`
    N,
    V,
    vocab,
    stride_in,
    stride_out,
    smoothing,
    scale,
    cap,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """S from stored logits, for the chunk of the vocabulary that starts at `vocab`."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_v = tl.program_id(0) * WIDTH
    v = vocab + o_v + tl.arange(0, WIDTH)
    known = r < N
    # tokens without a label have no stored logits
    valid = known & (tl.load(labels + r, mask=known, other=-1) >= 0)
    columns = o_v + tl.arange(0, WIDTH)
    p_x = stored + r.to(tl.int64)[:, None] * stride_in + columns[None, :]
    x = tl.load(p_x, mask=valid[:, None], other=0.0).to(tl.float32)
    x += tl.load(target + r, mask=known, other=0.0)[:, None] * LOG2E
    s = dlogits(
        x, r, v, known, labels, lse, token, of_lse, V, smoothing, scale, cap, SOFTCAP, HAS_LSE
    )
    p_o = out + r.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(p_o, s.to(out.dtype.element_ty), mask=known[:, None])


@triton.jit
def spread_kernel(source, rank, out, first, D, BLOCK: tl.constexpr):
    """One row of `out`: the sum of the token's place in the packed order, 0 where it is masked."""
    row = (first + tl.program_id(0)).to(tl.int64)
    place = tl.load(rank + row).to(tl.int64)
    known = tl.where(place >= 0, D, 0)
    for d in range(0, D, BLOCK):
        o = d + tl.arange(0, BLOCK)
        x = tl.load(source + place * D + o, mask=o < known, other=0.0)
        tl.store(out + row * D + o, x.to(out.dtype.element_ty), mask=o < D)


def spread(
    acc: Tensor,  # (n, D) fp32, packed; where `out` has 16 bits, the end of (2 N, D) of them ...
    rank: Tensor,  # (N,) int32
    out: Tensor,  # (N, D), the beginning of the same memory
) -> None:
    """Round the packed sum into every token's row, in place.

    Token s comes at place i ≥ s − (N − n), so its fp32 row begins at or behind row 2 s of `out`.
    Rows [a, b) can thus be written while b ≤ 2 a: in ever larger pieces, the first from a copy."""
    n, d = out.shape
    block = min(1024, triton.next_power_of_2(d))
    if out.dtype == torch.float32:
        pieces = [(acc, 0, n)]
    else:
        done = min(n, 64)
        pieces = [(acc[:done].clone(), 0, done)]
        while done < n:
            pieces.append((acc, done, min(2 * done, n)))
            done = pieces[-1][2]
    for source, first, stop in pieces:
        spread_kernel[(stop - first,)](source, rank, out, first, d, BLOCK=block)


class Exact:
    """The gradients of one super-block's packed tokens."""

    def __init__(
        self,
        hidden: Tensor,  # (n, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,
        labels: Tensor,  # (≥ n,) int32, -1 where there is no valid token
        target: Tensor,  # (≥ n,) fp32, the target's logit in nats
        lse: Tensor,  # (≥ n,) fp32, base 2
        token: Tensor,  # (n,) fp32, g_i, 0 where there is no valid token
        of_lse: Tensor | None,  # (n,) fp32, h_i, likewise
        options: Options,
        tiles: Tiles,
        regions: Regions,
        stored: Stored | None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.labels, self.target, self.lse = labels, target, lse
        self.token, self.of_lse = token, of_lse
        self.options, self.tiles = options, tiles
        self.regions, self.stored = regions, stored
        self.thin = max(tiles.rows // 4, 1)  # tokens a tile of the conversion
        apart = stored is not None and stored.apart
        self.space = hidden.new_empty(len(hidden), 0 if apart else regions.chunk)

    def backward(
        self,
        acc: Tensor | None,  # (n, D) fp32, written
        d_weight: Tensor | None,  # (V, D), written, or added to
        accumulate: bool,
    ) -> None:
        if acc is not None:
            acc.zero_()
        for start, stop, part in self.parts(None if accumulate else d_weight):
            if d_weight is not None:
                if accumulate:
                    d_weight[start:stop].addmm_(part.T, self.hidden)
                else:
                    torch.mm(part.T, self.hidden, out=d_weight[start:stop])
            if acc is not None:
                add_product(acc, part, self.weight[start:stop])

    def parts(self, idle: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        """S by chunks [start, stop), each until the next is asked for.

        `idle` is the weight gradient, in whose memory logits and S may lie where rows are not yet
        written. Logits take up N numbers an entry and gradients D, so stored logits are consumed
        from that end from which a piece and those before it make room for their gradients."""
        v, kept, done = len(self.weight), self.stored, 0
        n, d = len(self.hidden), self.hidden.shape[1]
        if kept is not None:
            rows, pieces = kept.regions.rows, kept.regions.pieces()
            done = min(kept.regions.near, v)
            for first, last in pieces if rows >= d else reversed(pieces):
                logits = kept.piece(first, last, n)
                stays = kept.apart or last * d <= first * rows or first * d >= last * rows
                out = logits.view(self.hidden.dtype) if stays else self.space
                stop = min(last, v)
                yield first, stop, self.convert(logits, out, first, stop)
        while done < v:
            out = self.space if idle is None else self.end(idle, done)
            stop = min(done + out.shape[1], v)
            yield done, stop, self.recompute(done, stop, out)
            done = stop

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
            self.target,
            self.labels,
            self.lse,
            self.token,
            self.of_lse,
            out,
            len(self.hidden),
            len(self.weight),
            start,
            logits.stride(0),
            out.stride(0),
            *self.numbers(),
            ROWS=self.thin,
            WIDTH=wide,
            SOFTCAP=self.options.softcap is not None,
            HAS_LSE=self.of_lse is not None,
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
            self.of_lse,
            out,
            len(hidden),
            len(weight),
            start,
            stop - start,
            hidden.stride(0),
            weight.stride(0),
            out.stride(0),
            *self.numbers(),
            D=hidden.shape[1],
            ROWS=tiles.rows,
            WIDTH=tiles.width,
            DEPTH=tiles.depth,
            HAS_BIAS=self.bias is not None,
            SOFTCAP=self.options.softcap is not None,
            HAS_LSE=self.of_lse is not None,
            TMA=tma,
            FLATTEN=tma or INTERPRETED,
            PRECISION=tiles.precision,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out[:, : stop - start]

    def numbers(self) -> tuple[float, float, float]:
        """Smoothing, logit scale and softcap, as the kernels take them."""
        o = self.options
        scale = 1.0 if o.logit_scale is None else o.logit_scale
        return o.label_smoothing, scale, o.softcap or 1.0


def add_product(
    acc: Tensor,  # (N, D) fp32
    a: Tensor,  # (N, K)
    b: Tensor,  # (K, D)
) -> None:
    """acc += a · b, summed in fp32 where this PyTorch can."""
    if a.dtype != torch.float32 and a.is_cuda and MIXED:
        torch.ops.aten.addmm.dtype_out(acc, a, b, torch.float32, out=acc)
    else:
        acc += (a @ b).float()

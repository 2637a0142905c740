"""The exact backward: every dlogit, from a stored logit or recomputed, chunk by chunk.

    S_iv = (g_i (p_iv − (1−β) [v = y_i] − β/V) + h_i p_iv) · ∂logit/∂product,  dC = Sᵀ E,  dE = S C

with the upstream gradients g of the losses and h of the log-sum-exps.

Only valid tokens are in E and S: they are packed before and spread out again afterwards. No atomics
and no order that depends on timing, so a first backward on equal inputs gives equal bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.chunked import MIXED
from smoothce.triton.forward import forward
from smoothce.triton.stored import NOTHING, Stored, regions_for, room, super_blocks, tokens_at_once
from smoothce.triton.tiles import LOG2E, base2_logits, descriptor, product, programs, slope
from smoothce.triton.tokens import Inputs, Made, Tokens, gather, valid_first


@triton.jit
def store_dlogits(
    x, r, v, columns,  # base-2 logits of tokens r and entries v, and where in `out` those go
    labels, lse, of_loss, of_lse,
    out, stride_out,
    N, V, smoothing, scale, softcap,
):  # fmt: skip
    """S of these logits; 0 for tokens without a label, whose g is 0 and whose lse is +inf."""
    known = r < N
    total = tl.load(lse + r, mask=known, other=float("inf"))
    y = tl.load(labels + r, mask=known, other=-1)
    g = tl.load(of_loss + r, mask=known, other=0.0)
    p = tl.exp2(x - total[:, None])
    s = p - smoothing / V
    s = tl.where(y[:, None] == v[None, :], s - (1.0 - smoothing), s)
    f = scale if softcap is None else slope(x, scale, softcap)
    if of_lse is not None:
        h = tl.load(of_lse + r, mask=known, other=0.0)
        s = (s * g[:, None] + p * h[:, None]) * f
    else:
        s *= f * g[:, None]
    # entries past the chunk are never read
    p_o = out + r.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(p_o, s.to(out.dtype.element_ty), mask=known[:, None])


@triton.jit(do_not_specialize=["N", "width"])
def recompute_kernel(
    hidden, weight, bias, labels, lse,  # (N, D), (V, D), (V,) or None, (N,), (N,)
    of_loss, of_lse,  # (N,) g, and h or None
    out, N, V, vocab, width, stride_out,  # S of entries [vocab, vocab + width)
    smoothing, scale, softcap, D: tl.constexpr,
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
        store_dlogits(
            x, row + tl.arange(0, ROWS), v, o_v + tl.arange(0, WIDTH), labels, lse,
            of_loss, of_lse, out, stride_out, N, V, smoothing, scale, softcap,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def convert_kernel(
    stored, target, labels, lse, of_loss, of_lse,
    out,  # may be the same memory as `stored`
    N, V, vocab, stride_in, stride_out,
    smoothing, scale, softcap, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """S from stored logits, for the chunk of the vocabulary that starts at `vocab`."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_v = tl.program_id(0) * WIDTH
    columns = o_v + tl.arange(0, WIDTH)
    known = r < N
    # tokens without a label have no stored logits
    valid = known & (tl.load(labels + r, mask=known, other=-1) >= 0)
    p_x = stored + r.to(tl.int64)[:, None] * stride_in + columns[None, :]
    x = tl.load(p_x, mask=valid[:, None], other=0.0).to(tl.float32)
    x += tl.load(target + r, mask=known, other=0.0)[:, None] * LOG2E
    store_dlogits(
        x, r, vocab + o_v + tl.arange(0, WIDTH), columns, labels, lse,
        of_loss, of_lse, out, stride_out, N, V, smoothing, scale, softcap,
    )  # fmt: skip


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
    source, first, stop = acc, 0, n
    if out.dtype != torch.float32:
        source, stop = acc[:64].clone(), min(n, 64)
    while first < n:
        block = min(1024, triton.next_power_of_2(d))
        spread_kernel[(stop - first,)](source, rank, out, first, d, BLOCK=block)
        source, first, stop = acc, stop, min(2 * stop, n)


@dataclass
class State:
    """What the forward leaves for the backward, which takes the gradient's memory."""

    tokens: list[Tokens]  # of each super-block
    counts: "Counts"
    d_weight: Tensor | None  # the weight gradient to be, in whose memory logits may be stored
    logits: Stored  # of the first super-block


class Counts:
    """Numbers of valid tokens, on their way to the host: None while a CUDA graph is captured."""

    def __init__(self, counts: list[Tensor]) -> None:
        self.event, self.host = None, [None] * len(counts)
        if counts and not counts[0].is_cuda:
            self.host = counts
        elif counts and not torch.cuda.is_current_stream_capturing():
            self.host = [count.to("cpu", non_blocking=True) for count in counts]
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> list[int | None]:
        """The numbers. The host waits for their kernel alone, which ran before the forward's."""
        if self.event is not None:
            self.event.synchronize()
        return [None if count is None else count.item() for count in self.host]


def forward_all(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, State | Made | None]:
    """Losses and log-sum-exps in the caller's order, 1 / tokens, and the backward's state."""
    parts, early = super_blocks(inputs), tokens_at_once(inputs) > 0
    orders = [valid_first(inputs.part(part)) for part in parts]
    token_weight = orders[0][3] if len(orders) == 1 else valid_first(inputs)[3]
    losses = inputs.hidden.new_empty(len(inputs.labels), dtype=torch.float32)
    lse = torch.empty_like(losses)
    state, logits = None, NOTHING
    if any(inputs.needs):
        d_weight, logits = room(inputs)
        state = State([], Counts([count for _, _, count, _ in orders]), d_weight, logits)
        if early:
            gradients = Gradients(inputs, d_weight)
    for i, (part, (order, rank, count, _)) in enumerate(zip(parts, orders, strict=True)):
        mine, here = inputs.part(part), logits if i == 0 or early else NOTHING
        tokens, packed = gather(mine, order, count)
        tokens = forward(
            mine, packed, tokens._replace(rank=rank), losses[part], lse[part], stored=here
        )
        if early:
            # asked for after the large kernel's launch, so that the device is busy meanwhile
            n = state.counts.values()[i]
            gradients.add(part, tokens, n, token_weight, None, here, packed)
        elif state is not None:
            state.tokens.append(tokens)
        del packed
    return losses, lse, token_weight, Made(gradients.result()) if early else state


def backward_all(
    inputs: Inputs,
    state: State,
    of_loss: Tensor,  # fp32, () or (N,)
    of_lse: Tensor | None,  # (N,)
    token_weight: Tensor,  # ()
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight that are wanted."""
    of_token = of_loss * token_weight
    # given away: a kept graph would hold the caller's gradient in memory through the logits' view
    logits, state.logits = state.logits, NOTHING
    gradients, state.d_weight = Gradients(inputs, state.d_weight), None
    counts = state.counts.values()
    for part, tokens, n in zip(super_blocks(inputs), state.tokens, counts, strict=True):
        g = of_token[part] if of_token.dim() else of_token
        h = None if of_lse is None else of_lse[part]
        gradients.add(part, tokens, n, g, h, logits)
        logits = NOTHING
    return gradients.result()


class Gradients:
    """The exact gradients that are wanted, filled super-block by super-block."""

    def __init__(self, inputs: Inputs, d_weight: Tensor | None) -> None:
        self.inputs, self.d_weight, self.begun = inputs, d_weight, False
        hidden, (n, d) = inputs.hidden, inputs.hidden.shape
        self.wide = hidden.dtype != torch.float32
        self.memory = None
        if inputs.needs[0]:
            # A super-block's sum is fp32, twice the size of its part of dE: each reaches into the
            # next one's rows.
            most = max((part.stop - part.start for part in super_blocks(inputs)), default=0)
            self.memory = hidden.new_empty(n + most * self.wide, d)
        if inputs.needs[1] and d_weight is None:
            self.d_weight = torch.empty_like(inputs.weight)

    def add(
        self,
        where: slice,  # of the caller's tokens
        tokens: Tokens,
        count: int | None,  # valid tokens; None: as many as there may be
        of_loss: Tensor,  # fp32, upstream gradient of the losses; () where all are alike
        of_lse: Tensor | None,  # of the log-sum-exps
        logits: Stored,
        packed: Tensor | None = None,  # the hidden states, valid ones first
    ) -> None:
        """Write dE of these tokens; write dC, or add to it."""
        size = where.stop - where.start
        n = size if count is None else count
        acc = None
        out = None if self.memory is None else self.memory[where]
        if n == 0:
            if out is not None:
                out.zero_()
            return
        hidden, d = self.inputs.hidden[where], self.inputs.hidden.shape[1]
        order, labels = tokens.order[:n], tokens.labels[:n]
        if out is not None and self.wide:
            memory = self.memory[where.start : where.stop + size]
            acc = memory.view(-1).view(torch.float32).view(size, d)[size - n :]
        elif out is not None:
            acc = out if count == size else torch.empty_like(hidden[:n])
        if count != size and packed is not None:
            hidden = packed[:n]
        elif count != size:
            # in what the sum leaves of its memory, where they fit
            fits = acc is not None and self.wide and 3 * n <= 2 * size
            gathered = memory[:n] if fits else hidden.new_empty(n, d)
            hidden = torch.index_select(hidden, 0, order, out=gathered)
        g, h = (
            None if x is None else torch.where(labels >= 0, x[order] if x.dim() else x, 0.0)
            for x in (of_loss, of_lse)
        )
        if acc is not None:
            acc.zero_()
        dlogits = Dlogits(self.inputs, hidden, tokens, g, h, logits)
        for start, stop, s in dlogits.chunks(None if self.begun else self.d_weight):
            if self.d_weight is not None:
                rows = self.d_weight[start:stop]
                if self.begun:
                    rows.addmm_(s.T, hidden)
                else:
                    torch.mm(s.T, hidden, out=rows)
            if acc is not None:
                add_product(acc, s, self.inputs.weight[start:stop])
        self.begun = True
        if acc is not None and acc is not out:
            spread(acc, tokens.rank, out)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        if self.d_weight is not None and not self.begun:
            self.d_weight.zero_()
        hidden = None if self.memory is None else self.memory[: len(self.inputs.hidden)]
        return hidden, self.d_weight


class Dlogits(NamedTuple):
    """S of one super-block's packed tokens, made chunk by chunk of the vocabulary."""

    inputs: Inputs
    hidden: Tensor  # (n, D) packed
    tokens: Tokens
    of_loss: Tensor  # (n,) fp32, g_i, 0 where there is no valid token
    of_lse: Tensor | None  # (n,) fp32, h_i, likewise
    logits: Stored

    def chunks(self, idle: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        """S of entries [start, stop), each until the next is asked for.

        `idle` is the weight gradient, in whose memory logits and S may lie where rows are not yet
        written. Logits take up N numbers an entry and gradients D, so stored logits are consumed
        from that end from which a piece and those before it make room for their gradients."""
        v, (n, d), stored = len(self.inputs.weight), self.hidden.shape, self.logits
        space = self.hidden.new_empty(n, 0 if stored.apart else regions_for(self.inputs).chunk)
        rows, pieces = stored.regions.rows, stored.regions.pieces()
        for first, last in pieces if rows >= d else reversed(pieces):
            logits = stored.piece(first, last, n)
            stays = stored.apart or last * d <= first * rows or first * d >= last * rows
            out = logits.view(self.hidden.dtype) if stays else space
            stop = min(last, v)
            yield first, stop, self.convert(logits, out, first, stop)
        done = min(stored.regions.entries, v)
        while done < v:
            out = space if idle is None else self.end(idle, done, space)
            stop = min(done + out.shape[1], v)
            yield done, stop, self.recompute(done, stop, out)
            done = stop

    def end(self, idle: Tensor, done: int, space: Tensor) -> Tensor:
        """Memory for S of the entries that follow: at the end of dC, so that its rows up to theirs
        are free, or the workspace where that holds more."""
        n, d = self.hidden.shape
        size, chunk = idle.numel(), space.shape[1]
        entries = (size - done * d - 8) // (n + d) // chunk * chunk
        if entries <= chunk:
            return space
        start = (size - entries * n) // 8 * 8
        return idle.view(-1)[start : start + entries * n].view(n, entries)

    def convert(self, logits: Tensor, out: Tensor, start: int, stop: int) -> Tensor:
        """S of entries [start, stop) from their stored logits, which may be in the same memory."""
        inputs, tokens, n = self.inputs, self.tokens, len(self.hidden)
        thin, wide = max(inputs.tiles.rows // 4, 1), min(inputs.tiles.width, 256)
        convert_kernel[(cdiv(stop - start, wide), cdiv(n, thin))](
            logits, tokens.target, tokens.labels, tokens.lse, self.of_loss, self.of_lse,
            out,
            n, len(inputs.weight), start, logits.stride(0), out.stride(0),
            inputs.options.label_smoothing, inputs.scale, inputs.options.softcap,
            ROWS=thin, WIDTH=wide,
        )  # fmt: skip
        return out[:, : stop - start]

    def recompute(self, start: int, stop: int, out: Tensor) -> Tensor:
        """S of entries [start, stop), from the product."""
        inputs, tiles = self.inputs, self.inputs.tiles
        recompute_kernel[(programs(self.hidden.device),)](
            descriptor(self.hidden, [tiles.rows, tiles.depth], tiles.tma),
            descriptor(inputs.weight, [tiles.width, tiles.depth], tiles.tma), inputs.bias,
            self.tokens.labels, self.tokens.lse, self.of_loss, self.of_lse,
            out, len(self.hidden), len(inputs.weight), start, stop - start, out.stride(0),
            inputs.options.label_smoothing, inputs.scale, inputs.options.softcap,
            D=self.hidden.shape[1], **tiles.product,
        )  # fmt: skip
        return out[:, : stop - start]


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

"""The exact backward: every dlogit, from a stored logit or recomputed, chunk by chunk.

    S_iv = (g_i (p_iv − (1−β) [v = y_i] − β/V) + h_i p_iv) · ∂logit/∂product,  dC = Sᵀ E,  dE = S C

with the upstream gradients g of the losses and h of the log-sum-exps.

Only valid tokens are in E and S: they are packed before and spread out again afterwards. No atomics
and no order that depends on timing, so a first backward on equal inputs gives equal bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from smoothce.chunked import MIXED, graph_is_kept
from smoothce.triton import stored
from smoothce.triton.forward import forward
from smoothce.triton.stored import Stored
from smoothce.triton.tiles import (
    LOG2E,
    base2_logits,
    descriptor,
    product,
    programs,
    slope,
)
from smoothce.triton.tokens import Inputs, Tokens, gather, outputs, scale, valid_first


@triton.jit
def dlogits(
    x,  # base-2 logits, (rows, entries)
    r, v, known, labels, lse, of_loss, of_lse, V, smoothing, scale, softcap,
):  # fmt: skip
    """S of these logits; 0 for tokens without a label, whose g is 0 and whose lse is +inf."""
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
    elif softcap is not None:
        s *= f * g[:, None]
    else:
        s *= (g * f)[:, None]
    return s


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
        r = row + tl.arange(0, ROWS)
        v = vocab + o_v + tl.arange(0, WIDTH)
        known = r < N
        x = base2_logits(acc, bias, v, V, scale, softcap)
        s = dlogits(x, r, v, known, labels, lse, of_loss, of_lse, V, smoothing, scale, softcap)
        # entries past the chunk are never read
        p_o = out + r.to(tl.int64)[:, None] * stride_out + (o_v + tl.arange(0, WIDTH))[None, :]
        tl.store(p_o, s.to(out.dtype.element_ty), mask=known[:, None])


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
    v = vocab + o_v + tl.arange(0, WIDTH)
    known = r < N
    # tokens without a label have no stored logits
    valid = known & (tl.load(labels + r, mask=known, other=-1) >= 0)
    columns = o_v + tl.arange(0, WIDTH)
    p_x = stored + r.to(tl.int64)[:, None] * stride_in + columns[None, :]
    x = tl.load(p_x, mask=valid[:, None], other=0.0).to(tl.float32)
    x += tl.load(target + r, mask=known, other=0.0)[:, None] * LOG2E
    s = dlogits(x, r, v, known, labels, lse, of_loss, of_lse, V, smoothing, scale, softcap)
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
    source, first, stop = acc, 0, n
    if out.dtype != torch.float32:
        source, stop = acc[:64].clone(), min(n, 64)
    while first < n:
        block = min(1024, triton.next_power_of_2(d))
        spread_kernel[(stop - first,)](source, rank, out, first, d, BLOCK=block)
        source, first, stop = acc, stop, min(2 * stop, n)


@dataclass
class State:
    """What the forward leaves for the backward, which takes the gradients that are in it."""

    tokens: list[Tokens]  # of each super-block
    counts: "Counts"
    d_weight: Tensor | None  # the weight gradient to be, in whose memory logits may be stored
    stored: Stored | None  # logits of the first super-block
    made: tuple[Tensor | None, Tensor | None] | None = None  # gradients made in the forward


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


class Exact(torch.autograd.Function):
    """The loss and the log-sum-exps, differentiable once in hidden and weight."""

    @staticmethod
    def forward(ctx, *inputs):
        inputs = Inputs(*inputs)
        with torch.cuda.device_of(inputs.hidden):
            losses, lse, token_weight, ctx.state = forward_all(inputs)
        return outputs(ctx, inputs, losses, lse, token_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_loss, of_lse):
        if of_loss is None and of_lse is None:
            return (None,) * 7
        *tensors, token_weight = ctx.saved_tensors
        inputs, device = Inputs(*tensors, *ctx.settings), tensors[0].device
        autocast = torch.autocast(device.type, enabled=False)
        with torch.cuda.device_of(inputs.hidden), autocast:
            of_loss = torch.zeros((), device=device) if of_loss is None else of_loss
            of_loss = of_loss.float()
            found = backward_all(inputs, ctx.state, of_loss, of_lse, token_weight)
        if not graph_is_kept():
            ctx.state = None
        return *found, None, None, None, None, None


def slices(inputs: Inputs) -> list[slice]:
    n, size = len(inputs.labels), stored.tokens_at_once(inputs) or stored.TOKENS
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def forward_all(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, State | None]:
    """Losses and log-sum-exps in the caller's order, 1 / tokens, and the backward's state."""
    parts, at_once = slices(inputs), stored.tokens_at_once(inputs)
    labels, ignore = inputs.labels, inputs.options.ignore_index
    found = [valid_first(labels[part], ignore) for part in parts]
    token_weight = found[0][3] if len(found) == 1 else valid_first(labels, ignore)[3]
    if inputs.options.reduction != "mean":
        token_weight = torch.ones_like(token_weight)
    losses = inputs.hidden.new_empty(len(labels), dtype=torch.float32)
    lse = torch.empty_like(losses)
    state = kept = gradients = None
    if any(inputs.needs):
        d_weight, kept = stored.room(inputs, at_once)
        state = State([], Counts([count for _, _, count, _ in found]), d_weight, kept)
        if at_once:
            state.d_weight, gradients = None, Gradients(inputs, parts, d_weight)
    for i, (part, (order, rank, count, _)) in enumerate(zip(parts, found, strict=True)):
        mine = inputs.part(part)
        tokens, packed = gather(mine, order, count)
        room = kept if i == 0 or at_once else None
        tokens, _ = forward(mine, packed, tokens, losses[part], lse[part], stored=room)
        tokens = tokens._replace(rank=rank)
        if gradients is not None:
            # asked for after the large kernel's launch, so that the device is busy meanwhile
            n = state.counts.values()[i]
            gradients.add(part, tokens, n, token_weight, None, room, packed)
        elif state is not None:
            state.tokens.append(tokens)
        del packed
    if gradients is not None:
        state.made, state.stored = gradients.result(), None
    return losses, lse, token_weight, state


def backward_all(
    inputs: Inputs,
    state: State,
    of_loss: Tensor,  # fp32, () or (N,)
    of_lse: Tensor | None,  # (N,)
    token_weight: Tensor,  # ()
) -> tuple[Tensor | None, Tensor | None]:
    if stored.tokens_at_once(inputs):
        # the first backward takes what there is, another makes it again
        made, state.made = state.made or forward_all(inputs)[3].made, None
        scale(made, of_loss)
        return made
    parts, token = slices(inputs), of_loss * token_weight
    kept = state.stored if state.d_weight is not None else None
    gradients, state.d_weight = Gradients(inputs, parts, state.d_weight), None
    for part, tokens, n in zip(parts, state.tokens, state.counts.values(), strict=True):
        g = token[part] if token.dim() else token
        h = None if of_lse is None else of_lse[part]
        gradients.add(part, tokens, n, g, h, kept)
        kept = None
    return gradients.result()


class Gradients:
    """The exact gradients that are wanted, filled super-block by super-block."""

    def __init__(self, inputs: Inputs, parts: list[slice], d_weight: Tensor | None) -> None:
        self.inputs, self.d_weight, self.begun = inputs, d_weight, False
        hidden, (n, d) = inputs.hidden, inputs.hidden.shape
        self.wide = hidden.dtype != torch.float32
        self.memory = None
        if inputs.needs[0]:
            # A super-block's sum is fp32, twice the size of its part of dE: each reaches into the
            # next one's rows.
            most = max((part.stop - part.start for part in parts), default=0)
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
        kept: Stored | None,
        packed: Tensor | None = None,  # the hidden states, valid ones first
    ) -> None:
        size = where.stop - where.start
        n = size if count is None else count
        out = acc = None
        if self.memory is not None:
            out = self.memory[where.start : where.stop]
        if n == 0:
            if out is not None:
                out.zero_()
            return
        hidden, d = self.inputs.hidden[where], self.inputs.hidden.shape[1]
        order, labels = tokens.order[:n], tokens.labels[:n]
        if out is not None and self.wide:
            room = self.memory[where.start : where.stop + size]
            acc = room.view(-1).view(torch.float32).view(size, d)[size - n :]
        elif out is not None:
            acc = out if count == size else torch.empty_like(hidden[:n])
        if count != size and packed is not None:
            hidden = packed[:n]
        elif count != size:
            # in what the sum leaves of its memory, where they fit
            fits = acc is not None and self.wide and 3 * n <= 2 * size
            hidden = torch.index_select(
                hidden, 0, order, out=room[:n] if fits else hidden.new_empty(n, d)
            )
        g, h = (
            None if x is None else torch.where(labels >= 0, x[order] if x.dim() else x, 0.0)
            for x in (of_loss, of_lse)
        )
        block = Block(self.inputs, hidden, tokens, g, h, kept)
        block.backward(acc, self.d_weight, self.begun)
        self.begun = True
        if acc is not None and acc is not out:
            spread(acc, tokens.rank, out)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        if self.d_weight is not None and not self.begun:
            self.d_weight.zero_()
        hidden = None if self.memory is None else self.memory[: len(self.inputs.hidden)]
        return hidden, self.d_weight


@dataclass
class Block:
    """One super-block's packed tokens, on the way to their gradients."""

    inputs: Inputs
    hidden: Tensor  # (n, D) packed
    tokens: Tokens
    of_loss: Tensor  # (n,) fp32, g_i, 0 where there is no valid token
    of_lse: Tensor | None  # (n,) fp32, h_i, likewise
    stored: Stored | None

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
                add_product(acc, part, self.inputs.weight[start:stop])

    def parts(self, idle: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        """S by chunks [start, stop), each until the next is asked for.

        `idle` is the weight gradient, in whose memory logits and S may lie where rows are not yet
        written. Logits take up N numbers an entry and gradients D, so stored logits are consumed
        from that end from which a piece and those before it make room for their gradients."""
        v, kept, done = len(self.inputs.weight), self.stored, 0
        n, d = self.hidden.shape
        apart = kept is not None and kept.apart
        chunk = 0 if apart else stored.regions_for(self.inputs).chunk
        space = self.hidden.new_empty(n, chunk)
        if kept is not None:
            rows, pieces = kept.regions.rows, kept.regions.pieces()
            done = min(kept.regions.entries, v)
            for first, last in pieces if rows >= d else reversed(pieces):
                logits = kept.piece(first, last, n)
                stays = kept.apart or last * d <= first * rows or first * d >= last * rows
                out = logits.view(self.hidden.dtype) if stays else space
                stop = min(last, v)
                yield first, stop, self.convert(logits, out, first, stop)
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

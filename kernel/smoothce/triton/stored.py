"""Logits that the forward leaves for the exact backward, and the memory that they may use.

The weight gradient's own memory has nothing in it until its rows are written, so it holds the
logits of the vocabulary's beginning, as many as fit. The backward turns them into dlogits, and
recomputes only the rest. Where a workspace holds every logit of a quarter of the tokens, a reduced
loss makes its gradients in the forward, one super-block of tokens after the other.

A stored logit is base-2 and minus the target's, in 16 bits (fp32 for fp32 inputs): where the
target is likely, large probabilities are those of small numbers, which 16 bits hold exactly.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.tiles import Tiles, programs
from smoothce.triton.tokens import Inputs

TOKENS = 8192  # most of a super-block; the filter's row lists are int16
# bytes of dlogits at a time, with what dE's sum takes beyond dE: at most so many, and at most this
# share of the two gradients; but so many for dlogits alone in any case
MOST, SHARE, LEAST = 112 * 2**20, 0.0965, 2**25

PIECES = 8  # most pieces of the logits in dC's memory, where they grow
MOST_PARTS = 4  # each super-block after the first rounds dC once more
CHUNKS = 32  # sizes of a chunk that are weighed up, from the largest down


class Regions(NamedTuple):
    """Which of the vocabulary's logits are stored for one super-block, and where."""

    rows: int  # tokens, the masked ones included
    chunk: int  # entries whose dlogits are in the workspace at a time
    growth: int  # each stored piece ends so many times later than the one before; 1: by `chunk`
    entries: int  # stored ones, from the first on, in contiguous pieces (rows, ·)

    def pieces(self) -> list[tuple[int, int]]:
        """Where the pieces of the stored entries begin and end.

        A piece's S may stay in its logits' memory while its gradient is written, if no row of dC
        is in both: always so where N and D differ by the factor `growth`, but for the first."""
        found, end = [], 0
        while end < self.entries:
            stop = max(end * self.growth, end + self.chunk)
            found.append((end, min(stop, self.entries)))
            end = stop
        return found


class Stored(NamedTuple):
    """Memory for one super-block's logits."""

    regions: Regions
    memory: Tensor | None  # (rows · entries,)
    apart: bool  # not in the memory of dC

    def piece(self, first: int, last: int, tokens: int) -> Tensor:
        """The logits of entries [first, last), (tokens, last − first)."""
        rows = self.regions.rows
        return self.memory[rows * first : rows * last].view(rows, last - first)[:tokens]


NOTHING = Stored(Regions(0, 1, 1, 0), None, False)


@functools.lru_cache(maxsize=4096)
def regions(
    n: int,
    d: int,
    v: int,
    size: int,  # bytes of a number
    needs: tuple[bool, bool],  # gradients of hidden and weight
    workers: int,
    tiles: Tiles,
) -> Regions:
    """The division for N tokens: the forward and the backward of one call agree on it."""
    unit = tiles.width
    rows, end = min(n, TOKENS), cdiv(v, unit) * unit
    most = min(MOST, SHARE * (v + n) * d * size)
    if needs[0] and size < 4:
        most -= rows * d * size
    at_most = int(max(most, LEAST)) // (max(rows, 1) * size)
    chunk = min(best_chunk(at_most, rows, d, workers, tiles), end)
    growth, entries = 1, 0
    if needs[1] and rows:
        entries = min(v * d // rows // unit * unit, end)
        growth = max(rows // d, d // rows)
        if growth > 1:
            entries = min(entries, chunk * growth ** (PIECES - 1))
    return Regions(rows, chunk, growth, entries)


def regions_for(inputs: Inputs) -> Regions:
    weight, workers = inputs.weight, programs(inputs.hidden.device)
    shape = *inputs.hidden.shape, len(weight), weight.element_size()
    return regions(*shape, inputs.needs, workers, inputs.tiles)


def tokens_at_once(inputs: Inputs) -> int:
    """Tokens of which the workspace holds every logit, in super-blocks whose gradients are made in
    the forward one after the other; 0 where that is not the better use of it.

    Two super-blocks or as many more as must be, since dC is rounded after each."""
    options, tiles, n = inputs.options, inputs.tiles, len(inputs.hidden)
    if not any(inputs.needs) or options.reduction == "none" or options.return_lse or n == 0:
        return 0
    most = options.workspace // (inputs.blocks * tiles.width * inputs.weight.element_size())
    if most * MOST_PARTS < n or regions_for(inputs).entries > 0.9 * len(inputs.weight):
        return 0
    sizes = (cdiv(cdiv(n, parts), tiles.rows) * tiles.rows for parts in range(2, MOST_PARTS + 1))
    return next((size for size in sizes if size <= most), 0)


def super_blocks(inputs: Inputs) -> list[slice]:
    """Which of the caller's tokens are packed and worked on together."""
    n, size = len(inputs.labels), tokens_at_once(inputs) or TOKENS
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def best_chunk(most: int, rows: int, d: int, workers: int, tiles: Tiles) -> int:
    """Of the numbers of entries from half of `most` to `most`, that whose products leave the fewest
    multiprocessors idle in their last round: E Cᵀ in this package's tiles, Sᵀ E in 128 × 256."""

    def filled(entries: int) -> float:
        share = 1.0
        for work in (
            cdiv(rows, tiles.rows) * (entries // tiles.width),
            cdiv(entries, 128) * cdiv(d, 256),
        ):
            share *= work / (max(cdiv(work, workers), 1) * workers)
        return share

    units = max(most // tiles.width, 1)
    least = max((units + 1) // 2, units - CHUNKS)
    return max((filled(k * tiles.width), k * tiles.width) for k in range(least, units + 1))[1]


def room(inputs: Inputs) -> tuple[Tensor | None, Stored]:
    """The weight gradient to be, and memory for the forward to write logits to."""
    weight = inputs.weight
    gradient = torch.empty_like(weight) if inputs.needs[1] else None
    # fp16 also for bf16 inputs: it has three more bits, and logits do not need bf16's range
    dtype = torch.float32 if weight.dtype == torch.float32 else torch.float16
    if tokens := tokens_at_once(inputs):
        width = inputs.blocks * inputs.tiles.width
        memory = torch.empty(tokens * width, device=weight.device, dtype=dtype)
        return gradient, Stored(Regions(tokens, width, 1, width), memory, True)
    plan = regions_for(inputs)
    if gradient is None or not plan.entries:
        return gradient, NOTHING
    return gradient, Stored(plan, gradient.view(-1)[: plan.rows * plan.entries].view(dtype), False)


@triton.jit
def store_logits(
    x,  # base-2 logits of a tile
    memory, rows, n, block,  # of stored logits, the tokens' places, how many there are
    stored_rows, chunk, growth, stored_entries, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Store the tile where its part of the vocabulary is kept, if it is."""
    v = block * WIDTH
    if v < stored_entries:
        # the piece [first, last) of the vocabulary, as in `Regions.pieces`
        first = v * 0
        last = first + chunk
        for _ in tl.static_range(PIECES - 1):
            after = (v >= last) & (growth > 1)
            first = tl.where(after, last, first)
            last = tl.where(after, last * growth, last)
        first = tl.where(growth > 1, first, v // chunk * chunk)
        last = tl.minimum(tl.where(growth > 1, last, first + chunk), stored_entries)
        offset = tl.multiple_of(first.to(tl.int64) * stored_rows + (v - first), 16)
        stride = tl.multiple_of(last - first, 16)
        p = memory + offset + rows.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        if memory.dtype.element_ty == tl.float16:
            x = tl.minimum(tl.maximum(x, -60000.0), 60000.0)
        known = (rows < n) & (rows < stored_rows)
        tl.store(p, x.to(memory.dtype.element_ty), mask=known[:, None])

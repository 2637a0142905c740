"""Logits that the forward leaves for the exact backward, and the memory that they may use.

The weight gradient's own memory has nothing in it until its rows are written, so it holds the
logits of the vocabulary's beginning, as many as fit; a workspace, where the caller grants one,
holds those that follow. The backward turns them into dlogits, and recomputes only the rest.

A stored logit is base-2 and minus the target's, in 16 bits (fp32 for fp32 inputs): where the
target is likely, large probabilities are those of small numbers, which 16 bits hold exactly.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.triton.tiles import Tiles, cdiv, programs

TOKENS = 8192  # most of a super-block; the filter's row lists are int16
# bytes of dlogits at a time, with what dE's sum takes beyond dE: at most so many, and at most this
# share of the two gradients; but so many for dlogits alone in any case
MOST, SHARE, LEAST = 112 * 2**20, 0.0965, 2**25

PIECES = 8  # most pieces of the logits in dC's memory, where they grow
MOST_PARTS = 4  # each super-block after the first rounds dC once more


class Regions(NamedTuple):
    """How one super-block's vocabulary is divided: [0, near), [near, near + far) and the rest."""

    rows: int  # tokens
    chunk: int  # entries whose dlogits are in the workspace at a time
    growth: int  # each piece of `near` ends so many times later than the one before; 1: by `chunk`
    near: int  # entries stored in the memory of dC, in contiguous pieces (rows, entries)
    far: int  # entries stored in memory of their own, (N, far)

    def pieces(self) -> list[tuple[int, int]]:
        """Where the pieces of [0, near) begin and end.

        A piece's S may stay in its logits' memory while its gradient is written, if no row of dC
        is in both: always so where N and D differ by the factor `growth`, but for the first."""
        found, end = [], 0
        while end < self.near:
            stop = max(end * self.growth, end + self.chunk) if end else self.chunk
            found.append((end, min(stop, self.near)))
            end = stop
        return found


class Stored(NamedTuple):
    """What the forward leaves."""

    regions: Regions
    weight: Tensor | None  # (V, D), the weight gradient to be
    near: Tensor | None  # the same memory as logits, rows · near
    far: Tensor | None  # (N, far)
    target: Tensor  # (N,) fp32, the target's base-2 logit

    def part(self, tokens: slice) -> "Stored":
        """What there is of a super-block's tokens."""
        near = None if tokens.start else self.near
        far = None if self.far is None else self.far[tokens]
        return self._replace(near=near, far=far, target=self.target[tokens])


def regions(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    needs: tuple[bool, bool, bool],  # gradients of hidden, weight and bias
    workspace: int,  # bytes
    tiles: Tiles,
) -> Regions:
    """The division for these inputs: the forward and the backward of one call agree on it."""
    (n, d), v = hidden.shape, len(weight)
    size, unit = weight.element_size(), tiles.width
    rows, end = min(n, TOKENS), cdiv(v, unit) * unit
    most = min(MOST, SHARE * (v + n) * d * size)
    if needs[0] and size < 4:
        most -= rows * d * size
    entries = int(max(most, LEAST)) // (max(rows, 1) * size)
    chunk = min(best_chunk(entries, rows, d, programs(hidden.device), tiles), end)
    growth, near = 1, 0
    if needs[1] and rows:
        near = min(v * d // rows // unit * unit, end)
        if not bounded(hidden, needs):
            growth = max(rows // d, d // rows)
        if growth > 1:
            near = min(near, chunk * growth ** (PIECES - 1))
    far = min(workspace // (max(n, 1) * size) // unit * unit, end - near)
    return Regions(rows, chunk, growth, near, far)


def tokens_at_once(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    needs: tuple[bool, bool, bool],
    workspace: int,
    tiles: Tiles,
) -> int:
    """Tokens of which the workspace holds every logit, in super-blocks whose gradients are made in
    the forward one after the other; 0 where that is not the better use of it.

    Few super-blocks, since dC is rounded after each, and such that S C in tiles of 192 × 192 leaves
    few multiprocessors idle."""
    n, v = len(hidden), len(weight)
    most = workspace // (cdiv(v, tiles.width) * tiles.width * weight.element_size())
    if n == 0 or most * MOST_PARTS < n:
        return 0
    plan = regions(hidden, weight, needs, workspace, tiles)
    if plan.near + plan.far > 0.9 * v:
        return 0
    workers = programs(hidden.device)
    best = 0.0, 0
    for parts in range(2, MOST_PARTS + 1):
        size = cdiv(cdiv(n, parts), tiles.rows) * tiles.rows
        work = cdiv(size, 192) * cdiv(hidden.shape[1], 192)
        if size <= most:
            best = max(best, (work / (cdiv(work, workers) * workers), size))
    return best[1]


def bounded(hidden: Tensor, needs: tuple[bool, bool, bool]) -> bool:
    """Whether every piece must be as small as a chunk, since other memory grows with it: the bias's
    partial sums, fp16's wide products."""
    return needs[2] or hidden.dtype == torch.float16


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
    return max(
        (filled(k * tiles.width), k * tiles.width) for k in range((units + 1) // 2, units + 1)
    )[1]


def room_at_once(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    tokens: int,
    tiles: Tiles,
) -> Stored:
    """Memory for every logit of so many tokens."""
    width = cdiv(len(weight), tiles.width) * tiles.width
    chunk = min(width, cdiv(LEAST // (tokens * weight.element_size()), tiles.width) * tiles.width)
    far = torch.empty(tokens, width, device=hidden.device, dtype=stored_dtype(hidden))
    target = torch.empty(tokens, device=hidden.device, dtype=torch.float32)
    return Stored(Regions(tokens, chunk, 1, 0, width), None, None, far, target)


def stored_dtype(hidden: Tensor) -> torch.dtype:
    """fp16 also for bf16 inputs: it has three more bits, and logits do not need bf16's range."""
    return torch.float32 if hidden.dtype == torch.float32 else torch.float16


def room(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    needs: tuple[bool, bool, bool],
    workspace: int,
    tiles: Tiles,
) -> Stored:
    """Memory for the forward to write to."""
    n = len(hidden)
    plan = regions(hidden, weight, needs, workspace, tiles)
    gradient = near = far = None
    if needs[1]:
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if plan.near:
        near = gradient.view(-1)[: plan.rows * plan.near].view(stored_dtype(hidden))
    if plan.far:
        far = torch.empty(n, plan.far, device=hidden.device, dtype=stored_dtype(hidden))
    target = torch.empty(n, device=hidden.device, dtype=torch.float32)
    return Stored(plan, gradient, near, far, target)


@triton.jit
def store_logits(
    x,  # base-2 logits of a tile
    base,
    source,
    block,
    near,
    chunk,
    near_rows,
    far_offset,
    far,
    N,
    WIDTH: tl.constexpr,
    GROWTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Store the tile where its part of the vocabulary is kept, if it is."""
    v = block * WIDTH
    if v < near + far:
        # the piece [first, last) of the vocabulary, as in `Regions.pieces`
        if GROWTH > 1:
            first = v * 0
            last = first + chunk
            for _ in tl.static_range(PIECES - 1):
                after = v >= last
                first = tl.where(after, last, first)
                last = tl.where(after, last * GROWTH, last)
        else:
            first = v // chunk * chunk
            last = first + chunk
        last = tl.minimum(last, near)
        inside = v < near
        piece = first.to(tl.int64) * near_rows + (v - first)
        offset = tl.multiple_of(tl.where(inside, piece, far_offset + v - near), 16)
        stride = tl.multiple_of(tl.where(inside, last - first, far), 16)
        limit = tl.where(inside, near_rows, N)
        p = base + offset + source.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        if base.dtype.element_ty == tl.float16:
            x = tl.minimum(tl.maximum(x, -60000.0), 60000.0)
        known = (source >= 0) & (source < limit)
        tl.store(p, x.to(base.dtype.element_ty), mask=known[:, None])

"""Which (token, vocabulary block) pairs the backward recomputes, and in which order.

A pair is kept when some probability in it reaches the threshold or it holds the target. Kept pairs
become row lists, the others keep their softmax mass. Everything is decided on the device; the
lists take the place of the statistics that they are made from.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.triton.forward import Statistics
from smoothce.triton.prepare import Tokens
from smoothce.triton.tiles import Tiles, cdiv


class Plan(NamedTuple):
    """Kept pairs and dropped mass of one super-block."""

    mass: Tensor  # (blocks, padded) bf16, softmax mass of a dropped pair, 0 for a kept one
    rows: Tensor  # (blocks, padded) int16, the first kept[j] entries are block j's tokens
    kept: Tensor  # (blocks,) int32


class Schedule(NamedTuple):
    """The queue of the backward: tiles of kept pairs, and weight-gradient slices behind them."""

    items: Tensor  # (·,) int32, block << 14 | index << 2 | kind
    total: Tensor  # (1,) int32, how many are in use
    first: Tensor  # (blocks,) int32, block's first tile
    owner: Tensor  # (·,) int32, tile's block
    readers: Tensor  # (blocks,) int32, weight-gradient items of the block


@triton.jit
def plan_kernel(
    mass,
    dropped,  # the same memory as `mass`
    peak,
    rows,  # the same memory as `peak`
    kept,
    lse,
    labels,
    count,
    padded,
    log_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j = tl.program_id(0)
    n = tl.load(count)
    o_j = j.to(tl.int64) * padded
    done = 0
    for i in range(0, padded, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        inside = o_i < padded
        b = tl.load(mass + o_j + o_i, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(peak + o_j + o_i, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(labels + o_i, mask=inside, other=-1)
        total = tl.load(lse + o_i, mask=inside, other=0.0)
        keep = (o_i < n) & ((x - total >= log_eps) | ((y >= 0) & (y // WIDTH == j)))
        # a dropped pair never reads as kept, however small
        p = tl.maximum(tl.exp2(b - total), 1e-30)
        p = tl.where((o_i < n) & (keep == 0), p, 0.0)
        flag = keep.to(tl.int32)
        place = done + tl.cumsum(flag, 0) - flag
        tl.debug_barrier()  # the list overwrites statistics of tokens already read, never others
        tl.store(dropped + o_j + o_i, p.to(tl.bfloat16), mask=inside)
        tl.store(rows + o_j + place, o_i.to(tl.int16), mask=keep)
        done += tl.sum(flag, 0)
    tl.store(kept + j, done)


def plan(statistics: Statistics, tokens: Tokens, vocabulary: int, eps: float, tiles: Tiles) -> Plan:
    """Turn block statistics, in place, into kept rows and dropped masses."""
    mass, peak = statistics.mass, statistics.peak
    blocks, padded = mass.shape
    dropped, rows = mass.view(torch.bfloat16), peak.view(torch.int16)
    kept = torch.empty(blocks, device=mass.device, dtype=torch.int32)
    plan_kernel[(blocks,)](
        mass,
        dropped,
        peak,
        rows,
        kept,
        statistics.lse,
        tokens.labels,
        tokens.count,
        padded,
        math.log2(eps),
        WIDTH=tiles.width,
        BLOCK=min(1024, triton.next_power_of_2(padded)),
    )
    return Plan(dropped, rows, kept)


@triton.jit
def items_kernel(items, owner, first, tiles, tile_at, slices, slice_at, BLOCK: tl.constexpr):
    j = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    n_tiles = tl.load(tiles + j)
    begin = tl.load(first + j)
    at = tl.load(tile_at + j)
    for i in range(0, n_tiles, BLOCK):
        inside = i + o < n_tiles
        tl.store(items + at + i + o, (j << 14) | ((i + o) << 2), mask=inside)
        tl.store(owner + begin + i + o, j, mask=inside)
    n_slices = tl.load(slices + j)
    at = tl.load(slice_at + j)
    for i in range(0, n_slices, BLOCK):
        tl.store(items + at + i + o, (j << 14) | ((i + o) << 2) | 1, mask=i + o < n_slices)


def schedule(
    kept: Tensor,  # (blocks,)
    padded: int,
    slices: Tensor,  # (blocks,) int32, weight-gradient slices wanted of each block
    most_slices: int,
    tiles: Tiles,
    ring: int,
    skip: Tensor | None = None,  # (blocks,) bool, blocks whose tiles are not wanted
) -> Schedule:
    """Order the work: tiles run as far ahead of their weight gradient as the ring has room."""
    blocks = len(kept)
    # two more rows a tile list: the block's profile and its uniform direction
    n_tiles = (kept + (2 + tiles.kept_rows - 1)) // tiles.kept_rows
    if skip is not None:
        n_tiles = n_tiles * ~skip
    end = n_tiles.cumsum(0)
    first = end - n_tiles
    read_end = slices.cumsum(0)
    read_first = read_end - slices
    index = torch.arange(blocks, device=kept.device)
    # A block's tiles come right before the readers of the first block within half a ring of it:
    # far enough behind those tiles to find them done, and far enough before the reuse of a slot.
    most_tiles = cdiv(padded + 2, tiles.kept_rows)
    reach = max(ring // 2, most_tiles)
    behind = torch.minimum(torch.searchsorted(first, end - reach), index)
    tile_at = read_first[behind] + first
    ahead = torch.searchsorted(behind, index, right=True)
    slice_at = read_first + end[ahead - 1]
    most_tiles *= blocks
    items = torch.empty(most_tiles + blocks * most_slices, device=kept.device, dtype=torch.int32)
    owner = torch.empty(most_tiles, device=kept.device, dtype=torch.int32)
    to = {"dtype": torch.int32}
    first = first.to(**to)
    items_kernel[(blocks,)](
        items,
        owner,
        first,
        n_tiles.to(**to),
        tile_at.to(**to),
        slices,
        slice_at.to(**to),
        BLOCK=64,
    )
    total = (end[-1:] + read_end[-1:]).to(**to)
    return Schedule(items, total, first, owner, slices)

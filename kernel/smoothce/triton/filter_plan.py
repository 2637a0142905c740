"""Which (token, vocabulary block) pairs the backward recomputes, and in which order.

A pair is kept when it holds the target or when √(mass · largest probability), which bounds the
2-norm of its probabilities, reaches the threshold. The others are drawn with probability
norm / threshold, so that gradients stay unbiased. Kept and drawn pairs become row
lists; each pair has a coefficient for the low-rank model: 0 if kept, its mass if dropped.
Everything is decided on the device, and lists take the place of the statistics they are made from.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.tiles import LOG2E, Tiles
from smoothce.triton.tokens import PackedTokens

ITEM = 2048  # listed tokens × slices of D a weight-gradient item
DRAWN = 64  # pairs that even a block of small norms has kept or drawn, about: half a tile


class Plan(NamedTuple):
    """The pairs of one super-block that are recomputed, and what the low-rank model takes."""

    # (blocks, padded) bf16: mass P of a dropped pair, (1 − w) P of one drawn with weight w, else 0
    coefficient: Tensor
    tokens: Tensor  # (blocks, padded) int16, the first listed[j] entries are block j's
    listed: Tensor  # (blocks,) int32


class Schedule(NamedTuple):
    """The queue of the backward: tiles of listed pairs, and weight-gradient slices behind them."""

    items: Tensor  # (·,) int32, block << 14 | index << 2 | kind
    total: Tensor  # (1,) int32, how many are in use
    first: Tensor  # (blocks,) int32, block's first tile
    owner: Tensor  # (·,) int32, tile's block
    readers: Tensor  # (blocks,) int32, weight-gradient items of the block


@triton.jit
def scramble(h):
    """MurmurHash3's finaliser, of uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def draw(a, b, c):
    """A number in (0, 1) that follows from three int32 alone."""
    h = scramble(a.to(tl.uint32, bitcast=True) ^ (b * 65537 + c).to(tl.uint32, bitcast=True))
    return scramble(h + 0x9E3779B9).to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
def plan_kernel(
    block_lse, coefficient,  # the same memory
    block_max, tokens,  # the same memory
    listed, lse, target, labels, count, padded, log_eps,
    DRAWN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block: its threshold, then the tokens that are kept or drawn and all coefficients.

    Statistics and `total` are base-2 and minus the target's logit."""
    j = tl.program_id(0)
    n = tl.load(count)
    o_j = j.to(tl.int64) * padded
    # a block where all norms are small must not be left to a handful of draws
    norms = 0.0
    most = tl.exp2(log_eps)
    for i in range(0, padded, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        inside = o_i < padded
        b = tl.load(block_lse + o_j + o_i, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(block_max + o_j + o_i, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(lse + o_i, mask=inside, other=0.0)
        total -= tl.load(target + o_i, mask=inside, other=0.0) * LOG2E
        norm = tl.minimum(tl.exp2(0.5 * (x + b) - total), most)
        norms += tl.sum(tl.where(o_i < n, norm, 0.0), 0)
    log_eps = tl.minimum(log_eps, tl.log2(tl.maximum(norms / DRAWN, 1e-30)))
    done = 0
    for i in range(0, padded, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        inside = o_i < padded
        b = tl.load(block_lse + o_j + o_i, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(block_max + o_j + o_i, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(labels + o_i, mask=inside, other=-1)
        total = tl.load(lse + o_i, mask=inside, other=0.0)
        seed = total.to(tl.int32, bitcast=True)
        total -= tl.load(target + o_i, mask=inside, other=0.0) * LOG2E
        # sum of p² over the block ≤ largest p · mass, so what is dropped has a 2-norm below eps
        norm = 0.5 * (x + b) - total
        keep = (o_i < n) & ((norm >= log_eps) | ((y >= 0) & (y // WIDTH == j)))
        # a dropped pair never reads as kept, however small
        p = tl.maximum(tl.exp2(b - total), 1e-30)
        # 1/w = norm / eps, so that the softmax that is added in the mean is the true one
        u = draw(seed, o_i, j)
        drawn = u < tl.exp2(norm - log_eps)
        p = tl.where(drawn, p * (1.0 - tl.exp2(log_eps - norm)), p)
        p = tl.where((o_i < n) & (keep == 0), p, 0.0)
        keep = keep | (drawn & (o_i < n))
        flag = keep.to(tl.int32)
        place = done + tl.cumsum(flag, 0) - flag
        tl.debug_barrier()  # the list overwrites statistics of tokens already read, never others
        tl.store(coefficient + o_j + o_i, p.to(tl.bfloat16), mask=inside)
        tl.store(tokens + o_j + place, o_i.to(tl.int16), mask=keep)
        done += tl.sum(flag, 0)
    tl.store(listed + j, done)


def plan(statistics: Tensor, tokens: PackedTokens, eps: float, tiles: Tiles) -> Plan:
    """Turn the forward's block statistics, in place, into lists of tokens and coefficients."""
    block_lse, block_max = statistics
    blocks, padded = block_lse.shape
    found = Plan(
        block_lse.view(torch.bfloat16),
        block_max.view(torch.int16),
        torch.empty(blocks, device=block_lse.device, dtype=torch.int32),
    )
    plan_kernel[(blocks,)](
        block_lse, found.coefficient,
        block_max, found.tokens,
        found.listed, tokens.lse, tokens.target, tokens.labels, tokens.count,
        padded, math.log2(eps),
        DRAWN=DRAWN, WIDTH=tiles.width, BLOCK=1024,
    )  # fmt: skip
    return found


@triton.jit
def count_kernel(
    listed, first, last, readers, read_last, total, blocks, slices, each,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles and weight-gradient items of every block, and where each block's begin and end."""
    tile_sum = 0
    read_sum = 0
    for i in range(0, blocks, BLOCK):
        j = i + tl.arange(0, BLOCK)
        inside = j < blocks
        n = tl.load(listed + j, mask=inside, other=0)
        # two more rows: the block's profile and its uniform direction
        tiles = tl.where(inside, (n + 2 + ROWS - 1) // ROWS, 0)
        # short weight gradients are worked off several slices at a time
        items = tl.minimum(n * slices // each + 1, slices)
        items = tl.where(inside, items, 0)
        ends = tile_sum + tl.cumsum(tiles, 0)
        tl.store(last + j, ends, mask=inside)
        tl.store(first + j, ends - tiles, mask=inside)
        tl.store(readers + j, items, mask=inside)
        tl.store(read_last + j, read_sum + tl.cumsum(items, 0), mask=inside)
        tile_sum += tl.sum(tiles, 0)
        read_sum += tl.sum(items, 0)
    tl.store(total, tile_sum + read_sum)


@triton.jit
def items_kernel(
    first, last, readers, read_last, items, owner, blocks, reach,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block j's places in the queue.

    Its tiles come right before the readers of the first block r within `reach` of their end:
    first[r] ≥ last[j] − reach. That is far enough behind r's tiles to find them done, and far
    enough before the reuse of a slot of the ring."""
    j = tl.program_id(0)
    begin = tl.load(first + j)
    end = tl.load(last + j)
    n_readers = tl.load(readers + j)
    read_end = tl.load(read_last + j)
    low, high = 0, j
    behind, top = j * 0, blocks + j * 0
    for _ in range(STEPS):
        # the first block whose tiles begin late enough, if it is before j
        middle = (low + high) // 2
        late = tl.load(first + middle) >= end - reach
        high = tl.where(late, middle, high)
        low = tl.where(late, low, tl.minimum(middle + 1, high))
        # how many blocks' tiles are before this block's readers
        middle = (behind + top) // 2
        fits = tl.load(last + tl.minimum(middle, blocks - 1)) <= begin + reach
        behind = tl.where(fits & (middle < top), middle + 1, behind)
        top = tl.where(fits, top, middle)
    tile_at = tl.load(read_last + high) - tl.load(readers + high) + begin
    ahead = tl.maximum(behind, j + 1)
    read_at = read_end - n_readers + tl.load(last + ahead - 1)
    o = tl.arange(0, BLOCK)
    for i in range(0, end - begin, BLOCK):
        inside = i + o < end - begin
        tl.store(items + tile_at + i + o, (j << 14) | ((i + o) << 2), mask=inside)
        tl.store(owner + begin + i + o, j, mask=inside)
    for i in range(0, n_readers, BLOCK):
        tl.store(items + read_at + i + o, (j << 14) | ((i + o) << 2) | 1, mask=i + o < n_readers)


def schedule(
    listed: Tensor,  # (blocks,)
    padded: int,
    slices: int,  # of D in a block's weight gradient, 0 where it is not wanted
    tiles: Tiles,
    ring: int,
) -> Schedule:
    """Order every block's tiles and the items of its weight gradient."""
    blocks = len(listed)
    most_tiles = cdiv(padded + 2, tiles.pair_rows)
    reach = max(ring // 2, most_tiles)
    sizes = [blocks] * 4 + [1, blocks * (most_tiles + slices)]
    memory = torch.empty(sum(sizes), device=listed.device, dtype=torch.int32)
    first, last, readers, read_last, total, items = memory.split(sizes)
    owner = torch.empty(blocks * most_tiles, device=listed.device, dtype=torch.int32)
    count_kernel[(1,)](
        listed, first, last, readers, read_last, total, blocks, slices, ITEM,
        ROWS=tiles.pair_rows, BLOCK=1024,
    )  # fmt: skip
    items_kernel[(blocks,)](
        first, last, readers, read_last, items, owner, blocks, reach,
        STEPS=blocks.bit_length() + 1, BLOCK=32, num_warps=1,
    )  # fmt: skip
    return Schedule(items, total, first, owner, readers)

# mypy: allow-untyped-defs
"""Decides which (token, vocabulary block) pairs the filtered backward recomputes, in which order.

`plan_pairs` chooses the pairs, and `schedule` orders the work on them for `kernels`. Both run on
the device alone. (`threshold` says which calls are filtered at all.) kernel/DERIVATION.md, "The
filter", has the mathematics.

With P_ij = Σ_{v∈j} p_iv for the pair's mass, a bound of the 2-norm of its probabilities is

    norm_ij = √(P_ij · max_{v∈j} p_iv)

A pair is kept when it holds the label, or when norm_ij reaches the block's threshold ε_j. Any other
pair is drawn with probability norm_ij / ε_j, so that gradients stay unbiased. ε_j is the call's
threshold ε (`call.eps`), unless the block's norms, each counted up to ε, sum to less than DRAWN
· ε. Then it is lower: that sum / DRAWN. Where the norms are alike, about DRAWN pairs are listed by
it. Where a few large norms make up most of the sum, those few are listed, and fewer than DRAWN in
all. Kept and drawn pairs are *listed*: each block has a list of its tokens.

Every pair has a coefficient m_ij for the low-rank model, which stands in for what is not
recomputed. Its sign says what became of the pair, since P > 0 and w > 1:

    kept                  m = 0
    drawn with weight w   m = (1 − w) P < 0
    dropped               m = P > 0

(Kernels take no Python types, so mypy lets functions without annotations pass in this file.)
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.forward import reference_logit_base2
from smoothce.triton.tiles import LOG2E, Tiles
from smoothce.triton.tokens import PackedTokens

# Listed tokens × slices of D that one share of a block's weight gradient takes on.
SHARE_SIZE = 2048
# About as many pairs are listed even of a block in which all norms are small, if they are alike:
# half a tile.
DRAWN = 64
# Places of packed tokens are int16 in the lists.
MAX_PADDED_TOKENS = 2**15

# What an item of the queue asks for.
TILE_ITEM = tl.constexpr(0)
SHARE_ITEM = tl.constexpr(1)

# How `pack_item` lays an item out.
_KIND_BITS = 2
_INDEX_BITS = 12
MAX_ITEMS_OF_BLOCK = 2**_INDEX_BITS  # of one kind
MAX_BLOCKS = 2 ** (31 - _INDEX_BITS - _KIND_BITS)
BLOCK_SHIFT = tl.constexpr(_INDEX_BITS + _KIND_BITS)
INDEX_SHIFT = tl.constexpr(_KIND_BITS)
INDEX_MASK = tl.constexpr(MAX_ITEMS_OF_BLOCK - 1)
KIND_MASK = tl.constexpr(2**_KIND_BITS - 1)


class PairPlan(NamedTuple):
    """Which pairs of one super-block are recomputed, and what the low-rank model takes.

    Fields have the names of `queue_kernel`'s parameters."""

    # (blocks, padded) bf16, m_ij: 0 for a kept pair, (1 − w) P < 0 for a drawn one, P > 0 for a
    # dropped one; see `is_dropped`.
    pair_coefficients: Tensor
    # (blocks, padded) int16: the first listed[j] entries of row j are block j's listed tokens, by
    # their places among the super-block's packed tokens. `PackedTokens.order` says which of the
    # call's tokens these are.
    listed_tokens: Tensor
    # (blocks,) int32: how many tokens each block lists.
    listed: Tensor


class Schedule(NamedTuple):
    """The queue of the backward: tiles of listed pairs, and shares of dC among them.

    A block's shares stand some way behind its tiles, behind tiles of later blocks: `items_kernel`
    says where. Tiles are numbered through all blocks, in the order of blocks, and so are shares.

    Fields have the names of `queue_kernel`'s parameters."""

    items: Tensor  # (·,) int32, as `pack_item` makes them, in the order of the queue
    n_items: Tensor  # (1,) int32, how many of `items` are in use
    first_tile: Tensor  # (blocks,) int32, the number of each block's first tile
    tile_owner: Tensor  # (·,) int32, the block of each tile
    n_shares: Tensor  # (blocks,) int32, in how many shares each block's dC is worked off


@triton.jit
def pack_item(block, index, kind):
    """One int32 for an item of the queue.

    From the lowest bit up it has 2 bits of kind (TILE_ITEM or SHARE_ITEM), 12 of the item's index
    among its block's items of that kind, and 17 of the block; the sign bit stays 0. `schedule`
    asserts that block and index fit.
    """
    return (block << BLOCK_SHIFT) | (index << INDEX_SHIFT) | kind


@triton.jit
def unpack_item(item):
    """(block, index, kind) of what `pack_item` made."""
    return item >> BLOCK_SHIFT, (item >> INDEX_SHIFT) & INDEX_MASK, item & KIND_MASK


@triton.jit
def is_dropped(pair_coefficient):
    """1.0 where coefficients m_ij are those of dropped pairs, 0.0 of kept and drawn ones."""
    return tl.where(pair_coefficient.to(tl.float32) > 0.0, 1.0, 0.0)


@triton.jit
def scramble(bits):
    """MurmurHash3's finalizer, of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def draw(seed, token, block):
    """A number in (0, 1] that follows from three int32 alone, so that no generator is needed.

    1 is what fp32 rounds the 128 largest of the 2^32 numbers to.

    `block` counts from 0 on each rank. Where ranks share a vocabulary, a token's log-sum-exp, which
    is the seed, is the same on all of them, so that block j of every rank gets the same number for
    a token. Each pair's number is uniform all the same, and the gradient right on average. But
    these pairs are not drawn independently, so that the errors which the ranks add to dE can add up
    and dE's variance can be larger than with a number of its own for each."""
    pair = (token * 65537 + block).to(tl.uint32, bitcast=True)
    bits = scramble(seed.to(tl.uint32, bitcast=True) ^ pair)
    return scramble(bits + 0x9E3779B9).to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
def plan_kernel(
    # Pair statistics (blocks, padded), and what is written over them: `pair_coefficients` lies in
    # the memory of `pair_lse`, `listed_tokens` in that of `pair_max`.
    pair_lse, pair_coefficients, pair_max, listed_tokens,
    listed,  # (blocks,) written
    lses_base2, label_logit, labels, valid_count,  # of the super-block's `PackedTokens`
    padded, log2_eps,  # of the call's threshold ε
    DRAWN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program finds one block's threshold, then its list of tokens and all its coefficients.

    Pair statistics are base-2 and relative to the label's logit (`reference_logit_base2`), and so
    is `relative_lse_base2`, the token's log-sum-exp over the whole vocabulary.
    """
    block = tl.program_id(0)
    n_valid = tl.load(valid_count)
    row_start = block.to(tl.int64) * padded

    # A block in which all norms are small must not be left to a handful of draws.
    sum_of_norms = 0.0
    eps = tl.exp2(log2_eps)
    for start in range(0, padded, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < padded
        # Both are of exponentials that the softmax has not yet divided: the pair's P is
        # 2^(pair_lse_base2 − relative_lse_base2), its largest p is
        # 2^(pair_max_base2 − relative_lse_base2).
        pair_offset = row_start + token
        pair_lse_base2 = tl.load(pair_lse + pair_offset, mask=inside, other=0.0).to(tl.float32)
        pair_max_base2 = tl.load(pair_max + pair_offset, mask=inside, other=0.0).to(tl.float32)
        relative_lse_base2 = tl.load(lses_base2 + token, mask=inside, other=0.0)
        label_logit_base2 = tl.load(label_logit + token, mask=inside, other=0.0) * LOG2E
        relative_lse_base2 -= reference_logit_base2(label_logit_base2)
        # A pair whose norm is larger than ε is kept, once. Without the cap it would count for many.
        log2_norm = 0.5 * (pair_max_base2 + pair_lse_base2) - relative_lse_base2
        norm = tl.minimum(tl.exp2(log2_norm), eps)
        sum_of_norms += tl.sum(tl.where(token < n_valid, norm, 0.0), 0)
    block_log2_eps = tl.minimum(log2_eps, tl.log2(tl.maximum(sum_of_norms / DRAWN, 1e-30)))

    n_listed = 0
    for start in range(0, padded, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < padded
        pair_offset = row_start + token
        pair_lse_base2 = tl.load(pair_lse + pair_offset, mask=inside, other=0.0).to(tl.float32)
        pair_max_base2 = tl.load(pair_max + pair_offset, mask=inside, other=0.0).to(tl.float32)
        label = tl.load(labels + token, mask=inside, other=-1)
        token_lse_base2 = tl.load(lses_base2 + token, mask=inside, other=0.0)
        # The bits of the token's log-sum-exp are the seed of its draws. They change from step to
        # step as the logits do, and equal inputs draw alike.
        seed = token_lse_base2.to(tl.int32, bitcast=True)
        label_logit_base2 = tl.load(label_logit + token, mask=inside, other=0.0) * LOG2E
        relative_lse_base2 = token_lse_base2 - reference_logit_base2(label_logit_base2)
        # Σ p² over the block ≤ largest p · mass = norm², so what is dropped has a 2-norm below ε_j.
        log2_norm = 0.5 * (pair_max_base2 + pair_lse_base2) - relative_lse_base2
        is_token = token < n_valid
        reaches_eps = log2_norm >= block_log2_eps
        holds_label = (label >= 0) & (label // WIDTH == block)
        kept = is_token & (reaches_eps | holds_label)
        # A dropped pair never reads as kept, however small its mass.
        mass = tl.maximum(tl.exp2(pair_lse_base2 - relative_lse_base2), 1e-30)
        # 1 / w = norm / ε_j, so that the softmax that is added in the mean is the true one.
        drawn = draw(seed, token, block) < tl.exp2(log2_norm - block_log2_eps)
        # (1 − w) P, which is negative, or P
        pair_coefficient = tl.where(drawn, mass * (1.0 - tl.exp2(block_log2_eps - log2_norm)), mass)
        pair_coefficient = tl.where(is_token & (kept == 0), pair_coefficient, 0.0)
        is_listed = kept | (drawn & is_token)
        flag = is_listed.to(tl.int32)
        place = n_listed + tl.cumsum(flag, 0) - flag
        # place ≤ token, and all these numbers have 2 bytes, so that what is written here takes the
        # place of pair statistics that were read above, or before. The barrier (a __syncthreads)
        # makes sure that every thread of the program has read them.
        tl.debug_barrier()
        tl.store(pair_coefficients + pair_offset, pair_coefficient.to(tl.bfloat16), mask=inside)
        tl.store(listed_tokens + row_start + place, token.to(tl.int16), mask=is_listed)
        n_listed += tl.sum(flag, 0)
    tl.store(listed + block, n_listed)


def plan_pairs(
    pair_statistics: Tensor,  # (2, blocks, padded) fp16, as `run_forward` writes them
    tokens: PackedTokens,
    eps: float,
    tiles: Tiles,
) -> PairPlan:
    """Choose the pairs of a super-block that are recomputed.

    The lists and coefficients take the place of the pair statistics, which are gone afterwards.
    """
    pair_lse, pair_max = pair_statistics
    blocks, padded = pair_lse.shape
    assert pair_statistics.element_size() == 2, "coefficients and lists take the same memory"
    assert padded <= MAX_PADDED_TOKENS, f"{padded} tokens do not fit an int16"
    pairs = PairPlan(
        pair_coefficients=pair_lse.view(torch.bfloat16),
        listed_tokens=pair_max.view(torch.int16),
        listed=torch.empty(blocks, device=pair_lse.device, dtype=torch.int32),
    )
    plan_kernel[(blocks,)](
        pair_lse=pair_lse,
        pair_coefficients=pairs.pair_coefficients,
        pair_max=pair_max,
        listed_tokens=pairs.listed_tokens,
        listed=pairs.listed,
        lses_base2=tokens.lse_base2,
        label_logit=tokens.label_logit,
        labels=tokens.labels,
        valid_count=tokens.valid_count,
        padded=padded,
        log2_eps=math.log2(eps),
        DRAWN=DRAWN,
        WIDTH=tiles.width,
        BLOCK=1024,
    )
    return pairs


@triton.jit
def count_kernel(
    listed,  # (blocks,)
    first_tile, tile_end, n_shares, share_end,  # (blocks,) each, written
    n_items,  # (1,) written
    blocks, slices, share_size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program counts every block's tiles and shares.

    `tile_end` and `share_end` are the sums over the blocks up to and including each block.
    """
    tile_sum = 0
    share_sum = 0
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        inside = block < blocks
        n_listed = tl.load(listed + block, mask=inside, other=0)
        # Two more rows are the profile's and the smoothing row (`kernels`).
        tiles = tl.where(inside, (n_listed + 2 + ROWS - 1) // ROWS, 0)
        # A block with few listed tokens has few shares, each of several slices of D; one with many
        # has a share for each slice. There is none where dC is not wanted, since `slices` is 0.
        shares = tl.minimum(n_listed * slices // share_size + 1, slices)
        shares = tl.where(inside, shares, 0)
        ends = tile_sum + tl.cumsum(tiles, 0)
        tl.store(tile_end + block, ends, mask=inside)
        tl.store(first_tile + block, ends - tiles, mask=inside)
        tl.store(n_shares + block, shares, mask=inside)
        tl.store(share_end + block, share_sum + tl.cumsum(shares, 0), mask=inside)
        tile_sum += tl.sum(tiles, 0)
        share_sum += tl.sum(shares, 0)
    tl.store(n_items, tile_sum + share_sum)


@triton.jit
def first_at_least(numbers, count, bound, STEPS: tl.constexpr):
    """The first i < count where numbers[i] is at least `bound`, or `count` where there is none.

    A binary search of ascending integers: the result is always in [low, high], and after STEPS
    turns, with 2^STEPS > count, the two ends have met.
    """
    low = 0
    high = count
    for _ in range(STEPS):
        middle = (low + high) // 2
        # Where the ends have met, `bound` is taken, so that they stay. numbers[count] is not read.
        is_enough = tl.load(numbers + middle, mask=low < high, other=bound) >= bound
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return high


@triton.jit
def items_kernel(
    first_tile, tile_end, n_shares, share_end,  # (blocks,) each
    items, tile_owner,  # written
    blocks, reach,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program puts one block's items into their places in the queue.

    Tiles stand in the order of blocks, and so do shares. How the two are shuffled into each other
    follows from one rule: the shares of block r come after the tiles of block b where

        b ≤ r                                   (own or earlier tiles)
        or tile_end[b] ≤ first_tile[r] + reach  (tiles within reach)

    and before those of all other blocks. So `reach` tiles or fewer stand between the begin of r's
    tiles and r's shares, mostly enough to find r's tiles done.

    The queue cannot lock up, since what an item waits for stands before it. A share waits for its
    block's tiles, which are own tiles in the rule. A tile waits until its slot of the ring is free.
    Say the tile is block b's, and a tile of block r had the slot before: RING tiles ago. Then

        r < b                                   a block has at most RING tiles, so the two tiles
                                                are of different blocks
        tile_end[b] > first_tile[r] + reach     reach is at most RING

    Neither half of the rule holds, so r's shares, which free the slot, stand before b's tiles.

    For example, with reach = 4, of three blocks of two, one and three tiles (T) and a share (S)
    each:

        T0 T0 T1 S0 T2 T2 T2 S1 S2

    S0 comes after T1, with which three tiles have ended, but before T2, with which six have, and
    0 + reach is 4. A place in the queue is the number of items before it:

        of a tile of b     the tiles before it, and the shares of all r < r₀, where r₀ is the
                           smallest r with b ≤ r or first_tile[r] ≥ tile_end[b] − reach
        of a share of r    the shares before it, and the tiles of all b < b₀, where b₀ is the
                           smallest b > r with tile_end[b] > first_tile[r] + reach
    """
    block = tl.program_id(0)
    begin = tl.load(first_tile + block)
    end = tl.load(tile_end + block)
    shares = tl.load(n_shares + block)
    last_share = tl.load(share_end + block)

    # r₀ is at most this block, since b ≤ r holds from there on. For T2 of the example above, end −
    # reach is 6 − 4 = 2. The first tiles of blocks 0, 1 and 2 are 0, 2 and 3, so block 1 is the
    # first with 2 or more. r₀ is 1, and S0 alone stands before T2.
    r0 = first_at_least(first_tile, block, end - reach, STEPS)
    # b₀ is more than this block. For S0 of the example, begin + reach is 0 + 4. The tiles of blocks
    # 0 and 1 end after 2 and 3 tiles, those of block 2 after 6. So b₀ is 2.
    b0 = tl.maximum(first_at_least(tile_end, blocks, begin + reach + 1, STEPS), block + 1)

    shares_before = tl.load(share_end + r0) - tl.load(n_shares + r0)
    tile_place = shares_before + begin
    share_place = last_share - shares + tl.load(tile_end + b0 - 1)
    step = tl.arange(0, BLOCK)
    for start in range(0, end - begin, BLOCK):
        index = start + step
        inside = index < end - begin
        item_pointers = items + tile_place + start + step
        tl.store(item_pointers, pack_item(block, index, TILE_ITEM), mask=inside)
        tl.store(tile_owner + begin + start + step, block, mask=inside)
    for start in range(0, shares, BLOCK):
        index = start + step
        inside = index < shares
        item_pointers = items + share_place + start + step
        tl.store(item_pointers, pack_item(block, index, SHARE_ITEM), mask=inside)


def schedule(
    listed: Tensor,  # (blocks,) int32
    padded: int,
    slices: int,  # of D in a block's weight gradient, 0 where it is not wanted
    tiles: Tiles,
    ring: int,  # tiles whose R may wait for their shares of dC
) -> Schedule:
    """Put every block's tiles and the shares of its weight gradient in order."""
    blocks = len(listed)
    most_tiles = cdiv(padded + 2, tiles.pair_rows)  # of one block
    assert blocks <= MAX_BLOCKS, f"{blocks} vocabulary blocks do not fit an item"
    assert most_tiles <= MAX_ITEMS_OF_BLOCK, f"{most_tiles} tiles of a block do not fit an item"
    assert slices <= MAX_ITEMS_OF_BLOCK, f"{slices} slices of D do not fit an item"
    # One allocation serves all.
    sizes = [blocks, blocks, blocks, blocks, 1, blocks * (most_tiles + slices)]
    memory = torch.empty(sum(sizes), device=listed.device, dtype=torch.int32)
    first_tile, tile_end, n_shares, share_end, n_items, items = memory.split(sizes)
    tile_owner = torch.empty(blocks * most_tiles, device=listed.device, dtype=torch.int32)
    count_kernel[(1,)](
        listed=listed,
        first_tile=first_tile,
        tile_end=tile_end,
        n_shares=n_shares,
        share_end=share_end,
        n_items=n_items,
        blocks=blocks,
        slices=slices,
        share_size=SHARE_SIZE,
        ROWS=tiles.pair_rows,
        BLOCK=1024,
    )
    # A block's own tiles are within its reach, and the reach is within the ring (`items_kernel`).
    assert ring >= most_tiles, f"a ring of {ring} tiles, and a block of {most_tiles}, may lock up"
    reach = max(ring // 2, most_tiles)
    items_kernel[(blocks,)](
        first_tile=first_tile,
        tile_end=tile_end,
        n_shares=n_shares,
        share_end=share_end,
        items=items,
        tile_owner=tile_owner,
        blocks=blocks,
        reach=reach,
        STEPS=blocks.bit_length() + 1,
        BLOCK=32,
        num_warps=1,
    )
    return Schedule(items, n_items, first_tile, tile_owner, n_shares)

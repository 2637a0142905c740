"""The forward: one walk over the vocabulary finds what the loss needs of every token.

That is the log-sum-exp and Σ_v u_v z_v. Where they are asked for, it also finds

    token statistics   entropy and argmax, which the caller has asked for
    pair statistics    two numbers for each pair of a token and a block of the vocabulary, by which
                       the filter decides what it computes
    probabilities      p̃, the softmax up to a factor for each token and tile, from which
                       `grad_in_forward` makes gradients

`forward_kernel` cuts the logits into tiles of `Tiles.rows` tokens by one block of the vocabulary,
and of each tile it keeps a few numbers a token, the `BlockSums`, so that logits are never written.
No tile needs what another has found. `finish_kernel` joins each token's blocks, and `losses_kernel`
makes losses of them. Inside kernels all exponents are in base 2.

Exponents are relative to the label's logit: p̃ = 2^(z − offset) is 1 for the label. So p̃ can
be saved in 16 bits with all of bfloat16's bits, however large the logits are. Where a token's
largest logit in a tile is more than SLACK above its label's, so that 2^(z − offset) would be more
than 2^SLACK, that logit is the token's offset in this tile. `SavedProbabilities.tile_offsets_base2`
has the offset of each token in each tile.

So what is written of a token is relative to one of two logits. What is exponentiated is relative to
the *offset*, which may differ from tile to tile. What is joined or compared across tiles,
`BlockSums.lse_base2` and the pair statistics, is relative to `reference_logit_base2`, which is the
same in all of a token's tiles. It is not absolute because a difference from the label's logit is
mostly small: then it loses no bits to the size of the logits, and the pair statistics fit fp16.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.options import LossOutput
from smoothce.triton.tiles import LOG2E, base2_logits, descriptor, product_tile, programs
from smoothce.triton.tokens import KernelCall, PackedTokens, token_slices
from smoothce.vocab_parallel import TokenLogitSums, merge_shards

# In base 2, so that p̃ ≤ 2^64. Over 2^18 vocabulary entries Σ_v p̃_iv ≤ 2^82. Both this sum, which is
# in dE as Σ_v p̃_iv C_v, and its inverse, which is in w_i = a_i / Σ_v p̃_iv, are normal fp32 numbers.
SLACK = tl.constexpr(64.0)
LOWEST = tl.constexpr(-1e38)  # an offset below every logit
FP16_RANGE = tl.constexpr(60000.0)

# `forward_kernel` is launched with so many programs for each of the GPU's multiprocessors, which
# can run one of them at a time. A program of a later wave starts on whichever multiprocessor is
# free. So where another stream's NCCL kernel occupies some multiprocessors, only their programs of
# the first wave are late, and not a share of all the work.
WAVES = 4

# The `BlockSums` that are kept at a time take at most so many bytes, unless those of one group of
# token tiles take more: 39 MiB at 256,000 entries with smoothing and statistics.
BLOCK_SUMS_BYTES = 2**25
# `finish_kernel` joins the blocks of so many tokens, so many blocks at a time.
FINISH_TOKENS = 32
FINISH_BLOCKS = 64


@triton.jit
def tile_place(tile, row_tiles, n_blocks, GROUP: tl.constexpr):
    """Which token tile and which block of the vocabulary a tile is, as (token tile, block).

    GROUP token tiles take all blocks, one after the other, before the next GROUP come: so few that
    their hidden states stay in the L2 cache meanwhile, and so many that C is seldom read again."""
    group = tile // (GROUP * n_blocks)
    within = tile % (GROUP * n_blocks)
    group_size = tl.minimum(row_tiles - group * GROUP, GROUP)  # the last group may be smaller
    return group * GROUP + within % group_size, within // group_size


@triton.jit
def reference_logit_base2(label_logit_base2):
    """What a token's `BlockSums.lse_base2` and pair statistics are relative to: its label's logit,
    or 0 where that is −∞. (The offset of what is exponentiated may be another: see the module.)"""
    return tl.where(label_logit_base2 > LOWEST, label_logit_base2, 0.0)


@triton.jit
def block_smoothing_logit(logits, smoothing_target, entries, V, factor, RAGGED: tl.constexpr):
    """Σ_v u_v z_v of a tile, or Σ_v z_v where u is uniform; `factor` makes logits of them."""
    if smoothing_target is not None:
        u = tl.load(smoothing_target + entries, mask=entries < V, other=0.0)[None, :]
        # a forbidden entry, of logit −∞, may have no part in it
        weighted = tl.where(u > 0, logits * u, 0.0)
    else:
        weighted = tl.where((entries < V)[None, :], logits, 0.0) if RAGGED else logits
    return tl.sum(weighted, 1) * factor


@triton.jit
def forward_kernel(
    hidden, weight, bias, smoothing_target,  # (padded, D) packed, (V, D), (V,) or None twice
    valid_count, label_logits,  # (1,), (padded,) in nats
    lse_base2, smoothing_logit_base2,  # the `BlockSums`, written; or None
    expected_logit_base2, largest_logit_base2, argmax,  # and those of token statistics
    pair_lse, pair_max,  # the pair statistics, written: (blocks, padded) fp16, or None
    probabilities, tile_offsets_base2, stride,  # the `SavedProbabilities`, written; or None
    first_token, n_tokens,  # of the packed tokens, those that `BlockSums` has
    padded, V, n_blocks, scale, softcap,
    D: tl.constexpr, GROUP: tl.constexpr, WAVES: tl.constexpr,
    RAGGED: tl.constexpr,  # whether the last block has fewer than WIDTH entries
    PLAIN: tl.constexpr,  # whether logits are products times a positive scale
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The `BlockSums` of the valid ones of these tokens, and what else is asked for of a tile."""
    n_valid = tl.minimum(tl.load(valid_count) - first_token, n_tokens)
    row_tiles = tl.cdiv(tl.maximum(n_valid, 0), ROWS)
    n_tiles = row_tiles * n_blocks
    wave_programs = tl.num_programs(0) // WAVES
    wave = tl.program_id(0) // wave_programs
    begin = (n_tiles * wave) // WAVES + tl.program_id(0) % wave_programs
    end = (n_tiles * (wave + 1)) // WAVES
    # Flattened into the loop over D, so that the next tile's loads start during this tile's
    # exponentials. `range` knows no `flatten`, but its unknown arguments are ignored by Triton's
    # compiler, and the interpreter takes `tl.range` (`Tiles.product_settings`).
    for tile in (tl.range if FLATTEN else range)(begin, end, wave_programs, flatten=True):  # type: ignore[call-overload]
        row_tile, block = tile_place(tile, row_tiles, n_blocks, GROUP)
        row = first_token + row_tile * ROWS
        entry = block * WIDTH
        product = product_tile(
            hidden, weight, row, entry, padded, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION
        )
        rows = row + tl.arange(0, ROWS)
        entries = entry + tl.arange(0, WIDTH)
        place = block * n_tokens + (rows - first_token)  # in the `BlockSums`

        # base-2 logits are `logits · factor`
        if PLAIN:
            # the positive factor is left to the exponent, where it costs nothing
            factor = scale * LOG2E
            logits = product
        else:
            factor = 1.0
            logits = base2_logits(product, bias, entries, V, scale, softcap)

        # Σ u z and the largest logit
        if smoothing_logit_base2 is not None:
            smoothing_logit = block_smoothing_logit(
                logits, smoothing_target, entries, V, factor, RAGGED
            )
            tl.store(smoothing_logit_base2 + place, smoothing_logit)
        if RAGGED:
            logits = tl.where((entries < V)[None, :], logits, -float("inf"))
        if argmax is not None:  # token statistics
            tile_largest, largest_column = tl.max(logits, 1, return_indices=True)
            tile_largest *= factor
            tl.store(largest_logit_base2 + place, tile_largest)
            tl.store(argmax + place, entry + largest_column)
        else:
            tile_largest = tl.max(logits, 1) * factor

        # sum of exponentials
        label_logit_base2 = tl.load(label_logits + rows) * LOG2E
        offset = tl.maximum(label_logit_base2, LOWEST)
        offset = tl.where(tile_largest > offset + SLACK, tile_largest, offset)
        exponentials = tl.exp2(logits * factor - offset[:, None])
        probability_sum = tl.sum(exponentials, 1)
        reference = reference_logit_base2(label_logit_base2)
        block_lse_base2 = tl.log2(probability_sum) + (offset - reference)
        tl.store(lse_base2 + place, block_lse_base2)
        if expected_logit_base2 is not None:  # token statistics
            # a logit of −∞ has no part in it
            terms = tl.where(exponentials > 0, exponentials * logits, 0.0)
            divisor = tl.where(probability_sum > 0, probability_sum, 1.0)
            tl.store(expected_logit_base2 + place, tl.sum(terms, 1) * factor / divisor)

        # what is kept of the tile itself
        if pair_lse is not None:  # a super-block's tokens and blocks are far fewer than 2^31
            pair_lse_base2 = tl.clamp(block_lse_base2, -FP16_RANGE, FP16_RANGE)
            pair_max_base2 = tl.clamp(tile_largest - reference, -FP16_RANGE, FP16_RANGE)
            tl.store(pair_lse + block * padded + rows, pair_lse_base2.to(tl.float16))
            tl.store(pair_max + block * padded + rows, pair_max_base2.to(tl.float16))
        if probabilities is not None:
            pointers = probabilities + entry + rows.to(tl.int64)[:, None] * stride
            pointers += tl.arange(0, WIDTH)[None, :]
            tl.store(pointers, exponentials.to(probabilities.dtype.element_ty))
            tl.store(tile_offsets_base2 + block * padded + rows, offset)


@triton.jit
def finish_kernel(
    lse_base2, smoothing_logit_base2,  # the `BlockSums` of these tokens
    expected_logit_base2, largest_logit_base2, argmax,  # and those of token statistics
    tile_offsets_base2,  # of all packed tokens, as (blocks, padded); or None
    valid_count, label_logits,  # (1,), (padded,) in nats
    lses, smoothing_logits, offsets_base2,  # (padded,) written: nats, nats, base 2
    expected_logits, largest_logits, argmaxes,  # (padded,) written where there is `argmax`, or None
    first_token, n_tokens,  # of the packed tokens, those that are joined
    first_entry, n_blocks, padded, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Join the blocks of TOKENS tokens; rows past the valid tokens get zeros, and −1 in `argmaxes`.

    BLOCKS blocks are read at a time, and each of BLOCKS running sums takes one of them. The sums
    are joined at the end. `probability_sum` and `expected_logit` are relative to `lse_max`, the
    largest log-sum-exp of a block so far; `shrink` is what they are multiplied by when that
    grows."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = first_token + token
    known = token < n_tokens
    valid = known & (rows < tl.load(valid_count))
    lse_max = tl.full((BLOCKS, TOKENS), LOWEST, tl.float32)
    probability_sum = tl.zeros((BLOCKS, TOKENS), tl.float32)
    smoothing_logit = tl.zeros((BLOCKS, TOKENS), tl.float32)
    expected_logit = tl.zeros((BLOCKS, TOKENS), tl.float32)
    largest_logit = tl.full((BLOCKS, TOKENS), -float("inf"), tl.float32)
    best_entry = tl.zeros((BLOCKS, TOKENS), tl.int32)
    offset = tl.full((BLOCKS, TOKENS), LOWEST, tl.float32)
    for first in range(0, n_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        mask = (blocks < n_blocks)[:, None] & valid[None, :]
        place = blocks[:, None] * n_tokens + token[None, :]
        block_lse_base2 = tl.load(lse_base2 + place, mask=mask, other=-float("inf"))
        new_lse_max = tl.maximum(lse_max, block_lse_base2)
        shrink = tl.exp2(lse_max - new_lse_max)
        block_sum = tl.exp2(block_lse_base2 - new_lse_max)
        probability_sum = probability_sum * shrink + block_sum
        if smoothing_logit_base2 is not None:
            smoothing_logit += tl.load(smoothing_logit_base2 + place, mask=mask, other=0.0)
        if tile_offsets_base2 is not None:
            offset_place = blocks[:, None] * padded + rows[None, :]
            tile_offset = tl.load(tile_offsets_base2 + offset_place, mask=mask, other=LOWEST)
            offset = tl.maximum(offset, tile_offset)
        if argmax is not None:  # token statistics
            block_expected_logit = tl.load(expected_logit_base2 + place, mask=mask, other=0.0)
            expected_logit = expected_logit * shrink + block_sum * block_expected_logit
            block_largest_logit = tl.load(
                largest_logit_base2 + place, mask=mask, other=-float("inf")
            )
            block_argmax = tl.load(argmax + place, mask=mask, other=0)
            best_entry = tl.where(block_largest_logit > largest_logit, block_argmax, best_entry)
            largest_logit = tl.maximum(largest_logit, block_largest_logit)
        lse_max = new_lse_max

    whole_lse_max = tl.max(lse_max, 0)
    shrink = tl.exp2(lse_max - whole_lse_max[None, :])
    whole_sum = tl.sum(probability_sum * shrink, 0)
    label_logit_base2 = tl.load(label_logits + rows, mask=known, other=0.0) * LOG2E
    token_lse_base2 = reference_logit_base2(label_logit_base2) + (
        whole_lse_max + tl.log2(whole_sum)
    )
    tl.store(lses + rows, tl.where(valid, token_lse_base2 / LOG2E, 0.0), mask=known)
    token_smoothing_logit_base2 = tl.sum(smoothing_logit, 0)
    tl.store(
        smoothing_logits + rows,
        tl.where(valid, token_smoothing_logit_base2 / LOG2E, 0.0),
        mask=known,
    )
    if tile_offsets_base2 is not None:
        tl.store(offsets_base2 + rows, tl.where(valid, tl.max(offset, 0), 0.0), mask=known)
    if argmax is not None:
        token_expected_logit_base2 = tl.sum(expected_logit * shrink, 0) / whole_sum
        tl.store(
            expected_logits + rows,
            tl.where(valid, token_expected_logit_base2 / LOG2E, 0.0),
            mask=known,
        )
        token_largest_logit = tl.max(largest_logit, 0)
        tl.store(
            largest_logits + rows, tl.where(valid, token_largest_logit / LOG2E, 0.0), mask=known
        )
        # the first of equals
        entries_of_largest = tl.where(
            largest_logit == token_largest_logit[None, :], best_entry, 2**31 - 1
        )
        token_argmax = tl.min(entries_of_largest, 0) + first_entry
        tl.store(argmaxes + rows, tl.where(valid, token_argmax, -1), mask=known)


@triton.jit(do_not_specialize=["n_order"])
def losses_kernel(
    packed_lses, label_logits, smoothing_logits,  # (padded,) of packed tokens, in nats
    expected_logits, packed_argmaxes,  # (padded,), or None without token statistics
    valid_count, order, token_weights,  # (1,), (n_order,), (N,) or None
    lses_base2,  # (padded,) written, for the backward
    losses, lses, log_probabilities, entropies, argmaxes,  # written at `order`: a `LossOutput`
    n_order, padded, smoothing, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each token's loss and token statistics at its place in the caller's order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = place < tl.load(valid_count)
    known = place < n_order
    source = tl.load(order + place, mask=known, other=0)
    lse = tl.load(packed_lses + place, mask=valid, other=0.0)
    label_logit = tl.load(label_logits + place, mask=valid, other=0.0)
    loss = lse - (1.0 - smoothing) * label_logit + z_loss * lse * lse
    if smoothing != 0:
        loss -= smoothing * tl.load(smoothing_logits + place, mask=valid, other=0.0)
    if token_weights is not None:
        loss *= tl.load(token_weights + source, mask=valid, other=0.0)
    tl.store(lses_base2 + place, tl.where(valid, lse * LOG2E, float("inf")), mask=place < padded)
    tl.store(losses + source, tl.where(valid, loss, 0.0), mask=known)
    tl.store(lses + source, tl.where(valid, lse, 0.0), mask=known)
    if expected_logits is not None:
        tl.store(log_probabilities + source, tl.where(valid, label_logit - lse, 0.0), mask=known)
        entropy = lse - tl.load(expected_logits + place, mask=valid, other=0.0)
        tl.store(entropies + source, tl.where(valid, entropy, 0.0), mask=known)
        argmax = tl.load(packed_argmaxes + place, mask=valid, other=-1)
        tl.store(argmaxes + source, tl.where(valid, argmax, -1), mask=known)


def empty_output(call: KernelCall) -> LossOutput:
    """Allocate what becomes a call's output, (N,) each: losses that are not yet reduced, and token
    statistics where they are asked for. Each has its own memory, as torch asks of what an operator
    returns."""
    labels = call.labels
    losses, lse, log_probability, entropy = [
        torch.empty_like(labels, dtype=torch.float32) for _ in range(4)
    ]
    if not call.options.return_statistics:
        return LossOutput(losses, lse)
    return LossOutput(losses, lse, log_probability, entropy, torch.empty_like(labels))


def output_of_tokens(output: LossOutput, where: slice) -> LossOutput:
    """Return the output of these tokens, in the same memory."""
    statistics = [None if x is None else x[where] for x in output[2:]]
    return LossOutput(output.loss[where], output.lse[where], *statistics)


class SavedProbabilities(NamedTuple):
    """Where the forward leaves the probabilities p̃ of packed tokens."""

    probabilities: Tensor  # (whole tiles of tokens, blocks · width) in the inputs' dtype
    # (blocks · tokens of a full part,) fp32 base 2, what each tile's are relative to. Kernels lay a
    # (blocks, padded) matrix over its beginning, whose rows are as long as the `padded` of the part
    # at hand. It is flat since the last part, which may be smaller, has a matrix of shorter rows.
    tile_offsets_base2: Tensor


class BlockSums(NamedTuple):
    """What the forward finds of some tokens in each block of the vocabulary, (blocks, tokens).

    Fields have the names of the kernels' parameters."""

    # log2 Σ_v 2^z over the block, for base-2 logits z, relative to `reference_logit_base2`; that of
    # `PackedTokens` is absolute
    lse_base2: Tensor
    # Σ_v u_v z_v, or Σ_v z_v where u is uniform; None without smoothing
    smoothing_logit_base2: Tensor | None = None
    # What token statistics are made of; None where they are not asked for:
    expected_logit_base2: Tensor | None = None  # the mean of z by the softmax within the block
    largest_logit_base2: Tensor | None = None  # the largest z
    argmax: Tensor | None = None  # int32, its row of C


def most_tokens_at_once(call: KernelCall) -> int:
    """Return how many tokens to have block sums of at a time.

    They are whole tiles, and at least as many as the forward works on together: with fewer C would
    be read more often."""
    numbers = 1 + bool(call.options.label_smoothing) + 3 * call.options.return_statistics
    tiles = BLOCK_SUMS_BYTES // (4 * numbers * call.blocks * call.tiles.rows)
    return max(tiles, call.tiles.group) * call.tiles.rows


def run_forward(
    call: KernelCall,  # the one whose tokens `tokens.order` numbers (see below)
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,  # whose log-sum-exps and offsets are written
    output: LossOutput,  # of the tokens of `call`, written at these
    pair_statistics: Tensor | None = None,  # (2, blocks, padded) fp16, written
    saved: SavedProbabilities | None = None,  # written, at the packed tokens' places
) -> None:
    """Walk over the vocabulary once, and write what these tokens' losses and gradients need.

    `call` is the whole call in `filter`, where `tokens` has a super-block of its tokens, and
    numbers them from the call's first. Elsewhere it is a part or super-block cut out of the call
    (`KernelCall.of_tokens`), and `tokens` has all tokens of that.

    Pair statistics are base-2 and relative to the label's logit (`reference_logit_base2`): the
    log-sum-exp and the largest logit within each block."""
    numbers = torch.empty_like(tokens.label_logit)
    sums = TokenLogitSums(
        lse=numbers, label_logit=tokens.label_logit, smoothing_logit=torch.empty_like(numbers)
    )
    if call.options.return_statistics:
        sums = sums._replace(
            expected_logit=torch.empty_like(numbers),
            largest_logit=torch.empty_like(numbers),
            argmax=torch.empty_like(numbers, dtype=torch.int64),
        )
    for where in token_slices(len(packed), most_tokens_at_once(call)):
        block_sums = walk_vocabulary(call, packed, tokens, where, pair_statistics, saved)
        join_blocks(call, tokens, where, block_sums, saved, sums)
        del block_sums  # before the next tokens' take their memory
    if call.smoothing_target is None:  # the kernel has summed with weights of 1
        sums.smoothing_logit.div_(call.vocabulary)
    if call.shard is not None:
        # `merge_shards` adds the ranks' label logits up, which `gather` has done already. Losses
        # take what `gather` has left in `tokens`, so that each rank may have zeros here.
        sums = sums._replace(label_logit=torch.zeros_like(sums.lse))
        sums = merge_shards(sums, call.shard)
    write_losses(call, tokens, sums, output)


def walk_vocabulary(
    call: KernelCall,
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,
    where: slice,  # the packed tokens that are looked at
    pair_statistics: Tensor | None,  # (2, blocks, padded), written at those tokens
    saved: SavedProbabilities | None,  # written at those tokens
) -> BlockSums:
    """Launch `forward_kernel`, and return what it writes."""
    tiles = call.tiles
    options = call.options
    padded, d = packed.shape
    v = len(call.weight)
    n_tokens = where.stop - where.start
    block_sums = BlockSums(packed.new_empty(call.blocks, n_tokens, dtype=torch.float32))
    numbers = block_sums.lse_base2
    if options.label_smoothing:
        block_sums = block_sums._replace(smoothing_logit_base2=torch.empty_like(numbers))
    if options.return_statistics:
        block_sums = block_sums._replace(
            expected_logit_base2=torch.empty_like(numbers),
            largest_logit_base2=torch.empty_like(numbers),
            argmax=torch.empty_like(numbers, dtype=torch.int32),
        )
    forward_kernel[(programs(packed.device) * WAVES,)](
        **block_sums._asdict(),
        hidden=descriptor(packed, [tiles.rows, tiles.depth], tiles.tma),
        weight=descriptor(call.weight, [tiles.width, tiles.depth], tiles.tma),
        bias=call.bias,
        smoothing_target=call.smoothing_target,
        valid_count=tokens.valid_count,
        label_logits=tokens.label_logit,
        pair_lse=None if pair_statistics is None else pair_statistics[0],
        pair_max=None if pair_statistics is None else pair_statistics[1],
        probabilities=None if saved is None else saved.probabilities,
        tile_offsets_base2=None if saved is None else saved.tile_offsets_base2,
        stride=0 if saved is None else saved.probabilities.stride(0),
        first_token=where.start,
        n_tokens=n_tokens,
        padded=padded,
        V=v,
        n_blocks=call.blocks,
        scale=call.logit_scale,
        softcap=options.softcap,
        D=d,
        GROUP=tiles.group,
        WAVES=WAVES,
        RAGGED=v % tiles.width != 0,
        PLAIN=call.bias is None and options.softcap is None and call.logit_scale > 0,
        **tiles.product_settings,
    )
    return block_sums


def join_blocks(
    call: KernelCall,
    tokens: PackedTokens,
    where: slice,  # the packed tokens whose blocks are joined
    block_sums: BlockSums,  # of those tokens
    saved: SavedProbabilities | None,
    sums: TokenLogitSums,  # on this rank, written at those tokens
) -> None:
    """Launch `finish_kernel`, which writes the tokens' offsets too where there is `saved`."""
    n_tokens = where.stop - where.start
    finish_kernel[(cdiv(n_tokens, FINISH_TOKENS),)](
        **block_sums._asdict(),
        tile_offsets_base2=None if saved is None else saved.tile_offsets_base2,
        valid_count=tokens.valid_count,
        label_logits=tokens.label_logit,
        lses=sums.lse,
        smoothing_logits=sums.smoothing_logit,
        offsets_base2=tokens.offset_base2,
        expected_logits=sums.expected_logit,
        largest_logits=sums.largest_logit,
        argmaxes=sums.argmax,
        first_token=where.start,
        n_tokens=n_tokens,
        first_entry=0 if call.shard is None else call.shard.first_entry,
        n_blocks=call.blocks,
        padded=len(tokens.lse_base2),
        TOKENS=FINISH_TOKENS,
        BLOCKS=FINISH_BLOCKS,
    )


def write_losses(
    call: KernelCall,
    tokens: PackedTokens,
    sums: TokenLogitSums,  # over the whole vocabulary
    output: LossOutput,  # written
) -> None:
    """Launch `losses_kernel`."""
    options = call.options
    padded = len(tokens.lse_base2)
    losses_kernel[(cdiv(padded, 1024),)](
        packed_lses=sums.lse,
        label_logits=tokens.label_logit,
        smoothing_logits=sums.smoothing_logit,
        expected_logits=sums.expected_logit,
        packed_argmaxes=sums.argmax,
        valid_count=tokens.valid_count,
        order=tokens.order,
        token_weights=call.token_weights,
        lses_base2=tokens.lse_base2,
        losses=output.loss,
        lses=output.lse,
        log_probabilities=output.log_probability,
        entropies=output.entropy,
        argmaxes=output.argmax,
        n_order=len(tokens.order),
        padded=padded,
        smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        BLOCK=1024,
    )

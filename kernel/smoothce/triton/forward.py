"""The forward: one walk over the vocabulary finds what the loss needs of every token.

That is the log-sum-exp and Σ_v u_v z_v. Where they are asked for, it also finds

    token statistics   entropy and argmax, which the caller has asked for
    filter statistics  two numbers for each token and block of the vocabulary
    probabilities      the softmax itself, from which `grad_in_forward` makes gradients

`forward_kernel` cuts the logits into tiles of `Tiles.rows` tokens by one block of the vocabulary,
and of each tile it keeps a few numbers a token, the `BlockSums`, so that logits are never written.
No tile needs what another has found. `finish_kernel` joins each token's blocks, and `losses_kernel`
makes losses of them. Inside kernels all exponents are in base 2.

Exponents are relative to the label's logit: p̃ = 2^(z − offset) is 1 for the label, and what is
saved of it in 16 bits has all of bfloat16's bits whatever the logit. Where a token's largest logit
in a tile is more than SLACK above its label's, so that 2^(z − offset) would be more than 2^SLACK,
that logit is the token's offset in this tile. `SavedProbabilities.tile_offsets2` has the offset of
each token in each tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.tiles import LOG2E, base2_logits, descriptor, product_tile, programs
from smoothce.triton.tokens import LossCall, PackedTokens, token_slices
from smoothce.vocab_parallel import TokenLogitSums, merge_shards

SLACK = tl.constexpr(64.0)  # base 2: sums of 2^18 such numbers, and their inverse, are fp32 numbers
LOWEST = tl.constexpr(-1e38)  # an offset below every logit
FP16_RANGE = tl.constexpr(60000.0)

# The programs of `forward_kernel` take the tiles in so many waves, one after the other, of as many
# programs as the GPU has multiprocessors. Where a collective holds some multiprocessors, the others
# take over their programs of the later waves, so that it delays a part of the work and not all.
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
def reference_logit2(label_logit2):
    """What a token's `BlockSums.lse2` and filter statistics are relative to: its label's logit, or
    0 where that is −∞."""
    return tl.where(label_logit2 > LOWEST, label_logit2, 0.0)


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
    lse2, smoothing_logit2, expected2, largest2, argmax,  # the `BlockSums`, written; or None
    filter_lse, filter_max,  # the filter's statistics, written: (blocks, padded) fp16, or None
    probabilities, tile_offsets2, stride,  # the `SavedProbabilities`, written; or None
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
    # exponentials (FLATTEN: `Tiles.product_settings`).
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
        if smoothing_logit2 is not None:
            block_sum = block_smoothing_logit(logits, smoothing_target, entries, V, factor, RAGGED)
            tl.store(smoothing_logit2 + place, block_sum)
        if RAGGED:
            logits = tl.where((entries < V)[None, :], logits, -float("inf"))
        if argmax is not None:  # token statistics
            top, top_column = tl.max(logits, 1, return_indices=True)
            top *= factor
            tl.store(largest2 + place, top)
            tl.store(argmax + place, entry + top_column)
        else:
            top = tl.max(logits, 1) * factor

        # sum of exponentials
        label_logit2 = tl.load(label_logits + rows) * LOG2E
        offset = tl.maximum(label_logit2, LOWEST)
        offset = tl.where(top > offset + SLACK, top, offset)
        exponentials = tl.exp2(logits * factor - offset[:, None])
        probability_sum = tl.sum(exponentials, 1)
        block_lse2 = tl.log2(probability_sum) + (offset - reference_logit2(label_logit2))
        tl.store(lse2 + place, block_lse2)
        if expected2 is not None:  # token statistics
            # a logit of −∞ has no part in it
            terms = tl.where(exponentials > 0, exponentials * logits, 0.0)
            mean = tl.sum(terms, 1) * factor / tl.where(probability_sum > 0, probability_sum, 1.0)
            tl.store(expected2 + place, mean)

        # what is kept of the tile itself
        if filter_lse is not None:  # a super-block's tokens and blocks are far fewer than 2^31
            relative_lse2 = tl.clamp(block_lse2, -FP16_RANGE, FP16_RANGE)
            largest = top - reference_logit2(label_logit2)
            largest = tl.clamp(largest, -FP16_RANGE, FP16_RANGE)
            tl.store(filter_lse + block * padded + rows, relative_lse2.to(tl.float16))
            tl.store(filter_max + block * padded + rows, largest.to(tl.float16))
        if probabilities is not None:
            pointers = probabilities + entry + rows.to(tl.int64)[:, None] * stride
            pointers += tl.arange(0, WIDTH)[None, :]
            tl.store(pointers, exponentials.to(probabilities.dtype.element_ty))
            tl.store(tile_offsets2 + block * padded + rows, offset)


@triton.jit
def finish_kernel(
    lse2, smoothing_logit2, expected2, largest2, argmax,  # the `BlockSums` of these tokens
    tile_offsets2,  # (blocks, padded) of all packed tokens, or None
    valid_count, label_logits,  # (1,), (padded,) in nats
    lses, smoothing_logits, offsets2,  # (padded,) written: nats, nats, base 2
    expectations, tops, argmaxes,  # (padded,) written where there is `argmax`, else None
    first_token, n_tokens,  # of the packed tokens, those that are joined
    first_entry, n_blocks, padded, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Join the blocks of TOKENS tokens; rows past the valid tokens get zeros.

    BLOCKS blocks are read at a time, and each of BLOCKS running sums takes one of them. The sums
    are joined at the end."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = first_token + token
    known = token < n_tokens
    valid = known & (rows < tl.load(valid_count))
    top = tl.full((BLOCKS, TOKENS), LOWEST, tl.float32)
    probability_sum = tl.zeros((BLOCKS, TOKENS), tl.float32)
    smoothing_logit = tl.zeros((BLOCKS, TOKENS), tl.float32)
    expected = tl.zeros((BLOCKS, TOKENS), tl.float32)
    largest = tl.full((BLOCKS, TOKENS), -float("inf"), tl.float32)
    best = tl.zeros((BLOCKS, TOKENS), tl.int32)
    offset = tl.full((BLOCKS, TOKENS), LOWEST, tl.float32)
    for first in range(0, n_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        mask = (blocks < n_blocks)[:, None] & valid[None, :]
        place = blocks[:, None] * n_tokens + token[None, :]
        block_lse2 = tl.load(lse2 + place, mask=mask, other=-float("inf"))
        new_top = tl.maximum(top, block_lse2)
        shrink = tl.exp2(top - new_top)
        share = tl.exp2(block_lse2 - new_top)
        probability_sum = probability_sum * shrink + share
        if smoothing_logit2 is not None:
            smoothing_logit += tl.load(smoothing_logit2 + place, mask=mask, other=0.0)
        if tile_offsets2 is not None:
            tile_place = blocks[:, None] * padded + rows[None, :]
            tile_offset = tl.load(tile_offsets2 + tile_place, mask=mask, other=LOWEST)
            offset = tl.maximum(offset, tile_offset)
        if argmax is not None:  # token statistics
            mean = tl.load(expected2 + place, mask=mask, other=0.0)
            expected = expected * shrink + share * mean
            block_largest = tl.load(largest2 + place, mask=mask, other=-float("inf"))
            block_best = tl.load(argmax + place, mask=mask, other=0)
            best = tl.where(block_largest > largest, block_best, best)
            largest = tl.maximum(largest, block_largest)
        top = new_top

    whole_top = tl.max(top, 0)
    shrink = tl.exp2(top - whole_top[None, :])
    whole_sum = tl.sum(probability_sum * shrink, 0)
    label_logit2 = tl.load(label_logits + rows, mask=known, other=0.0) * LOG2E
    token_lse2 = reference_logit2(label_logit2) + (whole_top + tl.log2(whole_sum))
    tl.store(lses + rows, tl.where(valid, token_lse2 / LOG2E, 0.0), mask=known)
    token_smoothing_logit2 = tl.sum(smoothing_logit, 0)
    tl.store(
        smoothing_logits + rows, tl.where(valid, token_smoothing_logit2 / LOG2E, 0.0), mask=known
    )
    if tile_offsets2 is not None:
        tl.store(offsets2 + rows, tl.where(valid, tl.max(offset, 0), 0.0), mask=known)
    if argmax is not None:
        token_expected2 = tl.sum(expected * shrink, 0) / whole_sum
        tl.store(expectations + rows, tl.where(valid, token_expected2 / LOG2E, 0.0), mask=known)
        token_largest = tl.max(largest, 0)
        tl.store(tops + rows, tl.where(valid, token_largest / LOG2E, 0.0), mask=known)
        # the first of equals
        candidates = tl.where(largest == token_largest[None, :], best, 2**31 - 1)
        token_best = tl.min(candidates, 0) + first_entry
        tl.store(argmaxes + rows, tl.where(valid, token_best, -1), mask=known)


@triton.jit(do_not_specialize=["n_order"])
def losses_kernel(
    lses, label_logits, smoothing_logits,  # (padded,) of packed tokens, in nats
    expectations, packed_argmaxes,  # (padded,), or None without token statistics
    valid_count, order, token_weights,  # (1,), (n_order,), (N,) or None
    lses2,  # (padded,) written, for the backward
    losses, full_lses, log_probabilities, entropies, argmaxes,  # (n_order,) written: the `Results`
    n_order, padded, smoothing, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each token's loss and token statistics at its place in the caller's order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = place < tl.load(valid_count)
    known = place < n_order
    source = tl.load(order + place, mask=known, other=0)
    lse = tl.load(lses + place, mask=valid, other=0.0)
    label_logit = tl.load(label_logits + place, mask=valid, other=0.0)
    loss = lse - (1.0 - smoothing) * label_logit + z_loss * lse * lse
    if smoothing != 0:
        loss -= smoothing * tl.load(smoothing_logits + place, mask=valid, other=0.0)
    if token_weights is not None:
        loss *= tl.load(token_weights + source, mask=valid, other=0.0)
    tl.store(lses2 + place, tl.where(valid, lse * LOG2E, float("inf")), mask=place < padded)
    tl.store(losses + source, tl.where(valid, loss, 0.0), mask=known)
    tl.store(full_lses + source, tl.where(valid, lse, 0.0), mask=known)
    if expectations is not None:
        tl.store(log_probabilities + source, tl.where(valid, label_logit - lse, 0.0), mask=known)
        entropy = lse - tl.load(expectations + place, mask=valid, other=0.0)
        tl.store(entropies + source, tl.where(valid, entropy, 0.0), mask=known)
        argmax = tl.load(packed_argmaxes + place, mask=valid, other=-1)
        tl.store(argmaxes + source, tl.where(valid, argmax, -1), mask=known)


@dataclass(frozen=True)
class Results:
    """What the loss returns of each token, (N,) each, in the caller's order; the last three are
    the token statistics, where they are asked for."""

    losses: Tensor  # fp32
    lse: Tensor  # fp32
    log_probability: Tensor | None = None  # fp32
    entropy: Tensor | None = None  # fp32
    argmax: Tensor | None = None  # int64

    @classmethod
    def allocate(cls, call: LossCall) -> "Results":
        """Memory for the results of a call: each has its own, as torch asks of what an operator
        returns."""
        labels = call.inputs.labels
        losses = torch.empty_like(labels, dtype=torch.float32)
        lse = torch.empty_like(losses)
        if not call.inputs.options.return_statistics:
            return cls(losses, lse)
        return cls(
            losses,
            lse,
            log_probability=torch.empty_like(losses),
            entropy=torch.empty_like(losses),
            argmax=torch.empty_like(labels, dtype=torch.int64),
        )

    def of_tokens(self, where: slice) -> "Results":
        """The results of these tokens, in the same memory."""
        return Results(
            losses=self.losses[where],
            lse=self.lse[where],
            log_probability=None if self.log_probability is None else self.log_probability[where],
            entropy=None if self.entropy is None else self.entropy[where],
            argmax=None if self.argmax is None else self.argmax[where],
        )


class SavedProbabilities(NamedTuple):
    """Where the forward leaves the probabilities p̃ of packed tokens."""

    probabilities: Tensor  # (whole tiles of tokens, blocks · width) in the inputs' dtype
    tile_offsets2: Tensor  # (blocks, padded) fp32 base 2, what each tile's are relative to


@dataclass(frozen=True)
class BlockSums:
    """What the forward finds of some tokens in each block of the vocabulary, (blocks, tokens)."""

    # log2 Σ_v 2^z over the block, for base-2 logits z, relative to `reference_logit2`
    lse2: Tensor  # fp32
    smoothing_logit2: Tensor | None  # fp32 Σ_v u_v z_v, or Σ_v z_v where u is uniform; base 2
    # Token statistics, or None:
    expected2: Tensor | None  # fp32, the mean of z by the softmax within the block; base 2
    largest2: Tensor | None  # fp32, the largest z; base 2
    argmax: Tensor | None  # int32, its row of C

    @classmethod
    def allocate(cls, call: LossCall, n_tokens: int) -> "BlockSums":
        hidden = call.inputs.hidden

        def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(call.blocks, n_tokens, device=hidden.device, dtype=dtype)

        options = call.inputs.options
        statistics = options.return_statistics
        return cls(
            lse2=numbers(),
            smoothing_logit2=numbers() if options.label_smoothing else None,
            expected2=numbers() if statistics else None,
            largest2=numbers() if statistics else None,
            argmax=numbers(torch.int32) if statistics else None,
        )

    @staticmethod
    def most_tokens(call: LossCall) -> int:
        """How many tokens to have block sums of at a time.

        They are whole tiles, and at least as many as the forward works on together: with fewer C
        would be read more often."""
        options = call.inputs.options
        numbers = 1
        if options.label_smoothing:
            numbers += 1
        if options.return_statistics:
            numbers += 3
        bytes_per_tile = 4 * numbers * call.blocks * call.tiles.rows
        tiles = max(BLOCK_SUMS_BYTES // bytes_per_tile, call.tiles.group)
        return tiles * call.tiles.rows


def run_forward(
    call: LossCall,  # or the part of it that these tokens are in
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,  # whose log-sum-exps and offsets are written
    results: Results,  # of the call or part: written at these tokens
    filter_statistics: Tensor | None = None,  # (2, blocks, padded) fp16, written
    saved: SavedProbabilities | None = None,  # written, at the packed tokens' places
) -> None:
    """Walk over the vocabulary once, and write what these tokens' losses and gradients need.

    Filter statistics are base-2 and relative to the label's logit (`reference_logit2`): the
    log-sum-exp and the largest logit within each block."""
    sums = empty_sums(call, tokens)
    for where in token_slices(len(packed), BlockSums.most_tokens(call)):
        block_sums = BlockSums.allocate(call, where.stop - where.start)
        walk_vocabulary(call, packed, tokens, where, block_sums, filter_statistics, saved)
        join_blocks(call, tokens, where, block_sums, saved, sums)
        del block_sums  # before the next tokens' take their memory
    if call.inputs.smoothing_target is None:  # the kernel has summed with weights of 1
        sums.smoothing_logit.div_(call.inputs.vocabulary)
    if call.inputs.shard is not None:
        # `merge_shards` adds the ranks' label logits up, which `gather` has done already. Losses
        # take what `gather` has left in `tokens`, so that each rank may have zeros here.
        sums = sums._replace(label_logit=torch.zeros_like(sums.lse))
        sums = merge_shards(sums, call.inputs.shard)
    write_losses(call, tokens, sums, results)


def empty_sums(call: LossCall, tokens: PackedTokens) -> TokenLogitSums:
    """Memory for what `join_blocks` finds, beside the labels' logits, which are known."""
    numbers = torch.empty_like(tokens.label_logit)
    expected = None
    top = None
    argmax = None
    if call.inputs.options.return_statistics:
        expected = torch.empty_like(numbers)
        top = torch.empty_like(numbers)
        argmax = torch.empty_like(numbers, dtype=torch.int64)
    return TokenLogitSums(
        lse=numbers,
        label_logit=tokens.label_logit,
        smoothing_logit=torch.empty_like(numbers),
        expected=expected,
        top=top,
        argmax=argmax,
    )


def walk_vocabulary(
    call: LossCall,
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,
    where: slice,  # the packed tokens that are looked at
    block_sums: BlockSums,  # of those tokens, written
    filter_statistics: Tensor | None,  # (2, blocks, padded), written at those tokens
    saved: SavedProbabilities | None,  # written at those tokens
) -> None:
    """Launch `forward_kernel`."""
    inputs = call.inputs
    tiles = call.tiles
    options = inputs.options
    padded, d = packed.shape
    v = len(inputs.weight)
    filter_lse = None
    filter_max = None
    if filter_statistics is not None:
        filter_lse, filter_max = filter_statistics.unbind()
    forward_kernel[(programs(packed.device) * WAVES,)](
        hidden=descriptor(packed, [tiles.rows, tiles.depth], tiles.tma),
        weight=descriptor(inputs.weight, [tiles.width, tiles.depth], tiles.tma),
        bias=inputs.bias,
        smoothing_target=inputs.smoothing_target,
        valid_count=tokens.valid_count,
        label_logits=tokens.label_logit,
        lse2=block_sums.lse2,
        smoothing_logit2=block_sums.smoothing_logit2,
        expected2=block_sums.expected2,
        largest2=block_sums.largest2,
        argmax=block_sums.argmax,
        filter_lse=filter_lse,
        filter_max=filter_max,
        probabilities=None if saved is None else saved.probabilities,
        tile_offsets2=None if saved is None else saved.tile_offsets2,
        stride=0 if saved is None else saved.probabilities.stride(0),
        first_token=where.start,
        n_tokens=where.stop - where.start,
        padded=padded,
        V=v,
        n_blocks=call.blocks,
        scale=inputs.logit_scale,
        softcap=options.softcap,
        D=d,
        GROUP=tiles.group,
        WAVES=WAVES,
        RAGGED=v % tiles.width != 0,
        PLAIN=inputs.bias is None and options.softcap is None and inputs.logit_scale > 0,
        **tiles.product_settings,
    )


def join_blocks(
    call: LossCall,
    tokens: PackedTokens,
    where: slice,  # the packed tokens whose blocks are joined
    block_sums: BlockSums,  # of those tokens
    saved: SavedProbabilities | None,
    sums: TokenLogitSums,  # on this rank, written at those tokens
) -> None:
    """Launch `finish_kernel`, which writes the tokens' offsets too where there is `saved`."""
    n_tokens = where.stop - where.start
    finish_kernel[(cdiv(n_tokens, FINISH_TOKENS),)](
        lse2=block_sums.lse2,
        smoothing_logit2=block_sums.smoothing_logit2,
        expected2=block_sums.expected2,
        largest2=block_sums.largest2,
        argmax=block_sums.argmax,
        tile_offsets2=None if saved is None else saved.tile_offsets2,
        valid_count=tokens.valid_count,
        label_logits=tokens.label_logit,
        lses=sums.lse,
        smoothing_logits=sums.smoothing_logit,
        offsets2=tokens.offset2,
        expectations=sums.expected,
        tops=sums.top,
        argmaxes=sums.argmax,
        first_token=where.start,
        n_tokens=n_tokens,
        first_entry=0 if call.inputs.shard is None else call.inputs.shard.first_entry,
        n_blocks=call.blocks,
        padded=len(tokens.lse2),
        TOKENS=FINISH_TOKENS,
        BLOCKS=FINISH_BLOCKS,
    )


def write_losses(
    call: LossCall,
    tokens: PackedTokens,
    sums: TokenLogitSums,  # over the whole vocabulary
    results: Results,  # written
) -> None:
    """Launch `losses_kernel`."""
    options = call.inputs.options
    padded = len(tokens.lse2)
    losses_kernel[(cdiv(padded, 1024),)](
        lses=sums.lse,
        label_logits=tokens.label_logit,
        smoothing_logits=sums.smoothing_logit,
        expectations=sums.expected,
        packed_argmaxes=sums.argmax,
        valid_count=tokens.valid_count,
        order=tokens.order,
        token_weights=call.inputs.token_weights,
        lses2=tokens.lse2,
        losses=results.losses,
        full_lses=results.lse,
        log_probabilities=results.log_probability,
        entropies=results.entropy,
        argmaxes=results.argmax,
        n_order=len(tokens.order),
        padded=padded,
        smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        BLOCK=1024,
    )

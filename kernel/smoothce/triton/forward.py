"""The forward: one walk over the vocabulary finds what the loss needs of every token.

That is the log-sum-exp and Σ_v u_v z_v. Where they are asked for, it also finds

    token statistics   entropy and argmax, which the caller has asked for
    block statistics   the filter's: two numbers for each token and block of the vocabulary
    probabilities      the softmax itself, from which `grad_in_forward` makes gradients

A program of `forward_kernel` owns a tile of tokens and a segment of the vocabulary. Sums stay in
registers, so that logits are never written. Inside it all exponents are in base 2. How the work is
cut follows the number of valid tokens, which only the device knows. `finish_kernel` joins each
token's segments, `losses_kernel` makes losses of them.

Exponents are relative to the label's logit: p̃ = 2^(z − offset) is 1 for the label, and what is
saved of it in 16 bits has all of bfloat16's bits whatever the logit. Where a token's logit in a
tile is more than SLACK above its offset, so that 2^(z − offset) is more than 2^SLACK, the tile's
largest logit becomes the token's offset, for this tile and all later ones of the segment.
`SavedProbabilities.tile_offsets2` has the offset of each token in each tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.tiles import LOG2E, base2_logits, descriptor, product_tile, programs
from smoothce.triton.tokens import LossCall, PackedTokens
from smoothce.vocab_parallel import TokenLogitSums, merge_shards

SLACK = tl.constexpr(64.0)  # base 2: sums of 2^18 such numbers, and their inverse, are fp32 numbers
LOWEST = tl.constexpr(-1e38)  # an offset below every logit
FP16_RANGE = tl.constexpr(60000.0)
PROGRAMS_PER_MULTIPROCESSOR = 4

# Rows of `Segments.sums` ...
OFFSET = tl.constexpr(0)
PROBABILITY_SUM = tl.constexpr(1)  # Σ_v p̃_v
SMOOTHING_LOGIT = tl.constexpr(2)  # Σ_v u_v z_v
EXPECTED_SUM = tl.constexpr(3)  # Σ_v p̃_v z_v
SUM_ROWS = 4
# ... and of `Segments.best`.
LARGEST = tl.constexpr(0)  # the largest logit's bits
ARGMAX = tl.constexpr(1)  # its entry
BEST_ROWS = 2


@triton.jit
def split_group(n_valid, group, n_blocks, workers, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """How to cut a group of token tiles × all vocabulary blocks into equal work for all programs.

    Groups follow one another, and each reads all of C once. A group is small, so that its tokens'
    hidden states stay in the L2 cache meanwhile.

    Every token tile gets `segments` segments of `length` vocabulary blocks, one program each. What
    is left of the vocabulary, from block `segments · length` on, is the *end*; the programs that
    have no segment, `n_spare` of them, do the end of one token tile after the other. 8 programs, 3
    token tiles and 10 blocks make 2 segments of 4 blocks, and 2 spare programs for the end:

        block          0 1 2 3     4 5 6 7     8 9
        token tile 0   program 0   program 3   program 6
        token tile 1   program 1   program 4   program 7
        token tile 2   program 2   program 5   program 6

    Returns (first token tile, token tiles, segments, length, spare programs)."""
    all_tiles = tl.cdiv(n_valid, ROWS)
    groups = tl.maximum(tl.cdiv(all_tiles, GROUP), 1)
    first_tile = group * all_tiles // groups
    n_tiles = tl.maximum((group + 1) * all_tiles // groups - first_tile, 1)
    segments = tl.minimum(workers // n_tiles, n_blocks)
    n_spare = workers - segments * n_tiles
    # A spare program has as much work as the others where
    #     tiles_per_spare · (n_blocks − segments · length) = length,
    # which `even_length` solves, rounded up to a whole block.
    tiles_per_spare = tl.cdiv(n_tiles, tl.maximum(n_spare, 1))
    even_length = tl.cdiv(n_blocks * tiles_per_spare, segments * tiles_per_spare + 1)
    length = tl.where(n_spare > 0, even_length, tl.cdiv(n_blocks, segments))
    # `length` is rounded up, so that fewer segments may be enough. The programs of the others have
    # nothing to do, and do not count as spare ones.
    segments = tl.minimum(segments, tl.cdiv(n_blocks, length))
    return first_tile, n_tiles, segments, length, n_spare


@triton.jit
def work_of_program(
    program, n_valid, group, n_blocks, workers, ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """One program's work in a group, as `split_group` cuts it.

    The end counts as one more segment, number `segments`. Returns (first token tile of the group,
    token tiles in it, the program's segment, the segment's first block and the one after its last,
    the program's first token tile in the group, the step to its next)."""
    first_tile, n_tiles, segments, length, n_spare = split_group(
        n_valid, group, n_blocks, workers, ROWS, GROUP
    )
    segment = tl.minimum(program // n_tiles, segments)  # a spare program's is the end
    first_block = tl.minimum(segment * length, n_blocks)
    end_block = tl.where(segment < segments, tl.minimum(first_block + length, n_blocks), n_blocks)
    begin = tl.where(segment < segments, program % n_tiles, program - segments * n_tiles)
    begin = tl.where(first_block < end_block, begin, n_tiles)
    step = tl.where(segment < segments, n_tiles, tl.maximum(n_spare, 1))
    return first_tile, n_tiles, segment, first_block, end_block, begin, step


@triton.jit
def segment_place(
    group, segment, tile, n_tiles, workers, ROWS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Where a token tile's sums over a segment lie in a row of `Segments`."""
    return (group * (workers + GROUP) + segment * n_tiles + tile) * ROWS + tl.arange(0, ROWS)


@triton.jit
def block_smoothing_logit(logits, smoothing_target, entries, V, factor, RAGGED: tl.constexpr):
    """Σ_v u_v z_v of a tile, or Σ_v z_v where u is uniform; `factor` makes logits of them."""
    if smoothing_target is not None:
        u = tl.load(smoothing_target + entries, mask=entries < V, other=0.0)[None, :]
        # a forbidden entry, of logit −∞, may have no part in it
        total = tl.sum(tl.where(u > 0, logits * u, 0.0), 1) * factor
    else:
        known = tl.where((entries < V)[None, :], logits, 0.0) if RAGGED else logits
        total = tl.sum(known, 1) * factor
    return total


@triton.jit
def store_block_statistics(block_lse, block_max, place, offset, probability_sum, top, label_logit2):
    """For the filter: a tile's log-sum-exp and largest logit, minus the label's, in fp16."""
    lse = offset - label_logit2 + tl.log2(probability_sum)
    tl.store(block_lse + place, tl.clamp(lse, -FP16_RANGE, FP16_RANGE).to(tl.float16))
    top = tl.clamp(top - label_logit2, -FP16_RANGE, FP16_RANGE)
    tl.store(block_max + place, top.to(tl.float16))


@triton.jit
def forward_kernel(
    hidden, weight, bias, smoothing_target,  # (padded, D) packed, (V, D), (V,) or None twice
    valid_count, label_logits,  # (1,), (padded,) in nats
    # The filter's block statistics, written: (blocks, padded) base 2, minus the label's; or None
    block_lse, block_max,
    # The `Segments`, written; `segment_best` is None where no token statistics are asked for
    segment_sums, segment_best,
    n_segment_tokens, padded,  # the length of a row of `Segments`, and of the packed tokens
    probabilities, tile_offsets2, stride,  # the `SavedProbabilities`, written; or None
    V, n_blocks, scale, softcap,
    D: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr,  # whether the last block has fewer than WIDTH entries
    PLAIN: tl.constexpr,  # whether logits are products times a positive scale
    MIX: tl.constexpr,  # whether Σ_v u_v z_v is wanted
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of every token over its program's tiles."""
    n_valid = tl.load(valid_count)
    program = tl.program_id(0)
    workers = tl.num_programs(0)
    for group in range(0, tl.cdiv(n_valid, ROWS * GROUP)):
        first_tile, n_tiles, segment, first_block, end_block, begin, step = work_of_program(
            program, n_valid, group, n_blocks, workers, ROWS, GROUP
        )
        for tile in range(begin, n_tiles, step):
            row = (first_tile + tile) * ROWS
            rows = row + tl.arange(0, ROWS)
            label_logit2 = tl.load(label_logits + rows) * LOG2E
            offset = tl.maximum(label_logit2, LOWEST)
            probability_sum = tl.zeros((ROWS,), tl.float32)
            smoothing_logit = tl.zeros((ROWS,), tl.float32)
            expected = tl.zeros((ROWS,), tl.float32)
            largest = tl.full((ROWS,), -float("inf"), tl.float32)
            argmax = tl.zeros((ROWS,), tl.int32)
            # Flattened into the loop over D, so that the next tile's loads start during this
            # tile's exponentials (FLATTEN: `Tiles.product_settings`).
            for block in (tl.range if FLATTEN else range)(first_block, end_block, flatten=True):  # type: ignore[call-overload]
                entry = block * WIDTH
                product = product_tile(
                    hidden, weight, row, entry, padded, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION
                )

                # base-2 logits are `logits · factor`
                entries = entry + tl.arange(0, WIDTH)
                if PLAIN:
                    # the positive factor is left to the exponent, where it costs nothing
                    factor = scale * LOG2E
                    logits = product
                else:
                    factor = 1.0
                    logits = base2_logits(product, bias, entries, V, scale, softcap)

                # Σ u z and the largest logit
                if MIX:
                    smoothing_logit += block_smoothing_logit(
                        logits, smoothing_target, entries, V, factor, RAGGED
                    )
                if RAGGED:
                    logits = tl.where((entries < V)[None, :], logits, -float("inf"))
                if segment_best is not None:  # token statistics
                    top, top_column = tl.max(logits, 1, return_indices=True)
                    top *= factor
                    argmax = tl.where(top > largest, entry + top_column, argmax)
                    largest = tl.maximum(largest, top)
                else:
                    top = tl.max(logits, 1) * factor

                # streaming sum of exponentials
                new_offset = tl.where(top > offset + SLACK, top, offset)
                exponentials = tl.exp2(logits * factor - new_offset[:, None])
                tile_sum = tl.sum(exponentials, 1)
                shrink = tl.exp2(offset - new_offset)
                probability_sum = probability_sum * shrink + tile_sum
                if segment_best is not None:
                    # a logit of −∞ has no part in it
                    terms = tl.where(exponentials > 0, exponentials * logits, 0.0)
                    expected = expected * shrink + tl.sum(terms, 1) * factor
                offset = new_offset

                # what is kept of the tile
                if block_lse is not None:
                    block_place = block * padded + rows  # a super-block keeps it far below 2^31
                    store_block_statistics(
                        block_lse, block_max, block_place, offset, tile_sum, top, label_logit2
                    )
                if probabilities is not None:
                    pointers = probabilities + entry + rows.to(tl.int64)[:, None] * stride
                    pointers += tl.arange(0, WIDTH)[None, :]
                    saved = exponentials.to(probabilities.dtype.element_ty)
                    tl.store(pointers, saved, mask=(rows < n_valid)[:, None])
                    tl.store(tile_offsets2 + block * padded + rows, offset)

            place = segment_place(group, segment, tile, n_tiles, workers, ROWS, GROUP)
            tl.store(segment_sums + OFFSET * n_segment_tokens + place, offset)
            tl.store(segment_sums + PROBABILITY_SUM * n_segment_tokens + place, probability_sum)
            tl.store(segment_sums + SMOOTHING_LOGIT * n_segment_tokens + place, smoothing_logit)
            if segment_best is not None:
                tl.store(segment_sums + EXPECTED_SUM * n_segment_tokens + place, expected)
                largest_bits = largest.to(tl.int32, bitcast=True)
                tl.store(segment_best + LARGEST * n_segment_tokens + place, largest_bits)
                tl.store(segment_best + ARGMAX * n_segment_tokens + place, argmax)


@triton.jit
def finish_kernel(
    segment_sums, segment_best, n_segment_tokens,  # the `Segments`, as the forward has left them
    valid_count,
    lses, smoothing_logits, offsets2,  # (padded,) written: nats, nats, base 2
    expectations, tops, argmaxes,  # (padded,) written where there is `segment_best`, else None
    first_entry, n_blocks, workers,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Join a token tile's segments; rows past the valid tokens get zeros."""
    n_valid = tl.load(valid_count)
    tile = tl.program_id(0)
    all_tiles = tl.cdiv(n_valid, ROWS)
    # The group that has this tile: the last one with first_tile ≤ tile, which inverts
    # `split_group`'s first_tile = group · all_tiles // groups.
    group = ((tile + 1) * tl.cdiv(all_tiles, GROUP) - 1) // tl.maximum(all_tiles, 1)
    first_tile, n_tiles, segments, length, _ = split_group(
        n_valid, group, n_blocks, workers, ROWS, GROUP
    )
    segments += (segments * length < n_blocks).to(tl.int32)  # the spare programs'
    rows = tile * ROWS + tl.arange(0, ROWS)
    valid = rows < n_valid
    offset = tl.full((ROWS,), LOWEST, tl.float32)
    probability_sum = tl.zeros((ROWS,), tl.float32)
    smoothing_logit = tl.zeros((ROWS,), tl.float32)
    expected = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    argmax = tl.zeros((ROWS,), tl.int32)
    for segment in range(0, segments):
        place = segment_place(group, segment, tile - first_tile, n_tiles, workers, ROWS, GROUP)
        its_offset = tl.load(
            segment_sums + OFFSET * n_segment_tokens + place, mask=valid, other=0.0
        )
        new_offset = tl.maximum(offset, its_offset)
        shrink = tl.exp2(offset - new_offset)
        its_shrink = tl.exp2(its_offset - new_offset)
        its_sum = tl.load(
            segment_sums + PROBABILITY_SUM * n_segment_tokens + place, mask=valid, other=1.0
        )
        probability_sum = probability_sum * shrink + its_sum * its_shrink
        smoothing_logit += tl.load(
            segment_sums + SMOOTHING_LOGIT * n_segment_tokens + place, mask=valid, other=0.0
        )
        if segment_best is not None:
            its_expected = tl.load(
                segment_sums + EXPECTED_SUM * n_segment_tokens + place, mask=valid, other=0.0
            )
            expected = expected * shrink + its_expected * its_shrink
            largest_bits = tl.load(
                segment_best + LARGEST * n_segment_tokens + place, mask=valid, other=0
            )
            its_largest = largest_bits.to(tl.float32, bitcast=True)
            its_argmax = tl.load(
                segment_best + ARGMAX * n_segment_tokens + place, mask=valid, other=0
            )
            argmax = tl.where(its_largest > largest, its_argmax, argmax)
            largest = tl.maximum(largest, its_largest)
        offset = new_offset
    tl.store(lses + rows, tl.where(valid, (offset + tl.log2(probability_sum)) / LOG2E, 0.0))
    tl.store(smoothing_logits + rows, tl.where(valid, smoothing_logit / LOG2E, 0.0))
    tl.store(offsets2 + rows, tl.where(valid, offset, 0.0))
    if segment_best is not None:
        tl.store(expectations + rows, tl.where(valid, expected / probability_sum / LOG2E, 0.0))
        tl.store(tops + rows, tl.where(valid, largest / LOG2E, 0.0))
        tl.store(argmaxes + rows, tl.where(valid, argmax + first_entry, -1))


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

    def part(self, where: slice) -> "Results":
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

    probabilities: Tensor  # (tokens, blocks · width) in the inputs' dtype
    tile_offsets2: Tensor  # (blocks, padded) fp32 base 2, what each tile's are relative to


@dataclass(frozen=True)
class Segments:
    """What the forward finds of each token in each segment of the vocabulary, and how it was cut.

    A row has one number for each token of each segment; `segment_place` says where."""

    sums: Tensor  # (4, ·) fp32: OFFSET, PROBABILITY_SUM, SMOOTHING_LOGIT, EXPECTED_SUM
    best: Tensor | None  # (2, ·) int32: LARGEST, ARGMAX; None without token statistics
    workers: int  # programs that walked
    group: int  # token tiles that they worked on at a time

    @classmethod
    def allocate(cls, call: LossCall, padded: int, device: torch.device) -> "Segments":
        rows = call.tiles.rows
        workers = programs(device, PROGRAMS_PER_MULTIPROCESSOR)
        group = min(call.tiles.group, workers)
        # A group has at most a segment a program, and besides each tile's end of the vocabulary.
        size = cdiv(padded, group * rows) * (workers + group) * rows
        sums = torch.empty(SUM_ROWS, size, device=device, dtype=torch.float32)
        best = None
        if call.inputs.options.return_statistics:
            best = torch.empty(BEST_ROWS, size, device=device, dtype=torch.int32)
        return cls(sums, best, workers, group)


def run_forward(
    call: LossCall,  # or the part of it that these tokens are in
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,  # whose log-sum-exps and offsets are written
    results: Results,  # of the call or part: written at these tokens
    block_statistics: Tensor | None = None,  # (2, blocks, padded) fp16, written
    saved: SavedProbabilities | None = None,  # written, at the packed tokens' places
) -> None:
    """Walk over the vocabulary once, and write what these tokens' losses and gradients need.

    Block statistics are base-2 and relative to the label's logit: the log-sum-exp and the largest
    logit within each block."""
    segments = Segments.allocate(call, len(packed), packed.device)
    walk_vocabulary(call, packed, tokens, segments, block_statistics, saved)
    sums = join_segments(call, tokens, segments)
    if call.inputs.shard is not None:
        # `gather` has joined the labels' logits already.
        sums = sums._replace(label_logit=torch.zeros_like(sums.lse))
        sums = merge_shards(sums, call.inputs.shard)
    write_losses(call, tokens, sums, results)


def walk_vocabulary(
    call: LossCall,
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,
    segments: Segments,  # written
    block_statistics: Tensor | None,  # (2, blocks, padded), written
    saved: SavedProbabilities | None,  # written
) -> None:
    """Launch `forward_kernel`."""
    inputs = call.inputs
    tiles = call.tiles
    options = inputs.options
    padded, d = packed.shape
    v = len(inputs.weight)
    block_lse = None
    block_max = None
    if block_statistics is not None:
        block_lse, block_max = block_statistics.unbind()
    forward_kernel[(segments.workers,)](
        hidden=descriptor(packed, [tiles.rows, tiles.depth], tiles.tma),
        weight=descriptor(inputs.weight, [tiles.width, tiles.depth], tiles.tma),
        bias=inputs.bias,
        smoothing_target=inputs.smoothing_target,
        valid_count=tokens.valid_count,
        label_logits=tokens.label_logit,
        block_lse=block_lse,
        block_max=block_max,
        segment_sums=segments.sums,
        segment_best=segments.best,
        n_segment_tokens=segments.sums.shape[1],
        padded=padded,
        probabilities=None if saved is None else saved.probabilities,
        tile_offsets2=None if saved is None else saved.tile_offsets2,
        stride=0 if saved is None else saved.probabilities.stride(0),
        V=v,
        n_blocks=call.blocks,
        scale=inputs.logit_scale,
        softcap=options.softcap,
        D=d,
        GROUP=segments.group,
        RAGGED=v % tiles.width != 0,
        PLAIN=inputs.bias is None and options.softcap is None and inputs.logit_scale > 0,
        MIX=options.label_smoothing != 0,
        **tiles.product_settings,
    )


def join_segments(call: LossCall, tokens: PackedTokens, segments: Segments) -> TokenLogitSums:
    """What the walk has found of each token on this rank, and the tokens' offsets."""
    inputs = call.inputs
    device = tokens.offset2.device
    padded = len(tokens.offset2)
    lse, smoothing_logit = torch.empty(2, padded, device=device, dtype=torch.float32).unbind()
    expected = None
    top = None
    argmax = None
    if segments.best is not None:
        expected, top = torch.empty(2, padded, device=device, dtype=torch.float32).unbind()
        argmax = torch.empty(padded, device=device, dtype=torch.int64)
    finish_kernel[(cdiv(padded, call.tiles.rows),)](
        segment_sums=segments.sums,
        segment_best=segments.best,
        n_segment_tokens=segments.sums.shape[1],
        valid_count=tokens.valid_count,
        lses=lse,
        smoothing_logits=smoothing_logit,
        offsets2=tokens.offset2,
        expectations=expected,
        tops=top,
        argmaxes=argmax,
        first_entry=0 if inputs.shard is None else inputs.shard.first_entry,
        n_blocks=call.blocks,
        workers=segments.workers,
        ROWS=call.tiles.rows,
        GROUP=segments.group,
    )
    if inputs.smoothing_target is None:  # the kernel has summed with weights of 1
        smoothing_logit /= inputs.vocabulary
    return TokenLogitSums(
        lse=lse,
        label_logit=tokens.label_logit,
        smoothing_logit=smoothing_logit,
        expected=expected,
        top=top,
        argmax=argmax,
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

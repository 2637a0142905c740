"""Exact gradients made in the backward, in little memory: every logit is computed a second time,
and S (`tokens.Coefficients`) of a chunk of the vocabulary at a time goes into both products.

A chunk has a number of `entries`. Its S, of N · entries numbers, is written to the end of dC's own
memory, whose rows there are not needed yet. Its rows of dC, of D · entries numbers, then go to the
first rows that are still free. Both fit while entries ≤ free numbers / (N + D)
(`end_of_free_memory`). When that is no more than what the *chunk memory* of this module holds, S
goes there instead. An example of V = 16 entries, with D = 1, N = 3 and a chunk memory for S of one
entry; each character is one of the 16 numbers of dC's memory:

    first chunk    CCCCSSSSSSSSSSSS    16 are free: 4 entries (S: their S, C: their rows of dC)
    second chunk   ....CCCSSSSSSSSS    12 are free: 3 entries
    third chunk    .......CC.SSSSSS    9 are free: 2 entries
    others         .........C          7 are free: 1 entry, no more than the chunk memory holds

(Rounding is left out here. The number of entries is rounded down to a multiple of what the chunk
memory holds, and so to whole tiles; and the place where S begins, to an aligned one.)

Only valid tokens are in E and S: they are packed before and spread out again afterwards. No atomics
and no order that depends on timing, so equal inputs give equal bits.

A call that wants no gradients takes `forward_without_gradients` of this module too, which keeps
least.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from smoothce.options import Gradients, LossOutput
from smoothce.triton.dproduct import (
    recompute_dproduct,
    write_hidden_from_dproduct,
)
from smoothce.triton.forward import output_of_tokens, run_forward
from smoothce.triton.tiles import add_matmul_fp32
from smoothce.triton.tokens import (
    Coefficients,
    KernelCall,
    PackedTokens,
    ValidCounts,
    coefficients,
    gather,
    token_slices,
    valid_first,
)
from smoothce.vocab_parallel import all_reduce_gradient

# A super-block is the tokens that are packed and worked on together, at most so many, here and in
# `filter`, which numbers them in int16.
SUPER_BLOCK_TOKENS = 8192

# The chunk memory, for a chunk's S, is this module's own: what the option `workspace` limits is the
# memory of `grad_in_forward`. Let n be the super-block's valid tokens, and `gradients` the bytes of
# dC and of dE of these n, whether both are wanted or only one of them:
#
#     chunk memory + (bytes of dE's sum in fp32 − bytes of dE)
#         ≤  min(CHUNK_BYTES, CHUNK_SHARE · gradients)
#
# The difference is 2 n D bytes for 16-bit inputs, and 0 for fp32 ones. It counts where
# dE is wanted (`entries_of_chunk_memory`).
#
# With CHUNK_BYTES and all else that it holds a step comes to the 119 MB of kernel/RESULTS.md.
#
# CHUNK_SHARE is for smaller calls. There a step that wants both gradients is to hold at most a
# tenth more than the gradients' own bytes. CHUNK_SHARE is that tenth, less 7 / D for what
# `PackedTokens` and `Coefficients` hold, with D = 2000 (larger ones need less). They hold seven
# 4-byte numbers a token, 28 n bytes, beside gradients of 16 bits, of 2 D (V + n) bytes: a share of
# 28 n / (2 D (V + n)), which is at most 7 / D where n ≤ V.
#
# In still smaller calls it is more than a tenth: the chunk memory has CHUNK_LEAST_BYTES in any
# case, for fewer entries at a time leave the products too small.
CHUNK_BYTES = 112 * 2**20
CHUNK_SHARE = 0.1 - 7 / 2000
CHUNK_LEAST_BYTES = 32 * 2**20

ALIGNED_NUMBERS = 8  # in 16 bits so many are 16 bytes, what a kernel's widest loads read at a time


class RecomputeState(NamedTuple):
    """What the forward leaves for the backward."""

    super_blocks: list[PackedTokens]
    counts: ValidCounts


def forward_without_gradients(call: KernelCall, output: LossOutput) -> RecomputeState:
    """Fill in the output; returns what `recompute_gradients` needs, if gradients are wanted."""
    # Each super-block has an order of its own, valid tokens first, unlike those of `filter`.
    places = token_slices(len(call.labels), SUPER_BLOCK_TOKENS)
    orders = [valid_first(call.of_tokens(where)) for where in places]
    counts = []
    if any(call.needs):  # else there is no backward to ask for them
        counts = [valid_count for _, valid_count in orders]
    state = RecomputeState([], ValidCounts(counts))
    for where, (order, valid_count) in zip(places, orders, strict=True):
        super_block_call = call.of_tokens(where)
        tokens, packed = gather(super_block_call, order, valid_count)
        run_forward(super_block_call, packed, tokens, output_of_tokens(output, where))
        state.super_blocks.append(tokens)
        del packed  # before the next super-block takes its memory
    return state


@dataclass
class ClassifierGradients:
    """Gradients of the classifier, which every super-block adds to."""

    weight: Tensor | None  # (V, D), without numbers before a super-block has begun it
    bias: Tensor | None  # (V,) fp32
    begun: bool = False


def recompute_gradients(
    call: KernelCall,
    state: RecomputeState,
    upstream_loss: Tensor,  # fp32, () or (N,)
    upstream_lse: Tensor | None,  # (N,)
    loss_scale: Tensor,  # ()
) -> Gradients:
    """Make the gradients that are wanted, in the backward."""
    hidden = call.hidden
    v, d = call.weight.shape
    classifier = ClassifierGradients(
        weight=torch.empty_like(call.weight) if call.needs.weight else None,
        bias=hidden.new_zeros(v, dtype=torch.float32) if call.needs.bias else None,
    )
    d_hidden: Tensor | None = None
    places = token_slices(len(hidden), SUPER_BLOCK_TOKENS)
    counts = state.counts.values()
    for where, tokens, n_valid in zip(places, state.super_blocks, counts, strict=True):
        super_block_call = call.of_tokens(where)
        packed = packed_again(super_block_call, tokens, n_valid)
        d_hidden_sums = None
        if call.needs.hidden:
            d_hidden_sums = torch.zeros(len(packed), d, device=hidden.device, dtype=torch.float32)
        if len(packed):
            token_coefficients = coefficients(
                super_block_call,
                tokens,
                upstream_loss[where] if upstream_loss.dim() else upstream_loss,
                loss_scale,
                None if upstream_lse is None else upstream_lse[where],
            )
            add_super_block(
                super_block_call, packed, tokens, token_coefficients, classifier, d_hidden_sums
            )
        if d_hidden_sums is not None:
            if d_hidden is None:  # not before the first super-block's chunk memory is freed
                d_hidden = torch.empty_like(hidden)
            write_hidden_from_dproduct(tokens, d_hidden_sums, d_hidden[where])
    if classifier.weight is not None and not classifier.begun:
        classifier.weight.zero_()
    if call.needs.hidden and len(hidden) == 0:
        d_hidden = torch.empty_like(hidden)
    return Gradients(
        hidden=all_reduce_gradient(d_hidden, call.shard),
        weight=classifier.weight,
        bias=classifier.bias,
    )


def packed_again(super_block_call: KernelCall, tokens: PackedTokens, n_valid: int | None) -> Tensor:
    """Return the hidden states of a super-block's valid tokens, (n_valid, D).

    Where the host does not know how many are valid, they are those of all its tokens, valid ones
    first and then zeros: a masked token's hidden state may hold NaN, which its coefficient of 0
    would not undo."""
    hidden = super_block_call.hidden
    if n_valid is None:
        packed = hidden.index_select(0, tokens.order)
        place = torch.arange(len(packed), device=packed.device)
        return packed.masked_fill_((place >= tokens.valid_count)[:, None], 0)
    if n_valid < len(hidden):
        return hidden.index_select(0, tokens.order[:n_valid])
    # All tokens are valid, so that `tokens.order`, which is stable, is the caller's order.
    return hidden


def add_super_block(
    call: KernelCall,  # of the super-block's tokens
    packed: Tensor,  # (n, D) hidden states of valid tokens
    tokens: PackedTokens,
    token_coefficients: Coefficients,
    classifier: ClassifierGradients,  # written, or added to
    d_hidden_sums: Tensor | None,  # (n, D) fp32, added to
) -> None:
    """Add a super-block's gradients, a chunk of the vocabulary at a time."""
    weight = call.weight
    # Rows of dC that are not yet written lend their memory.
    free_memory = None if classifier.begun else classifier.weight
    for start, stop, dproduct in dproduct_by_chunks(
        call, packed, tokens, token_coefficients, free_memory
    ):
        if classifier.weight is not None:
            if classifier.begun:
                classifier.weight[start:stop].addmm_(dproduct.T, packed)
            else:
                torch.mm(dproduct.T, packed, out=classifier.weight[start:stop])
        if d_hidden_sums is not None:
            add_matmul_fp32(d_hidden_sums, dproduct, weight[start:stop])
        if classifier.bias is not None:
            sums = dproduct.sum(0, dtype=torch.float32)
            classifier.bias[start:stop] += sums / call.logit_scale
    classifier.begun = True


def dproduct_by_chunks(
    call: KernelCall,
    packed: Tensor,  # (n, D)
    tokens: PackedTokens,
    token_coefficients: Coefficients,
    free_memory: Tensor | None,  # dC while its rows are not written
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield S of entries [start, stop), (n, stop − start), each until the next is asked for."""
    v = len(call.weight)
    n = len(packed)
    chunk = entries_of_chunk_memory(call, n)
    chunk_memory = packed.new_empty(n, chunk)
    start = 0
    while start < v:
        out = chunk_memory
        if free_memory is not None:
            larger = end_of_free_memory(free_memory, start, n, chunk)
            if larger is not None:
                out = larger
        stop = min(start + out.shape[1], v)
        dproduct = recompute_dproduct(call, packed, tokens, token_coefficients, out, start, stop)
        yield start, stop, dproduct
        start = stop


def entries_of_chunk_memory(call: KernelCall, n: int) -> int:
    """Return how many entries' S of n tokens the chunk memory holds: whole tiles."""
    v, d = call.weight.shape
    size = call.weight.element_size()
    most_bytes = min(CHUNK_BYTES, CHUNK_SHARE * (v + n) * d * size)
    if call.needs.hidden:  # less what dE's sum takes beyond dE
        most_bytes -= n * d * (4 - size)
    most_bytes = max(most_bytes, CHUNK_LEAST_BYTES)
    width = call.tiles.width
    tiles = max(int(most_bytes) // (n * size) // width, 1)
    return min(tiles, cdiv(v, width)) * width


def end_of_free_memory(
    d_weight: Tensor,  # (V, D), whose rows from `start` on are not written
    start: int,
    n: int,
    chunk: int,  # entries that the chunk memory holds, whole tiles of them
) -> Tensor | None:
    """Return the end of dC's memory as (n, entries), for S of the entries from `start` on.

    Their own rows of dC, which are written while S is read, lie before it. The number of entries is
    a multiple of `chunk`, so that S has whole tiles. None where there is no room for more than
    `chunk` of them, which the chunk memory has room for."""
    d = d_weight.shape[1]
    # Its beginning is moved down to a place that is aligned.
    room = d_weight.numel() - start * d - ALIGNED_NUMBERS
    entries = room // (n + d) // chunk * chunk
    if entries <= chunk:
        return None
    begin = (d_weight.numel() - entries * n) // ALIGNED_NUMBERS * ALIGNED_NUMBERS
    return d_weight.view(-1)[begin : begin + entries * n].view(n, entries)

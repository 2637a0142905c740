"""The walk over the vocabulary: of every token the log-sum-exp, Σ_v u_v z_v, and where asked for
entropy and argmax, the filter's block statistics, and the probabilities themselves.

A program owns a block of tokens and a segment of the vocabulary; sums stay in registers, so logits
are never written. How the work is cut follows the number of valid tokens, which only the device
knows.

Exponents are relative to the target's logit: p̃ = 2^(z − offset) is 1 for the target, and what is
kept of it in 16 bits has all of bfloat16's bits whatever the logit. A tile whose largest logit is
more than 2^SLACK times the offset's takes its own maximum for an offset, and `tops` says which.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.tiles import LOG2E, base2_logits, descriptor, product, programs
from smoothce.triton.tokens import LossCall, PackedTokens
from smoothce.vocab_parallel import TokenLogitSums, merge_shards

SLACK = tl.constexpr(64.0)  # base 2: sums of 2^18 such numbers, and their inverse, are fp32 numbers
LOWEST = tl.constexpr(-1e38)  # an offset below every logit
SHARES = 4  # programs a multiprocessor


@triton.jit
def split(n, group, n_blocks, workers, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """How to cut a group of token blocks × all vocabulary blocks into equal shares for all workers.

    Groups follow one another, and each reads all of C once. A group is small, so that its tokens'
    hidden states stay in the L2 cache meanwhile.

    Every token block gets `cuts` segments of `length` vocabulary blocks, each one program's share.
    Programs left over share the vocabulary's end, from `cuts · length` on, for all token blocks.
    Returns (first token block, token blocks, cuts, length, programs left over)."""
    all_rows = tl.cdiv(n, ROWS)
    groups = tl.maximum(tl.cdiv(all_rows, GROUP), 1)
    start = group * all_rows // groups
    n_rows = tl.maximum((group + 1) * all_rows // groups - start, 1)
    cuts = tl.minimum(workers // n_rows, n_blocks)
    spare = workers - cuts * n_rows
    # a program left over takes the end of `each` token blocks: a segment's work, at length `even`
    each = tl.cdiv(n_rows, tl.maximum(spare, 1))
    even = tl.cdiv(n_blocks * each, cuts * each + 1)
    length = tl.where(spare > 0, even, tl.cdiv(n_blocks, cuts))
    return start, n_rows, tl.minimum(cuts, tl.cdiv(n_blocks, length)), length, spare


@triton.jit
def share(program, n, group, n_blocks, workers, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """A program's part of `split`.

    Returns (first token block of the group, token blocks in it, the program's segment, where that
    begins and ends in the vocabulary, its first token block in the group, the step to the next)."""
    start, n_rows, cuts, length, spare = split(n, group, n_blocks, workers, ROWS, GROUP)
    cut = tl.minimum(program // n_rows, cuts)
    first = tl.minimum(cut * length, n_blocks)
    last = tl.where(cut < cuts, tl.minimum(first + length, n_blocks), n_blocks)
    begin = tl.where(cut < cuts, program % n_rows, program - cuts * n_rows)
    begin = tl.where(first < last, begin, n_rows)
    step = tl.where(cut < cuts, n_rows, tl.maximum(spare, 1))
    return start, n_rows, cut, first, last, begin, step


class SavedProbabilities(NamedTuple):
    """Where the probabilities of a super-block's tokens are kept."""

    memory: Tensor  # (tokens, blocks · width) in the inputs' dtype
    tops: Tensor  # (blocks, padded tokens) fp32, what each tile's are relative to


@triton.jit
def forward_kernel(
    hidden, weight, bias, mixture, count,  # (padded, D) packed, (V, D), (V,) or None twice, (1,)
    targets,  # (padded,) nats
    block_lse, block_max,  # (blocks, padded) base 2 and minus the target's, or None
    parts,  # (4, n_parts): offset, Σ p̃, Σ_v u_v z_v and Σ p̃ z of each segment's tokens
    best,  # (2, n_parts) int32: the largest logit's bits and its entry; or None
    n_parts, padded,
    memory, tops, stride,  # of p̃, a row a token, and offsets (blocks, padded); or None
    V, n_blocks, scale, softcap,
    D: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, PLAIN: tl.constexpr, MIX: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of every token over its program's tiles."""
    n = tl.load(count)
    program = tl.program_id(0)
    workers = tl.num_programs(0)
    for group in range(0, tl.cdiv(n, ROWS * GROUP)):
        start, n_rows, cut, first, last, begin, step = share(
            program, n, group, n_blocks, workers, ROWS, GROUP
        )
        for i in range(begin, n_rows, step):
            row = (start + i) * ROWS
            rows = row + tl.arange(0, ROWS)
            target = tl.load(targets + rows) * LOG2E
            m = tl.maximum(target, LOWEST)
            s = tl.zeros((ROWS,), tl.float32)
            z = tl.zeros((ROWS,), tl.float32)
            w = tl.zeros((ROWS,), tl.float32)
            largest = tl.full((ROWS,), -float("inf"), tl.float32)
            argmax = tl.zeros((ROWS,), tl.int32)
            # flattened, so that the next tile's loads start during this tile's exponentials
            for block in (tl.range if FLATTEN else range)(first, last, flatten=True):
                entry = block * WIDTH
                acc = product(
                    hidden, weight, row, entry, padded, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION
                )
                v = entry + tl.arange(0, WIDTH)
                if PLAIN:
                    # logits are products times a positive factor, which can join the exponent
                    factor = scale * LOG2E
                    x = acc
                else:
                    factor = 1.0
                    x = base2_logits(acc, bias, v, V, scale, softcap)
                if MIX:
                    if mixture is not None:
                        u = tl.load(mixture + v, mask=v < V, other=0.0)[None, :]
                        # a forbidden entry, of logit −∞, may have no part in it
                        z += tl.sum(tl.where(u > 0, x * u, 0.0), 1) * factor
                    else:
                        z += tl.sum(tl.where((v < V)[None, :], x, 0.0) if RAGGED else x, 1) * factor
                if RAGGED:
                    x = tl.where((v < V)[None, :], x, -float("inf"))
                if best is not None:
                    top, where = tl.max(x, 1, return_indices=True)
                    top *= factor
                    argmax = tl.where(top > largest, entry + where, argmax)
                    largest = tl.maximum(largest, top)
                else:
                    top = tl.max(x, 1) * factor
                new = tl.where(top > m + SLACK, top, m)
                e = tl.exp2(x * factor - new[:, None])
                t = tl.sum(e, 1)
                shrink = tl.exp2(m - new)
                s = s * shrink + t
                if best is not None:
                    # a logit of −∞ has no part in it
                    w = w * shrink + tl.sum(tl.where(e > 0, e * x, 0.0), 1) * factor
                m = new
                if block_lse is not None:
                    o = block * padded + rows  # a super-block keeps this far below 2^31
                    lse = new - target + tl.log2(t)
                    tl.store(block_lse + o, tl.clamp(lse, -60000.0, 60000.0).to(tl.float16))
                    top = tl.clamp(top - target, -60000.0, 60000.0)
                    tl.store(block_max + o, top.to(tl.float16))
                if memory is not None:
                    at = memory + entry + rows.to(tl.int64)[:, None] * stride
                    at += tl.arange(0, WIDTH)[None, :]
                    tl.store(at, e.to(memory.dtype.element_ty), mask=(rows < n)[:, None])
                    tl.store(tops + block * padded + rows, new)
            o = (group * (workers + GROUP) + cut * n_rows + i) * ROWS + tl.arange(0, ROWS)
            tl.store(parts + o, m)
            tl.store(parts + n_parts + o, s)
            tl.store(parts + 2 * n_parts + o, z)
            if best is not None:
                tl.store(parts + 3 * n_parts + o, w)
                tl.store(best + o, largest.to(tl.int32, bitcast=True))
                tl.store(best + n_parts + o, argmax)


@triton.jit
def finish_kernel(
    parts, best, n_parts,  # as the forward's kernel has left them
    count,
    lse, mixed, offset,  # (padded,) written: nats, nats, base 2
    expected, top, argmaxes,  # (padded,) written where there is `best`, else None
    begin, n_blocks, workers,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Join a token block's segments; rows past the valid tokens get zeros."""
    n = tl.load(count)
    i = tl.program_id(0)
    all_rows = tl.cdiv(n, ROWS)
    # the group whose token blocks, from `start` on, have this one among them
    group = ((i + 1) * tl.cdiv(all_rows, GROUP) - 1) // tl.maximum(all_rows, 1)
    start, n_rows, cuts, length, _ = split(n, group, n_blocks, workers, ROWS, GROUP)
    cuts += (cuts * length < n_blocks).to(tl.int32)
    rows = i * ROWS + tl.arange(0, ROWS)
    valid = rows < n
    m = tl.full((ROWS,), LOWEST, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    z = tl.zeros((ROWS,), tl.float32)
    w = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    argmax = tl.zeros((ROWS,), tl.int32)
    for cut in range(0, cuts):
        o = (group * (workers + GROUP) + cut * n_rows + i - start) * ROWS + tl.arange(0, ROWS)
        m_c = tl.load(parts + o, mask=valid, other=0.0)
        new = tl.maximum(m, m_c)
        shrink, shrink_c = tl.exp2(m - new), tl.exp2(m_c - new)
        s = s * shrink + tl.load(parts + n_parts + o, mask=valid, other=1.0) * shrink_c
        z += tl.load(parts + 2 * n_parts + o, mask=valid, other=0.0)
        if best is not None:
            w = w * shrink + tl.load(parts + 3 * n_parts + o, mask=valid, other=0.0) * shrink_c
            top_c = tl.load(best + o, mask=valid, other=0).to(tl.float32, bitcast=True)
            argmax_c = tl.load(best + n_parts + o, mask=valid, other=0)
            argmax = tl.where(top_c > largest, argmax_c, argmax)
            largest = tl.maximum(largest, top_c)
        m = new
    tl.store(lse + rows, tl.where(valid, (m + tl.log2(s)) / LOG2E, 0.0))
    tl.store(mixed + rows, tl.where(valid, z / LOG2E, 0.0))
    tl.store(offset + rows, tl.where(valid, m, 0.0))
    if best is not None:
        tl.store(expected + rows, tl.where(valid, w / s / LOG2E, 0.0))
        tl.store(top + rows, tl.where(valid, largest / LOG2E, 0.0))
        tl.store(argmaxes + rows, tl.where(valid, argmax + begin, -1))


@triton.jit(do_not_specialize=["n_order"])
def losses_kernel(
    lse, target, mixed, expected, argmax,  # (padded,) of packed tokens; the last two or None
    count, order, weights,  # weights (N,) or None
    base2,  # (padded,) written: the log-sum-exp for the backward
    losses, full_lse, log_p, entropies, argmaxes,  # (N,) written
    n_order, padded, smoothing, zeta, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each token's loss and statistics at its place in the caller's order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < tl.load(count)
    known = i < n_order
    source = tl.load(order + i, mask=known, other=0)
    total = tl.load(lse + i, mask=valid, other=0.0)
    z_y = tl.load(target + i, mask=valid, other=0.0)
    loss = total - (1.0 - smoothing) * z_y + zeta * total * total
    if smoothing != 0:
        loss -= smoothing * tl.load(mixed + i, mask=valid, other=0.0)
    if weights is not None:
        loss *= tl.load(weights + source, mask=valid, other=0.0)
    tl.store(base2 + i, tl.where(valid, total * LOG2E, float("inf")), mask=i < padded)
    tl.store(losses + source, tl.where(valid, loss, 0.0), mask=known)
    tl.store(full_lse + source, tl.where(valid, total, 0.0), mask=known)
    if expected is not None:
        tl.store(log_p + source, tl.where(valid, z_y - total, 0.0), mask=known)
        entropy = total - tl.load(expected + i, mask=valid, other=0.0)
        tl.store(entropies + source, tl.where(valid, entropy, 0.0), mask=known)
        found = tl.load(argmax + i, mask=valid, other=-1)
        tl.store(argmaxes + source, tl.where(valid, found, -1), mask=known)


class Results:
    """What the loss returns of each token, (N,) each, in the caller's order."""

    def __init__(self, call: LossCall) -> None:
        y = call.inputs.labels
        # each in memory of its own, as torch asks of what an operator returns
        self.losses, self.lse = (torch.empty_like(y, dtype=torch.float32) for _ in range(2))
        self.log_p = self.entropy = self.argmax = None
        if call.inputs.options.return_statistics:
            self.log_p, self.entropy = (torch.empty_like(self.lse) for _ in range(2))
            self.argmax = torch.empty_like(y, dtype=torch.int64)


def lse_forward(
    call: LossCall,  # a part of it, or all
    packed: Tensor,  # (padded, D)
    tokens: PackedTokens,
    results: Results,  # written at the super-block's tokens ...
    where: slice,  # ... which are these of the caller's; `tokens.order` counts from its start
    statistics: Tensor | None = None,  # (2, blocks, padded) fp16, written
    kept: SavedProbabilities | None = None,  # written, at the packed tokens' places
) -> PackedTokens:
    """Losses of one super-block, and its tokens with log-sum-exps and offsets.

    Statistics are base-2: the log-sum-exp and the largest logit within each block."""
    inputs, tiles = call.inputs, call.tiles
    weight, options, device = inputs.weight, inputs.options, packed.device
    (padded, d), v, blocks = packed.shape, len(weight), call.blocks
    workers = programs(device, SHARES)
    group = min(tiles.group, workers)
    # a group has at most a segment a program, and besides each token block's end of the vocabulary
    n_parts = cdiv(padded, group * tiles.rows) * (workers + group) * tiles.rows
    parts = torch.empty(4, n_parts, device=device, dtype=torch.float32)
    asked = options.return_statistics
    best = torch.empty(2, n_parts, device=device, dtype=torch.int32) if asked else None
    block_lse, block_max = (None, None) if statistics is None else statistics
    positive = inputs.bias is None and options.softcap is None and inputs.scale > 0
    forward_kernel[(workers,)](
        descriptor(packed, [tiles.rows, tiles.depth], tiles.tma),
        descriptor(weight, [tiles.width, tiles.depth], tiles.tma),
        inputs.bias, inputs.smoothing_target, tokens.count, tokens.target,
        block_lse, block_max,
        parts, best, n_parts, padded,
        *((None, None, 0) if kept is None else (*kept, kept.memory.stride(0))),
        v, blocks, inputs.scale, options.softcap,
        D=d, GROUP=group,
        RAGGED=v % tiles.width != 0, PLAIN=positive, MIX=options.label_smoothing != 0,
        **tiles.product,
    )  # fmt: skip
    del packed
    columns = torch.empty(5 if asked else 3, padded, device=device, dtype=torch.float32)
    lse, mixed, offset, *more = columns
    argmax = torch.empty(padded, device=device, dtype=torch.int64) if asked else None
    expected, top = more or (None, None)
    begin = 0 if inputs.shard is None else inputs.shard.offset
    finish_kernel[(cdiv(padded, tiles.rows),)](
        parts, best, n_parts, tokens.count,
        lse, mixed, offset, expected, top, argmax,
        begin, blocks, workers, ROWS=tiles.rows, GROUP=group,
    )  # fmt: skip
    if inputs.smoothing_target is None:
        mixed /= inputs.vocabulary
    found = TokenLogitSums(lse, tokens.target, mixed, expected, top, argmax)
    if inputs.shard is not None:  # the targets' logits are joined already
        found = merge_shards(found._replace(target=torch.zeros_like(lse)), inputs.shard)
    base2, omega = torch.empty_like(offset), inputs.token_weights
    losses_kernel[(cdiv(padded, 1024),)](
        found.lse, tokens.target, found.mixed, found.expected, found.argmax,
        tokens.count, tokens.order, omega if omega is None else omega[where],
        base2,
        *(x if x is None else x[where] for x in vars(results).values()),
        len(tokens.order), padded, options.label_smoothing, options.z_loss, BLOCK=1024,
    )  # fmt: skip
    return tokens._replace(lse=base2, offset=offset)

"""Log-sum-exp, Σ_v z and block statistics of every token, in one walk over the vocabulary; where
asked for, entropy and argmax instead of the two latter.

A program owns a block of tokens and a segment of the vocabulary; running maximum and sum stay in
registers, so logits are never written. How the work is cut follows the number of valid tokens,
which only the device knows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.stored import NOTHING, PIECES, Stored, store_logits
from smoothce.triton.tiles import LOG2E, base2_logits, descriptor, product, programs
from smoothce.triton.tokens import Inputs, Tokens


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


@triton.jit(do_not_specialize=["growth", "stored_rows"])
def forward_kernel(
    hidden, weight, bias, count,  # (padded, D) packed, (V, D), (V,) or None, (1,)
    block_lse, block_max,  # (blocks, padded), or None
    parts,  # (3, n_parts): maximum m, sum s and z of each segment's tokens
    best,  # (n_parts,) its argmax; or None, and then z is Σ logits instead of Σ e^(logit − m) logit
    n_parts, padded,
    targets, memory,  # (padded,), and of stored logits, or None: divided as `Regions` says
    stored_rows, chunk, growth, stored_entries,
    V, n_blocks, scale, softcap,
    D: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    RAGGED: tl.constexpr, PLAIN: tl.constexpr, SUM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and z of every token over its program's tiles."""
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
            m = tl.full((ROWS,), -float("inf"), tl.float32)
            s = tl.zeros((ROWS,), tl.float32)
            z = tl.zeros((ROWS,), tl.float32)
            target = s
            argmax = tl.zeros((ROWS,), tl.int32)
            if memory is not None:
                target = tl.load(targets + rows) * LOG2E
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
                if SUM:
                    z += tl.sum(tl.where((v < V)[None, :], x, 0.0) if RAGGED else x, 1) * factor
                if RAGGED:
                    x = tl.where((v < V)[None, :], x, -float("inf"))
                if best is not None:
                    top, where = tl.max(x, 1, return_indices=True)
                    top *= factor
                    argmax = tl.where(top > m, entry + where, argmax)
                else:
                    top = tl.max(x, 1) * factor
                new = tl.maximum(m, top)
                # a block that a -inf bias closes altogether must not turn into -inf - -inf
                base = tl.where(new == -float("inf"), 0.0, new)
                e = tl.exp2(x * factor - base[:, None])
                t = tl.sum(e, 1)
                if best is not None:
                    # a logit of −∞ has no part in it
                    z = z * tl.exp2(m - base) + tl.sum(tl.where(e > 0, e * x, 0.0), 1) * factor
                if block_lse is not None:
                    o = block * padded + rows  # a super-block keeps this far below 2^31
                    tl.store(block_lse + o, (base + tl.log2(t)).to(tl.float16))
                    tl.store(block_max + o, top.to(tl.float16))
                s = s * tl.exp2(m - base) + t
                if memory is not None:  # last, so that the tile's registers are free by then
                    z_t = x * factor - target[:, None]
                    store_logits(
                        z_t, memory, rows, n, block, stored_rows, chunk, growth, stored_entries,
                        WIDTH, PIECES
                    )  # fmt: skip
                m = new
            o = (group * (workers + GROUP) + cut * n_rows + i) * ROWS + tl.arange(0, ROWS)
            tl.store(parts + o, m)
            tl.store(parts + n_parts + o, s)
            tl.store(parts + 2 * n_parts + o, z)
            if best is not None:
                tl.store(best + o, argmax)


@triton.jit(do_not_specialize=["n_order"])
def finish_kernel(
    parts, best, n_parts,  # as the forward's kernel has left them
    target, count, order,
    lse, losses, full_lse,  # written
    entropies, argmaxes,  # written where there is `best`, else None
    n_order, smoothing, V, n_blocks, workers,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Join a token block's segments into log-sum-exp and loss, or entropy and argmax besides."""
    n = tl.load(count)
    i = tl.program_id(0)
    all_rows = tl.cdiv(n, ROWS)
    # the group whose token blocks, from `start` on, have this one among them
    group = ((i + 1) * tl.cdiv(all_rows, GROUP) - 1) // tl.maximum(all_rows, 1)
    start, n_rows, cuts, length, _ = split(n, group, n_blocks, workers, ROWS, GROUP)
    cuts += (cuts * length < n_blocks).to(tl.int32)
    rows = i * ROWS + tl.arange(0, ROWS)
    valid = rows < n
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    z = tl.zeros((ROWS,), tl.float32)
    argmax = tl.zeros((ROWS,), tl.int32)
    for cut in range(0, cuts):
        o = (group * (workers + GROUP) + cut * n_rows + i - start) * ROWS + tl.arange(0, ROWS)
        m_c = tl.load(parts + o, mask=valid, other=0.0)
        new = tl.maximum(m, m_c)
        base = tl.where(new == -float("inf"), 0.0, new)
        s_c = tl.load(parts + n_parts + o, mask=valid, other=1.0)
        s = s * tl.exp2(m - base) + s_c * tl.exp2(m_c - base)
        z_c = tl.load(parts + 2 * n_parts + o, mask=valid, other=0.0)
        if SUM:
            z += z_c
        if best is not None:
            z = z * tl.exp2(m - base) + z_c * tl.exp2(m_c - base)
            argmax = tl.where(m_c > m, tl.load(best + o, mask=valid, other=0), argmax)
        m = new
    total = m + tl.log2(s)
    z_y = tl.load(target + rows)
    loss = total / LOG2E - (1.0 - smoothing) * z_y
    if SUM:
        loss -= smoothing / V * (z / LOG2E)
    tl.store(lse + rows, tl.where(valid, total, float("inf")))
    known = rows < n_order
    source = tl.load(order + rows, mask=known, other=0)
    tl.store(losses + source, tl.where(valid, loss, 0.0), mask=known)
    tl.store(full_lse + source, tl.where(valid, total / LOG2E, 0.0), mask=known)
    if best is not None:
        entropy = (total - z / s) / LOG2E
        tl.store(entropies + source, tl.where(valid, entropy, 0.0), mask=known)
        tl.store(argmaxes + source, tl.where(valid, argmax, -1), mask=known)


def forward(
    inputs: Inputs,
    packed: Tensor,  # (padded, D)
    tokens: Tokens,
    losses: Tensor,  # (N,) fp32 in nats, written at the super-block's tokens
    full_lse: Tensor,  # (N,) fp32, likewise
    statistics: Tensor | None = None,  # (2, blocks, padded) fp16, written
    stored: Stored = NOTHING,  # its logits are written, at the packed tokens' places
    entropies: Tensor | None = None,  # (N,) fp32 in nats, written like the losses ...
    argmaxes: Tensor | None = None,  # ... and (N,) int64; both, without smoothing, or none
) -> Tokens:
    """Losses of one super-block, and its tokens with their log-sum-exps.

    loss_i = logsumexp_v z_iv − (1−β) z_iy − (β/V) Σ_v z_iv.

    Statistics are base-2: the log-sum-exp and the largest logit within each block."""
    weight, tiles, options = inputs.weight, inputs.tiles, inputs.options
    (padded, d), v, blocks = packed.shape, len(weight), inputs.blocks
    workers = programs(packed.device)
    group = min(tiles.group, workers)
    # a group has at most a segment a program, and besides each token block's end of the vocabulary
    n_parts = cdiv(padded, group * tiles.rows) * (workers + group) * tiles.rows
    parts = torch.empty(3, n_parts, device=packed.device, dtype=torch.float32)
    best = None if argmaxes is None else torch.empty_like(parts[0], dtype=torch.int32)
    block_lse, block_max = (None, None) if statistics is None else statistics
    positive = inputs.bias is None and options.softcap is None and inputs.scale > 0
    forward_kernel[(workers,)](
        descriptor(packed, [tiles.rows, tiles.depth], tiles.tma),
        descriptor(weight, [tiles.width, tiles.depth], tiles.tma), inputs.bias, tokens.count,
        block_lse, block_max,
        parts, best, n_parts, padded,
        tokens.target, stored.memory, *stored.regions,
        v, blocks, inputs.scale, options.softcap,
        D=d, GROUP=group, PIECES=PIECES,
        RAGGED=v % tiles.width != 0, PLAIN=positive, SUM=options.label_smoothing != 0,
        **tiles.product,
    )  # fmt: skip
    lse = torch.empty(padded, device=packed.device, dtype=torch.float32)
    finish_kernel[(cdiv(padded, tiles.rows),)](
        parts, best, n_parts,
        tokens.target, tokens.count, tokens.order,
        lse, losses, full_lse,
        entropies, argmaxes,
        len(tokens.order), options.label_smoothing, v, blocks, workers,
        ROWS=tiles.rows, GROUP=group, SUM=options.label_smoothing != 0,
    )  # fmt: skip
    return tokens._replace(lse=lse)

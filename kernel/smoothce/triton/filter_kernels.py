# mypy: allow-untyped-defs
"""The kernels of the filtered backward, which `filtered` launches.

`queue_kernel` works on the pairs that `filter_plan` lists. `block_sums_kernel` and
`filtered_hidden_kernel` add what the low-rank model puts in place of the others. The mathematics is
in kernel/DERIVATION.md ("The filter", "The filter's backward"), and the names here are the symbols
of `filtered`: R, P, q, W and H, a block j, a token i, a vocabulary entry v. The upstream gradient
g_i comes in two factors, `common_factor` and ĝ_i = g_i / common_factor, the latter in `relative`;
`lift` is 1 + 2ζ lse_i. Here R has ĝ_i in it. The common factor is that of whole sums over tokens or
entries, which are multiplied by it at their end.

Without a softcap R has no smoothing term, which is the same for all tokens: H and the uniform row
below stand for it. They have û, which is u, or 1 for every entry where u is uniform;
`smoothing_factor` is κ, with κ û_v = β u_v.

The queue has two kinds of items. A *tile* is up to ROWS listed tokens of one block: it makes their
R, leaves it in a ring, and adds R C to dE. A *share* of a block's dC is Rᵀ E over all tiles of the
block, for some slices of D. Programs take items in order by a ticket, and an item only waits for
items before it, so the kernel cannot lock up however few of its programs run at a time. The ring is
bounded.

Each block's tiles have two rows after the listed tokens. Both belong to the mean hidden state; f_v
is the slope of its logits. The *profile's row* holds q_v f_v, where q is its softmax within the
block. The *uniform row* holds û_v f_v, what the smoothing term of every token points to. So q, W
and H need no pass of their own over the classifier.

(Kernels take no Python types, so mypy lets functions without annotations pass in this file.)
"""

import triton
import triton.language as tl

from smoothce.triton.filter_plan import TILE_ITEM, is_dropped, unpack_item
from smoothce.triton.tiles import base2_logits, load_tile, slope


@triton.jit
def wait_for(counter, value):
    """Spin until the counter reaches value. What was written before it did is visible then."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < value:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def signal(counter):
    """Add one to the counter, after everything that this program has written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_for_ring_slot(tile, tile_owner, n_shares, shares_done, RING: tl.constexpr):
    """Wait until dC has read what the tile's slot of the ring held before, if it held anything."""
    if tile >= RING:
        previous = tl.load(tile_owner + tile - RING)
        wait_for(shares_done + previous, tl.load(n_shares + previous))


@triton.jit
def gathered_product(
    hidden, row_start,  # (ROWS,) where each row's hidden state begins, in numbers from `hidden`
    weight, entry, V,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gathered rows of E times C[entry : entry + WIDTH]ᵀ, (ROWS, WIDTH) in fp32."""
    column = tl.arange(0, DEPTH)
    p_e = hidden + row_start[:, None] + column[None, :]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for d in range(0, D, DEPTH):
        if D % DEPTH == 0:
            e = tl.load(p_e + d)
        else:
            e = tl.load(p_e + d, mask=(d + column < D)[None, :], other=0.0)
        c = load_tile(weight, entry, d, V, D, WIDTH, DEPTH, TMA)
        acc = tl.dot(e, tl.trans(c), acc, input_precision=PRECISION)
    return acc


@triton.jit
def lse_within_block(x):
    """The base-2 log-sum-exp of each row of base-2 logits; +inf, so that the softmax is 0, where a
    bias of -inf closes the block."""
    top = tl.max(x, 1)
    base = tl.where(top == -float("inf"), 0.0, top)
    lse = base + tl.log2(tl.sum(tl.exp2(x - base[:, None]), 1))
    return tl.where(top == -float("inf"), float("inf"), lse)


@triton.jit
def tile_gradients(
    logits2, softmax_lse2,  # (ROWS, WIDTH), (ROWS,) the log-sum-exp their softmax is relative to
    block, row, token, is_token, n_listed, v,
    coefficient, padded, V,
    labels, smoothing_target, relative, lift,
    smoothing_factor, smoothing, scale, softcap,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """R of the rows of a tile, with f the slope ∂logit/∂product:

    row < n_listed         a listed token: its R
    row = n_listed         the profile: q_v f_v
    row = n_listed + 1     the uniform row: û_v f_v
    rows past these        0

    The profile's and the uniform row have no label, m = 0 and factors of 1 until they are set.
    """
    y = tl.load(labels + token, mask=is_token, other=-1)
    p = tl.exp2(logits2 - softmax_lse2[:, None])
    # The draw's weight w solves m = (1 − w) P with the P of this very row, so that w P and the
    # low-rank part make up P exactly. It is 1 for a kept pair, which has m = 0.
    p_coefficient = coefficient + block.to(tl.int64) * padded + token
    m = tl.load(p_coefficient, mask=is_token, other=0.0).to(tl.float32)
    draw_weight = 1.0 - m / tl.maximum(tl.sum(p, 1), 1e-30)
    r = p * draw_weight[:, None]
    if lift is not None:
        r *= tl.load(lift + token, mask=is_token, other=1.0)[:, None]
    if smoothing_target is None:
        u_hat = 1.0
    else:
        u_hat = tl.load(smoothing_target + v, mask=v < V, other=0.0)[None, :]
    r = tl.where(y[:, None] == v[None, :], r - (1.0 - smoothing), r)
    f = slope(logits2, scale, softcap)
    if softcap is not None:
        # The uniform term is then not the same for all tokens: listed pairs carry their own.
        r = tl.where(is_token[:, None], r - smoothing_factor * u_hat, r)
    is_uniform = row == n_listed + 1
    r = tl.where(is_uniform[:, None], u_hat, r) * f
    if relative is not None:
        r *= tl.load(relative + token, mask=is_token, other=1.0)[:, None]
    r = tl.where((row < n_listed + 2)[:, None], r, 0.0)
    if RAGGED:
        r = tl.where((v < V)[None, :], r, 0.0)
    return r


@triton.jit
def store_profiles(profile, r, row, index, n_listed, v, V, ROWS: tl.constexpr):
    """Write q f and û f, if their rows are among those of the block's tile `index`."""
    if (index * ROWS <= n_listed) & (n_listed < (index + 1) * ROWS):
        q_f = tl.sum(tl.where((row == n_listed)[:, None], r, 0.0), 0)
        tl.store(profile + v, q_f, mask=v < V)
    if (index * ROWS <= n_listed + 1) & (n_listed + 1 < (index + 1) * ROWS):
        u_hat_f = tl.sum(tl.where((row == n_listed + 1)[:, None], r, 0.0), 0)
        tl.store(profile + V + v, u_hat_f, mask=v < V)


@triton.jit
def add_to_hidden_sums(
    acc, r, acc_row, is_used,  # (ROWS,) the row of `acc` that each row of R adds to, and whether
    weight, entry, V,
    D: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add R · C[entry : entry + WIDTH] to rows of `acc`, with atomics."""
    column = tl.arange(0, SLICE)
    p_acc = acc + acc_row.to(tl.int64)[:, None] * D + column[None, :]
    for d in tl.range(0, D, SLICE, num_stages=STAGES):
        c = load_tile(weight, entry, d, V, D, WIDTH, SLICE, TMA)
        products = tl.dot(r, c, input_precision=PRECISION)
        inside = is_used[:, None] & (d + column < D)[None, :]
        tl.atomic_add(p_acc + d, products, mask=inside, sem="relaxed")


@triton.jit
def tile_item(
    block, index, n_listed, begin, v,
    tile_owner, n_shares, tiles_done, shares_done,
    hidden, weight, weight_slices,
    bias, smoothing_target, order, labels, lse2,
    relative, lift,
    coefficient, listed_tokens,
    ring, ring_source, profile, acc, d_weight,
    mean_start, padded, blocks, V, smoothing_factor, smoothing, scale, softcap,
    ALIGNED: tl.constexpr, RAGGED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr,
    RING: tl.constexpr, HIDDEN_STAGES: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The block's tile number `index`: make R, leave it in the ring for dC, and add R C to dE.

    Its `row`s count the block's rows: listed tokens, the profile's row, the uniform row."""
    tile = begin + index
    if d_weight is not None:
        wait_for_ring_slot(tile, tile_owner, n_shares, shares_done, RING)

    # Gather hidden states. Rows past the listed ones read the mean hidden state, which begins
    # `mean_start` numbers away from `hidden`.
    row = index * ROWS + tl.arange(0, ROWS)
    is_token = row < n_listed
    p_listed = listed_tokens + block.to(tl.int64) * padded + row
    token = tl.load(p_listed, mask=is_token, other=0).to(tl.int32)
    source = tl.load(order + token, mask=is_token, other=0)
    row_start = tl.where(is_token, source.to(tl.int64) * D, mean_start)
    if ALIGNED:
        row_start = tl.multiple_of(row_start, 8)
    product = gathered_product(
        hidden, row_start, weight, block * WIDTH, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION
    )
    logits2 = base2_logits(product, bias, v, V, scale, softcap)
    if RAGGED:
        logits2 = tl.where((v < V)[None, :], logits2, -float("inf"))

    # A token's softmax goes over the whole vocabulary, the profile's over this block.
    softmax_lse2 = tl.load(lse2 + token, mask=is_token, other=0.0)
    has_other_rows = (index + 1) * ROWS > n_listed
    if has_other_rows:
        softmax_lse2 = tl.where(is_token, softmax_lse2, lse_within_block(logits2))
    r = tile_gradients(
        logits2, softmax_lse2,
        block, row, token, is_token, n_listed, v,
        coefficient, padded, V,
        labels, smoothing_target, relative, lift,
        smoothing_factor, smoothing, scale, softcap, RAGGED,
    )  # fmt: skip
    if has_other_rows:
        store_profiles(profile, r, row, index, n_listed, v, V, ROWS)

    r = r.to(hidden.dtype.element_ty)
    if d_weight is not None:
        slot_row = (tile % RING) * ROWS + tl.arange(0, ROWS)
        tl.store(ring_source + slot_row, source)
        tl.store(ring + slot_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], r)
    signal(tiles_done + block)

    if acc is not None:
        is_uniform = row == n_listed + 1
        # Without a softcap every block adds to the same uniform direction.
        uniform_row = padded + blocks + block if softcap is not None else padded + blocks
        acc_row = tl.where(is_token, token, tl.where(is_uniform, uniform_row, padded + block))
        add_to_hidden_sums(
            acc, r, acc_row, row < n_listed + 2,
            weight_slices, block * WIDTH, V, D, WIDTH, SLICE, HIDDEN_STAGES, TMA, PRECISION,
        )  # fmt: skip


@triton.jit
def listed_weight_sums(
    hidden, ring, ring_source, begin, n_listed,
    step, column,  # (STEP,) and (SLICE,): the offsets of a step's tokens, the columns of E
    ROWS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rᵀ E of a block's listed tokens and one slice of D, (WIDTH, SLICE) in fp32."""
    entry = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH, SLICE), tl.float32)
    # Indices are read one step ahead, so that the gathers they lead to can be pipelined.
    source = tl.load(ring_source + (begin % RING) * ROWS + step, mask=step < n_listed, other=0)
    for row in range(0, n_listed, STEP):
        slot_row = ((begin + row // ROWS) % RING) * ROWS + row % ROWS + step
        r = tl.load(ring + slot_row[:, None] * WIDTH + entry[None, :])
        inside = (row + step < n_listed)[:, None]
        if D % SLICE != 0:
            inside = inside & (column < D)[None, :]
        p_e = hidden + source.to(tl.int64)[:, None] * D + column[None, :]
        e = tl.load(p_e, mask=inside, other=0.0)
        sums = tl.dot(tl.trans(r), e, sums, input_precision=PRECISION)
        next_row = row + STEP
        slot_row = ((begin + next_row // ROWS) % RING) * ROWS + next_row % ROWS + step
        source = tl.load(ring_source + slot_row, mask=next_row + step < n_listed, other=0)
    return sums


@triton.jit
def share_item(
    block, index, n_listed, begin, v,
    n_shares, tiles_done, shares_done,
    hidden, common_factor, hidden_sum,
    ring, ring_source, profile, profile_sums, uniform_sums, d_weight,
    V, smoothing_factor, softcap,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The block's share number `index` of dC, written once: Rᵀ E of the listed tokens, and the
    rank-one terms of q f and û f. All have ĝ_i in them, and `common_factor` comes at the end."""
    shares = tl.load(n_shares + block)
    wait_for(tiles_done + block, (n_listed + 2 + ROWS - 1) // ROWS)
    step = tl.arange(0, STEP)
    q_f = tl.load(profile + v, mask=v < V, other=0.0)
    beta_u_f = tl.load(profile + V + v, mask=v < V, other=0.0) * smoothing_factor
    factor = tl.load(common_factor)
    slices: tl.constexpr = (D + SLICE - 1) // SLICE
    for i in range(index * slices // shares, (index + 1) * slices // shares):
        column = i * SLICE + tl.arange(0, SLICE)
        inside = column < D
        sums = listed_weight_sums(
            hidden, ring, ring_source, begin, n_listed, step, column,
            ROWS, WIDTH, RING, D, SLICE, STEP, PRECISION,
        )  # fmt: skip
        profile_sum = tl.load(
            profile_sums + block.to(tl.int64) * D + column, mask=inside, other=0.0
        )
        if softcap is not None:
            uniform_sum = tl.load(
                uniform_sums + block.to(tl.int64) * D + column, mask=inside, other=0.0
            )
        else:
            uniform_sum = tl.load(hidden_sum + column, mask=inside, other=0.0)
        sums = sums + q_f[:, None] * profile_sum[None, :] - beta_u_f[:, None] * uniform_sum[None, :]
        sums = sums * factor
        p_weight = d_weight + v.to(tl.int64)[:, None] * D + column[None, :]
        is_entry = (v < V)[:, None] & inside[None, :]
        if ACCUMULATE:
            sums += tl.load(p_weight, mask=is_entry, other=0.0).to(tl.float32)
        tl.store(p_weight, sums.to(d_weight.dtype.element_ty), mask=is_entry)
    signal(shares_done + block)


@triton.jit(do_not_specialize=["mean_start"])
def queue_kernel(
    items, n_items, first_tile, tile_owner, n_shares,  # the `Schedule`
    ticket, tiles_done, shares_done,  # zeros: (1,), (blocks,), (blocks,)
    hidden,  # (N, D)
    weight, weight_slices,  # (V, D), in tiles of WIDTH × DEPTH and of WIDTH × SLICE
    bias, smoothing_target,  # (V,) or None each
    order, labels, lse2,  # of the super-block's `PackedTokens`
    relative, lift, common_factor, hidden_sum,  # the `Upstream`
    coefficient, listed_tokens, listed,  # the `PairPlan`
    ring, ring_source,  # (RING, ROWS, WIDTH) R of tiles, (RING, ROWS) where their hidden states are
    profile,  # (2, V) written: q f and û f, with f the slope
    profile_sums,  # (blocks, D) Σ_i m_ij ĝ_i lift_i E_i
    uniform_sums,  # (blocks, D) Σ_i ĝ_i E_i of dropped pairs; None without a softcap
    acc,  # (·, D) sums of dE, from row `padded` on W, from `padded + blocks` on H; or None
    d_weight,  # (V, D), or None
    mean_start: tl.int64,  # where the mean hidden state is, in numbers from `hidden`
    padded, blocks, V,
    smoothing_factor,  # κ
    smoothing, scale, softcap,
    ALIGNED: tl.constexpr, RAGGED: tl.constexpr, ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr,
    RING: tl.constexpr, HIDDEN_STAGES: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take items in order until none is left; no item waits for a later one."""
    end = tl.load(n_items)
    turn = tl.atomic_add(ticket, 1)
    while turn < end:
        block, index, kind = unpack_item(tl.load(items + turn))
        n_listed = tl.load(listed + block)
        begin = tl.load(first_tile + block)
        v = block * WIDTH + tl.arange(0, WIDTH)
        if kind == TILE_ITEM:
            tile_item(
                block, index, n_listed, begin, v,
                tile_owner, n_shares, tiles_done, shares_done,
                hidden, weight, weight_slices,
                bias, smoothing_target, order, labels, lse2,
                relative, lift,
                coefficient, listed_tokens,
                ring, ring_source, profile, acc, d_weight,
                mean_start, padded, blocks, V, smoothing_factor, smoothing, scale, softcap,
                ALIGNED, RAGGED, ROWS, WIDTH, DEPTH, TMA, RING, HIDDEN_STAGES, D, SLICE, PRECISION,
            )  # fmt: skip
        elif d_weight is not None:
            share_item(
                block, index, n_listed, begin, v,
                n_shares, tiles_done, shares_done,
                hidden, common_factor, hidden_sum,
                ring, ring_source, profile, profile_sums, uniform_sums, d_weight,
                V, smoothing_factor, softcap,
                ACCUMULATE, ROWS, WIDTH, RING, D, SLICE, STEP, PRECISION,
            )  # fmt: skip
        turn = tl.atomic_add(ticket, 1)


@triton.jit
def block_sums_kernel(
    hidden,  # (N, D)
    coefficient,  # (blocks, padded) m_ij
    order, relative, lift, valid_count,
    profile_sums,  # (blocks, D) written: Σ_i m_ij ĝ_i lift_i E_i
    uniform_sums,  # (blocks, D) written: Σ_i ĝ_i E_i of dropped pairs; None without a softcap
    padded, blocks, BLOCKS: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program sums over all valid tokens for BLOCKS blocks and one slice of D."""
    n_valid = tl.load(valid_count)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    of_profile = tl.zeros((BLOCKS, SLICE), tl.float32)
    of_uniform = tl.zeros((BLOCKS, SLICE), tl.float32)
    p_coefficient = coefficient + tl.minimum(block, blocks - 1).to(tl.int64)[:, None] * padded
    # Indices are read one step ahead, so that the gathers they lead to can be pipelined.
    source = tl.load(order + tl.arange(0, STEP), mask=tl.arange(0, STEP) < n_valid, other=0)
    for start in range(0, n_valid, STEP):
        token = start + tl.arange(0, STEP)
        is_token = token < n_valid
        m = tl.load(p_coefficient + token[None, :])  # zero past the last token
        inside = is_token[:, None]
        if D % SLICE != 0:
            inside = inside & (column < D)[None, :]
        p_e = hidden + source.to(tl.int64)[:, None] * D + column[None, :]
        e = tl.load(p_e, mask=inside, other=0.0)
        dropped = is_dropped(m)
        if relative is not None:
            relative_g = tl.load(relative + token, mask=is_token, other=0.0)[None, :]
            m = m.to(tl.float32) * relative_g
            dropped *= relative_g
        if lift is not None:
            m = m.to(tl.float32) * tl.load(lift + token, mask=is_token, other=0.0)[None, :]
        of_profile = tl.dot(m.to(e.dtype), e, of_profile, input_precision=PRECISION)
        if uniform_sums is not None:
            of_uniform = tl.dot(dropped.to(e.dtype), e, of_uniform, input_precision=PRECISION)
        source = tl.load(order + token + STEP, mask=token + STEP < n_valid, other=0)
    inside = (block < blocks)[:, None] & (column < D)[None, :]
    at = block.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(profile_sums + at, of_profile, mask=inside)
    if uniform_sums is not None:
        tl.store(uniform_sums + at, of_uniform, mask=inside)


@triton.jit(do_not_specialize=["n_order"])
def filtered_hidden_kernel(
    coefficient,  # (blocks, padded) m_ij
    order, relative, lift, common_factor, valid_count,
    acc,  # (padded, D) sums of R C over listed pairs
    profiles,  # (blocks, D) W
    uniforms, uniform_sum,  # H: (blocks, D) of each block, or None without a softcap; (D,) of all
    out,  # (N, D) written: dE
    n_order, padded, blocks,
    smoothing_factor,  # κ
    ROWS: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program finishes dE of ROWS tokens and one slice of D: the sums over listed pairs, the mass
    of the others times their blocks' W, and the uniform term."""
    n_valid = tl.load(valid_count)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    is_column = column < D
    sums = tl.zeros((ROWS, SLICE), tl.float32)
    of_uniform = tl.zeros((ROWS, SLICE), tl.float32)
    dtype = out.dtype.element_ty
    if tl.program_id(0) * ROWS < n_valid:
        for start in range(0, blocks, STEP):
            block = start + tl.arange(0, STEP)
            is_block = block < blocks
            p_coefficient = coefficient + block.to(tl.int64)[:, None] * padded + token[None, :]
            m = tl.load(p_coefficient, mask=is_block[:, None], other=0.0)
            at = block.to(tl.int64)[:, None] * D + column[None, :]
            inside = is_block[:, None] & is_column[None, :]
            w = tl.load(profiles + at, mask=inside, other=0.0)
            sums = tl.dot(tl.trans(m).to(dtype), w, sums, input_precision=PRECISION)
            if uniforms is not None:
                h = tl.load(uniforms + at, mask=inside, other=0.0)
                dropped = is_dropped(tl.trans(m))
                of_uniform = tl.dot(dropped.to(dtype), h, of_uniform, input_precision=PRECISION)
        if lift is not None:
            sums *= tl.load(lift + token, mask=token < n_valid, other=0.0)[:, None]
        if uniforms is not None:
            sums -= of_uniform * smoothing_factor
        else:
            h_all = tl.load(uniform_sum + column, mask=is_column, other=0.0)
            sums -= (h_all * smoothing_factor)[None, :]
        if relative is not None:
            sums *= tl.load(relative + token, mask=token < n_valid, other=0.0)[:, None]
        inside = (token < n_valid)[:, None] & is_column[None, :]
        p_acc = acc + token.to(tl.int64)[:, None] * D + column[None, :]
        sums += tl.load(p_acc, mask=inside, other=0.0)
        sums = tl.where((token < n_valid)[:, None], sums * tl.load(common_factor), 0.0)
    is_known = token < n_order  # masked tokens come last, and their dE is 0
    source = tl.load(order + token, mask=is_known, other=0).to(tl.int64)
    p_out = out + source[:, None] * D + column[None, :]
    tl.store(p_out, sums.to(dtype), mask=is_known[:, None] & is_column[None, :])

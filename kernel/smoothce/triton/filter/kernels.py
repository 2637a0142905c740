# mypy: allow-untyped-defs
"""The kernels of the filtered backward, which `filter` launches.

`queue_kernel` works on the pairs that `pairs` lists. `block_sums_kernel` and
`filtered_hidden_kernel` add the low-rank model: all that there is of a dropped pair, and of a drawn
one what its weight takes away. The mathematics is in kernel/DERIVATION.md ("The filter"). With a
token i, a block j and a vocabulary entry v, the symbols of `filter` are called

    R_iv           `gradients`, those of a tile's rows
    m_ij           `pair_coefficients`: 0 for a kept pair, (1 − w) P for a drawn one, P for a
                   dropped one
    W_j, H_j       `profile_products`, `smoothing_products`: rows of `d_hidden_sums` behind the
                   tokens', where `queue_kernel` sums them. dC takes sums of hidden states instead:
                   `profile_sums`, Σ_i m_ij ĝ_i lift_i E_i, and `smoothing_sums`, Σ_i ĝ_i E_i of
                   dropped pairs
    q f, û f       `mean_rows`, from the logits of the mean hidden state, whose slope f is
    g_i            `common_factor` times ĝ_i, which is `relative_upstream`
    1 + 2ζ lse_i   `lift`
    κ              `smoothing_factor`; `tokens` defines it and û, with κ û_v = β u_v

Here R has ĝ_i in it. The common factor is that of whole sums over tokens or entries, which are
multiplied by it at their end. Without a softcap R has no smoothing term, which is the same for all
tokens: H and the smoothing row below stand for it.

The queue has two kinds of items. A *tile* is up to ROWS listed tokens of one block: it makes their
R, leaves it in a ring, and adds R C to dE. A *share* of a block's dC is Rᵀ E over all tiles of the
block, for some slices of D. Programs take items in order by a ticket, and an item only waits for
items before it, so the kernel cannot lock up however few of its programs run at a time. The ring is
bounded.

Each block's tiles have two rows after the listed tokens. Both belong to the mean hidden state; f_v
is the slope of its logits. The *profile's row* holds q_v f_v, where q is its softmax within the
block. The *smoothing row* holds û_v f_v, what the smoothing term of every token points to, whether
u is uniform or not. So q, W and H need no pass of their own over the classifier.

(Kernels take no Python types, so mypy lets functions without annotations pass in this file.)
"""

import triton
import triton.language as tl

from smoothce.triton.filter.pairs import TILE_ITEM, is_dropped, unpack_item
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
    state_pointers = hidden + row_start[:, None] + column[None, :]
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first_column in range(0, D, DEPTH):
        if D % DEPTH == 0:
            states = tl.load(state_pointers + first_column)
        else:
            states = tl.load(
                state_pointers + first_column, mask=(first_column + column < D)[None, :], other=0.0
            )
        weight_tile = load_tile(weight, entry, first_column, V, D, WIDTH, DEPTH, TMA)
        sums = tl.dot(states, tl.trans(weight_tile), sums, input_precision=PRECISION)
    return sums


@triton.jit
def lse_within_block(logits_base2):
    """The base-2 log-sum-exp of each row of base-2 logits; +inf, so that the softmax is 0, where a
    bias of -inf closes the block."""
    largest = tl.max(logits_base2, 1)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    lse = base + tl.log2(tl.sum(tl.exp2(logits_base2 - base[:, None]), 1))
    return tl.where(largest == -float("inf"), float("inf"), lse)


@triton.jit
def tile_gradients(
    logits_base2,  # (ROWS, WIDTH)
    softmax_lse_base2,  # (ROWS,) the log-sum-exp that each row's softmax is relative to
    block, row, token, is_token, n_listed, entries,
    pair_coefficients, padded, V,
    labels, smoothing_target, relative_upstream, lift,
    smoothing_factor, smoothing, scale, softcap,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """R of the rows of a tile, with f the slope ∂logit/∂product:

    row < n_listed         a listed token: its R
    row = n_listed         the profile: q_v f_v
    row = n_listed + 1     the smoothing row: û_v f_v
    rows past these        0

    `is_token` masks what is loaded of a token, so that the last two rows get no label, m = 0 and
    factors of 1. With these the profile's row comes out as its softmax times the slope by itself.
    The smoothing row's û is put in the place of its softmax below.
    """
    label = tl.load(labels + token, mask=is_token, other=-1)
    probabilities = tl.exp2(logits_base2 - softmax_lse_base2[:, None])
    # The draw's weight w solves m = (1 − w) P with the P of this very row, so that w P and the
    # low-rank part make up P exactly. It is 1 for a kept pair, which has m = 0.
    coefficient_pointers = pair_coefficients + block.to(tl.int64) * padded + token
    pair_coefficient = tl.load(coefficient_pointers, mask=is_token, other=0.0).to(tl.float32)
    draw_weight = 1.0 - pair_coefficient / tl.maximum(tl.sum(probabilities, 1), 1e-30)
    gradients = probabilities * draw_weight[:, None]
    if lift is not None:
        gradients *= tl.load(lift + token, mask=is_token, other=1.0)[:, None]
    if smoothing_target is None:
        u_hat = 1.0
    else:
        u_hat = tl.load(smoothing_target + entries, mask=entries < V, other=0.0)[None, :]
    gradients = tl.where(
        label[:, None] == entries[None, :], gradients - (1.0 - smoothing), gradients
    )
    slopes = slope(logits_base2, scale, softcap)
    if softcap is not None:
        # The smoothing term is then not the same for all tokens: listed pairs carry their own.
        gradients = tl.where(is_token[:, None], gradients - smoothing_factor * u_hat, gradients)
    is_smoothing_row = row == n_listed + 1
    gradients = tl.where(is_smoothing_row[:, None], u_hat, gradients) * slopes
    if relative_upstream is not None:
        gradients *= tl.load(relative_upstream + token, mask=is_token, other=1.0)[:, None]
    gradients = tl.where((row < n_listed + 2)[:, None], gradients, 0.0)
    if RAGGED:
        gradients = tl.where((entries < V)[None, :], gradients, 0.0)
    return gradients


@triton.jit
def store_mean_rows(mean_rows, gradients, row, index, n_listed, entries, V, ROWS: tl.constexpr):
    """Write q f and û f, if their rows are among those of the block's tile `index`."""
    if (index * ROWS <= n_listed) & (n_listed < (index + 1) * ROWS):
        profile_row = tl.sum(tl.where((row == n_listed)[:, None], gradients, 0.0), 0)
        tl.store(mean_rows + entries, profile_row, mask=entries < V)
    if (index * ROWS <= n_listed + 1) & (n_listed + 1 < (index + 1) * ROWS):
        smoothing_row = tl.sum(tl.where((row == n_listed + 1)[:, None], gradients, 0.0), 0)
        tl.store(mean_rows + V + entries, smoothing_row, mask=entries < V)


@triton.jit
def add_to_hidden_sums(
    d_hidden_sums, gradients,  # (·, D), (ROWS, WIDTH)
    sum_row, is_used,  # (ROWS,) which row of `d_hidden_sums` each row of R adds to, and whether
    weight, entry, V,
    D: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add R · C[entry : entry + WIDTH] to rows of `d_hidden_sums`, with atomics."""
    column = tl.arange(0, SLICE)
    sum_pointers = d_hidden_sums + sum_row.to(tl.int64)[:, None] * D + column[None, :]
    for first_column in tl.range(0, D, SLICE, num_stages=STAGES):
        weight_tile = load_tile(weight, entry, first_column, V, D, WIDTH, SLICE, TMA)
        products = tl.dot(gradients, weight_tile, input_precision=PRECISION)
        inside = is_used[:, None] & (first_column + column < D)[None, :]
        tl.atomic_add(sum_pointers + first_column, products, mask=inside, sem="relaxed")


@triton.jit
def tile_item(
    block, index, n_listed,
    begin,  # the number of the block's first tile; tiles are numbered through all blocks
    entries,
    tile_owner, n_shares, tiles_done, shares_done,
    hidden, weight, weight_slices,
    bias, smoothing_target, order, labels, lses_base2,
    relative_upstream, lift,
    pair_coefficients, listed_tokens,
    ring, ring_source, mean_rows, d_hidden_sums, d_weight,
    mean_start, padded, blocks, V, smoothing_factor, smoothing, scale, softcap,
    ALIGNED: tl.constexpr, RAGGED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr,
    RING: tl.constexpr, HIDDEN_STAGES: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The block's tile number `index`: make R, leave it in the ring for dC, and add R C to dE.

    Its `row`s count the block's rows: listed tokens, the profile's row, the smoothing row."""
    tile = begin + index
    if d_weight is not None:
        wait_for_ring_slot(tile, tile_owner, n_shares, shares_done, RING)

    # Gather hidden states. Rows past the listed ones read the mean hidden state, which begins
    # `mean_start` numbers away from `hidden`.
    row = index * ROWS + tl.arange(0, ROWS)
    is_token = row < n_listed
    listed_pointers = listed_tokens + block.to(tl.int64) * padded + row
    token = tl.load(listed_pointers, mask=is_token, other=0).to(tl.int32)
    source = tl.load(order + token, mask=is_token, other=0)
    row_start = tl.where(is_token, source.to(tl.int64) * D, mean_start)
    if ALIGNED:
        row_start = tl.multiple_of(row_start, 8)
    product = gathered_product(
        hidden, row_start, weight, block * WIDTH, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION
    )
    logits_base2 = base2_logits(product, bias, entries, V, scale, softcap)
    if RAGGED:
        logits_base2 = tl.where((entries < V)[None, :], logits_base2, -float("inf"))

    # A token's softmax goes over the whole vocabulary, the profile's over this block.
    softmax_lse_base2 = tl.load(lses_base2 + token, mask=is_token, other=0.0)
    has_other_rows = (index + 1) * ROWS > n_listed
    if has_other_rows:
        softmax_lse_base2 = tl.where(is_token, softmax_lse_base2, lse_within_block(logits_base2))
    gradients = tile_gradients(
        logits_base2, softmax_lse_base2,
        block, row, token, is_token, n_listed, entries,
        pair_coefficients, padded, V,
        labels, smoothing_target, relative_upstream, lift,
        smoothing_factor, smoothing, scale, softcap, RAGGED,
    )  # fmt: skip
    if has_other_rows:
        store_mean_rows(mean_rows, gradients, row, index, n_listed, entries, V, ROWS)

    gradients = gradients.to(hidden.dtype.element_ty)
    if d_weight is not None:
        slot_row = (tile % RING) * ROWS + tl.arange(0, ROWS)
        tl.store(ring_source + slot_row, source)
        tl.store(ring + slot_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], gradients)
    signal(tiles_done + block)

    if d_hidden_sums is not None:
        is_smoothing_row = row == n_listed + 1
        # Without a softcap every block adds to the same row, which is then the total of H.
        h_row = padded + blocks + block if softcap is not None else padded + blocks
        w_row = padded + block
        sum_row = tl.where(is_token, token, tl.where(is_smoothing_row, h_row, w_row))
        add_to_hidden_sums(
            d_hidden_sums, gradients, sum_row, row < n_listed + 2,
            weight_slices, block * WIDTH, V, D, WIDTH, SLICE, HIDDEN_STAGES, TMA, PRECISION,
        )  # fmt: skip


@triton.jit
def listed_weight_sums(
    hidden, ring, ring_source,
    begin, n_listed,  # the number of the block's first tile, and how many tokens it lists
    step, column,  # (STEP,) and (SLICE,): the offsets of a step's tokens, the columns of E
    ROWS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rᵀ E of a block's listed tokens and one slice of D, (WIDTH, SLICE) in fp32.

    The ring holds R of tile t in slot t % RING, and a block's tiles are `begin`, `begin` + 1, …"""
    entry = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH, SLICE), tl.float32)
    # Indices are read one step ahead, so that the gathers they lead to can be pipelined.
    source = tl.load(ring_source + (begin % RING) * ROWS + step, mask=step < n_listed, other=0)
    for row in range(0, n_listed, STEP):
        slot_row = ((begin + row // ROWS) % RING) * ROWS + row % ROWS + step
        gradients = tl.load(ring + slot_row[:, None] * WIDTH + entry[None, :])
        inside = (row + step < n_listed)[:, None]
        if D % SLICE != 0:
            inside = inside & (column < D)[None, :]
        state_pointers = hidden + source.to(tl.int64)[:, None] * D + column[None, :]
        states = tl.load(state_pointers, mask=inside, other=0.0)
        sums = tl.dot(tl.trans(gradients), states, sums, input_precision=PRECISION)
        next_row = row + STEP
        slot_row = ((begin + next_row // ROWS) % RING) * ROWS + next_row % ROWS + step
        source = tl.load(ring_source + slot_row, mask=next_row + step < n_listed, other=0)
    return sums


@triton.jit
def share_item(
    block, index, n_listed,
    begin,  # the number of the block's first tile
    entries,
    n_shares, tiles_done, shares_done,
    hidden, common_factor, hidden_sum,
    ring, ring_source, mean_rows, profile_sums, smoothing_sums, d_weight,
    V, smoothing_factor, softcap,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The block's share number `index` of dC, written once: Rᵀ E of the listed tokens, and the
    rank-one terms of q f and û f. All have ĝ_i in them, and `common_factor` comes at the end."""
    shares = tl.load(n_shares + block)
    wait_for(tiles_done + block, (n_listed + 2 + ROWS - 1) // ROWS)
    step = tl.arange(0, STEP)
    profile_row = tl.load(mean_rows + entries, mask=entries < V, other=0.0)
    smoothing_row = tl.load(mean_rows + V + entries, mask=entries < V, other=0.0)
    smoothing_row = smoothing_row * smoothing_factor
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
            smoothing_sum = tl.load(
                smoothing_sums + block.to(tl.int64) * D + column, mask=inside, other=0.0
            )
        else:
            smoothing_sum = tl.load(hidden_sum + column, mask=inside, other=0.0)
        profile_term = profile_row[:, None] * profile_sum[None, :]
        smoothing_term = smoothing_row[:, None] * smoothing_sum[None, :]
        sums = sums + profile_term - smoothing_term
        sums = sums * factor
        weight_pointers = d_weight + entries.to(tl.int64)[:, None] * D + column[None, :]
        is_entry = (entries < V)[:, None] & inside[None, :]
        if ACCUMULATE:
            sums += tl.load(weight_pointers, mask=is_entry, other=0.0).to(tl.float32)
        tl.store(weight_pointers, sums.to(d_weight.dtype.element_ty), mask=is_entry)
    signal(shares_done + block)


@triton.jit(do_not_specialize=["mean_start"])
def queue_kernel(
    items, n_items, first_tile, tile_owner, n_shares,  # the `Schedule`
    ticket, tiles_done, shares_done,  # zeros: (1,), (blocks,), (blocks,)
    hidden,  # (N, D)
    weight, weight_slices,  # (V, D), in tiles of WIDTH × DEPTH and of WIDTH × SLICE
    bias, smoothing_target,  # (V,) or None each
    order, labels, lses_base2,  # of the super-block's `PackedTokens`
    relative_upstream, lift, common_factor, hidden_sum,  # the `Upstream`
    pair_coefficients, listed_tokens, listed,  # the `PairPlan`
    ring, ring_source,  # (RING, ROWS, WIDTH) R of tiles, (RING, ROWS) where their hidden states are
    mean_rows,  # (2, V) written: q f and û f, with f the slope
    profile_sums,  # (blocks, D) Σ_i m_ij ĝ_i lift_i E_i
    smoothing_sums,  # (blocks, D) Σ_i ĝ_i E_i of dropped pairs; None without a softcap
    # (·, D) sums of dE; from row `padded` on W, from row `padded + blocks` on H; or None
    d_hidden_sums,
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
        entries = block * WIDTH + tl.arange(0, WIDTH)
        if kind == TILE_ITEM:
            tile_item(
                block, index, n_listed, begin, entries,
                tile_owner, n_shares, tiles_done, shares_done,
                hidden, weight, weight_slices,
                bias, smoothing_target, order, labels, lses_base2,
                relative_upstream, lift,
                pair_coefficients, listed_tokens,
                ring, ring_source, mean_rows, d_hidden_sums, d_weight,
                mean_start, padded, blocks, V, smoothing_factor, smoothing, scale, softcap,
                ALIGNED, RAGGED, ROWS, WIDTH, DEPTH, TMA, RING, HIDDEN_STAGES, D, SLICE, PRECISION,
            )  # fmt: skip
        elif d_weight is not None:
            share_item(
                block, index, n_listed, begin, entries,
                n_shares, tiles_done, shares_done,
                hidden, common_factor, hidden_sum,
                ring, ring_source, mean_rows, profile_sums, smoothing_sums, d_weight,
                V, smoothing_factor, softcap,
                ACCUMULATE, ROWS, WIDTH, RING, D, SLICE, STEP, PRECISION,
            )  # fmt: skip
        turn = tl.atomic_add(ticket, 1)


@triton.jit
def block_sums_kernel(
    hidden,  # (N, D)
    pair_coefficients,  # (blocks, padded) m_ij
    order, relative_upstream, lift, valid_count,
    profile_sums,  # (blocks, D) written: Σ_i m_ij ĝ_i lift_i E_i
    smoothing_sums,  # (blocks, D) written: Σ_i ĝ_i E_i of dropped pairs; None without a softcap
    padded, blocks, BLOCKS: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program sums over all valid tokens for BLOCKS blocks and one slice of D."""
    n_valid = tl.load(valid_count)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    profile_sum = tl.zeros((BLOCKS, SLICE), tl.float32)
    smoothing_sum = tl.zeros((BLOCKS, SLICE), tl.float32)
    known_block = tl.minimum(block, blocks - 1).to(tl.int64)
    coefficient_pointers = pair_coefficients + known_block[:, None] * padded
    # Indices are read one step ahead, so that the gathers they lead to can be pipelined.
    source = tl.load(order + tl.arange(0, STEP), mask=tl.arange(0, STEP) < n_valid, other=0)
    for start in range(0, n_valid, STEP):
        token = start + tl.arange(0, STEP)
        is_token = token < n_valid
        # They are 0 past the last token.
        coefficient_tile = tl.load(coefficient_pointers + token[None, :])
        inside = is_token[:, None]
        if D % SLICE != 0:
            inside = inside & (column < D)[None, :]
        state_pointers = hidden + source.to(tl.int64)[:, None] * D + column[None, :]
        states = tl.load(state_pointers, mask=inside, other=0.0)
        dropped = is_dropped(coefficient_tile)
        if relative_upstream is not None:
            token_upstream = tl.load(relative_upstream + token, mask=is_token, other=0.0)[None, :]
            coefficient_tile = coefficient_tile.to(tl.float32) * token_upstream
            dropped *= token_upstream
        if lift is not None:
            token_lift = tl.load(lift + token, mask=is_token, other=0.0)[None, :]
            coefficient_tile = coefficient_tile.to(tl.float32) * token_lift
        profile_sum = tl.dot(
            coefficient_tile.to(states.dtype), states, profile_sum, input_precision=PRECISION
        )
        if smoothing_sums is not None:
            smoothing_sum = tl.dot(
                dropped.to(states.dtype), states, smoothing_sum, input_precision=PRECISION
            )
        source = tl.load(order + token + STEP, mask=token + STEP < n_valid, other=0)
    inside = (block < blocks)[:, None] & (column < D)[None, :]
    at = block.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(profile_sums + at, profile_sum, mask=inside)
    if smoothing_sums is not None:
        tl.store(smoothing_sums + at, smoothing_sum, mask=inside)


@triton.jit(do_not_specialize=["n_order"])
def filtered_hidden_kernel(
    pair_coefficients,  # (blocks, padded) m_ij
    order, relative_upstream, lift, common_factor, valid_count,
    d_hidden_sums,  # (·, D); its first `padded` rows are sums of R C over listed pairs, then W, H
    profile_products,  # (blocks, D) W
    smoothing_products,  # (blocks, D) H of each block; None without a softcap
    smoothing_products_total,  # (D,) H of all blocks
    out,  # (N, D) written: dE
    n_order, padded, blocks,
    smoothing_factor,  # κ
    ROWS: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program finishes dE of ROWS tokens and one slice of D: the sums over listed pairs, the
    coefficients m of drawn and dropped pairs times their blocks' W, and the smoothing term."""
    n_valid = tl.load(valid_count)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    is_column = column < D
    sums = tl.zeros((ROWS, SLICE), tl.float32)
    smoothing_term = tl.zeros((ROWS, SLICE), tl.float32)
    dtype = out.dtype.element_ty
    if tl.program_id(0) * ROWS < n_valid:
        for start in range(0, blocks, STEP):
            block = start + tl.arange(0, STEP)
            is_block = block < blocks
            block_start = block.to(tl.int64)[:, None] * padded
            coefficient_pointers = pair_coefficients + block_start + token[None, :]
            coefficient_tile = tl.load(coefficient_pointers, mask=is_block[:, None], other=0.0)
            at = block.to(tl.int64)[:, None] * D + column[None, :]
            inside = is_block[:, None] & is_column[None, :]
            w_tile = tl.load(profile_products + at, mask=inside, other=0.0)
            sums = tl.dot(
                tl.trans(coefficient_tile).to(dtype), w_tile, sums, input_precision=PRECISION
            )
            if smoothing_products is not None:
                h_tile = tl.load(smoothing_products + at, mask=inside, other=0.0)
                dropped = is_dropped(tl.trans(coefficient_tile))
                smoothing_term = tl.dot(
                    dropped.to(dtype), h_tile, smoothing_term, input_precision=PRECISION
                )
        if lift is not None:
            sums *= tl.load(lift + token, mask=token < n_valid, other=0.0)[:, None]
        if smoothing_products is not None:
            sums -= smoothing_term * smoothing_factor
        else:
            total_product = tl.load(smoothing_products_total + column, mask=is_column, other=0.0)
            sums -= (total_product * smoothing_factor)[None, :]
        if relative_upstream is not None:
            sums *= tl.load(relative_upstream + token, mask=token < n_valid, other=0.0)[:, None]
        inside = (token < n_valid)[:, None] & is_column[None, :]
        sum_pointers = d_hidden_sums + token.to(tl.int64)[:, None] * D + column[None, :]
        sums += tl.load(sum_pointers, mask=inside, other=0.0)
        sums = tl.where((token < n_valid)[:, None], sums * tl.load(common_factor), 0.0)
    is_known = token < n_order  # masked tokens come last, and their dE is 0
    source = tl.load(order + token, mask=is_known, other=0).to(tl.int64)
    out_pointers = out + source[:, None] * D + column[None, :]
    tl.store(out_pointers, sums.to(dtype), mask=is_known[:, None] & is_column[None, :])

"""One kernel that works through the backward's queue: tiles of listed pairs, slices of dC.

Items are taken in order by a ticket and only wait for items before them, so the kernel cannot
lock up however few of its programs run at a time, and a bounded ring holds S between the two.
"""

import triton
import triton.language as tl

from smoothce.triton.logits import base2_logits, classifier, slope


@triton.jit
def wait_for(flag, value):
    """Spin until the counter reaches value; what was written before it did is then visible."""
    seen = tl.atomic_add(flag, 0, sem="acquire")
    while seen < value:
        seen = tl.atomic_add(flag, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def signal(flag):
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")


@triton.jit
def pair_tile(
    j,
    index,
    E,
    c_desc,
    c_wide,
    bias,
    order,
    labels,
    lse,
    token,
    rows,
    mass,
    kept,
    first,
    owner,
    readers,
    tiles_done,
    slices_done,
    ring,
    ring_rows,
    profile,
    uniform,
    d_hidden,
    mean_offset,
    stride_e,
    stride_c,
    padded,
    blocks,
    V,
    smoothing,
    scale,
    cap,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    RING: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NEED_HIDDEN: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S of up to ROWS tokens of block j: into the ring for dC, times C into dE."""
    n = tl.load(kept + j)
    tile = tl.load(first + j) + index
    slot = tile % RING
    if NEED_WEIGHT:  # noqa: SIM102 (compile-time)
        if tile >= RING:
            before = tl.load(owner + tile - RING)
            wait_for(slices_done + before, tl.load(readers + before))
    k = index * ROWS + tl.arange(0, ROWS)
    real = k < n
    r = tl.load(rows + j.to(tl.int64) * padded + k, mask=real, other=0).to(tl.int32)
    source = tl.load(order + r, mask=real, other=0)
    # rows past the kept ones read the mean hidden state, at its distance from `hidden`
    offset = tl.where(real, source.to(tl.int64) * stride_e, mean_offset)
    offset = tl.multiple_of(offset, 8) if ALIGNED else offset
    v = j * WIDTH + tl.arange(0, WIDTH)
    o_d = tl.arange(0, DEPTH)
    p_e = E + offset[:, None] + o_d[None, :]
    x = tl.zeros((ROWS, WIDTH), tl.float32)
    for d in range(0, D, DEPTH):
        if D % DEPTH == 0:
            e = tl.load(p_e + d)
        else:
            e = tl.load(p_e + d, mask=(d + o_d < D)[None, :], other=0.0)
        c = classifier(c_desc, stride_c, j * WIDTH, d, V, D, WIDTH, DEPTH, TMA)
        x = tl.dot(e, tl.trans(c), x, input_precision=PRECISION)
    x = base2_logits(x, bias, v, V, scale, cap, HAS_BIAS, SOFTCAP)
    if RAGGED:
        x = tl.where((v < V)[None, :], x, -float("inf"))
    total = tl.load(lse + r, mask=real, other=0.0)
    tail = (index + 1) * ROWS > n
    if tail:
        # the profile's row is a softmax within the block, and 0 where a -inf bias closes all of it
        top = tl.max(x, 1)
        base = tl.where(top == -float("inf"), 0.0, top)
        own = base + tl.log2(tl.sum(tl.exp2(x - base[:, None]), 1))
        own = tl.where(top == -float("inf"), float("inf"), own)
        total = tl.where(real, total, own)
    y = tl.load(labels + r, mask=real, other=-1)
    s = tl.exp2(x - total[:, None])
    # w from (1 − w) P and this P, so that w P and the low-rank part add up to P exactly
    low = tl.load(mass + j.to(tl.int64) * padded + r, mask=real, other=0.0).to(tl.float32)
    s *= (1.0 - low / tl.maximum(tl.sum(s, 1), 1e-30))[:, None]
    s = tl.where(y[:, None] == v[None, :], s - (1.0 - smoothing), s)
    f = slope(x, scale, cap, SOFTCAP)
    if SOFTCAP:
        # with a softcap the uniform term is not the same for all tokens, so kept pairs carry theirs
        s = tl.where(real[:, None], s - smoothing / V, s)
    is_uniform = k == n + 1
    s = tl.where(is_uniform[:, None], 1.0, s) * f
    if PER_TOKEN:
        s *= tl.load(token + r, mask=real, other=1.0)[:, None]
    s = tl.where((k < n + 2)[:, None], s, 0.0)
    if RAGGED:
        s = tl.where((v < V)[None, :], s, 0.0)
    if tail:
        if (index * ROWS <= n) & (n < (index + 1) * ROWS):
            tl.store(profile + v, tl.sum(tl.where((k == n)[:, None], s, 0.0), 0), mask=v < V)
        if (index * ROWS <= n + 1) & (n + 1 < (index + 1) * ROWS):
            tl.store(uniform + v, tl.sum(tl.where(is_uniform[:, None], s, 0.0), 0), mask=v < V)
    s = s.to(E.dtype.element_ty)
    if NEED_WEIGHT:
        at = slot * ROWS + tl.arange(0, ROWS)
        tl.store(ring_rows + at, source)
        tl.store(ring + at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], s)
    signal(tiles_done + j)
    if NEED_HIDDEN:
        # without a softcap every block adds to the same uniform direction
        even = padded + blocks + j if SOFTCAP else padded + blocks
        target = tl.where(real, r, tl.where(is_uniform, even, padded + j))
        o_s = tl.arange(0, SLICE)
        p_h = d_hidden + target.to(tl.int64)[:, None] * D + o_s[None, :]
        inside = (k < n + 2)[:, None]
        for d in tl.range(0, D, SLICE, num_stages=WIDE_STAGES):
            c = classifier(c_wide, stride_c, j * WIDTH, d, V, D, WIDTH, SLICE, TMA)
            part = tl.dot(s, c, input_precision=PRECISION)
            tl.atomic_add(p_h + d, part, mask=inside & (d + o_s < D)[None, :], sem="relaxed")


@triton.jit
def weight_share(
    j,
    index,
    E,
    rank_one,
    lean,
    rows_sum,
    top,
    kept,
    first,
    readers,
    tiles_done,
    slices_done,
    ring,
    ring_rows,
    profile,
    uniform,
    d_weight,
    stride_e,
    V,
    smoothing,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    STEP: tl.constexpr,
    RING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dC[block j, this item's share of D], written once."""
    n = tl.load(kept + j)
    begin = tl.load(first + j)
    share = tl.load(readers + j)
    wait_for(tiles_done + j, (n + 2 + ROWS - 1) // ROWS)
    v = j * WIDTH + tl.arange(0, WIDTH)
    o_v = tl.arange(0, WIDTH)
    o_k = tl.arange(0, STEP)
    q = tl.load(profile + v, mask=v < V, other=0.0)
    f = tl.load(uniform + v, mask=v < V, other=0.0) * (smoothing / V)
    factor = tl.load(top)
    n_slices: tl.constexpr = (D + SLICE - 1) // SLICE
    for i in range(index * n_slices // share, (index + 1) * n_slices // share):
        o_d = i * SLICE + tl.arange(0, SLICE)
        m_d = o_d < D
        acc = tl.zeros((WIDTH, SLICE), tl.float32)
        # indices are read one step ahead, so that the gathers they lead to can be pipelined
        source = tl.load(ring_rows + (begin % RING) * ROWS + o_k, mask=o_k < n, other=0)
        for k in range(0, n, STEP):
            at = ((begin + k // ROWS) % RING) * ROWS + k % ROWS + o_k
            s = tl.load(ring + at[:, None] * WIDTH + o_v[None, :])
            m_e = (k + o_k < n)[:, None]
            if D % SLICE != 0:
                m_e = m_e & m_d[None, :]
            p_e = E + source.to(tl.int64)[:, None] * stride_e + o_d[None, :]
            e = tl.load(p_e, mask=m_e, other=0.0)
            acc = tl.dot(tl.trans(s), e, acc, input_precision=PRECISION)
            after = k + STEP
            at = ((begin + after // ROWS) % RING) * ROWS + after % ROWS + o_k
            source = tl.load(ring_rows + at, mask=after + o_k < n, other=0)
        low = tl.load(rank_one + j.to(tl.int64) * D + o_d, mask=m_d, other=0.0)
        if SOFTCAP:
            flat = tl.load(lean + j.to(tl.int64) * D + o_d, mask=m_d, other=0.0)
        else:
            flat = tl.load(rows_sum + o_d, mask=m_d, other=0.0)
        acc = acc + q[:, None] * low[None, :] - f[:, None] * flat[None, :]
        acc = acc * factor
        p_w = d_weight + v.to(tl.int64)[:, None] * D + o_d[None, :]
        m_w = (v < V)[:, None] & m_d[None, :]
        if ACCUMULATE:
            acc += tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)
        tl.store(p_w, acc.to(d_weight.dtype.element_ty), mask=m_w)
    signal(slices_done + j)


@triton.jit(do_not_specialize=["mean_offset"])
def queue_kernel(
    items,
    total,
    ticket,
    E,
    c_desc,
    c_wide,
    bias,
    order,
    labels,
    lse,
    token,
    top,
    rows,
    mass,
    kept,
    first,
    owner,
    readers,
    tiles_done,
    slices_done,
    ring,
    ring_rows,
    profile,
    uniform,
    rank_one,
    lean,
    rows_sum,
    d_hidden,
    d_weight,
    mean_offset: tl.int64,
    stride_e,
    stride_c,
    padded,
    blocks,
    V,
    smoothing,
    scale,
    cap,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    STEP: tl.constexpr,
    RING: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NEED_HIDDEN: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take items in order until none is left; no item waits for a later one."""
    last = tl.load(total)
    turn = tl.atomic_add(ticket, 1)
    while turn < last:
        item = tl.load(items + turn)
        j = item >> 14
        index = (item >> 2) & 4095
        if item & 3 == 0:
            pair_tile(
                j,
                index,
                E,
                c_desc,
                c_wide,
                bias,
                order,
                labels,
                lse,
                token,
                rows,
                mass,
                kept,
                first,
                owner,
                readers,
                tiles_done,
                slices_done,
                ring,
                ring_rows,
                profile,
                uniform,
                d_hidden,
                mean_offset,
                stride_e,
                stride_c,
                padded,
                blocks,
                V,
                smoothing,
                scale,
                cap,
                D,
                ALIGNED,
                ROWS,
                WIDTH,
                DEPTH,
                SLICE,
                RING,
                WIDE_STAGES,
                HAS_BIAS,
                SOFTCAP,
                RAGGED,
                PER_TOKEN,
                NEED_HIDDEN,
                NEED_WEIGHT,
                TMA,
                PRECISION,
            )
        else:
            if NEED_WEIGHT:
                weight_share(
                    j,
                    index,
                    E,
                    rank_one,
                    lean,
                    rows_sum,
                    top,
                    kept,
                    first,
                    readers,
                    tiles_done,
                    slices_done,
                    ring,
                    ring_rows,
                    profile,
                    uniform,
                    d_weight,
                    stride_e,
                    V,
                    smoothing,
                    D,
                    ROWS,
                    WIDTH,
                    SLICE,
                    STEP,
                    RING,
                    SOFTCAP,
                    ACCUMULATE,
                    PRECISION,
                )
        turn = tl.atomic_add(ticket, 1)

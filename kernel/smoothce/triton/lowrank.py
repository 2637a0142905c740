"""The low-rank products of the filtered backward, over the plan's (token, block) coefficients."""

import triton
import triton.language as tl


@triton.jit
def block_sums_kernel(
    E,
    mass,
    order,
    token,
    count,
    rank_one,
    lean,
    stride_e,
    padded,
    blocks,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    SLICE: tl.constexpr,
    STEP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_i m_ij g_i E_i of WIDE blocks and one slice of D; `lean`: with 1 for a dropped pair."""
    n = tl.load(count)
    j = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    o_d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    acc = tl.zeros((WIDE, SLICE), tl.float32)
    flat = tl.zeros((WIDE, SLICE), tl.float32)
    p_m = mass + tl.minimum(j, blocks - 1).to(tl.int64)[:, None] * padded
    # indices are read one step ahead, so that the gathers they lead to can be pipelined
    source = tl.load(order + tl.arange(0, STEP), mask=tl.arange(0, STEP) < n, other=0)
    for i in range(0, n, STEP):
        o_i = i + tl.arange(0, STEP)
        inside = o_i < n
        p = tl.load(p_m + o_i[None, :])  # zero past the last token
        m_e = inside[:, None]
        if D % SLICE != 0:
            m_e = m_e & (o_d < D)[None, :]
        p_e = E + source.to(tl.int64)[:, None] * stride_e + o_d[None, :]
        e = tl.load(p_e, mask=m_e, other=0.0)
        if PER_TOKEN | SOFTCAP | (p.dtype != e.dtype):
            w = p.to(tl.float32)
            one = tl.where(w > 0.0, 1.0, 0.0)
            if PER_TOKEN:
                g = tl.load(token + o_i, mask=inside, other=0.0)[None, :]
                w *= g
                one *= g
            acc = tl.dot(w.to(e.dtype), e, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(p, e, acc, input_precision=PRECISION)
        if SOFTCAP:
            flat = tl.dot(one.to(e.dtype), e, flat, input_precision=PRECISION)
        source = tl.load(order + o_i + STEP, mask=o_i + STEP < n, other=0)
    m_o = (j < blocks)[:, None] & (o_d < D)[None, :]
    o = j.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(rank_one + o, acc, mask=m_o)
    if SOFTCAP:
        tl.store(lean + o, flat, mask=m_o)


@triton.jit(do_not_specialize=["n_order"])
def hidden_kernel(
    mass,
    order,
    token,
    count,
    top,
    acc,
    profiles,
    evens,
    flat,
    out,
    n_order,
    padded,
    blocks,
    stride_o,
    smoothing,
    V,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    STEP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dE of ROWS tokens and one slice of D: kept pairs' sums, dropped mass, uniform term."""
    n = tl.load(count)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    m_d = o_d < D
    low = tl.zeros((ROWS, SLICE), tl.float32)
    even = tl.zeros((ROWS, SLICE), tl.float32)
    dtype = out.dtype.element_ty
    if tl.program_id(0) * ROWS < n:
        for j in range(0, blocks, STEP):
            o_j = j + tl.arange(0, STEP)
            m_j = o_j < blocks
            p = tl.load(
                mass + o_j.to(tl.int64)[:, None] * padded + r[None, :],
                mask=m_j[:, None],
                other=0.0,
            )
            o_w = o_j.to(tl.int64)[:, None] * D + o_d[None, :]
            m_w = m_j[:, None] & m_d[None, :]
            w = tl.load(profiles + o_w, mask=m_w, other=0.0)
            low = tl.dot(tl.trans(p).to(dtype), w, low, input_precision=PRECISION)
            if SOFTCAP:
                h = tl.load(evens + o_w, mask=m_w, other=0.0)
                one = tl.where(tl.trans(p).to(tl.float32) > 0.0, 1.0, 0.0)
                even = tl.dot(one.to(dtype), h, even, input_precision=PRECISION)
        if SOFTCAP:
            low -= even * (smoothing / V)
        else:
            low -= (tl.load(flat + o_d, mask=m_d, other=0.0) * (smoothing / V))[None, :]
        if PER_TOKEN:
            low *= tl.load(token + r, mask=r < n, other=0.0)[:, None]
        m_a = (r < n)[:, None] & m_d[None, :]
        low += tl.load(acc + r.to(tl.int64)[:, None] * D + o_d[None, :], mask=m_a, other=0.0)
        low = tl.where((r < n)[:, None], low * tl.load(top), 0.0)
    known = r < n_order
    source = tl.load(order + r, mask=known, other=0).to(tl.int64)
    p_o = out + source[:, None] * stride_o + o_d[None, :]
    tl.store(p_o, low.to(dtype), mask=known[:, None] & m_d[None, :])

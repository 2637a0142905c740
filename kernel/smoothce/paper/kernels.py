"""Forward and backward tiles of Algorithm 1, and their launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.options import Options
from smoothce.triton.tiles import INTERPRETED

TILE = (
    {"ROWS": 16, "WIDTH": 16, "DEPTH": 16}
    if INTERPRETED
    else {"ROWS": 128, "WIDTH": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 3}
)


@triton.jit
def logits_tile(E, C, r, v, N, V, D, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    p_e = E + tl.minimum(r, N - 1).to(tl.int64)[:, None] * D
    p_c = C + tl.minimum(v, V - 1).to(tl.int64)[:, None] * D
    z = tl.zeros((ROWS, WIDTH), tl.float32)
    for d in range(0, D, DEPTH):
        o_d = d + tl.arange(0, DEPTH)
        e = tl.load(p_e + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
        c = tl.load(p_c + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
        z = tl.dot(e, tl.trans(c), z, input_precision="ieee")
    return z


@triton.jit
def acquire(lock):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.debug_barrier()


@triton.jit
def release(lock):
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def forward_kernel(
    E,
    C,
    labels,
    lse,
    rest,
    mean_logit,
    locks,
    N,
    V,
    D,
    smoothing,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile: its log-sum-exp, target logit and Σ z join those of its tokens under a lock."""
    n_rows = tl.cdiv(N, ROWS)
    i = tl.program_id(0) % n_rows
    j = tl.program_id(0) // n_rows
    r = i * ROWS + tl.arange(0, ROWS)
    v = j * WIDTH + tl.arange(0, WIDTH)
    z = logits_tile(E, C, r, v, N, V, D, ROWS, WIDTH, DEPTH)
    inside = (v < V)[None, :]
    known = r < N
    y = tl.load(labels + r, mask=known, other=-1)
    share = tl.where(y[:, None] == v[None, :], 1.0 - smoothing, 0.0) + smoothing / V
    linear = tl.sum(tl.where(inside, z * share, 0.0), 1)
    column = tl.sum(tl.where(known[:, None], z, 0.0), 0) / N
    tl.atomic_add(mean_logit + v, column, mask=v < V)
    z = tl.where(inside, z, -float("inf"))
    top = tl.max(z, 1)
    part = top + tl.log(tl.sum(tl.exp(z - top[:, None]), 1))
    acquire(locks + i)
    old = tl.load(lse + r, mask=known, other=0.0)
    high = tl.maximum(old, part)
    new = high + tl.log(tl.exp(old - high) + tl.exp(part - high))
    tl.store(lse + r, new, mask=known)
    tl.store(rest + r, tl.load(rest + r, mask=known, other=0.0) + linear, mask=known)
    release(locks + i)


@triton.jit
def backward_kernel(
    E,
    C,
    labels,
    lse,
    upstream,
    order,
    d_hidden,
    d_weight,
    locks,
    N,
    V,
    D,
    smoothing,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SORTED: tl.constexpr,
):
    """One tile's dlogits, and unless all are below eps their products into dE and dC."""
    n_rows = tl.cdiv(N, ROWS)
    n_columns = tl.cdiv(V, WIDTH)
    i = tl.program_id(0) % n_rows
    # programs that run together are far apart in the vocabulary too: few wait for the same lock
    j = (tl.program_id(0) // n_rows + i * tl.maximum(n_columns // n_rows, 1)) % n_columns
    r = i * ROWS + tl.arange(0, ROWS)
    o_v = j * WIDTH + tl.arange(0, WIDTH)
    v = tl.load(order + o_v, mask=o_v < V, other=V) if SORTED else o_v
    z = logits_tile(E, C, r, v, N, V, D, ROWS, WIDTH, DEPTH)
    known = r < N
    y = tl.load(labels + r, mask=known, other=-1)
    s = tl.exp(z - tl.load(lse + r, mask=known, other=0.0)[:, None]) - smoothing / V
    s = tl.where(y[:, None] == v[None, :], s - (1.0 - smoothing), s)
    g = tl.load(upstream + r, mask=known, other=0.0)
    inside = (known & (g != 0.0))[:, None] & (v < V)[None, :]
    s = tl.where(inside, s, 0.0)
    if tl.max(tl.max(tl.abs(s), 1), 0) >= eps:
        scaled = (s * g[:, None]).to(E.dtype.element_ty)
        p_r = tl.minimum(r, N - 1).to(tl.int64)[:, None] * D
        p_v = tl.minimum(v, V - 1).to(tl.int64)[:, None] * D
        acquire(locks + i)
        for d in range(0, D, DEPTH):
            o_d = d + tl.arange(0, DEPTH)
            c = tl.load(C + p_v + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
            at = d_hidden + p_r + o_d[None, :]
            m_h = known[:, None] & (o_d < D)[None, :]
            part = tl.dot(scaled, c, input_precision="ieee")
            part += tl.load(at, mask=m_h, other=0.0).to(tl.float32)
            tl.store(at, part.to(E.dtype.element_ty), mask=m_h)
        release(locks + i)
        acquire(locks + n_rows + j)
        for d in range(0, D, DEPTH):
            o_d = d + tl.arange(0, DEPTH)
            e = tl.load(E + p_r + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
            at = d_weight + p_v + o_d[None, :]
            m_w = (v < V)[:, None] & (o_d < D)[None, :]
            part = tl.dot(tl.trans(scaled), e, input_precision="ieee")
            part += tl.load(at, mask=m_w, other=0.0).to(tl.float32)
            tl.store(at, part.to(E.dtype.element_ty), mask=m_w)
        release(locks + n_rows + j)


def _locks(n: int, v: int, device: torch.device) -> tuple[Tensor, int]:
    n_rows, n_blocks = triton.cdiv(n, TILE["ROWS"]), triton.cdiv(v, TILE["WIDTH"])
    return torch.zeros(n_rows + n_blocks, device=device, dtype=torch.int32), n_rows * n_blocks


def forward(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (N,), log-sum-exps (N,) in nats and mean logits (V,)."""
    (n, d), v = hidden.shape, len(weight)
    lse = torch.full((n,), -float("inf"), device=hidden.device)
    rest = torch.zeros(n, device=hidden.device)
    mean_logit = torch.zeros(v, device=hidden.device)
    locks, programs = _locks(n, v, hidden.device)
    if n:
        settings = lse, rest, mean_logit, locks, n, v, d, options.label_smoothing
        forward_kernel[(programs,)](hidden, weight, labels, *settings, **TILE)
    return torch.where(options.valid(labels), lse - rest, 0.0), lse, mean_logit


def backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,  # (N,)
    upstream: Tensor,  # (N,) gradient of each token's loss
    order: Tensor | None,  # (V,) the vocabulary sorted by mean logit
    eps: float,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """dE and dC, summed in the inputs' dtype as tiles arrive."""
    (n, d), v = hidden.shape, len(weight)
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    locks, programs = _locks(n, v, hidden.device)
    g = torch.where(options.valid(labels), upstream, 0.0).contiguous()
    if n:
        settings = d_hidden, d_weight, locks, n, v, d, options.label_smoothing, eps
        backward_kernel[(programs,)](
            hidden, weight, labels, lse, g, order, *settings, SORTED=order is not None, **TILE
        )
    return d_hidden, d_weight

"""What the kernels share: a tile of the product, and the way from products to base-2 logits."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(
    e_desc,  # (rows, D) descriptor, or a pointer
    c_desc,  # (V, D) descriptor, or a pointer
    stride_e,
    stride_c,
    row,
    vocab,
    N,
    V,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """E[row : row + ROWS] · C[vocab : vocab + WIDTH]ᵀ in fp32; past N and V any finite value."""
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    if TMA:
        for k in range(0, D, DEPTH):
            a = e_desc.load([row, k])
            b = c_desc.load([vocab, k])
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    else:
        o_d = tl.arange(0, DEPTH)
        i_e = tl.minimum(row + tl.arange(0, ROWS), N - 1).to(tl.int64)
        i_c = tl.minimum(vocab + tl.arange(0, WIDTH), V - 1).to(tl.int64)
        p_e = e_desc + i_e[:, None] * stride_e + o_d[None, :]
        p_c = c_desc + i_c[:, None] * stride_c + o_d[None, :]
        for k in range(0, D, DEPTH):
            if D % DEPTH == 0:
                a = tl.load(p_e + k)
                b = tl.load(p_c + k)
            else:
                a = tl.load(p_e + k, mask=(k + o_d < D)[None, :], other=0.0)
                b = tl.load(p_c + k, mask=(k + o_d < D)[None, :], other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@triton.jit
def classifier(
    source,  # (V, D) descriptor of (WIDTH, DEPTH) blocks, or a pointer
    stride,
    row,
    column,
    V,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """C[row : row + WIDTH, column : column + DEPTH]; past V any finite value, past D zero."""
    if TMA:
        c = source.load([row, column])
    else:
        o_v = tl.minimum(row + tl.arange(0, WIDTH), V - 1).to(tl.int64)
        o_d = column + tl.arange(0, DEPTH)
        at = source + o_v[:, None] * stride + o_d[None, :]
        if D % DEPTH == 0:  # noqa: SIM108 (compile-time)
            c = tl.load(at)
        else:
            c = tl.load(at, mask=(o_d < D)[None, :], other=0.0)
    return c


@triton.jit
def base2_logits(acc, bias, v, V, scale, cap, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """cap(scale · acc + b) · log2(e); `cap` is in nats."""
    x = acc * (scale * LOG2E)
    if HAS_BIAS:
        x += tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)[None, :] * LOG2E
    if SOFTCAP:
        # tanh(u) = 1 - 2 / (exp(2u) + 1), which saturates cleanly at both ends
        x = (1.0 - 2.0 / (tl.exp2(x * (2.0 / cap)) + 1.0)) * (cap * LOG2E)
    return x


@triton.jit
def slope(x, scale, cap, SOFTCAP: tl.constexpr):
    """∂logit/∂product at the base-2 logits x."""
    if SOFTCAP:
        t = x / (cap * LOG2E)
        return scale * (1.0 - t * t)
    return tl.zeros_like(x) + scale

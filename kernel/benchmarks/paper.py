# mypy: allow-untyped-defs
"""The paper's algorithm, to compare with. It is not what one should train with, and not tuned.

This is Algorithm 1 of "Calibrated Language Models and How to Find Them with Label Smoothing",
written anew. In the forward, tiles of logits update the log-sum-exp, the target and the smoothing
term under a lock. The backward recomputes every tile, skips it where no |gradient| reaches 2^-12,
and adds to dE and dC under locks. Sorting the vocabulary by mean logit gathers small gradients into
tiles that can be skipped. A skipped tile takes its softmax mass and its share of −β/V with it, so
gradients are biased.

(Kernels take no Python types, so mypy lets functions without annotations pass in this file.)
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.autograd_tools import once_differentiable
from smoothce.triton.tiles import INTERPRETED

TILE = {"ROWS": 128, "WIDTH": 128, "DEPTH": 32}
if INTERPRETED:
    TILE = {"ROWS": 16, "WIDTH": 16, "DEPTH": 16}
AUTO_EPS = 2.0**-12


@triton.jit
def logits_tile(
    hidden, weight, rows, entries, N, V, D,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """E[rows] · C[entries]ᵀ in fp32; any finite value where a row or an entry is past the end."""
    p_e = hidden + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * D
    p_c = weight + tl.minimum(entries, V - 1).to(tl.int64)[:, None] * D
    z = tl.zeros((ROWS, WIDTH), tl.float32)
    for d in range(0, D, DEPTH):
        column = d + tl.arange(0, DEPTH)
        e = tl.load(p_e + column[None, :], mask=(column < D)[None, :], other=0.0)
        c = tl.load(p_c + column[None, :], mask=(column < D)[None, :], other=0.0)
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
def paper_forward_kernel(
    hidden, weight, labels,  # (N, D), (V, D), (N,)
    lse, label_terms,  # (N,) written: log-sum-exps, and the Σ q z that the loss takes from them
    mean_logit,  # (V,) written: means over all tokens, masked ones too, which only give an order
    locks,  # one for each block of rows
    N, V, D, smoothing,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile: its log-sum-exp and Σ q z join those of its tokens under a lock.

    q is the smoothed label: β/V for each entry, and 1 − β more for the token's own."""
    n_row_blocks = tl.cdiv(N, ROWS)
    row_block = tl.program_id(0) % n_row_blocks
    entry_block = tl.program_id(0) // n_row_blocks
    rows = row_block * ROWS + tl.arange(0, ROWS)
    entries = entry_block * WIDTH + tl.arange(0, WIDTH)
    z = logits_tile(hidden, weight, rows, entries, N, V, D, ROWS, WIDTH, DEPTH)
    is_entry = (entries < V)[None, :]
    is_row = rows < N
    y = tl.load(labels + rows, mask=is_row, other=-1)
    q = tl.where(y[:, None] == entries[None, :], 1.0 - smoothing, 0.0) + smoothing / V
    part_label_term = tl.sum(tl.where(is_entry, z * q, 0.0), 1)
    column_mean = tl.sum(tl.where(is_row[:, None], z, 0.0), 0) / N
    tl.atomic_add(mean_logit + entries, column_mean, mask=entries < V)
    z = tl.where(is_entry, z, -float("inf"))
    largest = tl.max(z, 1)
    part_lse = largest + tl.log(tl.sum(tl.exp(z - largest[:, None]), 1))
    acquire(locks + row_block)
    old_lse = tl.load(lse + rows, mask=is_row, other=0.0)
    # It is −∞ before a token's first tile. part_lse is finite, so that no ∞ − ∞ comes of it.
    high = tl.maximum(old_lse, part_lse)
    new_lse = high + tl.log(tl.exp(old_lse - high) + tl.exp(part_lse - high))
    tl.store(lse + rows, new_lse, mask=is_row)
    old_label_term = tl.load(label_terms + rows, mask=is_row, other=0.0)
    tl.store(label_terms + rows, old_label_term + part_label_term, mask=is_row)
    release(locks + row_block)


@triton.jit
def paper_backward_kernel(
    hidden, weight, labels, lse, d_losses,  # (N, D), (V, D), (N,) each
    order,  # (V,) in which entries are gathered into tiles
    d_hidden, d_weight,  # (N, D), (V, D) written
    locks,  # one for each block of rows, then one for each block of entries
    N, V, D, smoothing, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile's dlogits, and unless all are below eps their products into dE and dC."""
    n_row_blocks = tl.cdiv(N, ROWS)
    n_entry_blocks = tl.cdiv(V, WIDTH)
    row_block = tl.program_id(0) % n_row_blocks
    # Programs that run together are far apart in the vocabulary too: few wait for the same lock.
    shift = row_block * tl.maximum(n_entry_blocks // n_row_blocks, 1)
    entry_block = (tl.program_id(0) // n_row_blocks + shift) % n_entry_blocks
    rows = row_block * ROWS + tl.arange(0, ROWS)
    places = entry_block * WIDTH + tl.arange(0, WIDTH)
    entries = tl.load(order + places, mask=places < V, other=V)
    z = logits_tile(hidden, weight, rows, entries, N, V, D, ROWS, WIDTH, DEPTH)
    is_row = rows < N
    y = tl.load(labels + rows, mask=is_row, other=-1)
    # p − q: a token's dlogits before they are multiplied by the gradient of its loss. The filter
    # looks at these, as the paper's does, and not at the product.
    p_minus_q = tl.exp(z - tl.load(lse + rows, mask=is_row, other=0.0)[:, None]) - smoothing / V
    is_label = y[:, None] == entries[None, :]
    p_minus_q = tl.where(is_label, p_minus_q - (1.0 - smoothing), p_minus_q)
    d_loss = tl.load(d_losses + rows, mask=is_row, other=0.0)
    has_gradient = (is_row & (d_loss != 0.0))[:, None] & (entries < V)[None, :]
    p_minus_q = tl.where(has_gradient, p_minus_q, 0.0)
    if tl.max(tl.max(tl.abs(p_minus_q), 1), 0) >= eps:
        d_logits = (p_minus_q * d_loss[:, None]).to(hidden.dtype.element_ty)
        row_offset = tl.minimum(rows, N - 1).to(tl.int64)[:, None] * D
        entry_offset = tl.minimum(entries, V - 1).to(tl.int64)[:, None] * D
        acquire(locks + row_block)
        for d in range(0, D, DEPTH):
            column = d + tl.arange(0, DEPTH)
            is_column = (column < D)[None, :]
            c = tl.load(weight + entry_offset + column[None, :], mask=is_column, other=0.0)
            at = d_hidden + row_offset + column[None, :]
            inside = is_row[:, None] & is_column
            part = tl.dot(d_logits, c, input_precision="ieee")
            part += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, part.to(hidden.dtype.element_ty), mask=inside)
        release(locks + row_block)
        acquire(locks + n_row_blocks + entry_block)
        for d in range(0, D, DEPTH):
            column = d + tl.arange(0, DEPTH)
            is_column = (column < D)[None, :]
            e = tl.load(hidden + row_offset + column[None, :], mask=is_column, other=0.0)
            at = d_weight + entry_offset + column[None, :]
            inside = (entries < V)[:, None] & is_column
            part = tl.dot(tl.trans(d_logits), e, input_precision="ieee")
            part += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, part.to(hidden.dtype.element_ty), mask=inside)
        release(locks + n_row_blocks + entry_block)


class PaperLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        smoothing: float,
        eps: float,
        sort: bool,
        ignore_index: int,
    ) -> Tensor:
        n_tokens, d = hidden.shape
        vocabulary = len(weight)
        device = hidden.device
        is_valid = labels != ignore_index
        lse = torch.full((n_tokens,), -float("inf"), device=device)
        label_terms = torch.zeros_like(lse)
        mean_logit = torch.zeros(vocabulary, device=device)
        row_blocks = triton.cdiv(n_tokens, TILE["ROWS"])
        entry_blocks = triton.cdiv(vocabulary, TILE["WIDTH"])
        locks = torch.zeros(row_blocks + entry_blocks, device=device, dtype=torch.int32)
        if n_tokens:
            paper_forward_kernel[(row_blocks * entry_blocks,)](
                hidden=hidden,
                weight=weight,
                labels=labels,
                lse=lse,
                label_terms=label_terms,
                mean_logit=mean_logit,
                locks=locks,
                N=n_tokens,
                V=vocabulary,
                D=d,
                smoothing=smoothing,
                num_warps=8,
                **TILE,
            )
        order = torch.arange(vocabulary, device=device)
        if sort:
            order = mean_logit.argsort()
        share_of_mean = is_valid / is_valid.sum().clamp(min=1)
        ctx.smoothing = smoothing
        ctx.eps = eps
        ctx.save_for_backward(hidden, weight, labels, lse, order.int(), share_of_mean)
        return torch.where(is_valid, lse - label_terms, 0.0) @ share_of_mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, order, share_of_mean = ctx.saved_tensors
        n_tokens, d = hidden.shape
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight)
        row_blocks = triton.cdiv(n_tokens, TILE["ROWS"])
        entry_blocks = triton.cdiv(len(weight), TILE["WIDTH"])
        locks = torch.zeros(row_blocks + entry_blocks, device=hidden.device, dtype=torch.int32)
        if n_tokens:
            paper_backward_kernel[(row_blocks * entry_blocks,)](
                hidden=hidden,
                weight=weight,
                labels=labels,
                lse=lse,
                d_losses=(share_of_mean * d_mean).contiguous(),
                order=order,
                d_hidden=d_hidden,
                d_weight=d_weight,
                locks=locks,
                N=n_tokens,
                V=len(weight),
                D=d,
                smoothing=ctx.smoothing,
                eps=ctx.eps,
                num_warps=8,
                **TILE,
            )
        return d_hidden, d_weight, None, None, None, None, None


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    *,
    label_smoothing: float = 0.0,
    filter_eps: float | str | None = "auto",
    sort: bool = True,
    ignore_index: int = -100,
) -> Tensor:  # ()
    """The mean loss as the paper computes it.

    `patch_model(model, loss=functools.partial(loss, label_smoothing=0.1))` puts it into a model
    whose logits have neither a bias nor a cap nor a scale; others raise TypeError in training.

    `sort` orders the vocabulary by mean logit for the backward; `filter_eps` None keeps every tile,
    and "auto" is 2^-12."""
    eps = AUTO_EPS if filter_eps == "auto" else float(filter_eps or 0.0)
    return PaperLoss.apply(
        hidden.contiguous(),
        weight.contiguous(),
        labels.contiguous(),
        float(label_smoothing),
        eps,
        sort,
        ignore_index,
    )

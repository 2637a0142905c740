"""Logits that the forward leaves for the exact backward, and the memory that they may use.

The weight gradient's own memory has nothing in it until its rows are written, so it holds the
logits of the vocabulary's beginning, as many as fit; a workspace, where the caller grants one,
holds those that follow. The backward turns them into dlogits, and recomputes only the rest.

A stored logit is base-2 and minus the target's, in 16 bits (fp32 for fp32 inputs): where the
target is likely, large probabilities are those of small numbers, which 16 bits hold exactly.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoothce.triton.accumulator import borrowed_from
from smoothce.triton.tiles import Tiles, cdiv

TOKENS = 8192  # a super-block of the exact mode
WORKSPACE = 112 * 2**20  # most bytes of dlogits at a time, with the sum of dE where it has its own
SHARE = 0.09  # and at most this share of the two gradients


class Regions(NamedTuple):
    """How one super-block's vocabulary is divided: [0, near), [near, near + far) and the rest."""

    rows: int  # tokens
    chunk: int  # entries whose dlogits are in the workspace at a time
    later: bool  # rows of dE that are written later lend their memory to this super-block's sum
    head: int  # from here on rows of dC do; V: none does
    near: int  # entries stored in the memory of dC
    near_chunk: int  # in pieces of (rows, near_chunk)
    far: int  # entries stored in memory of their own, (N, far)


class Stored(NamedTuple):
    """What the forward leaves."""

    regions: Regions  # of the first super-block
    weight: Tensor | None  # (V, D), the weight gradient to be
    near: Tensor | None  # the same memory as logits, (pieces, rows, near_chunk)
    far: Tensor | None  # (N, far)
    target: Tensor  # (N,) fp32, the target's base-2 logit

    def part(self, tokens: slice) -> "Stored":
        """What there is of a super-block's tokens."""
        near = None if tokens.start else self.near
        far = None if self.far is None else self.far[tokens]
        return self._replace(near=near, far=far, target=self.target[tokens])


def regions(
    n: int,
    shape: tuple[int, int],  # of the weight
    dtype: torch.dtype,
    needs: tuple[bool, bool, bool],  # gradients of hidden, weight and bias
    workspace: int,  # bytes
    tiles: Tiles,
    start: int = 0,  # the super-block's first token
) -> Regions:
    """The division for these inputs: the forward and the backward of one call agree on it."""
    v, d = shape
    size, unit = dtype.itemsize, tiles.width
    rows, end = min(n, TOKENS), cdiv(v, unit) * unit
    total = rows * d * 4 if needs[0] else 0
    space, head = int(min(WORKSPACE, SHARE * (v + n) * d * size)), v
    paid = workspace >= total
    later = not paid and (n - start - rows) * d * size >= total
    if not paid and not later:
        if needs[1] and start == 0:
            head = borrowed_from(rows * d, shape, size, unit)
        if head == v:
            space = max(space - total, space // 4)
    chunk = max(space // (max(rows, 1) * size) // unit, 1) * unit
    chunk = min(chunk, end)
    if start:
        first = regions(n, shape, dtype, needs, workspace, tiles)
        return first._replace(chunk=chunk, later=later, head=v)
    end = min(end, cdiv(head, unit) * unit)
    near = near_chunk = 0
    if needs[1] and rows:
        near = min(head * d // rows, end)
        pieces = max(cdiv(near, chunk), 1)
        near_chunk = near // pieces // unit * unit
        near = pieces * near_chunk
    spare = workspace - total if paid else workspace
    far = min(spare // (max(n, 1) * size) // unit * unit, end - near)
    return Regions(rows, chunk, later, head, near, near_chunk, far)


def room(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    needs: tuple[bool, bool, bool],
    workspace: int,
    tiles: Tiles,
) -> Stored:
    """Memory for the forward to write to."""
    n = len(hidden)
    plan = regions(n, tuple(weight.shape), weight.dtype, needs, workspace, tiles)
    # of 16-bit numbers fp16 has three more bits than bf16, and logits do not need bf16's range
    kind = torch.float32 if hidden.dtype == torch.float32 else torch.float16
    gradient = near = far = None
    if needs[1]:
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if plan.near:
        near = gradient.view(-1)[: plan.near * plan.rows].view(kind)
        near = near.view(-1, plan.rows, plan.near_chunk)
    if plan.far:
        far = torch.empty(n, plan.far, device=hidden.device, dtype=kind)
    target = torch.empty(n, device=hidden.device, dtype=torch.float32)
    return Stored(plan, gradient, near, far, target)


@triton.jit
def store_logits(
    x,  # base-2 logits of a tile
    base,
    source,
    block,
    near,
    near_chunk,
    near_rows,
    far_offset,
    far,
    N,
    WIDTH: tl.constexpr,
):
    """Store the tile where its part of the vocabulary is kept, if it is."""
    v = block * WIDTH
    if v < near + far:
        inside = v < near
        piece = (v // near_chunk).to(tl.int64) * near_rows * near_chunk + v % near_chunk
        offset = tl.multiple_of(tl.where(inside, piece, far_offset + v - near), 16)
        stride = tl.multiple_of(tl.where(inside, near_chunk, far), 16)
        last = tl.where(inside, near_rows, N)
        p = base + offset + source.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        if base.dtype.element_ty == tl.float16:
            x = tl.minimum(tl.maximum(x, -60000.0), 60000.0)
        known = (source >= 0) & (source < last)
        tl.store(p, x.to(base.dtype.element_ty), mask=known[:, None])

"""Where the fp32 sum of dE lives: in memory of its own, or in rows of dC that are written last."""

import math

import torch
from torch import Tensor

from smoothce.triton.tiles import Tiles, cdiv

BORROW_FROM = 2**24  # bytes; a smaller accumulator is simply allocated


def accumulator(
    shape: tuple[int, int],
    d_weight: Tensor | None,  # (V, D) not yet written
    blocks: int,
    tiles: Tiles,
    device: torch.device,
) -> tuple[Tensor, int]:
    """Zeroed fp32 memory for dE, and the first vocabulary block whose dC must wait for it.

    A large accumulator borrows the last rows of the weight gradient's own memory. They are written
    last, from dlogits that are then computed a second time: a few percent of one product."""
    size = math.prod(shape)
    if d_weight is not None:
        v = len(d_weight)
        start = borrowed_from(size, tuple(d_weight.shape), d_weight.element_size(), tiles.width)
        if start < v:
            return borrowed(d_weight[start:], shape), start // tiles.width
    return torch.zeros(shape, device=device), blocks


def borrowed_from(size: int, shape: tuple[int, int], width: int, unit: int) -> int:
    """The first row of a (V, D) gradient of `width` bytes an element that lends its memory to
    `size` fp32 numbers, a multiple of `unit`; V where none should."""
    v, d = shape
    if size * 4 >= BORROW_FROM:
        start = (v - cdiv(size * 4, d * width)) // unit * unit
        if start > v // 2 and start * d * width % 16 == 0:
            return start
    return v


def borrowed(
    rows: Tensor,  # contiguous, not yet written
    shape: tuple[int, int],
) -> Tensor:
    """Zeroed fp32 numbers in the memory of these rows."""
    flat = rows.view(-1)
    flat = flat[: flat.numel() // 2 * 2].view(torch.float32)
    return flat[: math.prod(shape)].zero_().view(shape)

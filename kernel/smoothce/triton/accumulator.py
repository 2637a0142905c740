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
    if d_weight is not None and size * 4 >= BORROW_FROM:
        v, d = d_weight.shape
        width = d_weight.element_size()
        start = (v - cdiv(size * 4, d * width)) // tiles.width * tiles.width
        if start > v // 2 and start * d * width % 16 == 0:
            tail = d_weight.view(-1)[start * d :]
            room = tail[: tail.numel() // 2 * 2].view(torch.float32)[:size]
            return room.zero_().view(shape), start // tiles.width
    return torch.zeros(shape, device=device), blocks

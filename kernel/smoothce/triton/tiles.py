"""Tile shapes: one set for GPUs, one small set for Triton's interpreter."""

import os
from dataclasses import dataclass

import torch
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Tiles:
    """What every launch of one call agrees on.

    `width` is both the forward's vocabulary tile and the block that the filter keeps or skips."""

    rows: int = 128  # tokens a forward tile
    group: int = 12  # such tiles' rows that all programs work on at a time
    width: int = 256  # vocabulary entries a tile
    depth: int = 64  # step along D
    warps: int = 8
    stages: int = 3
    kept_rows: int = 128  # gathered tokens a backward tile
    kept_depth: int = 64
    kept_stages: int = 3
    wide_stages: int = 2  # of the loop over D that takes S to dE
    slice: int = 128  # width along D of a gradient tile
    step: int = 64  # step along tokens of the weight gradient
    wide: int = 128  # vocabulary blocks a low-rank tile
    ring: int = 192  # backward tiles that may wait for their weight gradient
    tma: bool = True  # tensor-memory-accelerator loads, else pointer loads
    precision: str = "ieee"  # of fp32 products


def tiles_for(hidden: torch.Tensor, weight: torch.Tensor) -> Tiles:
    """The tile set for these inputs on this machine."""
    tma = has_tma() and aligned(weight) and hidden.shape[1] * hidden.element_size() % 16 == 0
    if INTERPRETED:
        return Tiles(
            rows=16,
            group=2,
            width=32,
            depth=16,
            kept_rows=16,
            kept_depth=16,
            slice=16,
            step=16,
            wide=16,
            ring=8,
            tma=tma,
        )
    tma = tma and torch.cuda.get_device_capability(hidden.device)[0] == 9
    if hidden.dtype == torch.float32:
        return Tiles(
            rows=64,
            width=128,
            depth=32,
            warps=4,
            kept_rows=64,
            kept_depth=32,
            kept_stages=2,
            slice=64,
            step=32,
            tma=tma,
            precision="tf32x3",
        )
    if tma:
        return Tiles()
    return Tiles(slice=64, tma=False)


def has_tma() -> bool:
    """Whether this Triton has host-made tensor descriptors (3.4 and later)."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401
    except ImportError:
        return False
    return True


def aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read this matrix: unit stride, 16-byte rows and base."""
    size = matrix.element_size()
    return (
        matrix.stride(1) == 1 and matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
    )


def descriptor(matrix: torch.Tensor, block: list[int], tma: bool) -> object:
    """A descriptor of `matrix` for loads of `block`; the matrix itself where there is no TMA."""
    if not tma:
        return matrix
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block)


def programs(device: torch.device) -> int:
    """One program a multiprocessor."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    return triton.cdiv(a, b)

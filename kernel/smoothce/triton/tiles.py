"""How a call's work is cut into tiles, and the steps that several kernels share.

`tiles_for` picks the tile shapes for a GPU and a dtype; every launch of one call follows them. The
`@triton.jit` functions at the end are steps of the kernels in `forward`, `dproduct` and
`filter.kernels`: a tile of the product E Cᵀ, its base-2 logits, and their slope under a softcap.
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4 has none, and then no call uses the TMA
    TensorDescriptor = None  # type: ignore[assignment, misc]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2E = tl.constexpr(1.4426950408889634)
# Whether this PyTorch has matrix products of 16-bit factors in fp32.
HAS_FP32_OUT = "dtype_out" in torch.ops.aten.addmm.overloads()


@dataclass(frozen=True)
class Tiles:
    """The tile shapes that every launch of one call agrees on."""

    # The product E Cᵀ, of the forward and of the exact backward. `rows` is a tile's tokens in the
    # filter's low-rank product for dE too, and packed tokens are padded to a multiple of it.
    rows: int = 128  # tokens of a tile
    width: int = 256  # vocabulary entries of a tile, and of a block that the filter keeps or skips
    depth: int = 64  # step along D
    group: int = 16  # token tiles that all programs of the forward work on at a time
    warps: int = 8
    stages: int = 3

    # The filtered backward.
    pair_rows: int = 128  # gathered tokens of a tile
    pair_depth: int = 64  # step along D
    pair_stages: int = 3
    hidden_stages: int = 2  # pipeline stages of the loop over D that takes R to dE
    slice: int = 128  # width along D of a gradient's tile
    step: int = 64  # step along what is summed over: tokens for dC, blocks for dE's low-rank part
    low_rank_blocks: int = 128  # vocabulary blocks of a tile of the low-rank products
    ring: int = 192  # tiles of R that may wait for their weight gradient

    tma: bool = True  # whether loads go through the tensor memory accelerator, or else by pointers
    precision: str = "ieee"  # of fp32 products

    @property
    def product_settings(self) -> dict[str, int | bool | str]:
        """The settings of a kernel that computes tiles of E Cᵀ."""
        return {
            "ROWS": self.rows,
            "WIDTH": self.width,
            "DEPTH": self.depth,
            "TMA": self.tma,
            # Kernels loop over tiles with `(tl.range if FLATTEN else range)(…, flatten=True)`. With
            # the TMA that is `tl.range`; there `flatten` was measured. Elsewhere it is `range`,
            # since the Triton of such a GPU may be too old for `flatten`: Triton compiles the call
            # and drops a keyword that `range` does not know. Python itself would refuse it, so the
            # interpreter gets `tl.range`.
            "FLATTEN": self.tma or INTERPRETED,
            "PRECISION": self.precision,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def tiles_for(hidden: torch.Tensor, weight: torch.Tensor) -> Tiles:
    """Choose the tile shapes for these inputs on this machine."""
    tma = TensorDescriptor is not None and is_aligned(weight) and is_aligned(hidden)
    if INTERPRETED:
        return Tiles(
            rows=16,
            width=32,
            depth=16,
            group=2,
            pair_rows=16,
            pair_depth=16,
            slice=16,
            step=16,
            low_rank_blocks=16,
            ring=8,
            tma=tma,
        )
    return tile_set(hidden.dtype, torch.cuda.get_device_capability(hidden.device), tma)


def tile_set(dtype: torch.dtype, capability: tuple[int, int], tma: bool) -> Tiles:
    """Choose the tile shapes for a GPU of this compute capability.

    A new GPU is added here, in `unsupported` of `smoothce.triton` if it cannot be served, in
    `LIMITS` of tests/kernel/triton/test_shared_memory.py, whose bytes and `little_memory` here say
    the same, and in the table of kernel/README.md. One that is in none of these gets the large
    tiles. The TMA is used on 9.0 alone, where these tiles were measured with it; 10.0 and 12.0 have
    one too, but have not been run.

    What limits them is the shared memory of a program (a block of threads): 227 KB on 9.0 and 10.0,
    163 KB on 8.0, and 99 KB on 8.6, 8.9 and 12.0 (`tests/kernel/triton/test_shared_memory.py`)."""
    tma = tma and capability[0] == 9
    little_memory = capability[0] == 12 or capability in ((8, 6), (8, 9))
    if dtype == torch.float32:
        return Tiles(
            rows=64,
            width=128,
            depth=32,
            warps=4,
            pair_rows=32 if little_memory else 64,
            pair_depth=32,
            pair_stages=2,
            slice=64,
            step=32,
            tma=tma,
            precision="tf32x3",
        )
    if little_memory:
        return Tiles(pair_rows=64, pair_stages=2, slice=64, tma=False)
    if not tma:
        return Tiles(slice=64, tma=False)
    return Tiles()


def is_aligned(matrix: torch.Tensor) -> bool:
    """Tell whether the TMA can read this contiguous matrix, in whole 16-byte pieces."""
    return matrix.shape[1] * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def descriptor(
    matrix: torch.Tensor, block: list[int], tma: bool
) -> "torch.Tensor | TensorDescriptor":
    """Return what `load_tile` reads: a descriptor of `matrix` for loads of `block`, or without TMA
    the matrix itself."""
    return TensorDescriptor.from_tensor(matrix, block) if tma else matrix


def programs(device: torch.device) -> int:
    """Return how many programs run at a time: as many as the GPU has multiprocessors."""
    if device.type != "cuda":  # the interpreter's: few, but more than one
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in fp32, summed in it where this PyTorch can."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    if HAS_FP32_OUT:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def add_matmul_fp32(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to the sums, in fp32."""
    if a.dtype != torch.float32 and a.is_cuda and HAS_FP32_OUT:
        torch.ops.aten.addmm.dtype_out(sums, a, b, torch.float32, out=sums)
    else:
        sums += matmul_fp32(a, b)


@triton.jit
def load_tile(
    source,  # (rows, D): a descriptor of (ROWS, DEPTH) tiles, or a pointer
    row, column, rows,
    D: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """source[row : row + ROWS, column : column + DEPTH]; past `rows` anything finite, past D 0."""
    if TMA:
        tile = source.load([row, column])
    else:
        tile_rows = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        columns = column + tl.arange(0, DEPTH)
        pointers = source + tile_rows[:, None] * D + columns[None, :]
        if D % DEPTH == 0:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tile


@triton.jit
def product_tile(
    hidden, weight, row, entry, n_rows, V,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """E[row : row + ROWS] · C[entry : entry + WIDTH]ᵀ in fp32, of the n_rows
    of E and the V of C; past either any finite value."""
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for column in range(0, D, DEPTH):
        hidden_tile = load_tile(hidden, row, column, n_rows, D, ROWS, DEPTH, TMA)
        weight_tile = load_tile(weight, entry, column, V, D, WIDTH, DEPTH, TMA)
        sums = tl.dot(hidden_tile, tl.trans(weight_tile), sums, input_precision=PRECISION)
    return sums


@triton.jit
def base2_logits(product, bias, entries, V, scale, softcap):
    """softcap(scale · product + bias) · log2(e); the cap is in nats, or None."""
    logits = product * (scale * LOG2E)
    if bias is not None:
        entry_bias = tl.load(bias + entries, mask=entries < V, other=0.0)
        logits += entry_bias.to(tl.float32)[None, :] * LOG2E
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates cleanly at both ends
        tanh = 1.0 - 2.0 / (tl.exp2(logits * (2.0 / softcap)) + 1.0)
        logits = tanh * (softcap * LOG2E)
    return logits


@triton.jit
def slope(logits, scale, softcap):
    """∂logit/∂product at these base-2 logits: scale · (1 − tanh²) under a softcap."""
    if softcap is not None:
        tanh = logits / (softcap * LOG2E)
        return scale * (1.0 - tanh * tanh)
    return tl.zeros_like(logits) + scale

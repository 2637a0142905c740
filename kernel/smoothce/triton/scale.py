"""Gradients that were made in the forward, times the upstream factor that the backward brings."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    f = tl.load(factor)
    if f != 1.0:  # as it is in `loss.backward()`: then nothing is read
        o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + o, mask=o < size, other=0.0).to(tl.float32) * f
        tl.store(x + o, value.to(x.dtype.element_ty), mask=o < size)


def scale(
    gradient: Tensor,  # contiguous, multiplied in place
    factor: Tensor,  # () fp32
) -> None:
    if gradient.numel():
        grid = (triton.cdiv(gradient.numel(), BLOCK),)
        scale_kernel[grid](gradient, factor, gradient.numel(), BLOCK=BLOCK, num_warps=8)

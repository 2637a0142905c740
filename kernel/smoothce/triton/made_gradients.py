"""Gradients that the forward has made, and the backward's factor that is still to come."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.options import Gradients


@dataclass
class MadeGradients:
    """Gradients of hidden, weight and bias that the forward has made, up to the upstream factor.

    Two ways leave them: `grad_in_forward`, and `filtered` where several super-blocks would need too
    much memory until the backward."""

    gradients: Gradients | None  # None once a backward has taken them


@triton.jit
def scale_kernel(values, factors, size, D: tl.constexpr, BLOCK: tl.constexpr):
    """The values times one factor, or where D is given times one for each row of D numbers."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if D is not None:
        factor = tl.load(factors + places // D, mask=places < size, other=0.0)
        scaled = tl.load(values + places, mask=places < size, other=0.0).to(tl.float32) * factor
        tl.store(values + places, scaled.to(values.dtype.element_ty), mask=places < size)
    else:
        factor = tl.load(factors)
        if factor != 1.0:  # in a plain `loss.backward()` it is 1, and then nothing is read
            scaled = tl.load(values + places, mask=places < size, other=0.0).to(tl.float32) * factor
            tl.store(values + places, scaled.to(values.dtype.element_ty), mask=places < size)


def scale_gradients(
    gradients: Gradients,  # contiguous, multiplied in place
    upstream_loss: Tensor,  # fp32 (), or (N,) where there is a gradient of hidden alone
) -> None:
    """Multiply gradients made in the forward by the upstream factor that the backward brings."""
    factors = upstream_loss.contiguous()
    for gradient in gradients:
        if gradient is None or gradient.numel() == 0:
            continue
        scale_kernel[(cdiv(gradient.numel(), 4096),)](
            values=gradient,
            factors=factors,
            size=gradient.numel(),
            D=gradient.shape[1] if factors.dim() else None,
            BLOCK=4096,
            num_warps=8,
        )

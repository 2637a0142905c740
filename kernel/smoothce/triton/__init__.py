"""The loss in Triton kernels; see kernel/DERIVATION.md for the mathematics."""

import torch
from torch import Tensor

from smoothce.options import Options
from smoothce.triton.function import Loss, filter_statistics

__all__ = ["filter_statistics", "loss", "unsupported"]


@torch.compiler.disable
def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of `reference.loss`; gradients are filtered as `options.filter_eps` says.

    Nothing waits for the device but the exact gradient, for the number of valid tokens alone: it is
    counted before the forward's product, which keeps the device busy meanwhile."""
    hidden, weight = unit_stride(hidden), unit_stride(weight)
    found, lse = Loss.apply(hidden, weight, bias, labels, options, torch.is_grad_enabled())
    return (found, lse) if options.return_lse else found


def unit_stride(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def unsupported(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> str | None:
    """Why these inputs cannot be served, or None."""
    if not hidden.is_cuda:
        return f"the inputs are on {hidden.device.type}, not on a CUDA device"
    if torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if hidden.dtype not in (torch.float32, torch.bfloat16):
        return f"the inputs are {hidden.dtype}"  # fp16 has not the range of dlogits
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return "the bias needs a gradient"
    if len(weight) < 2:
        return "the vocabulary has fewer than 2 entries"
    if hidden.shape[1] < 1:
        return "hidden states have no dimensions"
    if options.logit_scale == 0:
        return "logit_scale is 0"
    return None

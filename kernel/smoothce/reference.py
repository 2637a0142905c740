"""The definition: dense logits in fp32 (fp64 for fp64 inputs), plain autograd. Reference is law."""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce.options import Options


def logits(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> Tensor:  # (N, V)
    """z = cap(scale · E Cᵀ + b), where cap(z) = softcap · tanh(z / softcap)."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    z = F.linear(hidden.to(dtype), weight.to(dtype))
    if options.logit_scale is not None:
        z = z * options.logit_scale
    if bias is not None:
        z = z + bias.to(dtype)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    return z


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:  # () or (N,), and with return_lse the log-sum-exps (N,)
    """logsumexp_v z_v − (1−β) z_y − (β/V) Σ_v z_v per valid token, 0 for the others; reduced."""
    beta = options.label_smoothing
    z = logits(hidden, weight, bias, options)
    valid = options.valid(labels)
    target = labels.where(valid, 0)
    lse = z.logsumexp(-1)
    losses = lse - (1 - beta) * z.gather(1, target[:, None]).squeeze(1)
    if beta:
        losses = losses - beta * z.mean(-1)
    losses = losses.where(valid, 0)
    if options.reduction != "none":
        losses = losses.sum() * options.token_weight(labels, losses.dtype)
    return (losses, lse.where(valid, 0)) if options.return_lse else losses

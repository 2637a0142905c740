"""The definition: dense logits in fp32 (fp64 for fp64 inputs), plain autograd. Reference is law."""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce.options import Inputs, LossOutput


def logits(inputs: Inputs) -> Tensor:  # (N, V)
    """z = cap(scale · E Cᵀ + b), where cap(z) = softcap · tanh(z / softcap)."""
    dtype, cap = torch.promote_types(inputs.hidden.dtype, torch.float32), inputs.options.softcap
    z = F.linear(inputs.hidden.to(dtype), inputs.weight.to(dtype)) * inputs.scale
    if inputs.bias is not None:
        z = z + inputs.bias.to(dtype)
    return z if cap is None else cap * torch.tanh(z / cap)


def loss(inputs: Inputs) -> LossOutput:
    """ω (logsumexp_v z_v − (1−β) z_y − β Σ_v u_v z_v + ζ logsumexp²) per valid token, else 0."""
    options, omega, u = inputs.options, inputs.token_weights, inputs.smoothing_target
    beta = options.label_smoothing
    z, valid = logits(inputs), inputs.valid()
    target = inputs.labels.where(valid, 0)
    lse, chosen = z.logsumexp(-1), z.gather(1, target[:, None]).squeeze(1)
    losses = lse - (1 - beta) * chosen + options.z_loss * lse.square()
    if beta:
        mixed = z.mean(-1) if u is None else torch.where(u > 0, u * z, 0).sum(-1)
        losses = losses - beta * mixed
    losses = (losses if omega is None else omega * losses).where(valid, 0)
    total = losses.sum() * inputs.loss_scale(losses.dtype)
    found = LossOutput(losses if options.reduction == "none" else total, lse.where(valid, 0))
    if not options.return_statistics:
        return found
    z, lse = z.detach(), lse.detach()
    entropy = torch.special.entr((z - lse[:, None]).exp()).sum(1)
    log_probability = chosen.detach() - lse
    return found._replace(
        log_probability=log_probability.where(valid, 0),
        entropy=entropy.where(valid, 0),
        argmax=z.argmax(1).where(valid, -1),
    )


def unsupported(inputs: Inputs) -> str | None:
    return None if inputs.shard is None else "the reference knows no split vocabulary"


def describe(inputs: Inputs) -> None:
    """There is nothing to choose: all logits are held at once."""

"""The definition of the loss: dense logits in fp32 (fp64 for fp64 inputs), and plain autograd.

Every other implementation is tested against this one, and this one against `F.cross_entropy`, for
every option that changes the loss (tests/kernel/test_reference.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce.options import LossCall, LossOutput, accumulation_dtype


def logits(call: LossCall, hidden: Tensor) -> Tensor:  # (N, V), of hidden states (N, D)
    """z = cap(logit_scale · E Cᵀ + b), where cap(z) = softcap · tanh(z / softcap)."""
    dtype = accumulation_dtype(hidden.dtype)
    z = F.linear(hidden.to(dtype), call.weight.to(dtype)) * call.logit_scale
    if call.bias is not None:
        z = z + call.bias.to(dtype)
    softcap = call.options.softcap
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z


def loss(call: LossCall) -> LossOutput:
    """ω (logsumexp_v z_v − (1−β) z_y − β Σ_v u_v z_v + ζ logsumexp²) per valid token, else 0."""
    options = call.options
    smoothing = options.label_smoothing
    valid = call.valid()
    # A masked token's hidden state may hold anything, also NaN, which 0 times does not undo.
    z = logits(call, call.hidden.where(valid[:, None], 0))
    lse = z.logsumexp(-1)
    label_logit = _logit_of(z, call.labels.where(valid, 0))
    losses = lse - (1 - smoothing) * label_logit + options.z_loss * lse.square()
    if smoothing != 0:
        losses = losses - smoothing * _smoothing_logit(z, call.smoothing_target)
    if call.token_weights is not None:
        losses = call.token_weights * losses
    losses = losses.where(valid, 0)
    if options.reduction != "none":
        losses = losses.sum() * call.loss_scale(losses.dtype)
    output = LossOutput(losses, lse.where(valid, 0))
    if not options.return_statistics:
        return output
    return _with_statistics(output, z.detach(), lse.detach(), label_logit.detach(), valid)


def _with_statistics(
    output: LossOutput, z: Tensor, lse: Tensor, label_logit: Tensor, valid: Tensor
) -> LossOutput:
    log_probability = label_logit - lse
    entropy = torch.special.entr((z - lse[:, None]).exp()).sum(1)
    return output._replace(
        log_probability=log_probability.where(valid, 0),
        entropy=entropy.where(valid, 0),
        argmax=z.argmax(1).where(valid, -1),
    )


def _logit_of(z: Tensor, entries: Tensor) -> Tensor:  # (N,)
    return z.gather(1, entries[:, None]).squeeze(1)


def _smoothing_logit(z: Tensor, smoothing_target: Tensor | None) -> Tensor:  # (N,)
    """Σ_v u_v z_v, to which a forbidden entry (z = −∞) that has no part in u adds nothing."""
    if smoothing_target is None:
        return z.mean(-1)
    return torch.where(smoothing_target > 0, smoothing_target * z, 0).sum(-1)


def unsupported(call: LossCall) -> str | None:
    return None if call.shard is None else "the reference knows no split vocabulary"


def describe(call: LossCall) -> None:
    """Say nothing: all logits are held at once."""

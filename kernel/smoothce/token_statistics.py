"""What a model says of each token, without its logits in memory."""

import math
from numbers import Real
from typing import TypeGuard

import torch
from torch import Tensor

from smoothce.checks import check_tensors
from smoothce.linear_cross_entropy import linear_cross_entropy
from smoothce.options import TokenStatistics, accumulation_dtype


@torch.no_grad()
def token_statistics(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    labels: Tensor | None = None,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    softcap: float | None = None,
    logit_scale: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    impl: str = "auto",
) -> TokenStatistics:  # each in the shape (...)
    """Log-probability of the label, entropy, log-sum-exp and likeliest entry of each token.

        z_iv = cap(logit_scale · C_v · E_i + b_v) / temperature,    lse_i = logsumexp_v z_iv
        log p_i = z_i,y − lse_i,    H_i = lse_i − Σ_v p_iv z_iv,    argmax_i = argmax_v z_iv

    They are in nats and fp32 (fp64 for fp64 inputs), without a gradient. The caller shifts labels.
    Without labels there is no log-probability. Tokens labeled `ignore_index` cost nothing.
    `linear_cross_entropy(return_statistics=True)` has the same with the loss, for nothing more, and
    explains `impl`.

    Raises ValueError, TypeError or IndexError as `linear_cross_entropy` does; but at another
    temperature than 1 a bias may have any dtype.
    """
    check_tensors(hidden=hidden, weight=weight, bias=bias)
    if not (_is_real_number(temperature) and 0 < temperature < math.inf):
        raise ValueError(f"temperature must be a positive number, not {temperature!r}")
    labels_or_zeros = labels
    if labels_or_zeros is None:
        labels_or_zeros = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        ignore_index = -1  # nothing is masked, also where the caller's `ignore_index` is 0
    if temperature != 1:
        # cap(x) / τ is a cap of softcap / τ on x / τ, and x is a scaled product plus a bias. A
        # number that the loss refuses stays as the caller gave it, so that it is refused by that.
        divisor = float(temperature)
        if _is_real_number(softcap) and softcap > 0:
            softcap = softcap / divisor
        if logit_scale is None:
            logit_scale = 1.0
        if _is_real_number(logit_scale):
            logit_scale = logit_scale / divisor
        if bias is not None:
            bias = bias.to(accumulation_dtype(bias.dtype)) / divisor
    _, statistics = linear_cross_entropy(
        hidden,
        weight,
        labels_or_zeros,
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        return_statistics=True,
        impl=impl,
    )
    if labels is None:
        return statistics._replace(log_probability=None)
    return statistics


def _is_real_number(value: object) -> TypeGuard[float]:
    """Tell whether a value can be divided as a number. Unlike `is_number` this accepts infinity: to
    ask whether a number is finite breaks a graph of `torch.compile` in which it is a symbol."""
    return isinstance(value, Real) and not isinstance(value, bool)

"""What a model says of each token, without its logits in memory."""

import torch
from torch import Tensor

from smoothce.dispatch import check_tensors
from smoothce.linear_cross_entropy import linear_cross_entropy
from smoothce.options import TokenStatistics, is_number


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

    Without a gradient, fp32 (fp64 for fp64 inputs); the caller shifts labels. Tokens labelled
    `ignore_index` cost nothing. `linear_cross_entropy(return_statistics=True)` has them with the
    loss, for nothing more. `impl` is as there.

    Raises ValueError, TypeError or IndexError as `linear_cross_entropy` does.
    """
    check_tensors(hidden=hidden, weight=weight, bias=bias)
    if not (is_number(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, not {temperature!r}")
    targets, tau = labels, float(temperature)
    if labels is None:
        targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        ignore_index = -1
    # z / τ: a cap of c / τ on products times s / τ with a bias of b / τ
    if tau != 1:
        softcap = softcap and softcap / tau
        logit_scale = (1.0 if logit_scale is None else logit_scale) / tau
        if bias is not None:
            bias = bias.to(torch.promote_types(bias.dtype, torch.float32)) / tau
    _, found = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        return_statistics=True,
        impl=impl,
    )
    return found if labels is not None else found._replace(log_probability=None)

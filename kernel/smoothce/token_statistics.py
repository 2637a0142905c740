"""What a model says of each token, without its logits in memory."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from smoothce import chunked, reference
from smoothce.dispatch import autocast, check, check_tensors, choose
from smoothce.options import Options, is_number

NUMBERS = 2**25  # logits at a time on a GPU, where they are chunked


class TokenStatistics(NamedTuple):
    """Of each token, in nats; 0 for those labelled `ignore_index`, whose argmax is -1."""

    log_probability: Tensor | None  # of the label, fp32; None without labels
    entropy: Tensor  # fp32
    lse: Tensor  # fp32
    argmax: Tensor  # int64


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
    `ignore_index` cost nothing. `impl` is "auto", "triton" (one walk over the vocabulary, without
    logits in memory), "chunked" (at most 2^25 logits at a time on a GPU, 128 tokens' on a CPU) or
    "reference" (dense).

    Raises ValueError, TypeError or IndexError as `linear_cross_entropy` does.
    """
    options = Options(softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index)
    if not (is_number(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, not {temperature!r}")
    if impl not in ("auto", "triton", "chunked", "reference"):
        raise ValueError(f"impl must be auto, triton, chunked or reference, not {impl!r}")
    check_tensors(("labels", "bias"), hidden=hidden, weight=weight, labels=labels, bias=bias)
    shape = hidden.shape[:-1]
    any_label = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
    hidden, weight, bias = autocast(hidden, weight, bias)
    check(hidden, weight, any_label if labels is None else labels, bias, options)
    impl, _ = choose(impl, hidden, weight, bias, options)
    y = (any_label if labels is None else labels).reshape(-1).long()
    flat = hidden.reshape(-1, hidden.shape[-1])
    if impl == "triton":
        from smoothce import triton

        options = options if labels is not None else replace(options, ignore_index=-1)
        found = triton.token_statistics(flat, weight, y, bias, options, temperature)
        *found, argmax = (x.view(shape) for x in found)
        return TokenStatistics(None if labels is None else found[0], found[1], found[2], argmax)
    rows = torch.arange(len(y), device=y.device)
    if labels is not None:
        rows = rows[options.valid(y)]
    size = max(len(rows), 1)
    if impl != "reference":
        on_cpu = hidden.device.type == "cpu"
        size = chunked.ROWS["cpu"] if on_cpu else max(NUMBERS // len(weight), 1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    found = torch.zeros(3, len(y), dtype=wide, device=y.device)
    argmax = torch.full_like(y, -1)
    with torch.autocast(hidden.device.type, enabled=False):
        for chosen in rows.split(size):
            if impl == "reference":
                z = reference.logits(flat[chosen], weight, bias, options)
            else:
                z = chunked.logits(flat[chosen], weight, bias, options)
            argmax[chosen] = z.argmax(1)
            z /= temperature
            lse = z.logsumexp(1)
            p = (z - lse[:, None]).exp_()
            found[0, chosen] = z.gather(1, y[chosen, None]).squeeze(1) - lse
            # a forbidden entry, of logit −∞, has no part in it
            found[1, chosen] = lse - p.mul_(z).nan_to_num_(nan=0.0).sum(1)
            found[2, chosen] = lse
    found, argmax = found.view(3, *shape), argmax.view(shape)
    return TokenStatistics(None if labels is None else found[0], found[1], found[2], argmax)

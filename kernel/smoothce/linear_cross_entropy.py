"""Start here: the public function."""

import torch
from torch import Tensor

from smoothce import compiled
from smoothce.dispatch import autocast, check, check_shapes, check_tensors, choose, run
from smoothce.options import Options


def linear_cross_entropy(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float | None = None,
    filter_eps: float | str | None = None,
    workspace: int = 0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # (), or the labels' shape where reduction is "none"
    """Cross-entropy with label smoothing β of a linear classifier, without its N × V logits.

        z_iv   = cap(logit_scale · C_v · E_i + b_v),    cap(z) = softcap · tanh(z / softcap)
        loss_i = logsumexp_v z_iv − (1−β) z_i,y − (β/V) Σ_v z_iv

    Equal to `F.cross_entropy(E @ C.T, y, label_smoothing=β)` computed in fp32, in nats per token;
    the caller shifts labels. Tokens labelled `ignore_index` have loss 0, and "mean" divides by the
    number of the others; where there are none the loss is 0 and its gradient zero, not NaN.

    The loss is fp32 (fp64 for fp64 inputs); gradients have their inputs' dtype. Under autocast the
    inputs are cast as for `F.linear`. Only `impl="reference"` has second derivatives; elsewhere
    they raise RuntimeError, but in a graph that `torch.compile` makes before torch 2.13: there they
    lack the loss's part, in silence.

    The gradient is exact unless `filter_eps` asks for speed from the Triton kernels; the other
    implementations are always exact. With a number, or "auto", which is 2^-8.3 (256000 / V)^¼ and
    exact under 8192 entries, they leave out small parts: where the 2-norm of a token's
    probabilities in a block of 256 entries is below it, the block is computed with probability
    norm / filter_eps and weighted accordingly, so that the gradient is right in the mean; a model
    of it stands in otherwise. A step's gradient is then off by 1.4e-2 (hidden) and 1.5e-2 (weight)
    on inputs like a language model's: training curves were within rounding of torch's
    (kernel/RESULTS.md). Equal inputs draw alike. The filter adds in an order that depends on
    timing; under `torch.use_deterministic_algorithms(True)` the gradient is exact.

    `workspace` is the memory, in bytes, that the exact gradient on the Triton kernels may use for
    logits instead of computing them again: from N·V/2 on (16-bit inputs) a reduced loss makes its
    gradients in the forward, a quarter of the tokens at a time; less is not used. `impl` is "auto"
    or one of reference, chunked, triton and paper; `explain` tells what "auto" takes.

    With `return_lse` the result is (loss, lse), where lse_i = logsumexp_v z_iv in the labels'
    shape, 0 for tokens labelled `ignore_index`. It is differentiable, as a z-loss needs:
    `loss + 1e-4 * lse.square().sum() / tokens`. The gradient is exact then.

    Raises ValueError or TypeError, naming what was given and what was expected. A label outside
    [0, V) raises IndexError on CPU and is a device-side assertion on CUDA.

    Source: "Calibrated Language Models and How to Find Them with Label Smoothing", equation 15.
    """
    settings = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "filter_eps": filter_eps,
        "workspace": workspace,
        "return_lse": return_lse,
    }
    check_tensors(("bias",), hidden=hidden, weight=weight, labels=labels, bias=bias)
    hidden, weight, bias = autocast(hidden, weight, bias)
    check_shapes(hidden, weight, labels, bias)
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), bias
    if torch.compiler.is_compiling() and impl != "reference":
        loss, lse = compiled.loss(*flat, impl, settings)
    else:
        options = Options(**settings)
        check(*flat, options)
        found = run(*flat, impl, options)
        loss, lse = found if return_lse else (found, None)
    loss = loss.view(labels.shape) if reduction == "none" else loss
    return (loss, lse.view(labels.shape)) if return_lse else loss


def explain(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    *,
    bias: Tensor | None = None,  # (V,)
    impl: str = "auto",
    **options: object,
) -> str:
    """Which implementation `linear_cross_entropy` takes for these inputs and options, and why."""
    check_tensors(("bias",), hidden=hidden, weight=weight, bias=bias)
    name, why = choose(impl, *autocast(hidden, weight, bias), Options(**options))
    return f"{name}: {why}"

"""Start here: the public function."""

import torch
import torch.distributed as dist
from torch import Tensor

from smoothce import compiled, dispatch, vocab_parallel
from smoothce.options import Inputs, LossOutput, Options, TokenStatistics


def linear_cross_entropy(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    label_smoothing: float = 0.0,
    smoothing_target: Tensor | None = None,  # (V,)
    token_weights: Tensor | None = None,  # (...)
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float | None = None,
    z_loss: float = 0.0,
    filter_eps: float | str | None = None,
    workspace: int | str = "auto",
    return_lse: bool = False,
    return_statistics: bool = False,
    process_group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> Tensor | tuple:  # (), or the labels' shape where reduction is "none"
    """Cross-entropy with label smoothing β of a linear classifier, without its N × V logits.

        z_iv   = cap(logit_scale · C_v · E_i + b_v),    cap(z) = softcap · tanh(z / softcap)
        lse_i  = logsumexp_v z_iv
        loss_i = ω_i (lse_i − (1−β) z_i,y − β Σ_v u_v z_iv + ζ lse_i²)

    With the defaults this equals `F.cross_entropy(E @ C.T, y, label_smoothing=β)` computed in fp32,
    in nats per token; the caller shifts labels. `smoothing_target` is u, a fixed distribution that
    smoothing moves labels towards (None: 1/V everywhere), `token_weights` is ω (None: 1) and
    `z_loss` is ζ. Tokens labelled `ignore_index` have loss 0, and "mean" divides by the sum of the
    others' ω; where that is nothing the loss is 0 and its gradient zero, not NaN.

    The loss is fp32 (fp64 for fp64 inputs); gradients have their inputs' dtype. Under autocast the
    inputs are cast as for `F.linear`. Only `impl="reference"` has second derivatives; elsewhere
    they raise RuntimeError, but in a graph that `torch.compile` makes before torch 2.13: there they
    lack the loss's part, in silence.

    `workspace` is memory for the Triton kernels, in bytes, in which a reduced loss (or one whose
    classifier is frozen) makes its gradients in the forward, some of the tokens at a time: three
    products of this shape, or two. "auto" holds the logits of D tokens, as much as the classifier's
    gradient, of 2048 at least, or of a quarter of all tokens where that is more but not over three
    times as many; with 0 logits are computed twice instead. `explain` tells what a call takes.
    `impl` is "auto" or one of reference, chunked and triton.

    The gradient is exact unless `filter_eps` asks for speed from the Triton kernels. With a number,
    or "auto", which is 2^-8.3 (256000 / V)^¼ and exact under 8192 entries, they leave out small
    parts: where the 2-norm of a token's probabilities in a block of 256 entries is below it, the
    block is computed with probability norm / filter_eps and weighted accordingly, so that the
    gradient is right in the mean; a model of it stands in otherwise. A step's gradient is then off
    by 1.4e-2 (hidden) and 1.5e-2 (weight) on inputs like a language model's (kernel/RESULTS.md).
    The filter adds in an order that depends on timing; the gradient is exact all the same under
    `torch.use_deterministic_algorithms(True)`, in fp16, with `return_lse` and for a bias.

    `return_lse` adds lse_i to what is returned, differentiable, 0 for masked tokens;
    `return_statistics` adds each token's `TokenStatistics`, without a gradient, in the same pass.

    With `process_group` every rank holds an equal number of the classifier's rows, in the order of
    ranks, as a plain tensor (bias and smoothing target likewise) or a DTensor of `Shard(0)`, and
    the same hidden states and labels; the loss and the gradient of `hidden` are the whole ones.

    Raises ValueError or TypeError, naming what was given and what was expected. A label outside
    [0, V) raises IndexError on CPU and is a device-side assertion on CUDA.

    Source: "Calibrated Language Models and How to Find Them with Label Smoothing", equation 15.
    """
    options = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "z_loss": z_loss,
        "filter_eps": filter_eps,
        "workspace": workspace,
        "return_lse": return_lse,
        "return_statistics": return_statistics,
    }
    tensors = bias, smoothing_target, token_weights
    inputs = prepare_inputs(hidden, weight, labels, *tensors, options, process_group)
    if torch.compiler.is_compiling() and impl != "reference" and process_group is None:
        found = compiled.loss(inputs, impl)
    else:
        inputs = inputs._replace(options=Options(**options))
        dispatch.check(inputs)
        found = dispatch.run(inputs, impl)
    return format_outputs(found, labels, options)


def prepare_inputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    smoothing_target: Tensor | None,
    token_weights: Tensor | None,
    options: dict[str, object] | Options,
    process_group: dist.ProcessGroup | None,
) -> Inputs:
    """A call's tensors, flat and in the dtypes that implementations take; options as given."""
    shard, whole = None, weight
    if process_group is not None and isinstance(weight, Tensor):
        whole, shard = vocab_parallel.local_shard(weight, process_group)
    dispatch.check_tensors(
        hidden=hidden,
        weight=whole,
        labels=labels,
        bias=bias,
        smoothing_target=smoothing_target,
        token_weights=token_weights,
    )
    u, omega = smoothing_target, token_weights
    hidden, whole, bias = dispatch.autocast(hidden, whole, bias)
    if shard is not None:
        bias, u = (x if x is None else shard.local_part(x, len(whole)) for x in (bias, u))
    dispatch.check_shapes(hidden, whole, labels, bias)
    return Inputs(
        hidden.reshape(-1, hidden.shape[-1]),
        whole,
        labels.reshape(-1),
        bias,
        None if u is None else u.float(),
        None if omega is None else omega.reshape(-1).float(),
        options,
        shard,
    )


def format_outputs(found: LossOutput, labels: Tensor, options: dict[str, object]) -> Tensor | tuple:
    """What the public function returns, in the labels' shape."""
    loss = found.loss.view(labels.shape) if options["reduction"] == "none" else found.loss
    more = [found.lse.view(labels.shape)] if options["return_lse"] else []
    if options["return_statistics"]:
        log_p, entropy, argmax = found[2:]
        of_tokens = log_p, entropy, found.lse, argmax
        more.append(TokenStatistics(*(x.detach().view(labels.shape) for x in of_tokens)))
    return (loss, *more) if more else loss


def explain(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    *,
    bias: Tensor | None = None,  # (V,)
    smoothing_target: Tensor | None = None,  # (V,)
    token_weights: Tensor | None = None,  # (...)
    process_group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    **options: object,
) -> str:
    """Which implementation `linear_cross_entropy` takes for these inputs and options, how, and
    why."""
    labels = hidden.new_empty(hidden.shape[:-1], dtype=torch.int64)
    tensors = bias, smoothing_target, token_weights
    inputs = prepare_inputs(hidden, weight, labels, *tensors, Options(**options), process_group)
    return dispatch.explain(impl, inputs)

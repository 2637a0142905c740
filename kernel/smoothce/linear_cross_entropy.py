"""Start here: the public function validates its inputs, then hands over to one implementation."""

import importlib

import torch
from torch import Tensor

from smoothce import compiled
from smoothce.options import Options

# Each module has `loss(hidden, weight, labels, bias, options)` on hidden (N, D), labels (N,) int64,
# and may have `unsupported(hidden, weight, bias, options)`, which names what it cannot do or
# returns None. Imported on first use, so that no implementation costs those who use another.
IMPLEMENTATIONS = {
    "reference": "smoothce.reference",
    "chunked": "smoothce.chunked",
    "triton": "smoothce.triton",
    "paper": "smoothce.paper",
}


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
    they raise RuntimeError.

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
    or one of `IMPLEMENTATIONS`; `explain` tells what "auto" takes.

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


def run(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    impl: str,
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:
    """What the chosen implementation finds, of checked inputs."""
    name, _ = choose(impl, hidden, weight, bias, options)
    with torch.autocast(hidden.device.type, enabled=False):
        module = importlib.import_module(IMPLEMENTATIONS[name])
        return module.loss(hidden, weight, labels.long(), bias, options)


def check_tensors(optional: tuple[str, ...], **given: object) -> None:
    """Raises TypeError where one is no tensor, or a piece of one; `optional` ones may be None."""
    for name, value in given.items():
        if value is None and name in optional:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
        if type(value).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor, a piece on each rank: call the loss where FSDP2 has it "
                "gathered, in the forward of a module that `fully_shard` wraps, or on full_tensor()"
            )


def explain(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    *,
    bias: Tensor | None = None,  # (V,)
    impl: str = "auto",
    **options: object,
) -> str:
    """Which implementation `linear_cross_entropy` takes for these inputs and options, and why."""
    name, why = choose(impl, *autocast(hidden, weight, bias), Options(**options))
    return f"{name}: {why}"


def choose(
    impl: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> tuple[str, str]:
    if impl == "auto":
        reason = _unsupported("triton", hidden, weight, bias, options)
        if reason is None:
            return "triton", "fused Triton kernels support these inputs"
        return "chunked", f"triton is not used because {reason}"
    check_impl(impl)
    reason = _unsupported(impl, hidden, weight, bias, options)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot be used: {reason}; impl='auto' can")
    return impl, "asked for by impl="


def check_impl(impl: str) -> None:
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be auto or one of {', '.join(IMPLEMENTATIONS)}, not {impl!r}")


def _unsupported(
    name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> str | None:
    try:
        module = importlib.import_module(IMPLEMENTATIONS[name])
    except ImportError as error:
        return f"{IMPLEMENTATIONS[name]} cannot be imported ({error})"
    check = getattr(module, "unsupported", None)
    return check(hidden, weight, bias, options) if check else None


def autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden must be (..., D) and weight (V, D), "
            f"not {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    vocabulary = weight.shape[0]
    if vocabulary < 1:
        raise ValueError("weight must have at least one row, one for each vocabulary entry")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of hidden without its last dimension, "
            f"{tuple(hidden.shape[:-1])}, not {tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"bias must be ({vocabulary},), not {tuple(bias.shape)}")


def check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, options: Options
) -> None:
    check_shapes(hidden, weight, labels, bias)
    if not hidden.dtype.is_floating_point:
        raise TypeError(f"hidden must be floating point, not {hidden.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"{name} must have hidden's dtype {hidden.dtype}, not {tensor.dtype}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels must be int64 or int32, not {labels.dtype}")
    for name, tensor in (("weight", weight), ("labels", labels), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} must be on hidden's device {hidden.device}, not {tensor.device}"
            )
    _check_labels(labels, len(weight), options.ignore_index)


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    fine = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    expected = f"expected 0 to {vocabulary - 1}, or ignore_index {ignore_index}"
    if labels.device.type != "cpu":
        # The host must not wait for the device, so the device itself raises.
        torch._assert_async(fine.all(), f"label out of range: {expected}")
    elif not fine.all():
        raise IndexError(f"label {labels[~fine][0].item()} is out of range: {expected}")

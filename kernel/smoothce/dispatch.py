"""What inputs must be, and which implementation takes them."""

import importlib

import torch
from torch import Tensor

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

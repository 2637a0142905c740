"""What inputs must be, and which implementation takes them."""

import functools
import importlib
import warnings

import torch
from torch import Tensor

from smoothce.options import Inputs, LossOutput
from smoothce.vocab_parallel import shards_agree

# Each module has `loss(inputs)`, and may have `unsupported(inputs)`, which names what it cannot do
# or returns None, and `describe(inputs)`, which says how it goes about it. Imported on first use,
# so that no implementation costs those who use another.
IMPLEMENTATIONS = {
    "reference": "smoothce.reference",
    "chunked": "smoothce.chunked",
    "triton": "smoothce.triton",
}


def run(inputs: Inputs, impl: str) -> LossOutput:
    """What the chosen implementation finds, of checked inputs."""
    name, why = choose(impl, inputs)
    if name == "chunked" and impl == "auto" and inputs.hidden.is_cuda:
        _warn_once(f"smoothce's chunked path, in fp32 and some ten times slower: {why}")
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        return importlib.import_module(IMPLEMENTATIONS[name]).loss(inputs)


def choose(impl: str, inputs: Inputs) -> tuple[str, str]:
    """The implementation's name, and why it is that one."""
    check_impl(impl)
    name, why = impl, "asked for by impl="
    if impl == "auto":
        reason = _unsupported("triton", inputs)
        if reason is None and not inputs.hidden.is_cuda:  # its interpreter is for tests
            reason = f"the inputs are on {inputs.hidden.device.type}"
        name = "triton" if reason is None else "chunked"
        why = "the Triton kernels" if reason is None else f"triton is not used because {reason}"
    reason = _unsupported(name, inputs)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot be used: {reason}; impl='auto' can")
    return name, why


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def explain(impl: str, inputs: Inputs) -> str:
    name, why = choose(impl, inputs)
    describe = getattr(importlib.import_module(IMPLEMENTATIONS[name]), "describe", None)
    return f"{name}: {why}" + (f"; {describe(inputs)}" if describe else "")


def check_impl(impl: str) -> None:
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be auto or one of {', '.join(IMPLEMENTATIONS)}, not {impl!r}")


def _unsupported(name: str, inputs: Inputs) -> str | None:
    if name == "reference" and inputs.shard is not None:
        return "the reference knows no split vocabulary"
    try:
        module = importlib.import_module(IMPLEMENTATIONS[name])
    except ImportError as error:
        return f"{IMPLEMENTATIONS[name]} cannot be imported ({error})"
    check = getattr(module, "unsupported", None)
    return check(inputs) if check else None


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Each as `F.linear` would take it."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if x is None else x.to(dtype) for x in tensors)


def check_tensors(**given: object) -> None:
    """Raises TypeError where one is no tensor, or a piece of one; None is what is not given."""
    for name, value in given.items():
        if value is None and name not in ("hidden", "weight", "labels"):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
        if type(value).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor, a piece on each rank: call the loss where FSDP2 has it "
                "gathered, in the forward of a module that `fully_shard` wraps, or on "
                "full_tensor(); a weight split by rows over process_group= may stay one"
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


def check(inputs: Inputs) -> None:
    """Raises what is wrong with a call, but for options and shapes, which are checked already."""
    hidden, weight, labels, bias, u, omega, options, shard = inputs
    if not hidden.dtype.is_floating_point:
        raise TypeError(f"hidden must be floating point, not {hidden.dtype}")
    for name, tensor, or_else in (("weight", weight, None), ("bias", bias, torch.float32)):
        if tensor is not None and tensor.dtype not in (hidden.dtype, or_else):
            raise TypeError(f"{name} must have hidden's dtype {hidden.dtype}, not {tensor.dtype}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels must be int64 or int32, not {labels.dtype}")
    if u is not None:
        check_target(u, len(weight), whole=shard is None)
    if omega is not None and omega.shape != labels.shape:
        raise ValueError(f"token_weights must have labels' shape, not {tuple(omega.shape)}")
    for name, tensor in (("smoothing_target", u), ("token_weights", omega)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name} gets no gradient: give {name}.detach()")
    for name, tensor in zip(Inputs._fields[1:6], inputs[1:6], strict=True):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} must be on hidden's device {hidden.device}, not {tensor.device}"
            )
    _check_labels(labels, inputs.vocabulary, options.ignore_index)
    if omega is not None:
        fine = (omega >= 0).all() & omega.isfinite().all()
        _require(fine, "token_weights must be finite, 0 or more")
    if shard is not None:
        fine = shards_agree(shard, labels, len(weight))
        _require(fine, "process_group must have the same labels and equal parts of one weight")


def check_target(u: Tensor, entries: int, whole: bool = True) -> None:
    """Raises ValueError where it is no distribution over them, or no part of one."""
    if u.shape != (entries,):
        raise ValueError(f"smoothing_target must be ({entries},), not {tuple(u.shape)}")
    if whole:
        fine = (u >= 0).all() & ((u.sum(dtype=torch.float64) - 1).abs() < 1e-3)
        _require(fine, "smoothing_target must be a distribution: 0 or more each, 1 in all")


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    fine = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    expected = f"expected 0 to {vocabulary - 1}, or ignore_index {ignore_index}"
    if labels.device.type == "cpu" and not fine.all():
        raise IndexError(f"label {labels[~fine][0].item()} is out of range: {expected}")
    _require(fine.all(), f"label out of range: {expected}")


def _require(fine: Tensor, message: str) -> None:
    """Raises ValueError; on a GPU, whose host must not wait, the device itself raises."""
    if fine.device.type != "cpu":
        torch._assert_async(fine, message)
    elif not fine:
        raise ValueError(message)

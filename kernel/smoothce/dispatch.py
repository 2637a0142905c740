"""Which implementation computes a call, and what the call's inputs must be."""

import functools
import importlib
import warnings
from typing import Protocol, cast

import torch
from torch import Tensor

from smoothce.options import Inputs, InputTensors, LossOutput
from smoothce.vocab_parallel import shards_agree


class Implementation(Protocol):
    """The functions that a module needs to be listed in `IMPLEMENTATIONS`."""

    def loss(self, inputs: Inputs) -> LossOutput:
        """The loss of checked inputs; differentiable in hidden, weight and bias."""

    def unsupported(self, inputs: Inputs) -> str | None:
        """Why these inputs cannot be served, in words that follow "because"; None: they can."""

    def describe(self, inputs: Inputs) -> str | None:
        """How the gradient is made of these inputs, in words; None where there is one way only."""


# They are imported on first use, so that no implementation costs those who use another.
IMPLEMENTATIONS = {
    "reference": "smoothce.reference",
    "chunked": "smoothce.chunked",
    "triton": "smoothce.triton",
}


def run(inputs: Inputs, impl: str) -> LossOutput:
    """The output of the chosen implementation for checked inputs."""
    name, reason = choose(impl, inputs)
    if name == "chunked" and impl == "auto" and inputs.hidden.is_cuda:
        _warn_once(f"smoothce's chunked path, in fp32 and some ten times slower: {reason}")
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        return _load(name).loss(inputs)


def explain(impl: str, inputs: Inputs) -> str:
    """The chosen implementation, why it is chosen, and how it makes the gradient."""
    name, reason = choose(impl, inputs)
    description = _load(name).describe(inputs)
    if description is None:
        return f"{name}: {reason}"
    return f"{name}: {reason}; {description}"


def choose(impl: str, inputs: Inputs) -> tuple[str, str]:
    """The name of the implementation, and the reason why it is that one.

    Raises ValueError where `impl` names none, or one that cannot serve these inputs.
    """
    check_impl(impl)
    if impl == "auto":
        return _choose_automatically(inputs)
    obstacle = _unsupported(impl, inputs)
    if obstacle is not None:
        raise ValueError(f"impl={impl!r} cannot be used: {obstacle}; impl='auto' can")
    return impl, "asked for by impl="


def _choose_automatically(inputs: Inputs) -> tuple[str, str]:
    obstacle = _unsupported("triton", inputs)
    if obstacle is None and not inputs.hidden.is_cuda:
        # Triton's interpreter could serve them, but it is for tests.
        obstacle = f"the inputs are on {inputs.hidden.device.type}"
    if obstacle is None:
        return "triton", "the Triton kernels"
    return "chunked", f"triton is not used because {obstacle}"


def _unsupported(name: str, inputs: Inputs) -> str | None:
    try:
        implementation = _load(name)
    except ImportError as error:
        return f"{IMPLEMENTATIONS[name]} cannot be imported ({error})"
    return implementation.unsupported(inputs)


def _load(name: str) -> Implementation:
    return cast(Implementation, importlib.import_module(IMPLEMENTATIONS[name]))


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each as `F.linear` would take it."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_impl(impl: str) -> None:
    """Raises ValueError where it is not the name of an implementation, or "auto"."""
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be auto or one of {', '.join(IMPLEMENTATIONS)}, not {impl!r}")


def check_tensors(**tensors: object) -> None:
    """Raises TypeError where one is no tensor, or only a rank's piece of one. Those which are
    optional may be None."""
    for name, value in tensors.items():
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
    """Raises ValueError where they do not fit together."""
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
    """Raises what is wrong with a call whose options and shapes are checked already."""
    tensors = inputs.tensors()
    _check_dtypes(tensors)
    if tensors.smoothing_target is not None:
        check_target(tensors.smoothing_target, len(tensors.weight), whole=inputs.shard is None)
    token_weights = tensors.token_weights
    if token_weights is not None and token_weights.shape != tensors.labels.shape:
        raise ValueError(f"token_weights must have labels' shape, not {tuple(token_weights.shape)}")
    _check_no_gradient(tensors)
    _check_devices(tensors)
    _check_labels(tensors.labels, inputs.vocabulary, inputs.options.ignore_index)
    if token_weights is not None:
        fine = (token_weights >= 0).all() & token_weights.isfinite().all()
        _require(fine, "token_weights must be finite, 0 or more")
    if inputs.shard is not None:
        fine = shards_agree(inputs.shard, tensors.labels, len(tensors.weight))
        _require(fine, "process_group must have the same labels and equal parts of one weight")


def _check_dtypes(tensors: InputTensors) -> None:
    dtype = tensors.hidden.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"hidden must be floating point, not {dtype}")
    if tensors.weight.dtype != dtype:
        raise TypeError(f"weight must have hidden's dtype {dtype}, not {tensors.weight.dtype}")
    bias = tensors.bias
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        raise TypeError(f"bias must have hidden's dtype {dtype}, not {bias.dtype}")
    if tensors.labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels must be int64 or int32, not {tensors.labels.dtype}")


def _check_no_gradient(tensors: InputTensors) -> None:
    for name in ("smoothing_target", "token_weights"):
        tensor = getattr(tensors, name)
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name} gets no gradient: give {name}.detach()")


def _check_devices(tensors: InputTensors) -> None:
    device = tensors.hidden.device
    for name, tensor in tensors._asdict().items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on hidden's device {device}, not {tensor.device}")


def check_target(smoothing_target: Tensor, entries: int, whole: bool = True) -> None:
    """Raises ValueError where it is no distribution over the vocabulary's entries, or where not
    `whole`, no part of one."""
    if smoothing_target.shape != (entries,):
        raise ValueError(
            f"smoothing_target must be ({entries},), not {tuple(smoothing_target.shape)}"
        )
    if whole:
        total = smoothing_target.sum(dtype=torch.float64)
        fine = (smoothing_target >= 0).all() & ((total - 1).abs() < 1e-3)
        _require(fine, "smoothing_target must be a distribution: 0 or more each, 1 in all")


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    fine = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    expected = f"expected 0 to {vocabulary - 1}, or ignore_index {ignore_index}"
    if labels.device.type == "cpu" and not fine.all():
        raise IndexError(f"label {labels[~fine][0].item()} is out of range: {expected}")
    _require(fine.all(), f"label out of range: {expected}")


def _require(fine: Tensor, message: str) -> None:
    """Raises ValueError. On a GPU the device raises, since the host must not wait for it."""
    if fine.device.type != "cpu":
        torch._assert_async(fine, message)
    elif not fine:
        raise ValueError(message)

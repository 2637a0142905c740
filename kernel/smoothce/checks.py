"""What a call's inputs must be. Options check themselves, in `options.Options`.

The checks come in an order, since each takes for granted what the one before has checked:

    check_tensors   types, before tensors are cast as autocast says, and flattened
    check_layout    shapes, on which flattening relies
    check_call      everything else that the host knows: dtypes, shapes, devices, gradients
    check_values    the numbers in the tensors, which on a GPU the device checks

`explain` runs all but the last.
"""

import math
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from smoothce.options import Inputs, InputTensors
from smoothce.vocab_parallel import shards_agree

REQUIRED = ("hidden", "weight", "labels")
# What hidden states and the classifier may be in. `options.accumulation_dtype` says where a new one
# goes.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(**tensors: Tensor | None) -> None:
    """Raises TypeError where one is no tensor, or only a rank's piece of one, whatever the
    annotation says. Those which are not `REQUIRED` may be None."""
    for name, value in tensors.items():
        if value is None and name not in REQUIRED:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
        if type(value).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor, a piece on each rank: call the loss where FSDP2 has it "
                "gathered, in the forward of a module that `fully_shard` wraps, or on "
                "full_tensor(); a weight split by rows over process_group= may stay one"
            )


def check_layout(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    """Raises ValueError where the shapes of these do not fit together."""
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden must be (..., D) and weight (V, D), "
            f"not {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if weight.shape[1] < 1:
        raise ValueError(f"the D of hidden (..., D) must be 1 or more, not {tuple(hidden.shape)}")
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
    if token_weights is not None and not _flatten_alike(token_weights.shape, labels.shape):
        raise ValueError(
            f"token_weights must have labels' shape {tuple(labels.shape)}, or that flattened, "
            f"not {tuple(token_weights.shape)}"
        )


def _flatten_alike(shape: torch.Size, other: torch.Size) -> bool:
    """Whether numbers of the two that have the same place when both are flattened belong together.

    They do where neighboring dimensions of one make up a dimension of the other, so that one has
    all products of leading dimensions that the other has: (2, 2, 3) has 2, 4 and 12, and (4, 3)
    has 4 and 12. (3, 4) has 3 and 12, which is another layout than either."""
    if shape == other:
        return True
    if math.prod(shape) != math.prod(other):
        return False
    products = list(accumulate(shape, mul, initial=1))
    other_products = list(accumulate(other, mul, initial=1))
    return _has_all(products, other_products) or _has_all(other_products, products)


def _has_all(numbers: list[int], wanted: list[int]) -> bool:
    # Not by `in`, which can miss a number that is a symbol in a graph of `torch.compile`.
    return all(any(number == one for number in numbers) for one in wanted)


def check_call(inputs: Inputs) -> None:
    """Raises TypeError or ValueError for what can be told without a look at the tensors' numbers,
    and has not been checked before the tensors were flattened."""
    tensors = inputs.tensors
    _check_dtypes(tensors)
    if tensors.smoothing_target is not None:
        _check_target_shape(tensors.smoothing_target, len(tensors.weight))
    _check_no_gradient(tensors)
    _check_devices(tensors)


def check_values(inputs: Inputs) -> None:
    """Raises ValueError or IndexError for numbers that the loss cannot take. On a GPU the device
    raises, since the host must not wait for it."""
    tensors = inputs.tensors
    # A rank's part of a target does not sum to 1. What all parts sum to would take a collective.
    if tensors.smoothing_target is not None and inputs.shard is None:
        _check_distribution(tensors.smoothing_target)
    _check_labels(tensors.labels, inputs.vocabulary, inputs.options.ignore_index)
    token_weights = tensors.token_weights
    if token_weights is not None:
        fine = (token_weights >= 0).all() & token_weights.isfinite().all()
        _require(fine, "token_weights must be finite, 0 or more")
    if inputs.shard is not None:
        _require(
            shards_agree(inputs.shard, tensors.labels, len(tensors.weight)),
            "the ranks of process_group must have the same labels, and parts of one weight that "
            "follow one another: an equal number of rows each, or a DTensor's Shard(0)",
        )


def check_target(smoothing_target: Tensor, entries: int) -> None:
    """Raises ValueError where it is no distribution over a vocabulary of so many entries."""
    _check_target_shape(smoothing_target, entries)
    _check_distribution(smoothing_target)


def _check_target_shape(smoothing_target: Tensor, entries: int) -> None:
    if smoothing_target.shape != (entries,):
        raise ValueError(
            f"smoothing_target must be ({entries},), not {tuple(smoothing_target.shape)}"
        )


def _check_distribution(smoothing_target: Tensor) -> None:
    mass = smoothing_target.sum(dtype=torch.float64)
    fine = (smoothing_target >= 0).all() & ((mass - 1).abs() < 1e-3)
    _require(fine, "smoothing_target must be a distribution: 0 or more each, 1 in all")


def _check_dtypes(tensors: InputTensors) -> None:
    dtype = tensors.hidden.dtype
    if dtype not in DTYPES:
        raise TypeError(
            f"hidden must be float16, bfloat16, float32 or float64, not {dtype}: give "
            "hidden.to(torch.bfloat16), and weight in the same dtype"
        )
    if tensors.weight.dtype != dtype:
        raise TypeError(f"weight must have hidden's dtype {dtype}, not {tensors.weight.dtype}")
    bias = tensors.bias
    if bias is not None and not is_bias_dtype(bias.dtype, dtype):
        raise TypeError(f"bias must have hidden's dtype {dtype} or torch.float32, not {bias.dtype}")
    if tensors.labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels must be int64 or int32, not {tensors.labels.dtype}")


def is_bias_dtype(bias_dtype: torch.dtype, hidden_dtype: torch.dtype) -> bool:
    """Whether a bias may have this dtype beside hidden states of that one."""
    return bias_dtype in (hidden_dtype, torch.float32)


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

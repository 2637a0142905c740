"""What a call's inputs must be. Options check themselves, in `options.Options`.

`prepare` checks what the host knows of the tensors, and makes them what implementations take;
`check_values` checks the numbers in them, which on a GPU the device checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from smoothce.options import LossCall
from smoothce.vocab_parallel import Shard, local_shard, shards_agree

REQUIRED = ("hidden", "weight", "labels")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of hidden and weight


def prepare(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (...)
    bias: Tensor | None,  # (V,)
    smoothing_target: Tensor | None,  # (V,)
    token_weights: Tensor | None,  # (...)
    process_group: dist.ProcessGroup | None,
) -> tuple[dict[str, Tensor | None], Shard | None]:
    """Return the tensors as a `LossCall` has them, and what this rank has of the vocabulary.

    Raises TypeError or ValueError for what can be told without a look at the tensors' numbers."""
    shard = None
    if process_group is not None and isinstance(weight, Tensor):
        weight, shard = local_shard(weight, process_group)
    check_tensors(
        hidden=hidden,
        weight=weight,
        labels=labels,
        bias=bias,
        smoothing_target=smoothing_target,
        token_weights=token_weights,
    )
    autocast_to = autocast_dtype(hidden)
    if autocast_to is not None:  # as `F.linear` would
        hidden = hidden.to(autocast_to)
        weight = weight.to(autocast_to)
        bias = None if bias is None else bias.to(autocast_to)
    if shard is not None:
        bias = shard.local_part("bias", bias, len(weight))
        smoothing_target = shard.local_part("smoothing_target", smoothing_target, len(weight))
    _check_shapes(hidden, weight, labels, bias, smoothing_target, token_weights)
    _check_dtypes(hidden, weight, labels, bias)
    _refuse_gradient("smoothing_target", smoothing_target)
    _refuse_gradient("token_weights", token_weights)
    tensors = {
        "hidden": hidden.reshape(-1, hidden.shape[-1]),
        "weight": weight,
        # Implementations index with them; not every PyTorch takes int32.
        "labels": labels.reshape(-1).long(),
        "bias": bias,
        "smoothing_target": None if smoothing_target is None else smoothing_target.float(),
        "token_weights": None if token_weights is None else token_weights.reshape(-1).float(),
    }
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} must be on hidden's device {hidden.device}, not {tensor.device}"
            )
    return tensors, shard


def check_tensors(**tensors: Tensor | None) -> None:
    """Raise TypeError where one is no tensor, or only a rank's piece of one, whatever the
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


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return what autocast makes of a call's tensors, or None where it leaves them as they are."""
    device = hidden.device.type
    if hidden.is_meta or not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def _check_shapes(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    smoothing_target: Tensor | None,
    token_weights: Tensor | None,
) -> None:
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
    if smoothing_target is not None:
        _check_target_shape(smoothing_target, vocabulary)
    if token_weights is not None and token_weights.shape != labels.shape:
        is_one_flat = token_weights.dim() == 1 or labels.dim() == 1
        if not is_one_flat or token_weights.numel() != labels.numel():
            raise ValueError(
                f"token_weights must have labels' shape {tuple(labels.shape)}, or that flattened, "
                f"not {tuple(token_weights.shape)}"
            )


def _refuse_gradient(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.requires_grad:
        raise ValueError(f"{name} gets no gradient: give {name}.detach()")


def _check_dtypes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    dtype = hidden.dtype
    if dtype not in DTYPES:
        raise TypeError(
            f"hidden must be float16, bfloat16, float32 or float64, not {dtype}: give "
            "hidden.to(torch.bfloat16), and weight in the same dtype"
        )
    if weight.dtype != dtype:
        raise TypeError(f"weight must have hidden's dtype {dtype}, not {weight.dtype}")
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        raise TypeError(f"bias must have hidden's dtype {dtype} or torch.float32, not {bias.dtype}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels must be int64 or int32, not {labels.dtype}")


def check_values(call: LossCall) -> None:
    """Raise ValueError or IndexError for numbers that the loss cannot take. On a GPU the device
    raises, since the host must not wait for it."""
    # A rank's part of a target does not sum to 1. What all parts sum to would take a collective.
    if call.smoothing_target is not None and call.shard is None:
        _check_distribution(call.smoothing_target)
    labels = call.labels
    ignore_index = call.options.ignore_index
    fine = ((labels >= 0) & (labels < call.vocabulary)) | (labels == ignore_index)
    expected = f"expected 0 to {call.vocabulary - 1}, or ignore_index {ignore_index}"
    if labels.device.type == "cpu" and not fine.all():
        raise IndexError(f"label {labels[~fine][0].item()} is out of range: {expected}")
    _require(fine.all(), f"label out of range: {expected}")
    token_weights = call.token_weights
    if token_weights is not None:
        fine = (token_weights >= 0).all() & token_weights.isfinite().all()
        _require(fine, "token_weights must be finite, 0 or more")
    if call.shard is not None:
        _require(
            shards_agree(call.shard, labels, len(call.weight)),
            "the ranks of process_group must have the same labels, and parts of one weight that "
            "follow one another: an equal number of rows each, or a DTensor's Shard(0)",
        )


def check_target(smoothing_target: Tensor, entries: int) -> None:
    """Raise TypeError or ValueError where it is no distribution over so many entries, as the loss
    does, and wherever the target is: here the host waits for its numbers."""
    check_tensors(smoothing_target=smoothing_target)
    _check_target_shape(smoothing_target, entries)
    _refuse_gradient("smoothing_target", smoothing_target)
    _check_distribution(smoothing_target.float().cpu())


def _check_target_shape(smoothing_target: Tensor, entries: int) -> None:
    if smoothing_target.shape != (entries,):
        raise ValueError(
            f"smoothing_target must be ({entries},), not {tuple(smoothing_target.shape)}"
        )


def _check_distribution(smoothing_target: Tensor) -> None:
    mass = smoothing_target.sum(dtype=torch.float64)
    fine = (smoothing_target >= 0).all() & ((mass - 1).abs() < 1e-3)
    _require(fine, "smoothing_target must be a distribution: 0 or more each, 1 in all")


def _require(fine: Tensor, message: str) -> None:
    """Raise ValueError. On a GPU the device raises, since the host must not wait for it."""
    if fine.device.type != "cpu":
        torch._assert_async(fine, message)
    elif not fine:
        raise ValueError(message)

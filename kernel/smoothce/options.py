"""What crosses the package: the loss's options, one call of it, and what comes out.

`linear_cross_entropy` makes a `LossCall` of what it is given. Every implementation takes that and
returns a `LossOutput`.
"""

import dataclasses
import functools
import math
import typing
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from smoothce.vocab_parallel import Shard

REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True)
class Options:
    """The options of the loss under the names of `linear_cross_entropy`'s keywords, which its
    docstring explains. They are checked here: raises ValueError, naming the option and its value.
    """

    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float | None = None
    z_loss: float = 0.0
    filter_eps: float | str | None = None
    workspace: int | str = "auto"
    return_lse: bool = False
    return_statistics: bool = False

    def __post_init__(self) -> None:
        smoothing = self.label_smoothing
        if not (is_number(smoothing) and 0 <= smoothing <= 1):
            raise ValueError(f"label_smoothing must be a number in [0, 1], not {smoothing!r}")
        if not is_integer(self.ignore_index):
            raise ValueError(f"ignore_index must be an integer, not {self.ignore_index!r}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}"
            )
        if self.softcap is not None and not (is_number(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be None or a positive number, not {self.softcap!r}")
        if self.logit_scale is not None and not is_number(self.logit_scale):
            raise ValueError(f"logit_scale must be None or a number, not {self.logit_scale!r}")
        if not is_number(self.z_loss):
            raise ValueError(f"z_loss must be a number, not {self.z_loss!r}")
        eps = self.filter_eps
        if not (eps is None or eps == "auto" or (is_number(eps) and 0 < eps < 1)):
            raise ValueError(
                f"filter_eps must be 'auto', None (exact) or a number in (0, 1), not {eps!r}"
            )
        size = self.workspace
        if size != "auto" and not (is_integer(size) and size >= 0):
            raise ValueError(
                f"workspace must be 'auto' or an integer of bytes, 0 or more, not {size!r}"
            )
        for name in ("return_lse", "return_statistics"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")
        # Kernels take Python's numbers alone, and neither NumPy's nor others.
        for name, types in option_types().items():
            number: Any = getattr(self, name)
            if number is None or isinstance(number, (str, bool)):
                continue
            object.__setattr__(self, name, float(number) if float in types else int(number))


@functools.cache  # every call of the loss makes an `Options`, which asks for them
def option_types() -> dict[str, tuple[Any, ...]]:
    """Return the types that each option's annotation allows, such as (float, NoneType)."""
    types = {}
    for field in dataclasses.fields(Options):
        types[field.name] = typing.get_args(field.type) or (field.type,)
    return types


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


def needs_of(tensors: dict[str, Any]) -> Needs:
    """Tell which of a call's tensors want a gradient from the call that is being made."""
    if not torch.is_grad_enabled():
        return Needs(hidden=False, weight=False, bias=False)
    bias = tensors["bias"]
    return Needs(
        hidden=tensors["hidden"].requires_grad,
        weight=tensors["weight"].requires_grad,
        bias=bias is not None and bias.requires_grad,
    )


class Gradients(NamedTuple):
    """The gradients of a call's inputs; None where one is not wanted."""

    hidden: Tensor | None = None  # (N, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)


@dataclass
class LossCall:
    """One call: what every implementation's `loss` takes. `checks` has checked it.

    A choice that decides which collectives a rank takes part in, or how large they are, must follow
    `most_rows` and `least_rows`, and never `len(weight)`, which may differ from rank to rank."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D); of a sharded vocabulary this rank's rows
    labels: Tensor  # (N,) int64, in the whole vocabulary
    bias: Tensor | None  # (V,)
    smoothing_target: Tensor | None  # (V,) fp32; None: 1/V everywhere
    token_weights: Tensor | None  # (N,) fp32; None: 1 everywhere
    options: Options
    needs: Needs
    shard: Shard | None = None
    vocabulary: int = dataclasses.field(init=False)  # entries of the whole vocabulary
    most_rows: int = dataclasses.field(init=False)  # of the classifier, on the rank that has most
    least_rows: int = dataclasses.field(init=False)  # on the rank that has least
    # What products of hidden states and classifier rows are multiplied by.
    logit_scale: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows = len(self.weight)
        shard = self.shard
        self.vocabulary = rows if shard is None else shard.entries
        self.most_rows = rows if shard is None else shard.most_rows
        self.least_rows = rows if shard is None else shard.least_rows
        scale = self.options.logit_scale
        self.logit_scale = 1.0 if scale is None else scale

    @classmethod
    def of(
        cls, tensors: dict[str, Any], options: Options, shard: Shard | None = None
    ) -> "LossCall":
        """Make a call of tensors by their names, which want the gradients that autograd says."""
        return cls(**tensors, options=options, needs=needs_of(tensors), shard=shard)

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the tensors by their names."""
        return {name: getattr(self, name) for name in TENSORS}

    def settings(self) -> dict[str, Any]:
        """Return everything but the tensors, which autograd saves one by one. With them it makes
        the call again."""
        fields = [field.name for field in dataclasses.fields(self) if field.init]
        return {name: getattr(self, name) for name in fields if name not in TENSORS}

    def valid(self) -> Tensor:  # (N,) bool
        """Return which tokens count."""
        return self.labels != self.options.ignore_index

    def loss_scale(self, dtype: torch.dtype = torch.float32) -> Tensor:  # ()
        """Return what the reduction multiplies the sum of the tokens' losses by.

        That is 1, or for a mean 1 / (sum of the valid tokens' weights). Where no token is valid it
        is 1 without token weights and 0 with them, which makes no difference: the losses that it
        multiplies are all 0. It stays on the device, so that nothing waits for the host."""
        if self.options.reduction != "mean":
            return torch.ones((), dtype=dtype, device=self.labels.device)
        valid = self.valid()
        if self.token_weights is None:
            return valid.sum().clamp(min=1).to(dtype).reciprocal()
        weight_sum = torch.where(valid, self.token_weights, 0).sum().to(dtype)
        return torch.where(weight_sum > 0, 1 / weight_sum, 0)


TENSORS = ("hidden", "weight", "labels", "bias", "smoothing_target", "token_weights")


class TokenStatistics(NamedTuple):
    """What a model says of each token, in nats.

    A token labeled `ignore_index` has 0 everywhere, and -1 as its argmax. Floats are fp32, or fp64
    for fp64 inputs."""

    log_probability: Tensor | None  # of the label; None where there are no labels
    entropy: Tensor
    lse: Tensor
    argmax: Tensor  # int64


class LossOutput(NamedTuple):
    """What an implementation's `loss` returns. The last three are there where `return_statistics`
    asks for them, and have no gradient."""

    loss: Tensor  # (), or (N,) where reduction is "none"
    lse: Tensor  # (N,), 0 where a token is masked; differentiable where `return_lse` asks for it
    log_probability: Tensor | None = None  # (N,) of the label, 0 where masked
    entropy: Tensor | None = None  # (N,), 0 where masked
    argmax: Tensor | None = None  # (N,) int64, -1 where masked


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what logits and sums of inputs of this dtype are in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lacks_gradient_range(dtype: torch.dtype) -> bool:
    """Tell whether gradients of this dtype underflow before a gradient scaler has multiplied the
    loss, so that they must not be made before the backward."""
    return dtype == torch.float16


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether it is a finite real number, NumPy's too, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether it is an integer, NumPy's too, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)

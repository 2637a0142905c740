"""What the loss computes: its settings, checked once, and what one call works on."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from smoothce.vocab_parallel import Shard

REDUCTIONS = ("none", "sum", "mean")
FLOATS = ("label_smoothing", "softcap", "logit_scale", "filter_eps", "z_loss")


@dataclass(frozen=True)
class Options:
    """Checked settings of the loss; `linear_cross_entropy` documents each. Raises ValueError."""

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
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            raise ValueError(
                f"label_smoothing must be a number in [0, 1], not {self.label_smoothing!r}"
            )
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
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in (*FLOATS, "ignore_index", "workspace"):  # NumPy's too; kernels get Python's
            value = getattr(self, name)
            if isinstance(value, Real):
                object.__setattr__(self, name, (float if name in FLOATS else int)(value))


class Inputs(NamedTuple):
    """One call, checked: what every implementation's `loss` takes."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D); of a sharded vocabulary this rank's rows
    labels: Tensor  # (N,) int64, in the whole vocabulary
    bias: Tensor | None  # (V,)
    smoothing_target: Tensor | None  # (V,) fp32, u; None: 1/V everywhere
    token_weights: Tensor | None  # (N,) fp32, ω; None: 1 everywhere
    options: Options
    shard: Shard | None = None

    @property
    def scale(self) -> float:
        return 1.0 if self.options.logit_scale is None else self.options.logit_scale

    @property
    def vocabulary(self) -> int:
        """Entries of the whole vocabulary."""
        return len(self.weight) if self.shard is None else self.shard.total

    def valid(self) -> Tensor:  # (N,) bool
        """Which tokens count."""
        return self.labels != self.options.ignore_index

    def loss_scale(self, dtype: torch.dtype = torch.float32) -> Tensor:  # ()
        """What the reduction multiplies the sum of the tokens' losses by: 1, or for a mean
        1 / Σ ω over valid tokens, and 0 where that is none.

        On the device, so that nothing waits for the host."""
        if self.options.reduction != "mean":
            return torch.ones((), dtype=dtype, device=self.labels.device)
        valid = self.valid()
        if self.token_weights is None:
            return valid.sum().clamp(min=1).to(dtype).reciprocal()
        total = torch.where(valid, self.token_weights, 0).sum().to(dtype)
        return torch.where(total > 0, 1 / total, 0)


class TokenStatistics(NamedTuple):
    """Of each token, in nats; 0 for those labelled `ignore_index`, whose argmax is -1."""

    log_probability: Tensor | None  # of the label, fp32; None without labels
    entropy: Tensor  # fp32
    lse: Tensor  # fp32
    argmax: Tensor  # int64


class LossOutput(NamedTuple):
    """What an implementation's `loss` returns; the last three, without a gradient, where
    `return_statistics` asks for them."""

    loss: Tensor  # (), or (N,) where reduction is "none"
    lse: Tensor  # (N,), 0 where a token is masked; differentiable where `return_lse`
    log_probability: Tensor | None = None  # (N,) of the label, 0 where masked
    entropy: Tensor | None = None  # (N,) likewise
    argmax: Tensor | None = None  # (N,) int64, -1 where masked


def is_number(value: object) -> bool:
    """Whether it is a finite real number, NumPy's too, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)

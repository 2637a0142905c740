"""What the loss computes, apart from its tensors: checked once, read by every implementation."""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

REDUCTIONS = ("none", "sum", "mean")
NUMBERS = ("label_smoothing", "softcap", "logit_scale", "filter_eps")


@dataclass(frozen=True)
class Options:
    """Checked settings of the loss; `linear_cross_entropy` documents each. Raises ValueError."""

    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float | None = None
    filter_eps: float | str | None = None
    workspace: int = 0
    return_lse: bool = False

    def __post_init__(self) -> None:
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            raise ValueError(
                f"label_smoothing must be a number in [0, 1], not {self.label_smoothing!r}"
            )
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index must be an integer, not {self.ignore_index!r}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}"
            )
        if self.softcap is not None and not (is_number(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be None or a positive number, not {self.softcap!r}")
        if self.logit_scale is not None and not is_number(self.logit_scale):
            raise ValueError(f"logit_scale must be None or a number, not {self.logit_scale!r}")
        eps = self.filter_eps
        if not (eps is None or eps == "auto" or (is_number(eps) and 0 < eps < 1)):
            raise ValueError(
                f"filter_eps must be 'auto', None (exact) or a number in (0, 1), not {eps!r}"
            )
        size = self.workspace
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"workspace must be an integer of bytes, 0 or more, not {size!r}")
        if not isinstance(self.return_lse, bool):
            raise ValueError(f"return_lse must be True or False, not {self.return_lse!r}")
        for name in NUMBERS:  # NumPy's numbers too; kernels get Python's
            if isinstance(getattr(self, name), Real):
                object.__setattr__(self, name, float(getattr(self, name)))

    def valid(
        self,
        labels: Tensor,  # (N,)
    ) -> Tensor:
        """Which tokens count, (N,) bool."""
        return labels != self.ignore_index

    def token_weight(
        self,
        labels: Tensor,  # (N,)
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """What the reduction multiplies each valid token's loss by: 1, or 1/max(valid, 1) for mean.

        A 0-d tensor on the labels' device, so that nothing waits for the host."""
        if self.reduction != "mean":
            return torch.ones((), dtype=dtype, device=labels.device)
        return self.valid(labels).sum().clamp(min=1).to(dtype).reciprocal()


def is_number(value: object) -> bool:
    """Whether it is a finite real number, NumPy's too, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)

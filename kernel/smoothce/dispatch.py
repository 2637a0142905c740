"""Which implementation computes a call: by name, or the fastest that can serve it."""

import functools
import importlib
import warnings
from typing import Protocol, cast

import torch

from smoothce.checks import check_values
from smoothce.options import LossCall, LossOutput, accumulation_dtype


class Implementation(Protocol):
    """The functions of a module that is listed in `IMPLEMENTATIONS`.

    The module stands in the place of `self`. A masked token has 0 everywhere and -1 as its argmax,
    and its hidden state may hold NaN, which reaches no output and no gradient. An entry whose bias
    is −∞ has no part in Σ_v u_v z_v where u_v is 0. Each gradient has its input's dtype, and none
    is made that is not wanted. A second derivative is right, or raises RuntimeError. The backward
    switches autocast off by itself, and a second one through a retained graph gives the same."""

    def loss(self, call: LossCall) -> LossOutput:
        """Compute the loss of a checked call; differentiable in hidden, weight and bias."""

    def unsupported(self, call: LossCall) -> str | None:
        """Say why this call cannot be served, in words that follow "because"; None: it can."""

    def describe(self, call: LossCall) -> str | None:
        """Say how the gradient is made; None where there is one way only."""


# They are imported on first use, so that no implementation costs those who use another. The package
# has another name where the Hub's `kernels` library loads it (kernel/build_hub.py).
IMPLEMENTATIONS = {
    "reference": f"{__package__}.reference",
    "chunked": f"{__package__}.chunked",
    "triton": f"{__package__}.triton",
}


def run(call: LossCall, impl: str) -> LossOutput:
    """Compute a call by the chosen implementation, with autocast switched off."""
    check_values(call)
    name, reason = choose(impl, call)
    if name == "chunked" and impl == "auto" and call.hidden.is_cuda:
        dtype = accumulation_dtype(call.hidden.dtype)
        _warn_once(f"smoothce's chunked path, in {dtype} and some ten times slower: {reason}")
    if call.hidden.is_meta:  # a device that autocast does not know
        return _load(name).loss(call)
    with torch.autocast(call.hidden.device.type, enabled=False):
        return _load(name).loss(call)


def explain(impl: str, call: LossCall) -> str:
    """Say which implementation is chosen, why, and how it makes the gradient."""
    name, reason = choose(impl, call)
    description = _load(name).describe(call)
    if description is None:
        return f"{name}: {reason}"
    return f"{name}: {reason}; {description}"


def choose(impl: str, call: LossCall) -> tuple[str, str]:
    """Return the name of the implementation, and the reason why it is that one.

    Raises ValueError where `impl` names none, or one that cannot serve this call."""
    check_impl(impl)
    if impl != "auto":
        obstacle = _unsupported(impl, call)
        if obstacle is not None:
            raise ValueError(f"impl={impl!r} cannot be used: {obstacle}; impl='auto' can")
        return impl, "asked for by impl="
    if call.hidden.is_meta:
        return "reference", "meta tensors have no numbers to compute with"
    obstacle = _unsupported("triton", call)
    if obstacle is None and not call.hidden.is_cuda:
        # Triton's interpreter could serve them, but it is for tests.
        obstacle = f"the inputs are on {call.hidden.device.type}"
    if obstacle is None:
        return "triton", "the Triton kernels"
    return "chunked", f"triton is not used because {obstacle}"


def _unsupported(name: str, call: LossCall) -> str | None:
    try:
        implementation = _load(name)
    except ImportError as error:
        return f"{IMPLEMENTATIONS[name]} cannot be imported ({error})"
    return implementation.unsupported(call)


def _load(name: str) -> Implementation:
    return cast(Implementation, importlib.import_module(IMPLEMENTATIONS[name]))


@functools.cache
def _warn_once(message: str) -> None:
    # The warning names the line that called `linear_cross_entropy`, which called `run`: the user's,
    # or one of this package where the call came through `LinearCrossEntropy` or `token_statistics`.
    warnings.warn(message, stacklevel=4)


def check_impl(impl: str) -> None:
    """Raise ValueError where it is not the name of an implementation, or "auto"."""
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be auto or one of {', '.join(IMPLEMENTATIONS)}, not {impl!r}")

"""Which implementation computes a call: by name, or the fastest that can serve it. It runs with
autocast switched off, on inputs that `autocast` has cast as autocast would."""

import functools
import importlib
import warnings
from typing import Protocol, cast

import torch
from torch import Tensor

from smoothce.options import Inputs, LossOutput, accumulation_dtype


class Implementation(Protocol):
    """The functions that a module needs to be listed in `IMPLEMENTATIONS`.

    Each is a plain function of the module, which stands in the place of `self`. A new
    implementation is listed there, and under `impl` in the docstring of `linear_cross_entropy`.
    Listing it does not make "auto" take it: `_choose_automatically` and the warning in `run` name
    those that it takes. `compile_operator` needs nothing for it.

    What `loss` has to keep, beside the values of `reference.loss`:

    - A masked token has 0 everywhere and -1 as its argmax (`LossOutput`), and its hidden state may
      hold NaN, which must reach no output and no gradient.
    - Where every token is masked, or their weights are 0, a mean is 0 and so is its gradient.
      `Inputs.loss_scale` is finite there; the losses that it multiplies have to be 0.
    - An entry whose bias is −∞ has no part in Σ_v u_v z_v where u_v is 0. It has probability 0, but
      not under a softcap, which makes a logit of −softcap of it.
    - A split vocabulary (`inputs.shard`) is served, or refused by `unsupported`. All ranks take
      part in the same collectives, so that they choose by `Inputs.most_rows` and `least_rows`.
    - No gradient is made that is not wanted (`InputTensors.needs`). Each has its input's dtype;
      autograd casts one that is wider.
    - It is differentiable once, in the log-sum-exps too where `return_lse` asks for them. A second
      derivative is right, or raises RuntimeError (`autograd_tools.once_differentiable`).
    - A second backward through a retained graph gives the same gradients, also where the first ones
      were changed in place (`autograd_tools.graph_is_kept`).
    - The backward switches autocast off by itself: here it is off around the forward alone.
    - What it cannot serve it refuses by `unsupported`, before anything is computed.

    Its tests: `check(impl=...)` of tests/helpers/loss_check.py, and the lists of implementations or
    modes in tests/kernel: test_dtypes, test_token_statistics, test_compiled, and of
    tests/kernel/triton: test_gradients and test_vocab_parallel."""

    def loss(self, inputs: Inputs) -> LossOutput:
        """The loss of checked inputs; differentiable in hidden, weight and bias."""

    def unsupported(self, inputs: Inputs) -> str | None:
        """Why these inputs cannot be served, in words that follow "because"; None: they can."""

    def describe(self, inputs: Inputs) -> str | None:
        """How the gradient is made of these inputs, in words; None where there is one way only."""


# They are imported on first use, so that no implementation costs those who use another. The package
# has another name where the Hub's `kernels` library loads it (kernel/build_hub.py).
IMPLEMENTATIONS = {
    "reference": f"{__package__}.reference",
    "chunked": f"{__package__}.chunked",
    "triton": f"{__package__}.triton",
}


def run(inputs: Inputs, impl: str) -> LossOutput:
    """The output of the chosen implementation for checked inputs."""
    name, reason = choose(impl, inputs)
    if name == "chunked" and impl == "auto" and inputs.hidden.is_cuda:
        dtype = accumulation_dtype(inputs.hidden.dtype)
        _warn_once(f"smoothce's chunked path, in {dtype} and some ten times slower: {reason}")
    if inputs.hidden.is_meta:  # autocast does not know the device
        return _load(name).loss(inputs)
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
    if inputs.hidden.is_meta:
        return "reference", "meta tensors have no numbers to compute with"
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
    # The warning names the line that called `linear_cross_entropy`, which called `run`: the user's,
    # or one of this package where the call came through `LinearCrossEntropy` or `token_statistics`.
    warnings.warn(message, stacklevel=4)


def autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each as `F.linear` would take it."""
    dtype = autocast_dtype(hidden)
    if dtype is None:
        return hidden, weight, bias
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What `autocast` casts a call's tensors to, or None where it leaves them as they are."""
    device = hidden.device.type
    if hidden.is_meta or not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def check_impl(impl: str) -> None:
    """Raises ValueError where it is not the name of an implementation, or "auto"."""
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be auto or one of {', '.join(IMPLEMENTATIONS)}, not {impl!r}")

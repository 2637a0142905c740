"""The loss as two operators of PyTorch's, which `torch.compile` takes into its graph whole.

This is no implementation of the loss beside Triton's and the chunked one: what an operator runs
when the graph does is `dispatch.run` and the eager backward, so that implementations need nothing
for `torch.compile`, whose graph sees tensors go in and come out. What an eager forward keeps for
its backward is no tensor of the graph. So the operator `loss` returns gradients beside the outputs
where they lack the upstream factor alone, and `loss_backward` computes all anew where they lack
more.

In the operators' schemas a call's tensors are positional, and everything else is a keyword. A graph
may hold a number as a symbol, so that an option which is a number or "auto" has the type of a
number, and the list `auto` names those that are "auto".
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smoothce.autograd_tools import once_differentiable
from smoothce.checks import REQUIRED
from smoothce.dispatch import run
from smoothce.options import (
    TENSORS,
    Gradients,
    LossCall,
    LossOutput,
    Needs,
    Options,
    accumulation_dtype,
    lacks_gradient_range,
    needs_of,
    option_types,
)

# Numbers come before `str`: an option that is a number or "auto" is a number in the schema.
SCHEMA_TYPES = {bool: "bool", float: "float", int: "SymInt", str: "str"}


def _schema(upstream: str, outputs: int) -> str:
    tensors = ", ".join(f"Tensor{'' if name in REQUIRED else '?'} {name}" for name in TENSORS)
    settings = ["str impl", "bool[] needs", "str[] auto"]
    for name, types in option_types().items():
        schema_type = next(text for python, text in SCHEMA_TYPES.items() if python in types)
        optional = "?" if type(None) in types else ""
        settings.append(f"{schema_type}{optional} {name}")
    returned = ", ".join(["Tensor"] * outputs)
    return f"({tensors}{upstream}, *, {', '.join(settings)}) -> ({returned})"


def call_operator(tensors: dict[str, Any], options: dict[str, Any], impl: str) -> LossOutput:
    """Compute the loss in a graph that is being compiled. Options are as the caller gave them."""
    # Everything is checked now but plain numbers, which the graph may hold as symbols: words, None,
    # NumPy's numbers, and flags whatever is given for them, since 1 is not True. (While a graph is
    # made, `type` says int or float of a symbol as well.)
    checked_now = {}
    for name, value in options.items():
        if name.startswith("return_") or type(value) not in (int, float):
            checked_now[name] = value
    mistake = _mistake_in(**checked_now)
    if mistake is not None:
        raise ValueError(mistake)
    auto = []
    numbers = {**options}
    for name, value in options.items():
        if name != "reduction" and isinstance(value, str):
            auto.append(name)
            numbers[name] = 0
    needs = list(needs_of(tensors))
    outputs = loss_operator(*tensors.values(), impl=impl, needs=needs, auto=auto, **numbers)
    return LossOutput(*outputs[:5])


@torch.compiler.assume_constant_result
def _mistake_in(**options: Any) -> str | None:
    """Return what `Options` says against these, or None. They are checked while the graph is made;
    options that are plain numbers are checked when it runs."""
    try:
        Options(**options)
    except ValueError as error:
        return str(error)
    return None


# Named for the package: another copy of it, which the Hub's `kernels` library loads under a name of
# its own, has its own operators.
@torch.library.custom_op(f"{__package__}::loss", mutates_args=(), schema=_schema("", outputs=8))
def loss_operator(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """Compute the fields of a `LossOutput`, then those of `Gradients` for an upstream factor of 1.
    An empty tensor stands for what there is none of."""
    if _makes_gradients(tensors[0], settings):
        dtype = accumulation_dtype(tensors[0].dtype)
        unit_upstream = torch.ones((), dtype=dtype, device=tensors[0].device)
        output, gradients = _run_with_gradients(tensors, settings, unit_upstream, None)
        return _without_none(tensors[0], (*output, *gradients))
    with torch.no_grad():
        output = run(_make_call(tensors, {**settings, "needs": [False] * 3}), settings["impl"])
    return _without_none(tensors[0], (*output, *Gradients()))


@torch.library.custom_op(
    f"{__package__}::loss_backward",
    mutates_args=(),
    schema=_schema(", Tensor? upstream_loss, Tensor? upstream_lse", outputs=3),
)
def backward_operator(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """Compute the fields of `Gradients` from the inputs anew."""
    *call_tensors, upstream_loss, upstream_lse = tensors
    _, gradients = _run_with_gradients(call_tensors, settings, upstream_loss, upstream_lse)
    return _without_none(tensors[0], gradients)


def _makes_gradients(hidden: Tensor, settings: dict[str, Any]) -> bool:
    """Tell whether gradients lack an upstream factor alone, so that the forward can make them.

    The operator returns gradients in the inputs' dtype, which in fp16 has no range for that. (In an
    eager call `chunked` holds them in fp32 until the backward.)"""
    one_factor = settings["reduction"] != "none" and not settings["return_lse"]
    return any(settings["needs"]) and one_factor and not lacks_gradient_range(hidden.dtype)


def _make_call(tensors: Sequence[Any], settings: dict[str, Any]) -> LossCall:
    """Make a call with a graph of its own, and with checked options."""
    needs = Needs(*settings["needs"])
    named = dict(zip(TENSORS, tensors, strict=True))
    for name, needed in needs._asdict().items():
        if named[name] is not None:
            named[name] = named[name].detach().contiguous().requires_grad_(needed)
    values = {name: settings[name] for name in option_types()}
    options = Options(**{**values, **dict.fromkeys(settings["auto"], "auto")})
    return LossCall(**named, options=options, needs=needs)


def _run_with_gradients(
    tensors: Sequence[Any],
    settings: dict[str, Any],
    upstream_loss: Tensor | None,  # () or (N,)
    upstream_lse: Tensor | None,  # (N,)
) -> tuple[LossOutput, Gradients]:
    """Run the loss and its eager backward, for the upstream gradients that there are."""
    call = _make_call(tensors, settings)
    with torch.enable_grad():
        output = run(call, settings["impl"])
    outputs = []
    upstream_gradients = []
    for tensor, upstream in ((output.loss, upstream_loss), (output.lse, upstream_lse)):
        if upstream is not None:
            outputs.append(tensor)
            upstream_gradients.append(upstream)
    wanted = [name for name, needed in call.needs._asdict().items() if needed]
    leaves = [getattr(call, name) for name in wanted]
    made = torch.autograd.grad(outputs, leaves, upstream_gradients)
    return output, Gradients(**dict(zip(wanted, made, strict=True)))


def _without_none(hidden: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Put an empty tensor where there is none, each its own: an operator returns no None, and no
    tensor twice."""
    return tuple(hidden.new_empty(0) if x is None else x.detach() for x in tensors)


@loss_operator.register_fake
def _shapes_of_loss(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes and dtypes that the operator returns, without values."""
    hidden = tensors[0]
    (n_tokens,) = tensors[2].shape
    per_token = hidden.new_empty(n_tokens, dtype=accumulation_dtype(hidden.dtype))
    loss = per_token if settings["reduction"] == "none" else per_token.new_empty(())
    output = LossOutput(loss, torch.empty_like(per_token))
    if settings["return_statistics"]:
        log_probability, entropy = torch.empty_like(per_token), torch.empty_like(per_token)
        argmax = torch.empty_like(per_token, dtype=torch.int64)
        output = LossOutput(loss, output.lse, log_probability, entropy, argmax)
    if not _makes_gradients(hidden, settings):
        return _without_none(hidden, (*output, *Gradients()))
    return (*_without_none(hidden, output), *_shapes_of_gradients(*tensors, None, None, **settings))


@backward_operator.register_fake
def _shapes_of_gradients(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    named = dict(zip(TENSORS, tensors[: len(TENSORS)], strict=True))
    gradients: list[Tensor | None] = []
    for name, needed in zip(Needs._fields, settings["needs"], strict=True):
        gradients.append(torch.empty_like(named[name]) if needed else None)
    return _without_none(tensors[0], gradients)


def _save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]
) -> None:
    ctx.settings = keyword_only_inputs
    ctx.gradients_are_made = _makes_gradients(inputs[0], keyword_only_inputs)
    ctx.set_materialize_grads(False)
    made = output[5:] if ctx.gradients_are_made else ()
    ctx.save_for_backward(*inputs, *made)


def _backward(
    ctx: Any, upstream_loss: Tensor | None, upstream_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    gradients: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    tensors = ctx.saved_tensors[: len(TENSORS)]
    made = ctx.saved_tensors[len(TENSORS) :]
    if upstream_loss is None and upstream_lse is None:
        return tuple(gradients.values())
    if not ctx.gradients_are_made:
        made = backward_operator(*tensors, upstream_loss, upstream_lse, **ctx.settings)
    for name, needed, gradient in zip(Needs._fields, ctx.settings["needs"], made, strict=True):
        if needed and ctx.gradients_are_made:  # rounded once to the gradient's dtype
            assert upstream_loss is not None  # the log-sum-exps have no gradient then
            gradient = (gradient.to(upstream_loss.dtype) * upstream_loss).to(gradient.dtype)
        if needed:
            gradients[name] = gradient
    return tuple(gradients.values())


loss_operator.register_autograd(once_differentiable(_backward), setup_context=_save_for_backward)

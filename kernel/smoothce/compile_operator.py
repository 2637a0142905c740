"""The loss as an operator of PyTorch's, which `torch.compile` takes into its graph without a break.

This is no implementation of the loss beside Triton's and the chunked one. `linear_cross_entropy`
calls `call_operator` here where it is being compiled, and `dispatch.run` elsewhere. The operator's
body, which runs when the graph does, calls `dispatch.run` too.

There is one operator for the forward and the backward. Its body runs the eager loss and, where it
is to make gradients, the eager backward by `torch.autograd.grad`: so implementations need nothing
for `torch.compile`, whose graph sees tensors go in and come out. What an eager forward keeps for
its backward is no tensor of the graph, so that nothing passes from one run of the operator to the
next but what it returns. `OperatorCall.step` says which of three things a run is to do:

    forward                 the outputs
    forward with gradients  the outputs, and their gradients up to the upstream factor; the backward
                            of the graph multiplies these, and runs the operator no second time
    backward                the gradients for the upstream gradients that are given, from the inputs
                            anew

In the operator's schema the fields of `OperatorTensors` are positional arguments and everything
else is a keyword. PyTorch hands the operator's functions all tensors in the schema's order, also
those that `call_operator` and `backward` pass by name. The schema has the names and types of
`OperatorTensors`, `Options` and `OperatorOutputs`.
"""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import assert_never  # not yet in Python 3.10's typing

from smoothce.autograd_tools import once_differentiable
from smoothce.checks import check_call, check_values
from smoothce.dispatch import run
from smoothce.options import (
    Gradients,
    Inputs,
    InputTensors,
    LossOutput,
    Needs,
    Options,
    accumulation_dtype,
    lacks_gradient_range,
    option_types,
)

# Numbers come before `str`: an option that is a number or "auto" is a number in the schema.
SCHEMA_TYPES = {Tensor: "Tensor", bool: "bool", float: "float", int: "SymInt", str: "str"}


class OperatorTensors(NamedTuple):
    """The operator's positional arguments."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    labels: Tensor  # (N,)
    bias: Tensor | None  # (V,)
    smoothing_target: Tensor | None  # (V,)
    token_weights: Tensor | None  # (N,)
    upstream_loss: Tensor | None  # () or (N,); only a backward gives this one and the next
    upstream_lse: Tensor | None  # (N,)

    def inputs(self) -> InputTensors:
        return InputTensors(*(getattr(self, name) for name in InputTensors._fields))


class OperatorOutputs(NamedTuple):
    """What the operator returns; an empty tensor stands for what there is none of."""

    loss: Tensor  # () or (N,)
    lse: Tensor  # (N,)
    log_probability: Tensor  # (N,) or empty, as the next two
    entropy: Tensor
    argmax: Tensor
    grad_hidden: Tensor  # (N, D) or empty
    grad_weight: Tensor  # (V, D) or empty
    grad_bias: Tensor  # (V,) or empty

    @classmethod
    def of(cls, output: LossOutput, gradients: Gradients) -> "OperatorOutputs":
        none = output.loss.new_empty(0)
        return cls(
            loss=output.loss.detach(),
            lse=output.lse.detach(),
            log_probability=_detached(output.log_probability, none),
            entropy=_detached(output.entropy, none),
            argmax=_detached(output.argmax, none),
            grad_hidden=_detached(gradients.hidden, none),
            grad_weight=_detached(gradients.weight, none),
            grad_bias=_detached(gradients.bias, none),
        )

    # What is missing is an empty tensor in both, since an operator of torch returns no None.

    def loss_output(self) -> LossOutput:
        return LossOutput(*(getattr(self, name) for name in LossOutput._fields))

    def gradients(self) -> Gradients:
        return Gradients(hidden=self.grad_hidden, weight=self.grad_weight, bias=self.grad_bias)


def _detached(tensor: Tensor | None, none: Tensor) -> Tensor:
    # An operator must not return a tensor twice, so that each has an empty one of its own.
    return none.clone() if tensor is None else tensor.detach()


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}


def names_of_numbers_or_auto() -> tuple[str, ...]:
    """The options that may be a number or "auto"."""
    names = []
    for name, types in option_types().items():
        if str in types and (float in types or int in types):
            names.append(name)
    return tuple(names)


NUMBERS_OR_AUTO = names_of_numbers_or_auto()
FLAGS = tuple(name for name, types in option_types().items() if bool in types)


class EncodedOptions(NamedTuple):
    """Every option as the operator's schema holds it, not yet checked.

    A graph may hold a number as a symbol, so that an option which is a number or "auto" has the
    type of a number in the schema. Which of these are "auto" is said beside them:
    filter_eps="auto" becomes values["filter_eps"] = 0 and is_auto = ["filter_eps"]."""

    values: dict[str, Any]  # by the names of `Options`' fields; 0 where the option is "auto"
    is_auto: list[str]  # the names of the options that are "auto"

    @classmethod
    def of(cls, options: dict[str, Any]) -> "EncodedOptions":
        """The options as the caller gave them, and the defaults of the others."""
        values = {**DEFAULTS, **options}
        is_auto = []
        for name in NUMBERS_OR_AUTO:
            if isinstance(values[name], str):
                is_auto.append(name)
                values[name] = 0
        return cls(values, is_auto)

    def checked(self) -> Options:
        """Raises ValueError where an option is out of range."""
        return Options(**{**self.values, **dict.fromkeys(self.is_auto, "auto")})


Step = Literal["forward", "forward with gradients", "backward"]


@dataclass(frozen=True)
class OperatorCall:
    """The operator's arguments, and what follows from them."""

    tensors: OperatorTensors
    options: EncodedOptions
    impl: str
    needs: Needs

    @classmethod
    def of_arguments(
        cls,
        tensors: tuple[Any, ...],
        *,
        impl: str,
        needs: list[bool],
        is_auto: list[str],
        **options: Any,
    ) -> "OperatorCall":
        return cls(OperatorTensors(*tensors), EncodedOptions(options, is_auto), impl, Needs(*needs))

    @property
    def step(self) -> Step:
        """What this run of the operator is to do."""
        if self.tensors.upstream_loss is not None or self.tensors.upstream_lse is not None:
            return "backward"
        options = self.options.values
        if not any(self.needs) or options["reduction"] == "none" or options["return_lse"]:
            return "forward"
        if lacks_gradient_range(self.tensors.hidden.dtype):
            # The operator returns gradients in the inputs' dtype. (In an eager call `chunked` holds
            # them in fp32 until the backward, so that it can make them in the forward.)
            return "forward"
        return "forward with gradients"

    def inputs(self) -> Inputs:
        """The inputs, in a graph of their own, with checked options."""
        tensors = self.tensors.inputs()
        leaves = {}
        for name, needed in self.needs._asdict().items():
            tensor = getattr(tensors, name)
            if tensor is not None:
                leaves[name] = tensor.detach().contiguous().requires_grad_(needed)
        return tensors._replace(**leaves).with_options(self.options.checked())


def schema_type(annotation: Any) -> str:
    """What an operator's schema calls this annotation: "float?" for `float | None`."""
    types = typing.get_args(annotation) or (annotation,)
    for python_type, name in SCHEMA_TYPES.items():
        if python_type in types:
            return f"{name}?" if type(None) in types else name
    raise TypeError(f"an operator's schema has no type for {annotation}")


def operator_schema() -> str:
    tensors = [
        f"{schema_type(annotation)} {name}"
        for name, annotation in OperatorTensors.__annotations__.items()
    ]
    options = [f"{schema_type(field.type)} {field.name}" for field in dataclasses.fields(Options)]
    keywords = ["str impl", "bool[] needs", "str[] is_auto", *options]
    outputs = [f"Tensor {name}" for name in OperatorOutputs._fields]
    return f"({', '.join(tensors)}, *, {', '.join(keywords)}) -> ({', '.join(outputs)})"


def call_operator(tensors: InputTensors, options: dict[str, Any], impl: str) -> LossOutput:
    """`dispatch.run` in a graph that is being compiled. Options are as the caller gave them."""
    # Everything is checked now but plain numbers, which the graph may hold as symbols: words, None,
    # NumPy's numbers, and flags whatever is given for them, since 1 is not True. (While a graph is
    # made, `type` says int or float of a symbol as well.)
    checked_now = {}
    for name, value in options.items():
        is_plain_number = type(value) in (int, float)
        if name in FLAGS or not is_plain_number:
            checked_now[name] = value
    mistake = mistake_in(**checked_now)
    if mistake is not None:
        raise ValueError(mistake)
    encoded = EncodedOptions.of(options)
    outputs = operator(
        *tensors,
        upstream_loss=None,
        upstream_lse=None,
        impl=impl,
        needs=list(tensors.needs()),
        is_auto=encoded.is_auto,
        **encoded.values,
    )
    return OperatorOutputs(*outputs).loss_output()


@torch.compiler.assume_constant_result
def mistake_in(**options: Any) -> str | None:
    """What `Options` says against these, or None. They are checked while the graph is made; options
    that are plain numbers are checked when it runs."""
    try:
        Options(**options)
    except ValueError as error:
        return str(error)
    return None


# Named for the package: another copy of it, which the Hub's `kernels` library loads under a name of
# its own, has its own operator.
@torch.library.custom_op(f"{__package__}::loss", mutates_args=(), schema=operator_schema())
def operator(*tensors: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    """What runs in the graph: the step that the call asks for."""
    call = OperatorCall.of_arguments(tensors, **keywords)
    inputs = call.inputs()
    check_call(inputs)
    check_values(inputs)
    match call.step:
        case "forward":
            with torch.no_grad():
                output = run(inputs, call.impl)
            return OperatorOutputs.of(output, Gradients())
        case "forward with gradients":
            hidden = inputs.hidden
            unit_upstream = torch.ones(
                (), device=hidden.device, dtype=accumulation_dtype(hidden.dtype)
            )
            return run_with_gradients(call, inputs, unit_upstream, None)
        case "backward":
            return run_with_gradients(
                call, inputs, call.tensors.upstream_loss, call.tensors.upstream_lse
            )
        case _:
            assert_never(call.step)


def run_with_gradients(
    call: OperatorCall,
    inputs: Inputs,
    upstream_loss: Tensor | None,  # () or (N,)
    upstream_lse: Tensor | None,  # (N,)
) -> OperatorOutputs:
    """The loss and its eager backward, for the upstream gradients that there are."""
    with torch.enable_grad():
        output = run(inputs, call.impl)
    outputs = []
    upstream_gradients = []
    for tensor, upstream in ((output.loss, upstream_loss), (output.lse, upstream_lse)):
        if upstream is not None:
            outputs.append(tensor)
            upstream_gradients.append(upstream)
    wanted = [name for name, needed in call.needs._asdict().items() if needed]
    leaves = [getattr(inputs, name) for name in wanted]
    made = torch.autograd.grad(outputs, leaves, upstream_gradients)
    return OperatorOutputs.of(output, Gradients(**dict(zip(wanted, made, strict=True))))


@operator.register_fake
def operator_shapes(*tensors: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    """Tensors of the shapes and dtypes that the operator returns, without values."""
    call = OperatorCall.of_arguments(tensors, **keywords)
    hidden = call.tensors.hidden
    options = call.options.values
    dtype = accumulation_dtype(hidden.dtype)
    (n_tokens,) = call.tensors.labels.shape
    output = LossOutput(
        loss=hidden.new_empty(n_tokens if options["reduction"] == "none" else (), dtype=dtype),
        lse=hidden.new_empty(n_tokens, dtype=dtype),
    )
    if options["return_statistics"]:
        output = output._replace(
            log_probability=hidden.new_empty(n_tokens, dtype=dtype),
            entropy=hidden.new_empty(n_tokens, dtype=dtype),
            argmax=hidden.new_empty(n_tokens, dtype=torch.int64),
        )
    gradients = {}
    if call.step != "forward":
        for name, needed in call.needs._asdict().items():
            if needed:
                leaf = getattr(call.tensors, name)
                gradients[name] = hidden.new_empty(leaf.shape, dtype=leaf.dtype)
    return OperatorOutputs.of(output, Gradients(**gradients))


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]
) -> None:
    call = OperatorCall.of_arguments(inputs, **keyword_only_inputs)
    ctx.keywords = keyword_only_inputs
    ctx.needs = call.needs
    ctx.gradients_are_made = call.step == "forward with gradients"
    ctx.set_materialize_grads(False)
    if ctx.gradients_are_made:
        inputs_with_gradient = [getattr(call.tensors, name) for name in Needs._fields]
        ctx.save_for_backward(*inputs_with_gradient, *OperatorOutputs(*output).gradients())
    else:
        ctx.save_for_backward(*call.tensors.inputs())


def backward(
    ctx: Any, upstream_loss: Tensor | None, upstream_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if upstream_loss is None and upstream_lse is None:
        gradients = Gradients()
    elif ctx.gradients_are_made:
        assert upstream_loss is not None  # the log-sum-exps have no gradient then
        gradients = Gradients(*(_scaled(made, upstream_loss) for made in ctx.saved_tensors[3:]))
    else:
        outputs = operator(
            *ctx.saved_tensors,
            upstream_loss=upstream_loss,
            upstream_lse=upstream_lse,
            **ctx.keywords,
        )
        gradients = OperatorOutputs(*outputs).gradients()
    # One for each positional argument, in their order.
    gradient_of: dict[str, Tensor | None] = dict.fromkeys(OperatorTensors._fields)
    for name, needed in ctx.needs._asdict().items():
        if needed:
            gradient_of[name] = getattr(gradients, name)
    return tuple(gradient_of.values())


def _scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """Their product, rounded once to the gradient's dtype."""
    return (gradient.to(upstream.dtype) * upstream).to(gradient.dtype)


operator.register_autograd(once_differentiable(backward), setup_context=setup_context)

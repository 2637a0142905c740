"""The loss as an operator of torch's, which `torch.compile` takes into its graph without a break.

A reduced loss makes its gradients with its forward, up to the upstream factor. Another, one with
its log-sum-exps or one in fp16 calls the operator again in the backward, with upstream gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from smoothce.chunked import once_differentiable
from smoothce.dispatch import check, run
from smoothce.options import Inputs, LossOutput, Options

AUTO = -1  # "auto" as a number, since a graph may hold numbers as symbols


class OperatorArguments(NamedTuple):
    """The operator's arguments."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    smoothing_target: Tensor | None
    token_weights: Tensor | None
    of_loss: Tensor | None  # upstream gradients; None and None: this is the forward
    of_lse: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str
    softcap: float | None
    logit_scale: float | None
    z_loss: float
    filter_eps: float | None
    workspace: int
    return_lse: bool
    return_statistics: bool
    impl: str
    needs: list[bool]  # gradients of hidden, weight and bias

    @property
    def with_forward(self) -> bool:
        """Whether gradients are made with the forward; fp16 has no range for them before a
        gradient scaler's factor."""
        reduced = self.reduction != "none" and not self.return_lse
        return any(self.needs) and reduced and self.hidden.dtype != torch.float16

    def inputs(self) -> Inputs:
        """Detached, with options that are checked."""
        options = {name: getattr(self, name) for name in Options.__dataclass_fields__}
        for name in ("filter_eps", "workspace"):
            options[name] = "auto" if options[name] == AUTO else options[name]
        leaves = [self.hidden, self.weight, self.bias]
        hidden, weight, bias = (
            x if x is None else x.detach().contiguous().requires_grad_(need)
            for x, need in zip(leaves, self.needs, strict=True)
        )
        return Inputs(hidden, weight, self.labels, bias, *self[4:6], Options(**options))


SCHEMA = """(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? smoothing_target,
    Tensor? token_weights, Tensor? of_loss, Tensor? of_lse, float label_smoothing,
    SymInt ignore_index, str reduction, float? softcap, float? logit_scale, float z_loss,
    float? filter_eps, SymInt workspace, bool return_lse, bool return_statistics, str impl,
    bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"""


def loss(inputs: Inputs, impl: str) -> LossOutput:
    """`dispatch.run` in a graph that is being compiled; options are a dictionary, unchecked."""
    options = dict(inputs.options)
    check_constants(**{k: v for k, v in options.items() if type(v) not in (int, float)})
    for name in ("filter_eps", "workspace"):
        options[name] = AUTO if options[name] == "auto" else options[name]
    leaves, grad = (inputs.hidden, inputs.weight, inputs.bias), torch.is_grad_enabled()
    needs = [grad and x is not None and x.requires_grad for x in leaves]
    settings = [options[name] for name in Options.__dataclass_fields__]
    return LossOutput(*operator(*inputs[:6], None, None, *settings, impl, needs)[:5])


@torch.compiler.assume_constant_result
def check_constants(**options: object) -> None:
    """What is no number is checked while the graph is made, and numbers when it runs."""
    Options(**options)


@torch.library.custom_op("smoothce::loss", mutates_args=(), schema=SCHEMA)
def operator(*given):
    """Loss, log-sum-exps, statistics, and gradients of hidden, weight and bias; empty where there
    is none."""
    call = OperatorArguments(*given)
    inputs, upstream = call.inputs(), (call.of_loss, call.of_lse)
    check(inputs)
    if call.of_loss is None and call.of_lse is None and call.with_forward:
        wide = torch.promote_types(call.hidden.dtype, torch.float32)
        upstream = torch.ones((), device=call.hidden.device, dtype=wide), None
    terms = [i for i in range(2) if upstream[i] is not None]
    with torch.set_grad_enabled(bool(terms)):
        found = run(inputs, call.impl)
    leaves = inputs.hidden, inputs.weight, inputs.bias
    made = [call.hidden.new_empty(0) for _ in leaves]
    if terms:
        wanted = [i for i in range(3) if call.needs[i]]
        gradients = torch.autograd.grad(
            [found[i] for i in terms], [leaves[i] for i in wanted], [upstream[i] for i in terms]
        )
        for i, gradient in zip(wanted, gradients, strict=True):
            made[i] = gradient
    nothing = found.loss.new_empty(0)
    return *(nothing.clone() if x is None else x.detach() for x in found), *made


@operator.register_fake
def _(*given):
    call = OperatorArguments(*given)
    wide = torch.promote_types(call.hidden.dtype, torch.float32)
    tokens = call.labels.shape

    def like(shape: object, wanted: bool = True, dtype: torch.dtype = wide) -> Tensor:
        return call.hidden.new_empty(shape if wanted else 0, dtype=dtype)

    found = like(tokens if call.reduction == "none" else ()), like(tokens)
    log_p, entropy = (like(tokens, call.return_statistics) for _ in range(2))
    argmax = like(tokens, call.return_statistics, torch.int64 if call.return_statistics else wide)
    now = call.with_forward or call.of_loss is not None or call.of_lse is not None
    leaves = call.hidden, call.weight, call.bias
    made = [
        like(x.shape if need else 0, need and now, x.dtype if need else call.hidden.dtype)
        for x, need in zip(leaves, call.needs, strict=True)
    ]
    return *found, log_p, entropy, argmax, *made


def save(ctx, inputs, output):
    ctx.settings, ctx.with_forward = inputs[8:], OperatorArguments(*inputs).with_forward
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(output[5:] if ctx.with_forward else inputs[:6]))


def differentiate(ctx, of_loss, of_lse, *_):
    saved, needs = ctx.saved_tensors, ctx.settings[-1]
    if of_loss is None and of_lse is None:
        made = [None] * 3
    elif ctx.with_forward:
        made = [(gradient.to(of_loss.dtype) * of_loss).to(gradient.dtype) for gradient in saved]
    else:
        made = operator(*saved, of_loss, of_lse, *ctx.settings)[5:]
    hidden, weight, bias = (x if need else None for x, need in zip(made, needs, strict=True))
    return hidden, weight, None, bias, *[None] * (len(ctx.settings) + 4)


operator.register_autograd(once_differentiable(differentiate), setup_context=save)

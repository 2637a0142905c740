"""The loss as operators of torch's, which `torch.compile` takes into its graph without a break.

A reduced loss makes its gradients with its forward, up to the upstream factor. Another, or one with
its log-sum-exps, computes its forward again in the backward.
"""

import json

import torch
from torch import Tensor

from smoothce.options import Options


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    impl: str,
    settings: dict[str, object],
) -> tuple[Tensor, Tensor]:  # () or (N,); (N,)
    """Loss and log-sum-exps of `linear_cross_entropy`, in a graph that is being compiled."""
    grad = torch.is_grad_enabled()
    needs = [grad and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    inputs = hidden, weight, labels, bias, packed(**settings), impl, needs
    return forward(*inputs)[:2]


@torch.compiler.assume_constant_result
def packed(**options: object) -> str:
    """Checked options as an operator's argument, made while the graph is."""
    return json.dumps(vars(Options(**options)))


def eager(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    options: str,
    impl: str,
    needs: list[bool],
    upstream: tuple[Tensor | None, Tensor | None] | None,  # None: no gradient
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, log-sum-exps and gradients of hidden, weight and bias, empty where not needed."""
    from smoothce.linear_cross_entropy import check, run

    settings = Options(**json.loads(options))
    hidden, weight, bias = (
        None if x is None else x.detach().contiguous().requires_grad_(need)
        for x, need in zip((inputs[0], inputs[1], inputs[3]), needs, strict=True)
    )
    check(hidden, weight, inputs[2], bias, settings)
    with torch.set_grad_enabled(upstream is not None):
        found = run(hidden, weight, inputs[2], bias, impl, settings)
    found = found if settings.return_lse else (found, hidden.new_empty(0))
    made = [hidden.new_empty(0) for _ in range(3)]
    if upstream is not None:
        wanted = [i for i in range(3) if needs[i]]
        terms = [i for i in range(2) if upstream[i] is not None]
        leaves = hidden, weight, bias
        gradients = torch.autograd.grad(
            [found[i] for i in terms], [leaves[i] for i in wanted], [upstream[i] for i in terms]
        )
        for i, gradient in zip(wanted, gradients, strict=True):
            made[i] = gradient
    return found[0].detach(), found[1].detach(), made


def with_forward(options: str, needs: list[bool]) -> bool:
    """Whether gradients are made with the forward."""
    settings = json.loads(options)
    return any(needs) and settings["reduction"] != "none" and not settings["return_lse"]


INPUTS = "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias"
INPUTS += ", str options, str impl, bool[] needs"


@torch.library.custom_op(
    "smoothce::loss",
    mutates_args=(),
    schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(hidden, weight, labels, bias, options, impl, needs):
    one = torch.ones((), device=hidden.device, dtype=accumulated(hidden))
    upstream = (one, None) if with_forward(options, needs) else None
    found, lse, made = eager((hidden, weight, labels, bias), options, impl, needs, upstream)
    return found, lse, *made


@forward.register_fake
def _(hidden, weight, labels, bias, options, impl, needs):
    settings, made = json.loads(options), with_forward(options, needs)
    shape = labels.shape if settings["reduction"] == "none" else ()
    found = hidden.new_empty(shape, dtype=accumulated(hidden))
    lse = hidden.new_empty(labels.shape if settings["return_lse"] else 0, dtype=found.dtype)
    return found, lse, *gradients_like((hidden, weight, bias), [made and need for need in needs])


@torch.library.custom_op(
    "smoothce::loss_backward",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor? of_loss, Tensor? of_lse) -> (Tensor, Tensor, Tensor)",
)
def backward(hidden, weight, labels, bias, options, impl, needs, of_loss, of_lse):
    inputs = hidden, weight, labels, bias
    return tuple(eager(inputs, options, impl, needs, (of_loss, of_lse))[2])


@backward.register_fake
def _(hidden, weight, labels, bias, options, impl, needs, of_loss, of_lse):
    return gradients_like((hidden, weight, bias), needs)


def accumulated(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def gradients_like(
    inputs: tuple[Tensor, Tensor, Tensor | None], needs: list[bool]
) -> tuple[Tensor, ...]:
    return tuple(
        inputs[0].new_empty(x.shape if need else 0) for x, need in zip(inputs, needs, strict=True)
    )


def save(ctx, inputs, output):
    *tensors, options, impl, needs = inputs
    ctx.settings, ctx.made = (options, impl, needs), with_forward(options, needs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(output[2:] if ctx.made else tensors))


def differentiate(ctx, of_loss, of_lse, *_):
    saved, needs = ctx.saved_tensors, ctx.settings[2]
    if of_loss is None and of_lse is None:
        made = [None] * 3
    elif ctx.made:
        made = [(gradient.to(of_loss.dtype) * of_loss).to(gradient.dtype) for gradient in saved]
    else:
        made = backward(*saved, *ctx.settings, of_loss, of_lse)
    hidden, weight, bias = (x if need else None for x, need in zip(made, needs, strict=True))
    return hidden, weight, None, bias, None, None, None


forward.register_autograd(differentiate, setup_context=save)

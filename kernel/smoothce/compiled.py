"""The loss as operators of torch's, which `torch.compile` takes into its graph without a break.

A reduced loss makes its gradients with its forward, up to the upstream factor. Another, one with
its log-sum-exps or one in fp16 computes its forward again in the backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from smoothce.chunked import once_differentiable
from smoothce.dispatch import check, run
from smoothce.options import Options

# Numbers are arguments of their own, since a graph may hold them as symbols.
ARGUMENTS = """Tensor hidden, Tensor weight, Tensor labels, Tensor? bias,
    float label_smoothing, SymInt ignore_index, str reduction, float? softcap, float? logit_scale,
    float? filter_eps, bool filter_auto, SymInt workspace, bool return_lse,
    str impl, bool[] needs"""


class Settings(NamedTuple):
    """The operators' arguments that are not tensors."""

    label_smoothing: float
    ignore_index: int
    reduction: str
    softcap: float | None
    logit_scale: float | None
    filter_eps: float | None
    filter_auto: bool  # filter_eps is "auto", which is no number
    workspace: int
    return_lse: bool
    impl: str
    needs: list[bool]  # gradients of hidden, weight and bias

    def options(self) -> Options:
        """Checked."""
        options = {name: getattr(self, name) for name in Options.__dataclass_fields__}
        return Options(**options | ({"filter_eps": "auto"} if self.filter_auto else {}))

    def with_forward(self, dtype: torch.dtype) -> bool:
        """Whether gradients are made with the forward.

        fp16 has no range for them before a gradient scaler's factor.
        """
        reduced = self.reduction != "none" and not self.return_lse
        return any(self.needs) and reduced and dtype != torch.float16


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    impl: str,
    options: dict[str, object],
) -> tuple[Tensor, Tensor]:  # () or (N,); (N,)
    """Loss and log-sum-exps of `linear_cross_entropy`, in a graph that is being compiled."""
    check_constants(**{k: v for k, v in options.items() if type(v) not in (int, float)})
    grad, auto = torch.is_grad_enabled(), options["filter_eps"] == "auto"
    needs = [grad and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    eps = None if auto else options["filter_eps"]
    settings = Settings(**{**options, "filter_eps": eps}, filter_auto=auto, impl=impl, needs=needs)
    return forward(hidden, weight, labels, bias, *settings)[:2]


@torch.compiler.assume_constant_result
def check_constants(**options: object) -> None:
    """What is no number is checked while the graph is made, and numbers when it runs."""
    Options(**options)


def eager(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    settings: Settings,
    upstream: tuple[Tensor | None, Tensor | None] | None,  # None: no gradient
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, log-sum-exps and gradients of hidden, weight and bias, empty where not needed."""
    options, needs = settings.options(), settings.needs
    leaves = hidden, weight, bias = [
        None if x is None else x.detach().contiguous().requires_grad_(need)
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    ]
    check(hidden, weight, labels, bias, options)
    with torch.set_grad_enabled(upstream is not None):
        found = run(hidden, weight, labels, bias, settings.impl, options)
    found = found if options.return_lse else (found, found.new_empty(0))
    made = [hidden.new_empty(0) for _ in leaves]
    if upstream is not None:
        wanted = [i for i in range(3) if needs[i]]
        terms = [i for i in range(2) if upstream[i] is not None]
        gradients = torch.autograd.grad(
            [found[i] for i in terms], [leaves[i] for i in wanted], [upstream[i] for i in terms]
        )
        for i, gradient in zip(wanted, gradients, strict=True):
            made[i] = gradient
    return found[0].detach(), found[1].detach(), made


@torch.library.custom_op(
    "smoothce::loss",
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(hidden, weight, labels, bias, *settings):
    settings = Settings(*settings)
    one = torch.ones((), device=hidden.device, dtype=accumulated(hidden))
    upstream = (one, None) if settings.with_forward(hidden.dtype) else None
    found, lse, made = eager(hidden, weight, labels, bias, settings, upstream)
    return found, lse, *made


@forward.register_fake
def _(hidden, weight, labels, bias, *settings):
    settings = Settings(*settings)
    shape = labels.shape if settings.reduction == "none" else ()
    found = hidden.new_empty(shape, dtype=accumulated(hidden))
    lse = found.new_empty(labels.shape if settings.return_lse else 0)
    made = [need and settings.with_forward(hidden.dtype) for need in settings.needs]
    return found, lse, *gradients_like((hidden, weight, bias), made)


@torch.library.custom_op(
    "smoothce::loss_backward",
    mutates_args=(),
    schema=f"({ARGUMENTS}, Tensor? of_loss, Tensor? of_lse) -> (Tensor, Tensor, Tensor)",
)
def backward(hidden, weight, labels, bias, *settings_and_upstream):
    *settings, of_loss, of_lse = settings_and_upstream
    upstream = of_loss, of_lse
    return tuple(eager(hidden, weight, labels, bias, Settings(*settings), upstream)[2])


@backward.register_fake
def _(hidden, weight, labels, bias, *settings_and_upstream):
    return gradients_like((hidden, weight, bias), Settings(*settings_and_upstream[:-2]).needs)


def accumulated(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def gradients_like(
    inputs: tuple[Tensor, Tensor, Tensor | None], needs: list[bool]
) -> tuple[Tensor, ...]:
    return tuple(
        inputs[0].new_empty(x.shape if need else 0) for x, need in zip(inputs, needs, strict=True)
    )


def save(ctx, inputs, output):
    ctx.settings = Settings(*inputs[4:])
    ctx.set_materialize_grads(False)
    early = ctx.settings.with_forward(inputs[0].dtype)
    ctx.save_for_backward(*(output[2:] if early else inputs[:4]))


def differentiate(ctx, of_loss, of_lse, *_):
    saved, settings = ctx.saved_tensors, ctx.settings
    if of_loss is None and of_lse is None:
        made = [None] * 3
    elif settings.with_forward(saved[0].dtype):
        made = [(gradient.to(of_loss.dtype) * of_loss).to(gradient.dtype) for gradient in saved]
    else:
        made = backward(*saved, *settings, of_loss, of_lse)
    hidden, weight, bias = (x if y else None for x, y in zip(made, settings.needs, strict=True))
    return hidden, weight, None, bias, *[None] * len(settings)


forward.register_autograd(once_differentiable(differentiate), setup_context=save)

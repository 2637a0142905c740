"""What the loss is measured against on a GPU: ours, the paper's, torch's and other libraries'."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy, paper
from smoothce.options import Options

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Peer:
    """A mean loss (hidden, weight, labels, β), and whether it knows label smoothing."""

    name: str
    loss: Loss
    smooths: bool = True


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, beta: float) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, label_smoothing=beta)


def ours(eps: float | str | None, share: float = 0.0, unbiased: bool = True) -> Loss:
    """`share` of all logits, which are two bytes each, is the workspace."""
    return lambda e, c, y, beta: linear_cross_entropy(
        e,
        c,
        y,
        label_smoothing=beta,
        filter_eps=eps,
        filter_unbiased=unbiased,
        workspace=int(share * 2 * len(e) * len(c)),
        impl="triton",
    )


def papers(eps: float | str | None, sort: bool, fused: bool = False) -> Loss:
    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float) -> Tensor:
        options = Options(label_smoothing=beta, filter_eps=eps)
        return paper.loss(e, c, y, None, options, sort=sort, fused=fused)

    return loss


def peers() -> tuple[list[Peer], dict[str, str]]:
    """All that can be imported here, and why the others cannot."""
    found = [
        Peer("ours, filtered", ours("auto")),
        Peer("ours, biased filter", ours("auto", unbiased=False)),
        Peer("ours, exact", ours(None)),
        Peer("ours, exact, workspace for 1/4 of the logits", ours(None, 0.26)),
        Peer("ours, exact, workspace for all", ours(None, 1.1)),
        Peer("torch", dense),
        Peer("torch.compile", torch.compile(dense)),
        Peer("paper", papers("auto", sort=True)),
        Peer("paper, unsorted", papers("auto", sort=False)),
        Peer("paper, no filter", papers(None, sort=False)),
        Peer("paper, fused", papers("auto", sort=True, fused=True)),
    ]
    missing = {}
    for name, smooths, load in OTHERS:
        try:
            found.append(Peer(name, load(), smooths))
        except Exception as error:  # a broken optional library must not end the run
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return found, missing


def _torch_linear() -> Loss:
    function, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return lambda e, c, y, beta: function(e, c, y, label_smoothing=beta, options=options)


def _liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float) -> Tensor:
        apply = LigerFusedLinearCrossEntropyFunction.apply
        found = apply(e, c, y, None, None, -100, 0.0, beta, "mean")
        return found[0] if isinstance(found, tuple) else found

    return loss


def _liger_hopper() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float) -> Tensor:
        found = LigerFusedScaledCrossEntropySM90Function.apply(e, c, y)
        return (found[0] if isinstance(found, tuple) else found).mean()

    return loss


def _liger_hopper_chunked() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return lambda e, c, y, beta: liger_fused_linear_cross_entropy_sm90(e, c, y)


def _cut(filter_eps: str | None) -> Callable[[], Loss]:
    def load() -> Loss:
        from cut_cross_entropy import linear_cross_entropy as function

        return lambda e, c, y, beta: function(e, c, y, filter_eps=filter_eps)

    return load


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda e, c, y, beta: chunked_linear_cross_entropy(e, c, y)


OTHERS = (
    ("F.linear_cross_entropy", True, _torch_linear),
    ("Liger", True, _liger),
    ("Liger Hopper FLSCE", False, _liger_hopper),
    ("Liger Hopper FLCE", False, _liger_hopper_chunked),
    ("cut-cross-entropy", False, _cut("auto")),
    ("cut-cross-entropy, no filter", False, _cut(None)),
    ("quack", False, _quack),
)

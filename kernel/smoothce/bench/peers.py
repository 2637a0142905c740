"""What the loss is measured against: ours, the paper's, torch's and other libraries'."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy, paper
from smoothce.bench.arguments import asked
from smoothce.bench.inputs import IGNORED
from smoothce.options import Options

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Peer:
    """A mean loss (hidden, weight, labels, β[, softcap]), and what it knows."""

    name: str
    loss: Loss
    smooths: bool = True
    softcaps: bool = False
    filter: Options | None = None  # ours: which pairs it computes
    floor: bool = False  # no loss: the least work of an exact gradient


def dense(
    hidden: Tensor, weight: Tensor, labels: Tensor, beta: float, softcap: float | None = None
) -> Tensor:
    z = (hidden @ weight.T).float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z, labels, label_smoothing=beta)


def ours(eps: float | str | None, share: float = 0.0, impl: str = "triton") -> Loss:
    """The workspace is `share` of all logits, which are two bytes each."""

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float, softcap: float | None = None) -> Tensor:
        return linear_cross_entropy(
            e,
            c,
            y,
            label_smoothing=beta,
            softcap=softcap,
            filter_eps=eps,
            workspace=int(share * 2 * len(e) * len(c)),
            impl=impl,
        )

    return loss


def papers(eps: float | str | None, sort: bool) -> Loss:
    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float) -> Tensor:
        options = Options(label_smoothing=beta, filter_eps=eps)
        return paper.loss(e, c, y, None, options, sort=sort)

    return loss


class Products(torch.autograd.Function):
    """The lower bound of an exact gradient: E Cᵀ, and with something of its shape as dlogits the
    two products that make the gradients; masked tokens are left out."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kept = (labels != IGNORED).nonzero()[:, 0]
        rows = hidden[kept]
        logits = rows @ weight.T
        ctx.shape = hidden.shape
        ctx.save_for_backward(rows, weight, kept, logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        rows, weight, kept, logits = ctx.saved_tensors
        of_hidden = rows.new_zeros(ctx.shape).index_copy_(0, kept, logits @ weight)
        return of_hidden, logits.T @ rows, None


def products(
    hidden: Tensor, weight: Tensor, labels: Tensor, beta: float, softcap: float | None = None
) -> Tensor:
    return Products.apply(hidden, weight, labels)


def peers(
    device: str, filter_eps: Sequence[float] = (), only: Sequence[str] = ("",)
) -> tuple[list[Peer], dict[str, str]]:
    """All that runs on this device, ours also with these thresholds; why others do not.

    Libraries with none of `only` in the name are left alone: some change torch when imported."""
    found = [
        Peer("three products", products, smooths=False, softcaps=True, floor=True),
        Peer("torch", dense, softcaps=True),
    ]
    if device == "cpu":
        return [Peer("ours, chunked", ours(None, impl="chunked"), softcaps=True), *found], {}
    found = [
        _filtered("ours, filtered", "auto"),
        *(_filtered(f"ours, filtered, 2^{round(math.log2(x), 2):g}", x) for x in filter_eps),
        Peer("ours, exact", ours(None), softcaps=True),
        Peer("ours, exact, workspace for 1/4 of the logits", ours(None, 0.26), softcaps=True),
        *found,
        Peer("torch.compile", torch.compile(dense), softcaps=True),
        Peer("paper", papers("auto", sort=True)),
        Peer("paper, unsorted", papers("auto", sort=False)),
        Peer("paper, no filter", papers(None, sort=False)),
    ]
    missing = {}
    for name, smooths, softcaps, load in OTHERS:
        if not asked(name, only):
            missing[name] = "not asked for"
            continue
        try:
            found.append(Peer(name, load(), smooths, softcaps))
        except Exception as error:  # a broken optional library must not end the run
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return found, missing


def _filtered(name: str, eps: float | str) -> Peer:
    return Peer(name, ours(eps), softcaps=True, filter=Options(filter_eps=eps))


def _torch_linear() -> Loss:
    function, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return lambda e, c, y, beta: function(e, c, y, label_smoothing=beta, options=options)


def liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float, softcap: float | None = None) -> Tensor:
        apply = LigerFusedLinearCrossEntropyFunction.apply
        found = apply(e, c, y, None, None, IGNORED, 0.0, beta, "mean", softcap)
        return found[0] if isinstance(found, tuple) else found

    return loss


def _liger_hopper() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float) -> Tensor:
        found = LigerFusedScaledCrossEntropySM90Function.apply(e, c, y)
        losses = found[0] if isinstance(found, tuple) else found  # 0 where a label is masked
        return losses.sum() / (y != IGNORED).sum()

    return loss


def _liger_hopper_chunked() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return lambda e, c, y, beta: liger_fused_linear_cross_entropy_sm90(e, c, y)


def _cut(filter_eps: str | None) -> Callable[[], Loss]:
    def load() -> Loss:
        from cut_cross_entropy import linear_cross_entropy as function

        return lambda e, c, y, beta, softcap=None: function(
            e, c, y, softcap=softcap, filter_eps=filter_eps
        )

    return load


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda e, c, y, beta: chunked_linear_cross_entropy(e, c, y)


def _torchtune() -> Loss:
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    function = CEWithChunkedOutputLoss()
    # as its documentation says
    function.compute_cross_entropy = torch.compile(function.compute_cross_entropy)

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float) -> Tensor:
        logits = [rows @ c.T for rows in e[None].chunk(function.num_output_chunks, dim=1)]
        return function(logits, y[None])

    return loss


def trl() -> Loss:
    from trl.kernels import ChunkedLogProbFunction

    try:  # its backward asks this module for what gathers weights under ZeRO-3
        import trl.trainer.utils  # noqa: F401
    except ImportError:  # which needs packages that the loss does not
        nothing = SimpleNamespace(maybe_gather_lm_head_ctx=lambda *_: nullcontext())
        sys.modules["trl.trainer.utils"] = nothing

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float, softcap: float | None = None) -> Tensor:
        kept = y != IGNORED
        rest = y[kept], 1.0, 65536, softcap, 1.0, ()
        return -ChunkedLogProbFunction.apply(e[kept], c, None, *rest)[0].mean()

    return loss


def _unsloth() -> Loss:
    from unsloth_zoo.fused_losses import unsloth_fused_ce_loss

    def loss(e: Tensor, c: Tensor, y: Tensor, beta: float, softcap: float | None = None) -> Tensor:
        given = None, e[None], c, None, y[None]
        settings = {"label_smoothing": beta, "logit_softcapping": softcap, "shift_labels": False}
        return unsloth_fused_ce_loss(*given, **settings)

    return loss


# name, whether it knows label smoothing, whether a softcap; all leave out masked labels
OTHERS = (
    ("F.linear_cross_entropy", True, False, _torch_linear),
    ("Liger", True, True, liger),
    ("Liger Hopper FLSCE", False, False, _liger_hopper),
    ("Liger Hopper FLCE", False, False, _liger_hopper_chunked),
    ("cut-cross-entropy", False, True, _cut("auto")),
    ("cut-cross-entropy, no filter", False, True, _cut(None)),
    ("quack", False, False, _quack),
    ("torchtune, chunked", False, False, _torchtune),
    ("TRL, chunked", False, True, trl),
    ("Unsloth", True, True, _unsloth),
)

"""Other libraries' losses, for the benchmark to measure beside ours:

    PYTHONPATH=kernel/examples python -m smoothce.bench --method peers:liger peers:trl paper:loss

Each takes (hidden, weight, labels, label_smoothing, softcap=None) and returns the mean loss. Where
one knows no smoothing or no softcap, that is a row of the table. Some change torch when imported.
"""

from torch import Tensor

IGNORED = -100


def liger(e: Tensor, c: Tensor, y: Tensor, label_smoothing: float = 0.0, softcap=None) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    apply = LigerFusedLinearCrossEntropyFunction.apply
    found = apply(e, c, y, None, None, IGNORED, 0.0, label_smoothing, "mean", softcap)
    return found[0] if isinstance(found, tuple) else found


def cut(e: Tensor, c: Tensor, y: Tensor, label_smoothing: float = 0.0, softcap=None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    without(label_smoothing)
    return linear_cross_entropy(e, c, y, softcap=softcap)


def trl(e: Tensor, c: Tensor, y: Tensor, label_smoothing: float = 0.0, softcap=None) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    without(label_smoothing)
    kept = y != IGNORED
    rest = y[kept], 1.0, 65536, softcap, 1.0, ()
    return -ChunkedLogProbFunction.apply(e[kept], c, None, *rest)[0].mean()


def unsloth(e: Tensor, c: Tensor, y: Tensor, label_smoothing: float = 0.0, softcap=None) -> Tensor:
    from unsloth_zoo.fused_losses import unsloth_fused_ce_loss

    settings = {"logit_softcapping": softcap, "shift_labels": False}
    settings["label_smoothing"] = label_smoothing
    return unsloth_fused_ce_loss(None, e[None], c, None, y[None], **settings)


def without(label_smoothing: float) -> None:
    if label_smoothing:
        raise ValueError("knows no smoothing: --label-smoothing 0")

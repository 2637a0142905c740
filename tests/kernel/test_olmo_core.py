"""The function that kernel/README.md gives OLMo-core, in OLMo-core's own head."""

import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

lm_head = pytest.importorskip("olmo_core.nn.lm_head")
README = Path(__file__).parents[2] / "kernel" / "README.md"


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    """What the page says to type."""
    monkeypatch.setattr(lm_head, "fused_linear_cross_entropy_loss", None)
    code = README.read_text().split("### OLMo-core")[1].split('"fused_linear")`:')[1]
    exec(textwrap.dedent(code.split("\nIts trainer sums")[0]), {})


@pytest.mark.parametrize("z", [None, 1e-4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_heads_loss_and_gradients_are_torchs(reduction, bias, z):
    torch.manual_seed(0)
    config = lm_head.LMHeadConfig(bias=bias, loss_implementation="fused_linear")
    head = config.build(d_model=16, vocab_size=50)
    hidden, labels = torch.randn(2, 7, 16), torch.randint(50, (2, 7))
    labels[0, :3] = -100
    inputs = [hidden.requires_grad_(), *head.parameters()]
    out = head(hidden, labels=labels, loss_reduction=reduction, z_loss_multiplier=z)
    logits = head.w_out(hidden).flatten(0, 1)
    ce = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1, reduction=reduction)
    squares = (logits.logsumexp(-1).square() * (labels.flatten() != -100)).view_as(labels)
    penalty = (z or 0) * {"none": squares, "sum": squares.sum(), "mean": squares.sum() / 11}[
        reduction
    ]
    want = ce.view_as(penalty) + penalty
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(out.ce_loss.view_as(ce), ce)
    for ours, theirs in zip(
        torch.autograd.grad(out.loss.sum(), inputs),
        torch.autograd.grad(want.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_batch_without_labels_is_zero():
    head = lm_head.LMHeadConfig(loss_implementation="fused_linear").build(d_model=16, vocab_size=50)
    hidden, labels = torch.randn(2, 7, 16), torch.full((2, 7), -100)
    out = head(hidden, labels=labels, loss_reduction="mean", z_loss_multiplier=1e-4)
    assert out.loss == 0

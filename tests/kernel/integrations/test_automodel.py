"""NeMo Automodel's own config loader and `calculate_loss`."""

import pytest
import torch
import torch.nn.functional as F

losses = pytest.importorskip("nemo_automodel.components.loss.utils")
from nemo_automodel.components.config.loader import ConfigNode  # noqa: E402
from tiny_models import batch, gradients, tiny  # noqa: E402

BETA = 0.2


def loss_function(**options):
    target = "smoothce.integrations.automodel.SmoothedLinearCrossEntropy"
    return ConfigNode({"_target_": target, "label_smoothing": BETA, **options}).instantiate()


def inputs(model):
    """Hidden states and shifted labels, as a recipe has them."""
    data = batch()
    labels = F.pad(data.pop("labels")[:, 1:], (0, 1), value=-100)
    hidden = model.model(**data).last_hidden_state
    return hidden, labels


def dense(model, hidden, labels, beta, reduction="sum"):
    logits = model.lm_head(hidden)
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=beta, reduction=reduction
    )


@pytest.mark.parametrize("tokens", [None, 7, 0])
def test_loss_and_gradients(tokens):
    model = tiny()
    hidden, labels = inputs(model)
    want = dense(model, hidden, labels, BETA)
    if tokens is not None:
        labels = labels if tokens else torch.full_like(labels, -100)
        want = want / tokens if tokens else hidden.sum() * 0
    theirs = gradients(model, want)

    hidden, _ = inputs(model)
    found = losses.calculate_loss(
        loss_function(), model=model, hidden_states=hidden, labels=labels, num_label_tokens=tokens
    )
    torch.testing.assert_close(found.detach(), want.detach(), rtol=1e-5, atol=1e-6)
    ours = gradients(model, found)
    for name in {*ours, *theirs}:
        gradient = ours.get(name, torch.zeros(()))
        error = (gradient - theirs.get(name, torch.zeros(()))).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-6, name


def test_weights_of_tokens():
    model = tiny()
    hidden, labels = inputs(model)
    weights = torch.rand(labels.shape)
    each = dense(model, hidden, labels, BETA, "none").view(labels.shape)
    found = losses.calculate_loss(
        loss_function(), model=model, hidden_states=hidden, labels=labels, loss_weights=weights
    )
    torch.testing.assert_close(found, (weights * each).sum())


def test_evaluation_is_of_the_plain_loss():
    model = tiny()
    with torch.no_grad():
        hidden, labels = inputs(model)
        found = losses.calculate_loss(
            loss_function(), model=model, hidden_states=hidden, labels=labels
        )
    torch.testing.assert_close(found, dense(model, hidden, labels, 0.0))


def test_a_head_that_is_trained_alone_is_smoothed():
    """Hidden states of a frozen decoder need no gradient, and it is training all the same."""
    model = tiny()
    hidden, labels = inputs(model)
    found = losses.calculate_loss(
        loss_function(), model=model, hidden_states=hidden.detach(), labels=labels
    )
    torch.testing.assert_close(found, dense(model, hidden, labels, BETA))

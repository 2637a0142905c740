"""The reference is the law, so it is held against torch and against numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import gradients, inputs

import smoothce


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**16),
    n=st.integers(1, 7),
    v=st.integers(1, 11),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_torch(seed, n, v, dtype, **options):
    hidden, weight, labels, _ = inputs(n, v, 5, dtype, seed=seed)
    labels[1::3] = -100
    ours = gradients("reference", hidden, weight, labels, **options)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    torchs = F.cross_entropy(hidden @ weight.T, labels, **options)
    want = [torchs.detach(), *torch.autograd.grad(torchs.sum(), leaves)]
    torch.testing.assert_close(ours, want)


def test_options_enter_the_logits_as_documented():
    hidden, weight = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0], [-3.0]])
    bias = torch.tensor([0.5, 0.0, 1.0])
    loss = smoothce.linear_cross_entropy(
        hidden, weight, torch.tensor([2]), bias=bias, logit_scale=0.5, softcap=2.0, impl="reference"
    )
    z = [2 * math.tanh(x / 2) for x in (0.5 * 2 + 0.5, 0.0, 0.5 * -6 + 1)]
    expected = math.log(sum(math.exp(x) for x in z)) - z[2]
    assert loss.item() == pytest.approx(expected, rel=1e-6)

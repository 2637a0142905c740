"""The reference defines the loss for all other tests, so it is held against PyTorch itself."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import gradients, inputs


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**16),
    n=st.integers(1, 7),
    v=st.integers(1, 11),
    bias=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    softcap=st.sampled_from([None, 2.0]),
    logit_scale=st.sampled_from([None, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loss_and_gradients_equal_pytorchs(seed, n, v, bias, dtype, **options):
    """Scaled, with a bias, then capped, as one writes it with torch."""
    hidden, weight, labels, bias = inputs(n, v, 5, dtype, bias=bias, seed=seed)
    labels[1::3] = -100
    found = gradients("reference", hidden, weight, labels, bias, **options)
    expected = gradients(None, hidden, weight, labels, bias, **options)
    torch.testing.assert_close(found, expected)

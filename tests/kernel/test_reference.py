"""The reference defines the loss for all other tests, so it is held against PyTorch itself."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, gradients, inputs


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
    z_loss=st.sampled_from([0.0, 0.1, -0.3]),
    with_smoothing_target=st.booleans(),
    with_token_weights=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loss_and_gradients_equal_pytorchs(
    seed, n, v, bias, dtype, with_smoothing_target, with_token_weights, **options
):
    """Scaled, with a bias, then capped, as one writes it with torch. PyTorch's side
    (`loss_check.torch_loss`) is `F.cross_entropy` of a smoothed distribution, plus the z-loss,
    times the token's weight. Targets and weights are eighths and the like, which are exact in fp32:
    there they are rounded."""
    hidden, weight, labels, bias = inputs(n, v, 5, dtype, bias=bias, seed=seed)
    labels[1::3] = -100
    generator = torch.Generator().manual_seed(seed + 1)
    if with_smoothing_target:
        drawn = torch.randint(0, v, (64,), generator=generator)
        target = torch.bincount(drawn, minlength=v) / 64
        options["smoothing_target"] = target.to(DEVICE, dtype)
    if with_token_weights:
        eighths = torch.randint(0, 16, (n,), generator=generator)
        options["token_weights"] = (eighths / 8).to(DEVICE, dtype)
    found = gradients("reference", hidden, weight, labels, bias, **options)
    expected = gradients(None, hidden, weight, labels, bias, **options)
    torch.testing.assert_close(found, expected)

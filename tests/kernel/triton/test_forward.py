"""What the forward says of each token besides the loss."""

import pytest
import torch
from loss_check import DEVICE, inputs

from smoothce import token_statistics
from smoothce.triton import late


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0, "logit_scale": -1.7, "temperature": 3.0, "bias": True, "masked": 0.4},
        {"bias": True, "closed": True},
        {"labels": False},
    ],
    ids=str,
)
def test_token_statistics(options, monkeypatch):
    """Several segments a token, super-blocks, a ragged vocabulary, blocks closed by a bias."""
    options = {**options}
    blocks = late.super_blocks
    monkeypatch.setattr(late, "super_blocks", lambda n: blocks(n, 64))
    bias, masked = options.pop("bias", False), options.pop("masked", 0.3)
    size = 1100 if DEVICE == "cuda" else 301
    hidden, weight, labels, bias = inputs(100, size, 16, masked=masked, bias=bias)
    if options.pop("closed", False):
        bias[:64] = -torch.inf
        labels[(labels >= 0) & (labels < 64)] = 70
    if not options.pop("labels", True):
        labels = None
    found, want = (
        token_statistics(hidden, weight, labels, bias=bias, impl=impl, **options)
        for impl in ("triton", "reference")
    )
    assert torch.equal(found.argmax, want.argmax)
    for a, b in zip(found[:3], want[:3], strict=True):
        if labels is None and b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_equal_largest_logits_have_the_first_as_argmax():
    weight = torch.ones(700, 16, device=DEVICE)
    hidden = torch.ones(3, 16, device=DEVICE)
    found = token_statistics(hidden, weight, impl="triton")
    assert not found.argmax.any()
    torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, 700).log())

"""Log-probability, entropy, log-sum-exp and argmax, without logits: against dense logits."""

import itertools

import pytest
import torch
from loss_check import DEVICE, inputs

from smoothce import chunked, token_statistics
from smoothce.triton import recompute_backward

DTYPES = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("triton", torch.float32), *itertools.product(("chunked", "reference"), DTYPES)],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "logit_scale": -1.7, "temperature": 3, "masked": 0.4},
        {"closed": True},
        {"labels": False},
    ],
    ids=str,
)
def test_against_dense_logits(options, impl, dtype, monkeypatch):
    """Several segments a token, super-blocks, a ragged vocabulary, blocks closed by a bias."""
    options, blocks = {**options}, recompute_backward.super_blocks
    monkeypatch.setattr(recompute_backward, "super_blocks", lambda n: blocks(n, 64))
    monkeypatch.setattr(chunked, "CPU_CHUNK_TOKENS", 5)
    monkeypatch.setattr(chunked, "CAST_ROWS", 20)
    size, masked = 1100 if DEVICE == "cuda" else 301, options.pop("masked", 0.3)
    hidden, weight, labels, bias = inputs(100, size, 16, dtype, masked, bias=True)
    weight[0] *= 3  # the likeliest of many tokens
    if options.pop("closed", False):
        bias[:64] = -torch.inf
        labels[(labels >= 0) & (labels < 64)] = 70
    if not options.pop("labels", True):
        labels = bias = None
    found = token_statistics(hidden, weight, labels, bias=bias, impl=impl, **options)
    z = hidden.double() @ weight.double().T * options.get("logit_scale", 1)
    z = z if bias is None else z + bias.double()
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    z = z / options.get("temperature", 1)
    valid = torch.ones(100, dtype=torch.bool, device=DEVICE) if labels is None else labels >= 0
    assert torch.equal(found.argmax, torch.where(valid, z.argmax(1), -1))
    want = [torch.distributions.Categorical(logits=z).entropy(), z.logsumexp(1)]
    if labels is None:
        assert found.log_probability is None
    else:
        want.insert(0, z.log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0])
    for a, b in zip([x for x in found[:3] if x is not None], want, strict=True):
        assert a.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(a.double(), torch.where(valid, b, 0), rtol=1e-5, atol=2e-5)


def test_shapes():
    hidden, weight, labels, _ = inputs(6, 61, 8)
    found = token_statistics(hidden.view(2, 3, 8), weight, labels.view(2, 3))
    assert all(x.shape == (2, 3) for x in found)
    assert all(len(x) == 0 for x in token_statistics(hidden[:0], weight, labels[:0]))


def test_equal_largest_logits_have_the_first_as_argmax():
    weight = torch.ones(700, 16, device=DEVICE)
    hidden = torch.ones(3, 16, device=DEVICE)
    found = token_statistics(hidden, weight, impl="triton")
    assert not found.argmax.any()
    torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, 700).log())

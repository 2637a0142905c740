"""Log-probability, entropy, log-sum-exp and argmax, without logits: against dense logits."""

import itertools

import pytest
import torch
from loss_check import DEVICE, inputs

from smoothce import chunked, token_statistics
from smoothce.triton import recompute_backward

CASES = [
    ("triton", torch.float32),
    *itertools.product(("chunked", "reference"), (torch.float32, torch.float64, torch.bfloat16)),
]
every_implementation = pytest.mark.parametrize(("impl", "dtype"), CASES)
# A ragged vocabulary of several segments a token.
ENTRIES = 1100 if DEVICE == "cuda" else 301
TOKENS = 100


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Tokens come in several super-blocks or chunks, the classifier in several blocks."""
    monkeypatch.setattr(recompute_backward, "SUPER_BLOCK_TOKENS", 64)
    monkeypatch.setattr(chunked, "CPU_CHUNK_TOKENS", 5)
    monkeypatch.setattr(chunked, "CAST_ROWS", 20)


def tensors_with_likely_entry(dtype, masked=0.3):
    """Hidden states, classifier, labels and bias; entry 0 is the likeliest of many tokens."""
    hidden, weight, labels, bias = inputs(TOKENS, ENTRIES, 16, dtype, masked, bias=True)
    weight[0] *= 3
    return hidden, weight, labels, bias


def dense_logits(hidden, weight, bias=None, softcap=None, logit_scale=1.0, temperature=1.0):
    logits = hidden.double() @ weight.double().T * logit_scale
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def assert_statistics_of(logits, found, labels, dtype):
    """`found` holds the statistics of dense fp64 logits; labels may be None."""
    valid = torch.ones(TOKENS, dtype=torch.bool, device=DEVICE) if labels is None else labels >= 0
    assert torch.equal(found.argmax, torch.where(valid, logits.argmax(1), -1))
    pairs = [
        (found.entropy, torch.distributions.Categorical(logits=logits).entropy()),
        (found.lse, logits.logsumexp(1)),
    ]
    if labels is None:
        assert found.log_probability is None
    else:
        targets = labels.clamp(min=0)[:, None]
        pairs.append((found.log_probability, logits.log_softmax(1).gather(1, targets)[:, 0]))
    for statistic, expected in pairs:
        assert statistic.dtype == torch.promote_types(dtype, torch.float32)
        expected = torch.where(valid, expected, 0)
        torch.testing.assert_close(statistic.double(), expected, rtol=1e-5, atol=2e-5)


@every_implementation
@pytest.mark.parametrize(
    ("masked", "options"),
    [(0.3, {}), (0.4, {"softcap": 2.0, "logit_scale": -1.7, "temperature": 3})],
    ids=["plain", "capped, scaled and tempered"],
)
def test_they_are_those_of_dense_logits(masked, options, impl, dtype):
    hidden, weight, labels, bias = tensors_with_likely_entry(dtype, masked)
    found = token_statistics(hidden, weight, labels, bias=bias, impl=impl, **options)
    logits = dense_logits(hidden, weight, bias, **options)
    assert_statistics_of(logits, found, labels, dtype)


@every_implementation
def test_entries_closed_by_a_bias_have_no_part_in_them(impl, dtype):
    hidden, weight, labels, bias = tensors_with_likely_entry(dtype)
    bias[:64] = -torch.inf
    labels[(labels >= 0) & (labels < 64)] = 70
    found = token_statistics(hidden, weight, labels, bias=bias, impl=impl)
    assert_statistics_of(dense_logits(hidden, weight, bias), found, labels, dtype)


@every_implementation
def test_without_labels_there_is_no_log_probability(impl, dtype):
    hidden, weight, _, _ = tensors_with_likely_entry(dtype)
    found = token_statistics(hidden, weight, impl=impl)
    assert_statistics_of(dense_logits(hidden, weight), found, None, dtype)


def test_they_have_the_labels_shape_also_of_no_tokens():
    hidden, weight, labels, _ = inputs(6, 61, 8)
    found = token_statistics(hidden.view(2, 3, 8), weight, labels.view(2, 3))
    assert all(statistic.shape == (2, 3) for statistic in found)
    empty = token_statistics(hidden[:0], weight, labels[:0])
    assert all(len(statistic) == 0 for statistic in empty)


def test_equal_largest_logits_have_the_first_as_argmax():
    weight = torch.ones(700, 16, device=DEVICE)
    hidden = torch.ones(3, 16, device=DEVICE)
    found = token_statistics(hidden, weight, impl="triton")
    assert not found.argmax.any()
    torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, 700).log())

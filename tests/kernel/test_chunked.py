"""`chunked` against the reference in fp64, by the error the reference itself makes in the dtype."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import ANY_SHAPE_AND_OPTION, DEVICE, check, inputs

import smoothce
from smoothce import chunked

loss_of = functools.partial(smoothce.linear_cross_entropy, impl="chunked")


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    chunk=st.sampled_from([1, 4, 128]),
    **ANY_SHAPE_AND_OPTION,
)
def test_as_exact_as_the_reference(chunk, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CPU_CHUNK_TOKENS", chunk)
        patch.setattr(chunked, "CAST_ROWS", 50)
        check(impl="chunked", **options)


def test_of_fp64_nothing_is_rounded_to_fp32():
    given = {"label_smoothing": 0.1, "softcap": 2.0, "mixture": True, "reduction": "none"}
    check(5, 20, 4, torch.float64, impl="chunked", bias=True, **given)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_refused(reduction):
    """torch's own guard lets one pass that lacks the loss's part, where other terms have one."""
    hidden, weight, labels, _ = inputs(6, 9, 4, torch.float64, 0.3)
    x = hidden.clone().requires_grad_()
    loss = loss_of(x * x, weight, labels, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_leading_dimensions_and_module():
    hidden, weight, labels, bias = inputs(6, 9, 4, masked=0.3, bias=True)
    module = smoothce.LinearCrossEntropy(label_smoothing=0.1, reduction="none", impl="chunked")
    flat = module(hidden, weight, labels, bias)
    shaped = module(hidden.reshape(3, 2, 4), weight, labels.reshape(3, 2).int(), bias)
    assert shaped.shape == (3, 2)
    assert torch.equal(shaped.flatten(), flat)


def test_autocast_casts_the_inputs_and_nothing_inside():
    """And around the backward it changes nothing: tests/kernel/triton/test_gradients.py."""
    hidden, weight, labels, _ = inputs(6, 9, 64, masked=0.3)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = loss_of(hidden, weight, labels)
    assert torch.equal(loss, loss_of(hidden.bfloat16(), weight.bfloat16(), labels))


def test_no_gradient_is_computed_that_nobody_asked_for(monkeypatch):
    """With the classifier frozen, or under no_grad, no buffer of the classifier's size appears."""
    hidden, weight, labels, _ = inputs(40, 5000, 4)
    allocated, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: allocated.append(a) or zeros(*a, **k))
    loss_of(hidden.clone().requires_grad_(), weight, labels).backward()
    with torch.no_grad():
        loss_of(hidden, weight.clone().requires_grad_(), labels)
    assert allocated and (5000, 4) not in allocated

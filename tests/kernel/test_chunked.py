"""`chunked` against the reference in fp64, by the error the reference itself makes in the dtype."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, gradients, inputs, spaced

import smoothce
from smoothce import chunked

loss_of = functools.partial(smoothce.linear_cross_entropy, impl="chunked")


@settings(max_examples=100, deadline=None)
@given(
    n=st.sampled_from([0, 1, 2, 5, 17]),
    v=st.sampled_from([1, 2, 7, 129]),
    d=st.sampled_from([1, 8, 33]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    softcap=st.sampled_from([None, 3.0]),
    logit_scale=st.sampled_from([None, 0.0625, -1.5]),
    ignore_index=st.sampled_from([-100, 0]),
    chunk=st.sampled_from([1, 4, 128]),
    unit=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_as_exact_as_the_reference(n, v, d, dtype, masked, chunk, unit, seed, **options):
    *tensors, labels, bias = inputs(n, v, d, dtype, masked, bias=True, seed=seed, spread=d**0.5)
    labels[labels == -100] = options["ignore_index"]
    data = spaced(*tensors, labels, bias)
    shape = labels.shape if options["reduction"] == "none" else ()
    generator = torch.Generator().manual_seed(seed + 1)
    upstream = torch.ones(shape) if unit else torch.randn(shape, generator=generator)
    options |= {"upstream": upstream, "passes": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "ROWS", chunk)
        patch.setattr(chunked, "CAST_ROWS", 50)
        found = gradients("chunked", *data, **options)
    same = gradients("reference", *data, **options)
    wide = [x.double() if x.is_floating_point() else x for x in data]
    true = gradients("reference", *wide, **options)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    floor = 1e-5 if dtype != torch.float64 else 1e-12
    for a, b, c in zip(found, same, true, strict=True):
        assert a.shape == c.shape and a.isfinite().all()
        error, theirs = ((x.double() - c).norm().item() for x in (a, b))
        assert error <= 2 * theirs + floor * (1 + c.norm().item())


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

"""`chunked` against the reference in fp64, by the error the reference itself makes in the dtype."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smoothce
from smoothce import chunked

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
loss_of = functools.partial(smoothce.linear_cross_entropy, impl="chunked")
OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "reduction": st.sampled_from(["none", "sum", "mean"]),
        "softcap": st.sampled_from([None, 3.0]),
        "logit_scale": st.sampled_from([None, 0.0625, -1.5]),
        "ignore_index": st.sampled_from([-100, 0]),
    }
)


def inputs(n, v, d, dtype, masked, ignore_index, seed=0):
    """Hidden, weight, bias and labels, none of them contiguous."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 2 * d, generator=generator)[:, ::2].to(dtype)
    weight = torch.randn(d, v, generator=generator).to(dtype).T
    bias = torch.randn(2 * v, generator=generator).to(dtype)[::2]
    labels = torch.randint(v, (2 * n,), generator=generator)[::2]
    if masked == "some":
        labels[::3] = ignore_index
    elif masked == "all":
        labels.fill_(ignore_index)
    elif ignore_index >= 0:
        labels = labels.where(labels != ignore_index, v - 1)
    return hidden, weight, bias, labels


def run(tensors, labels, needs, options, upstream, impl):
    """Loss and the needed gradients, twice from one graph; what is done to the first's in place, as
    an optimizer may, leaves the second right."""
    leaves = [
        t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)
    ]
    loss = smoothce.linear_cross_entropy(
        leaves[0], leaves[1], labels, bias=leaves[2], impl=impl, **options
    )
    wanted = [t for t in leaves if t.requires_grad]
    passes = []
    for _ in range(2 if wanted else 0):
        found = torch.autograd.grad(loss, wanted, upstream.to(loss.dtype), retain_graph=True)
        passes.append([gradient.clone() for gradient in found])
        for gradient in found:
            gradient.fill_(7)
    return loss.detach(), *passes


def error(actual, truth):
    return (actual.double() - truth).norm().item()


@settings(max_examples=100, deadline=None)
@given(
    n=st.sampled_from([0, 1, 2, 5, 17]),
    v=st.sampled_from([1, 2, 7, 129]),
    d=st.sampled_from([1, 8, 33]),
    dtype=st.sampled_from(DTYPES),
    masked=st.sampled_from(["none", "some", "all"]),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    options=OPTIONS,
    chunk=st.sampled_from([1, 4, 128]),
    unit=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_as_exact_as_the_reference(n, v, d, dtype, masked, needs, options, chunk, unit, seed):
    *tensors, labels = inputs(n, v, d, dtype, masked, options["ignore_index"], seed)
    shape = labels.shape if options["reduction"] == "none" else ()
    generator = torch.Generator().manual_seed(seed + 1)
    upstream = torch.ones(shape) if unit else torch.randn(shape, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "ROWS", chunk)
        patch.setattr(chunked, "CAST_ROWS", 50)
        loss, *passes = run(tensors, labels, needs, options, upstream, "chunked")
    same_loss, *same_passes = run(tensors, labels, needs, options, upstream, "reference")
    true_loss, *true_passes = run(
        [t.double() for t in tensors], labels, needs, options, upstream, "reference"
    )

    assert loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == shape
    assert loss.isfinite().all()
    floor = 1e-5 if dtype != torch.float64 else 1e-12
    bound = 2 * error(same_loss, true_loss) + floor * (1 + true_loss.norm().item())
    assert error(loss, true_loss) <= bound
    for gradients, same, true in zip(passes, same_passes, true_passes, strict=True):
        for g, s, t in zip(gradients, same, true, strict=True):
            assert g.dtype == dtype and g.shape == t.shape
            assert error(g, t) <= 2 * error(s, t) + floor * (1 + t.norm().item())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_refused(reduction):
    """torch's own guard lets one pass that lacks the loss's part, where other terms have one."""
    hidden, weight, _, labels = inputs(6, 9, 4, torch.float64, "some", -100)
    x = hidden.clone().requires_grad_()
    loss = loss_of(x * x, weight, labels, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_extreme_logits_stay_finite():
    hidden, weight, _, labels = inputs(6, 9, 4, torch.float32, "none", -100)
    leaves = [(1e3 * t).requires_grad_() for t in (hidden, weight)]
    found = loss_of(*leaves, labels, label_smoothing=0.1)
    want = loss_of(*leaves, labels, label_smoothing=0.1, impl="reference")
    torch.testing.assert_close(found, want)
    pair = (torch.autograd.grad(loss, leaves) for loss in (found, want))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-2)


def test_a_forbidden_token_costs_nothing_without_smoothing():
    """A bias of −∞ removes a token; β = 0 must not turn 0 · ∞ into NaN."""
    hidden, weight, _, _ = inputs(3, 9, 4, torch.float32, "none", -100)
    bias = torch.zeros(9)
    bias[8] = -torch.inf
    given = {"labels": torch.tensor([0, 1, 2]), "bias": bias}
    losses = [loss_of(hidden, weight, impl=impl, **given) for impl in ("chunked", "reference")]
    assert losses[0].isfinite()
    torch.testing.assert_close(*losses)


def test_leading_dimensions_and_module():
    hidden, weight, bias, labels = inputs(6, 9, 4, torch.float32, "some", -100)
    module = smoothce.LinearCrossEntropy(label_smoothing=0.1, reduction="none", impl="chunked")
    flat = module(hidden, weight, labels, bias)
    shaped = module(hidden.reshape(3, 2, 4), weight, labels.reshape(3, 2).int(), bias)
    assert shaped.shape == (3, 2)
    assert torch.equal(shaped.flatten(), flat)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_casts_the_inputs_and_nothing_inside(reduction):
    hidden, weight, _, labels = inputs(6, 9, 64, torch.float32, "some", -100)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(*leaves, labels, reduction=reduction)
        gradients = torch.autograd.grad(loss.sum(), leaves)
    rounded = [t.detach().bfloat16().requires_grad_() for t in leaves]
    expected = loss_of(*rounded, labels, reduction=reduction)
    assert torch.equal(loss, expected)
    for g, e in zip(gradients, torch.autograd.grad(expected.sum(), rounded), strict=True):
        assert torch.equal(g, e.float())


def test_no_gradient_is_computed_that_nobody_asked_for(monkeypatch):
    """With the classifier frozen, or under no_grad, no buffer of the classifier's size appears."""
    hidden, weight, _, labels = inputs(40, 5000, 4, torch.float32, "none", -100)
    allocated, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: allocated.append(a) or zeros(*a, **k))
    loss_of(hidden.clone().requires_grad_(), weight, labels).backward()
    with torch.no_grad():
        loss_of(hidden, weight.clone().requires_grad_(), labels)
    assert allocated and (5000, 4) not in allocated

"""Loss and gradients for every option and ragged shapes, in every way that gradients are made.

Shapes here are the interpreter's; `test_gpu` runs the same checks on the tiles of a GPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import (
    DEVICE,
    HALF,
    WIDE_CUMSUM,
    check,
    error,
    gradients,
    inputs,
    runs_schedule,
)

from smoothce import linear_cross_entropy
from smoothce.triton import early, filtered, late, plan

EARLY, LATE, FILTERED = {}, {"workspace": 0}, {"filter_eps": 1e-12}  # which keeps all
EXACT = pytest.mark.parametrize("how", [EARLY, LATE], ids=["early", "late"])
EVERY = pytest.mark.parametrize(
    "how",
    [EARLY, LATE, pytest.param(FILTERED, marks=runs_schedule)],
    ids=["early", "late", "filtered"],
)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """Gradients in the forward are made in up to four parts also for few tokens."""
    monkeypatch.setattr(plan, "FEW", 16)
    monkeypatch.setattr(plan, "LEAST", 1)


def assert_same(found, want, rtol=1e-4, atol=1e-6):
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@EVERY
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum", "logit_scale": -2.0, "label_smoothing": 1.0},
        {"label_smoothing": 0.2, "mixture": True, "weighted": True, "masked": 0.3},
        {"softcap": 3.0, "label_smoothing": 0.2, "logit_scale": 1.7, "mixture": True},
        {"z_loss": 0.1, "label_smoothing": 0.1, "weighted": True, "masked": 0.3},
        {"z_loss": -0.3, "softcap": 2.0},  # some softmaxes count negatively
        {"reduction": "none", "softcap": 2.0, "z_loss": 0.2, "mixture": True, "masked": 0.3},
        {"bias": True, "softcap": 3.0, "logit_scale": -1.7, "masked": 0.2},
        {"bias": True, "reduction": "none", "mixture": True},
        {"dtype": HALF, "label_smoothing": 0.1, "masked": 0.3},
    ],
    ids=str,
)
def test_options(how, options):
    check(50, 97, 20, **how, **options)


@EVERY
@pytest.mark.parametrize(("n", "v", "masked"), [(0, 50, 0.0), (1, 2, 0.0), (17, 64, 1.0)])
def test_nothing_or_next_to_nothing(how, n, v, masked):
    check(n, v, 16, label_smoothing=0.1, masked=masked, **how)


@pytest.mark.parametrize("loss", [2, 54, 1611])
@EXACT
def test_unlikely_targets(how, loss):
    """The mean loss in nats. What is kept of a probability is relative to the target's logit, or
    where that is too far off to its tile's largest."""
    hidden, weight, labels, _ = inputs(60, 300, 32, seed=loss)
    scale = {2: 0.3, 54: 18.0, 1611: 540.0}[loss]
    options = {"label_smoothing": 0.1, "logit_scale": scale}
    want = gradients("reference", hidden.double(), weight.double(), labels, **options)
    plain = gradients(None, hidden, weight, labels, **options)
    found = gradients("triton", hidden, weight, labels, **options, **how)
    assert math.isclose(found[0], want[0], rel_tol=1e-5)
    for a, b, c in zip(found[1:], want[1:], plain[1:], strict=True):
        assert error(a, b) <= 2 * error(c, b) + max(3e-5, 1e-6 * loss)


@EVERY
def test_strided_inputs(how):
    hidden, weight, labels, _ = inputs(30, 90, 24, masked=0.3)
    want = gradients("reference", hidden, weight, labels, label_smoothing=0.1)
    labels = torch.stack([labels, labels + 1, labels + 2], 1)[:, 0]
    wide = torch.zeros(30, 48, device=DEVICE)
    wide[:, :24] = hidden
    for both in ((wide[:, :24], weight), (hidden.T.contiguous().T, weight.T.contiguous().T)):
        leaves = [x.detach().requires_grad_() for x in both]
        options = {"label_smoothing": 0.1, "impl": "triton", **how}
        loss = linear_cross_entropy(*leaves, labels, **options)
        assert_same(torch.autograd.grad(loss, leaves), want[1:])


@EVERY
@pytest.mark.parametrize(
    ("reduction", "softcap"), [("mean", None), ("mean", 3.0), ("none", None)], ids=str
)
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_cost_no_gradient(how, frozen, reduction, softcap):
    hidden, weight, labels, _ = inputs(40, 90, 24, masked=0.2)
    options = {"label_smoothing": 0.1, "reduction": reduction, "softcap": softcap}
    upstream = torch.rand(40, device=DEVICE) if reduction == "none" else None
    want = gradients("reference", hidden, weight, labels, None, upstream, **options)[1:]
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    leaves[frozen].requires_grad_(False)
    loss = linear_cross_entropy(*leaves, labels, impl="triton", **options, **how)
    loss.backward(upstream)
    assert leaves[frozen].grad is None
    assert_same([leaves[1 - frozen].grad], [want[1 - frozen]])


@EVERY
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_super_blocks_of_tokens(how, reduction, monkeypatch):
    """A second backward of them repeats the first."""
    monkeypatch.setattr(filtered, "STATISTICS", 2**9)
    monkeypatch.setattr(late, "super_blocks", lambda n, size=32: early.super_blocks(n, size))
    more = {"dtype": HALF, "weighted": True} if reduction == "mean" else {}
    check(70, 97, 16, label_smoothing=0.1, masked=0.3, reduction=reduction, **more, **how)
    hidden, weight, labels, _ = inputs(40, 97, 16, masked=0.3)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    options = {"label_smoothing": 0.1, "reduction": reduction, "impl": "triton", **how}
    loss = linear_cross_entropy(*leaves, labels, **options).sum()
    first = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    assert_same(torch.autograd.grad(loss * 3, leaves), first, 1e-5, 1e-8)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("masked", [slice(0, 16), slice(48, 64)], ids=["first", "last"])
def test_parts_of_which_one_is_masked(wide, masked, monkeypatch):
    """The first, where Σ_v u_v C_v is to come from, or the last, which brings Σ_i E_i."""
    monkeypatch.setattr(plan, "plan_for", lambda call: plan.Plan("early", "", 16, wide))
    hidden, weight, labels, bias = inputs(64, 90, 24, bias=True)
    labels[masked] = -100
    given = hidden, weight, labels, bias
    options = {"label_smoothing": 0.2, "reduction": "sum"}
    found, want = (gradients(impl, *given, **options) for impl in ("triton", "reference"))
    assert_same(found, want, 1e-4, 1e-5)


@pytest.mark.parametrize("masked", [0.0, 0.7])
@pytest.mark.parametrize(("n", "v", "d"), [(70, 301, 16), (20, 150, 40)], ids=["N>D", "N<D"])
def test_dlogits_in_the_memory_of_the_weights_gradient(n, v, d, masked, monkeypatch):
    """Chunks of one tile, so that there are many."""
    monkeypatch.setattr(late, "LEAST", 2**12)
    monkeypatch.setattr(late, "OF_GRADIENTS", 0)
    check(n, v, d, HALF, label_smoothing=0.1, masked=masked, workspace=0)
    options = {"softcap": 3.0, "logit_scale": -1.7, "bias": True, "reduction": "none"}
    check(n, v, d, masked=masked, workspace=0, **options)


@EXACT
def test_masked_tokens_are_in_no_product(how, monkeypatch):
    """The exact gradient's products have a row for each valid token, in the forward and after."""
    rows = []

    def noted(times):
        def note(*given):
            found = times(*given)
            rows.append(len(found))
            return found

        return note

    monkeypatch.setattr(early, "times", noted(early.times))
    monkeypatch.setattr(late, "recompute", noted(late.recompute))
    hidden, weight, labels, _ = inputs(96, 150, 16, masked=0.6)
    labels[:50] = -100
    gradients("triton", hidden, weight, labels, **how)
    valid = (labels != -100).sum()
    assert (sum(rows) == valid if how == EARLY else set(rows) == {valid.item()}) and rows


@EXACT
def test_an_unknown_number_of_valid_tokens(how, monkeypatch):
    """While a CUDA graph is captured nothing reaches the host: then there is room for all."""
    monkeypatch.setattr(late.Counts, "values", lambda self: [None] * len(self.host))
    for options in ({"softcap": 2.0}, {"dtype": HALF}):
        check(50, 97, 16, label_smoothing=0.1, masked=0.4, **how, **options)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradient_of_the_log_sum_exp(reduction):
    """A z-loss beside the loss, and alone; the option says the same."""
    options = {"label_smoothing": 0.1, "reduction": reduction, "softcap": 3.0, "return_lse": True}
    hidden, weight, labels, bias = inputs(40, 97, 20, masked=0.3, bias=True)

    def total(impl, share):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        given = *leaves[:2], labels
        loss, lse = linear_cross_entropy(*given, bias=leaves[2], impl=impl, **options)
        (share * loss.sum() + 0.1 * lse.square().sum()).backward()
        return loss.detach(), lse.detach(), *(leaf.grad for leaf in leaves)

    for share in (0.0, 1.0):
        assert_same(total("triton", share), total("reference", share), 1e-4, 1e-5)


@EVERY
def test_statistics_in_the_same_pass(how):
    hidden, weight, labels, _ = inputs(50, 97, 16, masked=0.3)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "return_statistics": True}

    def found(impl, **more):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss, statistics = linear_cross_entropy(*leaves, labels, impl=impl, **options, **more)
        assert not any(x.requires_grad for x in statistics)
        return loss.detach(), *statistics, *torch.autograd.grad(loss, leaves)

    assert_same(found("triton", **how), found("reference"), 1e-4, 1e-5)


@EVERY
def test_a_closed_block_of_the_vocabulary(how):
    """A bias of −∞ over more than a block leaves loss and gradients as they are without it; with a
    smoothing target that has nothing there, too."""
    hidden, weight, labels, bias = inputs(40, 1100 if DEVICE == "cuda" else 150, 16, bias=True)
    closed = slice(256, 800) if DEVICE == "cuda" else slice(32, 100)
    bias[closed] = -torch.inf
    labels[(labels >= closed.start) & (labels < closed.stop)] = 0
    u = torch.ones(len(weight), device=DEVICE)
    u[closed] = 0
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    more = {"filter_eps": 0.05} if how == FILTERED else how
    for options in ({}, {"label_smoothing": 0.2, "smoothing_target": u / u.sum()}):
        given = {"bias": bias, **options}
        found = linear_cross_entropy(*leaves, labels, impl="triton", **given, **more)
        want = linear_cross_entropy(*leaves, labels, impl="reference", **given)
        torch.testing.assert_close(found, want)
        pair = (torch.autograd.grad(loss, leaves) for loss in (found, want))
        for a, b in zip(*pair, strict=True):
            assert error(a, b) <= (0.3 if how == FILTERED else 1e-4)


@EXACT
def test_autocast_around_the_backward_changes_nothing(how):
    hidden, weight, labels, _ = inputs(40, 97, 64, masked=0.3)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    found = []
    for enabled in (False, True):
        loss = linear_cross_entropy(*leaves, labels, label_smoothing=0.1, impl="triton", **how)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(loss, leaves))
    assert_same(*found, 1e-5, 1e-7)


@EVERY
def test_nothing_is_left_after_the_backward(how):
    """Neither the state, nor memory of another's behind a gradient; and bits come again."""
    hidden, weight, labels, _ = inputs(40, 97, 16, masked=0.2)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    first, second = (
        linear_cross_entropy(*leaves, labels, label_smoothing=0.1, impl="triton", **how)
        for _ in range(2)
    )
    state = first.grad_fn.state
    first.backward(retain_graph=True)
    assert first.grad_fn.state is state
    first.backward()
    assert first.grad_fn.state is None
    gradients = torch.autograd.grad(second, leaves)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        assert how == FILTERED or torch.equal(leaf.grad, 2 * gradient)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(0, 40),
    v=st.integers(2, 100),
    d=st.integers(1, 40),
    beta=st.sampled_from([0.0, 0.1, 0.9]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    softcap=st.sampled_from([None, 1.5]),
    scale=st.sampled_from([None, 0.5]),
    z_loss=st.sampled_from([0.0, 0.01]),
    bias=st.booleans(),
    mixture=st.booleans(),
    weighted=st.booleans(),
    masked=st.sampled_from([0.0, 0.5]),
    how=st.sampled_from([EARLY, LATE] if WIDE_CUMSUM else [EARLY, LATE, FILTERED]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_option(n, v, d, beta, scale, how, **options):
    check(n, v, d, label_smoothing=beta, logit_scale=scale, **options, **how)

"""Loss and gradients for every option and ragged shapes: exact, and filtered without dropping."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, WIDE_CUMSUM, check, gradients, inputs, runs_schedule

from smoothce import reference, triton
from smoothce.options import Options
from smoothce.triton import accumulator, function, stored

KEEP_ALL = 1e-12
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bf16
FILTERED = pytest.param(KEEP_ALL, marks=runs_schedule)
FILTERS = pytest.mark.parametrize("eps", [None, FILTERED], ids=["exact", "filtered"])


@FILTERS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_and_ragged_shapes(eps, reduction):
    check(37, 100, 24, reduction=reduction, label_smoothing=0.1, filter_eps=eps)
    check(20, 70, 16, reduction=reduction, filter_eps=eps)
    check(5, 33, 7, reduction=reduction, label_smoothing=0.3, filter_eps=eps, masked=0.4)


@FILTERS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 1.0},
        {"logit_scale": 0.25, "label_smoothing": 0.1},
        {"logit_scale": -2.0, "label_smoothing": 0.1},
        {"softcap": 2.0},
        {"softcap": 3.0, "label_smoothing": 0.2, "logit_scale": 1.7, "bias": True},
        {"bias": True, "label_smoothing": 0.1, "masked": 0.5},
        {"bias": True, "softcap": 2.0, "label_smoothing": 0.1, "reduction": "none", "masked": 0.3},
    ],
    ids=str,
)
def test_options(eps, options):
    check(40, 129, 20, filter_eps=eps, **options)


@FILTERS
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_half_precision(eps, dtype):
    check(48, 200, 32, dtype, filter_eps=eps, label_smoothing=0.1)
    check(33, 70, 17, dtype, filter_eps=eps, label_smoothing=0.1, bias=True, masked=0.3)


@FILTERS
@pytest.mark.parametrize(("n", "v"), [(0, 50), (1, 2), (17, 64)])
def test_nothing_or_next_to_nothing(eps, n, v):
    check(n, v, 16, filter_eps=eps, label_smoothing=0.1)
    check(n, v, 16, filter_eps=eps, label_smoothing=0.1, masked=1.0)


@FILTERS
def test_strided_inputs(eps):
    hidden, weight, labels, _ = inputs(30, 90, 24)
    options = Options(label_smoothing=0.1, filter_eps=eps)
    expected = gradients(reference.loss, hidden, weight, labels, None, options)
    wide = torch.zeros(30, 48, device=DEVICE)
    wide[:, :24] = hidden
    for h, w in ((wide[:, :24], weight), (hidden.T.contiguous().T, weight.T.contiguous().T)):
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        triton.loss(*leaves, labels, None, options).backward()
        for leaf, want in zip(leaves, expected[1:], strict=True):
            torch.testing.assert_close(leaf.grad, want, rtol=1e-4, atol=1e-7)


@FILTERS
@pytest.mark.parametrize("frozen", [0, 1, (0, 1)], ids=["hidden", "weight", "both"])
def test_frozen_inputs_cost_no_gradient(eps, frozen):
    hidden, weight, labels, bias = inputs(30, 90, 24, bias=True)
    options = Options(label_smoothing=0.1, filter_eps=eps)
    expected = gradients(reference.loss, hidden, weight, labels, bias, options)[1:]
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    for i in (frozen,) if isinstance(frozen, int) else frozen:
        leaves[i].requires_grad_(False)
    triton.loss(leaves[0], leaves[1], labels, leaves[2], options).backward()
    for leaf, want in zip(leaves, expected, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, want, rtol=1e-4, atol=1e-7)
        else:
            assert leaf.grad is None


@FILTERS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_super_blocks_of_tokens(eps, reduction, monkeypatch):
    monkeypatch.setattr(function, "STATISTICS", 2**9)
    monkeypatch.setattr(stored, "TOKENS", 32)
    monkeypatch.setattr(stored, "LEAST", 2**12)
    options = {"reduction": reduction, "label_smoothing": 0.1, "filter_eps": eps, "masked": 0.3}
    check(70, 150, 16, bias=True, **options)


@runs_schedule
def test_sum_of_hidden_gradient_in_borrowed_memory(monkeypatch):
    monkeypatch.setattr(accumulator, "BORROW_FROM", 1)
    check(20, 600, 16, filter_eps=KEEP_ALL, label_smoothing=0.1, bias=True)


@FILTERS
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("early", [False, True])
def test_second_backward_repeats_the_first(eps, reduction, early, monkeypatch):
    if early:
        monkeypatch.setattr(function, "STATISTICS", 2**9)
    hidden, weight, labels, _ = inputs(40, 100, 16)
    hidden.requires_grad_(), weight.requires_grad_()
    options = Options(label_smoothing=0.1, filter_eps=eps, reduction=reduction)
    loss = triton.loss(hidden, weight, labels, None, options).sum()
    first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


SOME, ALL = 8000, 2**30  # bytes of workspace
BUDGETS = pytest.mark.parametrize("workspace", [0, SOME, ALL], ids=["none", "some", "all"])


@BUDGETS
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"reduction": "none", "masked": 0.4, "label_smoothing": 0.3},
        {"softcap": 3.0, "label_smoothing": 0.2, "logit_scale": -1.7, "bias": True, "masked": 0.3},
        {"dtype": torch.float16, "label_smoothing": 0.1, "bias": True},
        {"dtype": HALF, "softcap": 2.0, "masked": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "v", "d"), [(70, 701, 16), (20, 150, 40)], ids=["N>D", "N<D"])
def test_stored_logits(n, v, d, options, workspace, monkeypatch):
    monkeypatch.setattr(stored, "LEAST", 2**12)
    check(n, v, d, filter_eps=None, workspace=workspace, **options)


@BUDGETS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_stored_logits_of_super_blocks(reduction, workspace, monkeypatch):
    monkeypatch.setattr(stored, "TOKENS", 32)
    options = {"reduction": reduction, "label_smoothing": 0.1, "masked": 0.3}
    check(150, 170, 16, filter_eps=None, workspace=workspace, bias=True, **options)
    check(50, 170, 16, filter_eps=None, workspace=workspace, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum", "masked": 0.5},
        {"softcap": 3.0, "logit_scale": -1.7, "bias": True, "masked": 0.3},
        {"dtype": torch.float16, "bias": True},
        {"dtype": HALF},
    ],
    ids=str,
)
def test_gradients_in_the_forward(options):
    shape, workspace = ((600, 1000, 32), 2**20) if DEVICE == "cuda" else ((90, 200, 8), 2**16)
    half = options.get("dtype", torch.float32) != torch.float32
    check(*shape, filter_eps=None, label_smoothing=0.1, workspace=workspace >> half, **options)
    hidden, weight, labels, _ = inputs(*shape, masked=0.2)
    hidden.requires_grad_(), weight.requires_grad_()
    settings = Options(filter_eps=None, workspace=workspace)
    assert function.Call(hidden, weight, None, labels, settings, (True, True, False)).early
    loss = triton.loss(hidden, weight, labels, None, settings)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b)


@BUDGETS
@pytest.mark.parametrize("frozen", [0, 1])
def test_stored_logits_with_a_frozen_input(frozen, workspace):
    hidden, weight, labels, _ = inputs(60, 170, 24)
    options = Options(label_smoothing=0.1, filter_eps=None, workspace=workspace)
    expected = gradients(reference.loss, hidden, weight, labels, None, options)[1:]
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    leaves[frozen].requires_grad_(False)
    triton.loss(*leaves, labels, None, options).backward()
    torch.testing.assert_close(leaves[1 - frozen].grad, expected[1 - frozen], rtol=1e-4, atol=1e-7)


@BUDGETS
def test_exact_mode_gives_equal_bits(workspace):
    hidden, weight, labels, bias = inputs(70, 150, 16, HALF, masked=0.2, bias=True)
    options = Options(label_smoothing=0.1, filter_eps=None, workspace=workspace)
    runs = [gradients(triton.loss, hidden, weight, labels, bias, options) for _ in range(3)]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a, b)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 40),
    v=st.integers(2, 140),
    d=st.integers(1, 40),
    beta=st.sampled_from([0.0, 0.1, 0.9]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    softcap=st.sampled_from([None, 1.5]),
    scale=st.sampled_from([None, 0.5]),
    bias=st.booleans(),
    masked=st.sampled_from([0.0, 0.5]),
    eps=st.sampled_from([None] if WIDE_CUMSUM else [None, KEEP_ALL]),
    workspace=st.sampled_from([0, SOME, ALL]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_option(
    n, v, d, beta, reduction, softcap, scale, bias, masked, eps, workspace, seed
):
    check(
        n,
        v,
        d,
        masked=masked,
        bias=bias,
        seed=seed,
        label_smoothing=beta,
        reduction=reduction,
        softcap=softcap,
        logit_scale=scale,
        filter_eps=eps,
        workspace=workspace,
    )

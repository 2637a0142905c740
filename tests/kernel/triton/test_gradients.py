"""Loss and gradients for every option and ragged shapes: exact, and filtered without dropping.

Shapes here are the interpreter's; `test_gpu` runs the same checks on the tiles of a GPU."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, WIDE_CUMSUM, check, gradients, inputs, runs_schedule

from smoothce import reference, triton
from smoothce.options import Options
from smoothce.triton import exact, filtered, inputs_for, stored

KEEP_ALL = 1e-12
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bf16
FILTERED = pytest.param(KEEP_ALL, marks=runs_schedule)
FILTERS = pytest.mark.parametrize("eps", [None, FILTERED], ids=["exact", "filtered"])


@pytest.fixture(autouse=True)
def fresh_regions():
    """Tests change what the cached division of the vocabulary follows from."""
    stored.regions.cache_clear()
    yield
    stored.regions.cache_clear()


@FILTERS
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"label_smoothing": 1.0, "logit_scale": -2.0},
        {"softcap": 3.0, "label_smoothing": 0.2, "logit_scale": 1.7, "bias": True},
        {"reduction": "none", "bias": True, "softcap": 2.0, "label_smoothing": 0.1, "masked": 0.3},
    ],
    ids=str,
)
def test_options(eps, options):
    check(40, 129, 20, filter_eps=eps, **options)


@FILTERS
def test_half_precision(eps):
    check(48, 200, 32, HALF, filter_eps=eps, label_smoothing=0.1)
    check(33, 70, 17, HALF, filter_eps=eps, label_smoothing=0.1, bias=True, masked=0.3)


@FILTERS
@pytest.mark.parametrize(("n", "v"), [(0, 50), (1, 2), (17, 64)])
def test_nothing_or_next_to_nothing(eps, n, v):
    check(n, v, 16, filter_eps=eps, label_smoothing=0.1)
    check(n, v, 16, filter_eps=eps, label_smoothing=0.1, masked=1.0)


@FILTERS
def test_strided_inputs(eps):
    hidden, weight, labels, bias = inputs(30, 90, 24, masked=0.3, bias=True)
    options = Options(label_smoothing=0.1, filter_eps=eps)
    expected = gradients(reference.loss, hidden, weight, labels, bias, options)
    wide = torch.zeros(30, 48, device=DEVICE)
    wide[:, :24] = hidden
    every_third = torch.stack([labels, labels + 1, labels + 2], 1)[:, 0]
    apart = torch.stack([bias, bias + 1], 1)[:, 0]
    for h, w in ((wide[:, :24], weight), (hidden.T.contiguous().T, weight.T.contiguous().T)):
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        triton.loss(*leaves, every_third, apart, options).backward()
        for leaf, want in zip(leaves, expected[1:], strict=True):
            torch.testing.assert_close(leaf.grad, want, rtol=1e-4, atol=1e-7)


@FILTERS
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_cost_no_gradient(eps, frozen):
    hidden, weight, labels, _ = inputs(30, 90, 24)
    options = Options(label_smoothing=0.1, filter_eps=eps)
    expected = gradients(reference.loss, hidden, weight, labels, None, options)[1:]
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    leaves[frozen].requires_grad_(False)
    triton.loss(leaves[0], leaves[1], labels, None, options).backward()
    for leaf, want in zip(leaves, expected, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, want, rtol=1e-4, atol=1e-7)
        else:
            assert leaf.grad is None


@FILTERS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_super_blocks_of_tokens(eps, reduction, monkeypatch):
    monkeypatch.setattr(filtered, "STATISTICS", 2**9)
    monkeypatch.setattr(stored, "TOKENS", 32)
    options = {"reduction": reduction, "label_smoothing": 0.1, "filter_eps": eps, "masked": 0.3}
    check(70, 150, 16, HALF, bias=True, **options)


@runs_schedule
def test_sum_of_hidden_gradient_in_borrowed_memory(monkeypatch):
    monkeypatch.setattr(filtered, "BORROW_FROM", 1)
    check(20, 600, 16, filter_eps=KEEP_ALL, label_smoothing=0.1, bias=True)


@FILTERS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward_repeats_the_first(eps, reduction, monkeypatch):
    if reduction == "mean":
        monkeypatch.setattr(filtered, "STATISTICS", 2**9)
    hidden, weight, labels, _ = inputs(40, 100, 16, masked=0.3)
    hidden.requires_grad_(), weight.requires_grad_()
    options = Options(label_smoothing=0.1, filter_eps=eps, reduction=reduction)
    loss = triton.loss(hidden, weight, labels, None, options).sum()
    first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("masked", [0.0, 0.2, 0.7])
@pytest.mark.parametrize(("n", "v", "d"), [(70, 701, 16), (20, 150, 40)], ids=["N>D", "N<D"])
def test_stored_logits(n, v, d, masked, monkeypatch):
    """Logits in dC's memory, dE summed in its own: whole, packed beside it, packed inside it.

    Chunks of one tile, so that the pieces of stored logits and the rest are many."""
    monkeypatch.setattr(stored, "LEAST", 2**12)
    check(n, v, d, HALF, label_smoothing=0.1, masked=masked)
    check(n, v, d, masked=masked, softcap=3.0, logit_scale=-1.7, bias=True, reduction="none")


@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum", "masked": 0.5, "softcap": 3.0, "bias": True}, {"dtype": HALF}],
    ids=str,
)
def test_gradients_in_the_forward(options):
    shape, workspace = ((600, 1000, 32), 2**20) if DEVICE == "cuda" else ((90, 200, 8), 2**16)
    half = options.get("dtype", torch.float32) != torch.float32
    check(*shape, label_smoothing=0.1, workspace=workspace >> half, **options)
    hidden, weight, labels, _ = inputs(*shape, masked=0.2)
    hidden.requires_grad_(), weight.requires_grad_()
    settings = Options(workspace=workspace)
    assert stored.tokens_at_once(inputs_for(hidden, weight, labels, None, settings))
    loss = triton.loss(hidden, weight, labels, None, settings)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("workspace", [0, 2**30], ids=["none", "all"])
def test_masked_tokens_are_in_no_product(workspace, monkeypatch):
    """The exact gradient's products have a row for each valid token, in the forward and after."""
    rows = []

    class Noted(exact.Dlogits):
        def chunks(self, *rest):
            rows.append(len(self.hidden))
            return super().chunks(*rest)

    monkeypatch.setattr(exact, "Dlogits", Noted)
    hidden, weight, labels, _ = inputs(96, 150, 16, masked=0.6)
    labels[:50] = -100
    options = Options(label_smoothing=0.1, workspace=workspace)
    gradients(triton.loss, hidden, weight, labels, None, options)
    assert sum(rows) == (labels != -100).sum() and 0 not in rows


def test_an_unknown_number_of_valid_tokens(monkeypatch):
    """While a CUDA graph is captured nothing reaches the host: then there is room for all."""
    monkeypatch.setattr(exact.Counts, "values", lambda self: [None] * len(self.host))
    for dtype in (torch.float32, HALF):
        check(70, 150, 16, dtype, label_smoothing=0.1, masked=0.4)


@settings(max_examples=40, deadline=None)
@given(masks=st.lists(st.booleans(), min_size=1, max_size=300), d=st.integers(1, 9))
def test_sums_are_spread_in_their_own_memory(masks, d):
    valid = torch.tensor(masks, device=DEVICE)
    size, n = len(masks), int(valid.sum())
    rank = torch.where(valid, valid.cumsum(0) - 1, -1).int()
    memory = torch.full((2 * size, d), float("nan"), dtype=HALF, device=DEVICE)
    acc = memory.view(-1).view(torch.float32).view(size, d)[size - n :]
    acc.copy_(torch.arange(n * d, device=DEVICE).view(n, d) % 97)
    want = torch.zeros(size, d, device=DEVICE)
    want[valid] = acc
    exact.spread(acc, rank, memory[:size])
    assert torch.equal(memory[:size].float(), want)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradient_of_the_log_sum_exp(reduction):
    """A z-loss beside the loss, and alone."""
    options = Options(label_smoothing=0.1, reduction=reduction, softcap=3.0, return_lse=True)
    data = inputs(40, 129, 20, masked=0.3, bias=True)

    def total(module, share):
        leaves = [t.clone().requires_grad_() for t in data[:2]]
        loss, lse = module.loss(*leaves, *data[2:], options)
        (share * loss.sum() + 0.1 * lse.square().sum()).backward()
        return loss.detach(), lse.detach(), *(leaf.grad for leaf in leaves)

    for share in (0.0, 1.0):
        for found, want in zip(total(triton, share), total(reference, share), strict=True):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@FILTERS
def test_a_closed_block_of_the_vocabulary(eps):
    """A bias of −∞ over more than a block leaves loss and gradients as they are without it."""
    hidden, weight, labels, bias = inputs(40, 1100 if DEVICE == "cuda" else 150, 16, bias=True)
    closed = slice(256, 800) if DEVICE == "cuda" else slice(32, 100)
    bias[closed] = -torch.inf
    labels[(labels >= closed.start) & (labels < closed.stop)] = 0
    options = Options(filter_eps=eps and 0.05)

    def found(module, options):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss = module.loss(*leaves, labels, bias, options)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    want = found(reference, Options())
    for a, b in zip(found(triton, options), want, strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= (0.3 if eps else 1e-4) * b.norm()


@pytest.mark.parametrize("eps", [None, FILTERED], ids=["exact", "filtered"])
def test_autocast_around_the_backward_changes_nothing(eps):
    hidden, weight, labels, _ = inputs(40, 129, 64, masked=0.3)
    options = Options(label_smoothing=0.1, filter_eps=eps)
    found = []
    for enabled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss = triton.loss(*leaves, labels, None, options)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(loss, leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@FILTERS
def test_nothing_is_left_after_the_backward(eps):
    hidden, weight, labels, _ = inputs(40, 129, 16)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    loss = triton.loss(*leaves, labels, None, Options(filter_eps=eps))
    state = loss.grad_fn.state
    loss.backward(retain_graph=True)
    assert loss.grad_fn.state is state
    loss.backward()
    assert loss.grad_fn.state is None


@FILTERS
def test_kernels_run_on_the_inputs_device(eps, monkeypatch):
    """With `device_map` the current device is not always the inputs'."""
    guarded = []
    guard = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: guarded.append(x.shape) or guard(x))
    data = inputs(20, 70, 16)
    gradients(triton.loss, *data, Options(filter_eps=eps))
    assert guarded == [data[0].shape] * 2


def test_exact_mode_gives_equal_bits():
    hidden, weight, labels, _ = inputs(70, 150, 16, HALF, masked=0.2)
    options = Options(label_smoothing=0.1)
    runs = [gradients(triton.loss, hidden, weight, labels, None, options) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=12, deadline=None)
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
    workspace=st.sampled_from([0, 2**30]),
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


def test_a_kept_graph_does_not_keep_the_weight_gradient():
    """Logits lie in the weight gradient's memory; a backward that gives it away lets go of it."""
    hidden, weight, labels, _ = inputs(40, 129, 20)
    x = weight.requires_grad_()
    loss = triton.loss(hidden, x, labels, None, Options(filter_eps=None))
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    memory = gradient.untyped_storage().data_ptr()
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    assert sum(x.untyped_storage().data_ptr() == memory for x in found) == 1
    (again,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(again, gradient)

"""Loss and gradients for every option and ragged shapes, in every way that gradients are made.

Shapes here are the interpreter's; `test_gpu` runs the same checks on the tiles of a GPU."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import (
    ANY_SHAPE_AND_OPTION,
    DEVICE,
    FLOOR,
    HALF,
    WIDE_CUMSUM,
    check,
    error,
    gradients,
    inputs,
    runs_schedule,
)

from smoothce import linear_cross_entropy, triton
from smoothce.triton import filtered, forward, grad_in_forward, plan, recompute_backward
from smoothce.triton.tiles import tiles_for

EARLY, LATE, FILTERED = {}, {"workspace": 0}, {"filter_eps": 1e-12}  # which keeps all
WAYS = [
    pytest.param(EARLY, id="grad_in_forward"),
    pytest.param(LATE, id="recompute_backward"),
    pytest.param(FILTERED, id="filtered", marks=runs_schedule),
]
SOFTCAPS = 0.5, 30.0, 43.0, 43.4, 44.0, 50.0, 64.0, 100.0, 1000.0
CHUNKED = pytest.param({"impl": "chunked"}, id="chunked")


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """Gradients in the forward are made in up to four parts also for few tokens."""
    monkeypatch.setattr(plan, "FEW", 16)
    monkeypatch.setattr(plan, "LEAST", 1)


SMALL = {  # what only a GPU's large shapes, or rare moments, would meet
    "super-blocks of tokens": {
        (filtered, "STATISTICS_BYTES"): 2**9,
        (recompute_backward, "super_blocks"): lambda n, size=32: grad_in_forward.super_blocks(
            n, size
        ),
    },
    "chunks of one tile in the memory of dC": {
        (recompute_backward, "LEAST"): 2**12,
        (recompute_backward, "OF_GRADIENTS"): 0,
    },
    # While a CUDA graph is captured nothing reaches the host: then there is room for all tokens.
    "unknown counts": {(recompute_backward.Counts, "values"): lambda self: [None] * len(self.host)},
    "few shares": {(forward, "programs"): lambda *_: 3},
    "shares of larger groups": {
        (forward, "programs"): lambda *_: 7,
        (triton, "tiles_for"): lambda *given: dataclasses.replace(tiles_for(*given), group=5),
    },
    "": {},
}


@pytest.mark.parametrize("loss", [2, 54, 1611])
@pytest.mark.parametrize("how", [*WAYS[:2], CHUNKED])
def test_unlikely_targets(how, loss):
    """The mean loss in nats. What is kept of a probability is relative to the target's logit, or
    where that is too far off to its tile's largest."""
    hidden, weight, labels, _ = inputs(60, 300, 32, seed=loss)
    scale = {2: 0.3, 54: 18.0, 1611: 540.0}[loss]
    options = {"label_smoothing": 0.1, "logit_scale": scale}
    want = gradients("reference", hidden.double(), weight.double(), labels, **options)
    plain = gradients(None, hidden, weight, labels, **options)
    how = {"impl": "triton", **how}
    found = gradients(how.pop("impl"), hidden, weight, labels, **options, **how)
    assert math.isclose(found[0], want[0], rel_tol=1e-5)
    for a, b, c in zip(found[1:], want[1:], plain[1:], strict=True):
        assert error(a, b) <= 2 * error(c, b) + max(3e-5, 1e-6 * loss)


@pytest.mark.parametrize(
    ("how", "softcap", "dtype"),
    [
        *itertools.product(
            [EARLY, LATE, {"reduction": "none"}, {"impl": "chunked"}], SOFTCAPS, [torch.float32]
        ),
        *itertools.product([EARLY], SOFTCAPS, [HALF]),
        # Where the filter drops a block, a softcap biases the smoothing term: under a cap of 13 no
        # probability is below e^-26, and so none below the threshold.
        pytest.param(FILTERED, 0.5, torch.float32, marks=runs_schedule),
        pytest.param(FILTERED, 13.0, torch.float32, marks=runs_schedule),
    ],
    ids=str,
)
def test_softcaps(how, softcap, dtype):
    """Logits that stay far below the cap, that it bends, and that it flattens altogether."""
    options = {"label_smoothing": 0.1, "softcap": softcap, "reduction": how.get("reduction", "sum")}
    for deviation in (5.0, 30.0, 100.0, 1e4):  # of the logits before the cap
        hidden, weight, labels, _ = inputs(17, 100, 24, dtype, spread=deviation)
        want = gradients("reference", hidden.double(), weight.double(), labels, **options)
        plain = gradients(None, hidden, weight, labels, **options)
        asked = {"impl": "triton", **options, **how}
        found = gradients(asked.pop("impl"), hidden, weight, labels, **asked)
        for ours, right, theirs in zip(found, want, plain, strict=True):
            # 1 - tanh² is a difference, and so is the kernels' tanh: a cap of 1,000 costs 1e-5
            bound = 10 * error(theirs, right) + max(2e-5, FLOOR[dtype])
            assert error(ours, right) <= bound, deviation


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("masked", [slice(0, 16), slice(48, 64)], ids=["first", "last"])
def test_parts_of_which_one_is_masked(wide, masked, monkeypatch):
    """The first, where Σ_v u_v C_v is to come from, or the last, which brings Σ_i E_i."""
    monkeypatch.setattr(plan, "plan_for", lambda call: plan.Plan("grad_in_forward", "", 16, wide))
    hidden, weight, labels, bias = inputs(64, 90, 24, bias=True)
    labels[masked] = -100
    given = hidden, weight, labels, bias
    options = {"label_smoothing": 0.2, "reduction": "sum"}
    found, want = (gradients(impl, *given, **options) for impl in ("triton", "reference"))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", WAYS[:2])
def test_masked_tokens_are_in_no_product(how, monkeypatch):
    """The exact gradient's products have a row for each valid token, in the forward and after."""
    rows = []

    def noted(times):
        def note(*given):
            found = times(*given)
            rows.append(len(found))
            return found

        return note

    monkeypatch.setattr(grad_in_forward, "times", noted(grad_in_forward.times))
    monkeypatch.setattr(recompute_backward, "recompute", noted(recompute_backward.recompute))
    hidden, weight, labels, _ = inputs(96, 150, 16, masked=0.6)
    labels[:50] = -100
    gradients("triton", hidden, weight, labels, **how)
    valid = (labels != -100).sum()
    assert (sum(rows) == valid if how == EARLY else set(rows) == {valid.item()}) and rows


@pytest.mark.parametrize("how", [*WAYS, CHUNKED])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_log_sum_exps_and_statistics_beside_the_loss(how, reduction):
    """A z-loss of the log-sum-exps beside the loss, and their sum alone."""
    hidden, weight, labels, bias = inputs(40, 97, 20, masked=0.3, bias=True)
    options = {"label_smoothing": 0.1, "reduction": reduction, "softcap": 3.0, "z_loss": 0.01}

    def found(share, lse, **more):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        given = {"bias": leaves[2], "return_lse": lse, "return_statistics": True, **options}
        loss, *said, statistics = linear_cross_entropy(*leaves[:2], labels, **given, **more)
        assert not any(x.requires_grad for x in statistics)
        total = share * loss.sum() + sum(0.1 * (x.square() if share else x).sum() for x in said)
        total.backward()
        return loss.detach(), *(x.detach() for x in said), *statistics, *(x.grad for x in leaves)

    for asked in ((1.0, False), (1.0, True), (0.0, True)):
        ours = found(*asked, **{"impl": "triton", **how})
        torch.testing.assert_close(ours, found(*asked, impl="reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [*WAYS, CHUNKED])
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
    more = {"impl": "triton", **({"filter_eps": 0.05} if how == FILTERED else how)}
    for options in ({}, {"label_smoothing": 0.2, "smoothing_target": u / u.sum()}):
        given = {"bias": bias, **options}
        found = linear_cross_entropy(*leaves, labels, **given, **more)
        want = linear_cross_entropy(*leaves, labels, impl="reference", **given)
        torch.testing.assert_close(found, want)
        pair = (torch.autograd.grad(loss, leaves) for loss in (found, want))
        for a, b in zip(*pair, strict=True):
            assert error(a, b) <= (0.3 if how == FILTERED else 1e-4)


@pytest.mark.parametrize("how", [*WAYS[:2], CHUNKED])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_around_the_backward_changes_nothing(how, reduction):
    hidden, weight, labels, _ = inputs(40, 97, 64, masked=0.3)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    options = {"label_smoothing": 0.1, "reduction": reduction, "impl": "triton", **how}
    found = []
    for enabled in (False, True):
        loss = linear_cross_entropy(*leaves, labels, **options).sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", WAYS)
def test_nothing_is_left_after_the_backward(how, monkeypatch):
    """Neither the state, nor memory of another's behind a gradient; and bits come again."""
    hidden, weight, labels, _ = inputs(40, 97, 16, masked=0.2)
    for (module, name), value in SMALL["super-blocks of tokens"].items():
        monkeypatch.setattr(module, name, value)
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


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, HALF]),
    small=st.sampled_from([*SMALL]),
    how=st.sampled_from([EARLY, LATE] if WIDE_CUMSUM else [EARLY, LATE, FILTERED]),
    **ANY_SHAPE_AND_OPTION,
)
def test_any_shape_and_option(small, how, **options):
    """In the memory of a GPU's large shapes, too."""
    if how == FILTERED:  # which neither a bias nor fp16 has
        options |= {"bias": False, "dtype": torch.float32}
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in SMALL[small].items():
            patch.setattr(module, name, value)
        check(**options, **how)

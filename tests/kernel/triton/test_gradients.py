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
    needs_narrow_cumsum,
)

from smoothce import linear_cross_entropy, triton
from smoothce.triton import filter, forward, plan, recompute_backward
from smoothce.triton.tiles import tiles_for

# Options that choose the way in which gradients are made.
GRAD_IN_FORWARD = {}
RECOMPUTE = {"workspace": 0}
FILTERED = {"filter_eps": 1e-12}  # which keeps every block
CHUNKED = {"impl": "chunked"}

EXACT_MODES = [
    pytest.param(GRAD_IN_FORWARD, id="grad_in_forward"),
    pytest.param(RECOMPUTE, id="recompute_backward"),
]
TRITON_MODES = [*EXACT_MODES, pytest.param(FILTERED, id="filtered", marks=needs_narrow_cumsum)]
REFERENCE_MODE = pytest.param({"impl": "reference"}, id="reference")
CHUNKED_MODE = pytest.param(CHUNKED, id="chunked")

# The least that bends all logits, the largest that probabilities are saved under, and one more.
SOFTCAPS = (0.5, 43.0, 1000.0)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """Gradients in the forward are made in up to four parts also for few tokens."""
    monkeypatch.setattr(plan, "BUSY_TOKENS", 16)
    monkeypatch.setattr(plan, "LEAST_TOKENS", 1)


# What only a GPU's large shapes, or rare moments, would meet: attributes of modules to change.
SITUATIONS = {
    "super-blocks of tokens": {
        (filter, "STATISTICS_BYTES"): 2**9,
        (recompute_backward, "SUPER_BLOCK_TOKENS"): 32,
    },
    "chunks of one tile in the memory of dC": {
        (recompute_backward, "CHUNK_LEAST_BYTES"): 2**12,
        (recompute_backward, "CHUNK_SHARE"): 0,
    },
    # While a CUDA graph is captured nothing reaches the host: then there is room for all tokens.
    "unknown counts": {
        (recompute_backward.ValidCounts, "values"): lambda self: [None] * len(self.host),
    },
    "one program a wave": {(forward, "programs"): lambda *_: 1},
    "many programs on larger groups": {
        (forward, "programs"): lambda *_: 7,
        (triton, "tiles_for"): lambda *tensors: dataclasses.replace(tiles_for(*tensors), group=3),
    },
    "block sums of few tokens at a time": {(forward, "BLOCK_SUMS_BYTES"): 1},
    "as it is": {},
}


def simulate(monkeypatch, situation):
    for (module, name), value in SITUATIONS[situation].items():
        monkeypatch.setattr(module, name, value)


def three_ways(mode, hidden, weight, labels, **options):
    """Loss and gradients by the package, by the reference in fp64 and by plain PyTorch."""
    ours = {"impl": "triton", **options, **mode}
    return (
        gradients(ours.pop("impl"), hidden, weight, labels, **ours),
        gradients("reference", hidden.double(), weight.double(), labels, **options),
        gradients(None, hidden, weight, labels, **options),
    )


@pytest.mark.parametrize("loss", [2, 54, 1611])
@pytest.mark.parametrize("mode", [*EXACT_MODES, CHUNKED_MODE])
def test_unlikely_targets(mode, loss):
    """The mean loss in nats. What is saved of a probability is relative to the target's logit, or
    where that is too far off to its tile's largest."""
    hidden, weight, labels, _ = inputs(60, 300, 32, seed=loss)
    scale = {2: 0.3, 54: 18.0, 1611: 540.0}[loss]
    options = {"label_smoothing": 0.1, "logit_scale": scale}
    found, expected, plain = three_ways(mode, hidden, weight, labels, **options)
    assert math.isclose(found[0], expected[0], rel_tol=1e-5)
    for ours, right, theirs in zip(found[1:], expected[1:], plain[1:], strict=True):
        assert error(ours, right) <= 2 * error(theirs, right) + max(3e-5, 1e-6 * loss)


@pytest.mark.parametrize(
    ("mode", "softcap", "dtype"),
    [
        # Only gradients in the forward are made otherwise under the middle one.
        *itertools.product([GRAD_IN_FORWARD], SOFTCAPS, [torch.float32, HALF]),
        *itertools.product([RECOMPUTE, CHUNKED], SOFTCAPS[::2], [torch.float32]),
        *itertools.product([RECOMPUTE], SOFTCAPS[::2], [HALF]),
        ({"reduction": "none"}, SOFTCAPS[0], torch.float32),
        # Where the filter drops a block, a softcap biases the smoothing term: under a cap of 13 no
        # probability is below e^-26, and so none below the threshold.
        pytest.param(FILTERED, 13.0, torch.float32, marks=needs_narrow_cumsum),
    ],
    ids=str,
)
def test_softcaps(mode, softcap, dtype):
    """Logits that stay far below the cap, that it bends, and that it flattens altogether."""
    reduction = mode.get("reduction", "sum")
    options = {"label_smoothing": 0.1, "softcap": softcap, "reduction": reduction}
    for deviation in (5.0, 100.0, 1e4):  # of the logits before the cap
        hidden, weight, labels, _ = inputs(17, 100, 24, dtype, spread=deviation)
        for ours, right, theirs in zip(
            *three_ways(mode, hidden, weight, labels, **options), strict=True
        ):
            # 1 - tanh² is a difference, and so is the kernels' tanh: a cap of 1,000 costs 1e-5
            bound = 10 * error(theirs, right) + max(2e-5, FLOOR[dtype])
            assert error(ours, right) <= bound, deviation


@pytest.mark.parametrize("sum_in_fp32", [False, True])
@pytest.mark.parametrize("masked", [slice(0, 16), slice(48, 64)], ids=["first", "last"])
def test_parts_of_which_one_is_masked(sum_in_fp32, masked, monkeypatch):
    """The first, where Σ_v u_v C_v is to come from, or the last, which brings Σ_i E_i."""
    planned = plan.GradientPlan("grad_in_forward", "", 16, sum_in_fp32)
    monkeypatch.setattr(plan, "plan_for", lambda call: planned)
    hidden, weight, labels, bias = inputs(64, 90, 24, bias=True)
    labels[masked] = -100
    options = {"label_smoothing": 0.2, "reduction": "sum"}
    found = gradients("triton", hidden, weight, labels, bias, **options)
    expected = gradients("reference", hidden, weight, labels, bias, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_scale_is_divided_out_of_the_gradient_of_a_bias_in_fp32(monkeypatch):
    """Under a softcap S has the scale as a factor. 1 / scale lies between two 16-bit numbers here,
    so that rounding it would move the whole gradient."""
    planned = plan.GradientPlan("grad_in_forward", "", 16, sum_in_fp32=False)
    monkeypatch.setattr(plan, "plan_for", lambda call: planned)
    off = 0.45 * torch.finfo(HALF).eps
    hidden, weight, labels, bias = inputs(64, 90, 24, HALF, bias=True)
    options = {"softcap": 5.0, "logit_scale": 1 / (1 + off), "reduction": "sum"}
    options["needs"] = (False, False, True)
    exact = gradients(
        "reference", hidden.double(), weight.double(), labels, bias.double(), **options
    )[1]
    found = gradients("triton", hidden, weight, labels, bias.float(), **options)[1].double()
    factor = (found @ exact) / (exact @ exact)
    assert abs(factor.item() - 1) < 0.3 * off


@pytest.mark.parametrize("mode", [*TRITON_MODES, CHUNKED_MODE])
def test_the_labels_entries_alone(mode):
    """S_iy of each token, which a norm over all entries might drown: dE is S where C = I, and dC is
    Sᵀ where E = I. In the forward they come from two formulas."""
    logits, _, labels, _ = inputs(40, 96, 96, spread=2.0)
    options = {"label_smoothing": 0.3, "reduction": "sum", "z_loss": 0.05, "needs": (True,) * 3}
    tokens = torch.arange(40, device=DEVICE)
    eye = torch.eye(96, device=DEVICE)
    found, expected, _ = three_ways(mode, logits, eye, labels, **options)
    right = expected[1][tokens, labels].float()
    torch.testing.assert_close(found[1][tokens, labels], right, rtol=1e-4, atol=1e-5)

    eye = torch.eye(40, device=DEVICE)
    of_weight = three_ways(mode, eye, logits.T.contiguous(), labels, **options)[0][2]
    torch.testing.assert_close(of_weight[labels, tokens], right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [*TRITON_MODES, CHUNKED_MODE, REFERENCE_MODE])
@pytest.mark.parametrize(
    ("situation", "more"),
    [
        ("as it is", {"token_weights": torch.linspace(0.5, 2, 30, device=DEVICE)}),
        ("as it is", {"reduction": "none", "softcap": 3.0}),
        ("unknown counts", {}),
        ("super-blocks of tokens", {"z_loss": 0.01}),
    ],
    ids=["token_weights", "none", "unknown counts", "super-blocks"],
)
def test_a_masked_token_counts_for_nothing_whatever_it_holds(mode, situation, more, monkeypatch):
    simulate(monkeypatch, situation)
    hidden, weight, labels, _ = inputs(30, 60, 16, masked=0.3)
    options = {"impl": "triton", "label_smoothing": 0.1, **more, **mode}
    expected = gradients(hidden=hidden, weight=weight, labels=labels, **options)
    hidden[labels == -100] = torch.nan
    found = gradients(hidden=hidden, weight=weight, labels=labels, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def loss_with_statistics(hidden, weight, labels, bias, loss_factor, **options):
    """Loss, log-sum-exps if they are asked for, statistics, and the gradients of `loss_factor`
    times the loss plus a z-loss of the log-sum-exps, or plus their sum where the factor is 0."""
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    loss, *lse, statistics = linear_cross_entropy(
        leaves[0], leaves[1], labels, bias=leaves[2], return_statistics=True, **options
    )
    assert not any(x.requires_grad for x in statistics)
    total = loss_factor * loss.sum()
    for x in lse:
        total = total + 0.1 * (x.square() if loss_factor else x).sum()
    total.backward()
    outputs = [loss.detach(), *(x.detach() for x in lse), *statistics]
    return outputs, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("mode", [*TRITON_MODES, CHUNKED_MODE])
@pytest.mark.parametrize(
    ("reduction", "loss_factor", "return_lse"),
    [("mean", 1.0, False), ("none", 1.0, True), ("mean", 0.0, True)],
    ids=["loss", "loss and lse", "lse"],
)
def test_log_sum_exps_and_statistics_beside_the_loss(mode, reduction, loss_factor, return_lse):
    hidden, weight, labels, bias = inputs(40, 97, 20, masked=0.3, bias=True)
    options = {
        "label_smoothing": 0.1,
        "reduction": reduction,
        "softcap": 3.0,
        "z_loss": 0.01,
        "return_lse": return_lse,
    }
    data = hidden, weight, labels, bias, loss_factor
    found = loss_with_statistics(*data, **{"impl": "triton", **options, **mode})
    expected = loss_with_statistics(*data, impl="reference", **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_target", [False, True], ids=["plain", "smoothing_target"])
@pytest.mark.parametrize("mode", [*TRITON_MODES, CHUNKED_MODE])
def test_a_closed_block_of_the_vocabulary(mode, with_target):
    """A bias of −∞ over more than a block leaves loss and gradients as they are without it; with a
    smoothing target that has nothing there, too."""
    hidden, weight, labels, bias = inputs(40, 1100 if DEVICE == "cuda" else 150, 16, bias=True)
    closed = slice(256, 800) if DEVICE == "cuda" else slice(32, 100)
    bias[closed] = -torch.inf
    labels[(labels >= closed.start) & (labels < closed.stop)] = 0
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    options = {"bias": bias}
    if with_target:
        u = torch.ones(len(weight), device=DEVICE)
        u[closed] = 0
        options |= {"label_smoothing": 0.2, "smoothing_target": u / u.sum()}
    if mode == FILTERED:
        mode = {"filter_eps": 0.05}
    found = linear_cross_entropy(*leaves, labels, **{"impl": "triton", **options, **mode})
    expected = linear_cross_entropy(*leaves, labels, impl="reference", **options)
    torch.testing.assert_close(found, expected)
    bound = 0.3 if "filter_eps" in mode else 1e-4
    for ours, right in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert error(ours, right) <= bound


@pytest.mark.parametrize("mode", [*EXACT_MODES, CHUNKED_MODE])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_around_the_backward_changes_nothing(mode, reduction):
    hidden, weight, labels, _ = inputs(40, 97, 64, masked=0.3)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    options = {"label_smoothing": 0.1, "reduction": reduction, "impl": "triton", **mode}
    found = []
    for enabled in (False, True):
        loss = linear_cross_entropy(*leaves, labels, **options).sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def leaves_and_loss(mode):
    """Inputs of several super-blocks, and their loss."""
    hidden, weight, labels, _ = inputs(40, 97, 16, masked=0.2)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    options = {"label_smoothing": 0.1, "impl": "triton", **mode}
    return leaves, linear_cross_entropy(*leaves, labels, **options)


@pytest.mark.parametrize("mode", [*TRITON_MODES, CHUNKED_MODE])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_refused_in_every_input(mode, reduction):
    """Also beside a term that has one, which alone would come out."""
    hidden, weight, labels, bias = inputs(6, 40, 8, bias=True)
    leaves = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_()}
    options = {"impl": "triton", "reduction": reduction, **mode}
    if mode != FILTERED:  # which makes no gradient of a bias
        leaves["bias"] = options["bias"] = bias.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    leaves["upstream"] = upstream = torch.ones_like(loss, requires_grad=True)
    for first, second in itertools.product(leaves, repeat=2):
        if first == "upstream":
            continue
        (gradient,) = torch.autograd.grad(loss, leaves[first], upstream, create_graph=True)
        total = gradient.square().sum() + leaves[second].square().sum()
        with pytest.raises(RuntimeError, match=r"second derivative.*impl=.reference"):
            total.backward(inputs=[leaves[second]])


@pytest.mark.parametrize("mode", TRITON_MODES)
def test_nothing_outlives_the_last_backward_but_the_gradients_own_memory(mode, monkeypatch):
    simulate(monkeypatch, "super-blocks of tokens")
    leaves, loss = leaves_and_loss(mode)
    state = loss.grad_fn.state
    torch.autograd.grad(loss, leaves, retain_graph=True)
    assert loss.grad_fn.state is state
    for gradient in torch.autograd.grad(loss, leaves):
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
    assert loss.grad_fn.state is None


@pytest.mark.parametrize("mode", EXACT_MODES)
def test_a_second_backward_gives_equal_bits(mode, monkeypatch):
    simulate(monkeypatch, "super-blocks of tokens")
    leaves, loss = leaves_and_loss(mode)
    loss.backward(retain_graph=True)
    loss.backward()
    other_leaves, other_loss = leaves_and_loss(mode)
    once = torch.autograd.grad(other_loss, other_leaves)
    for leaf, gradient in zip(leaves, once, strict=True):
        assert torch.equal(leaf.grad, 2 * gradient)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, HALF]),
    situation=st.sampled_from([*SITUATIONS]),
    mode=st.sampled_from(
        [GRAD_IN_FORWARD, RECOMPUTE] if WIDE_CUMSUM else [GRAD_IN_FORWARD, RECOMPUTE, FILTERED]
    ),
    **ANY_SHAPE_AND_OPTION,
)
def test_any_shape_and_option(situation, mode, **options):
    """In the memory of a GPU's large shapes, too."""
    if mode == FILTERED:  # which neither a bias nor fp16 has
        options["bias"] = False
        options["dtype"] = torch.float32
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulate(monkeypatch, situation)
        check(**options, **mode)

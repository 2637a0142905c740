"""What only a GPU can show: large shapes, no waiting for the device, graphs, torch.compile, how
often a kernel is compiled, and where training ends."""

import copy
import random

import methods
import pytest
import torch
import torch.nn.functional as F
import triton
from language import language_like
from loss_check import check, error, gradients, inputs
from torch import nn

from smoothce import explain, linear_cross_entropy
from smoothce.triton import dproduct, forward, grad_in_forward, tokens
from smoothce.triton.filter import kernels, pairs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# Options that choose the way in which gradients are made.
GRAD_IN_FORWARD = {}
RECOMPUTE = {"workspace": 0}
FILTERED = {"filter_eps": 1e-4}
ALL_KEPT = {"filter_eps": 1e-12}  # the filter, which then keeps every block

EXACT_MODES = [
    pytest.param(GRAD_IN_FORWARD, id="grad_in_forward"),
    pytest.param(RECOMPUTE, id="recompute_backward"),
]
each_exact_mode = pytest.mark.parametrize("mode", EXACT_MODES)
each_mode = pytest.mark.parametrize("mode", [*EXACT_MODES, pytest.param(FILTERED, id="filtered")])


@pytest.mark.parametrize("mode", [*EXACT_MODES, pytest.param(ALL_KEPT, id="all_kept")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "v", "d", "options"),
    [
        (1000, 50257, 768, {}),
        (2048, 32768, 1024, {"softcap": 30.0, "masked": 0.5}),
        (777, 10007, 515, {"bias": True, "reduction": "none"}),
    ],
)
def test_large_shapes(n, v, d, options, dtype, mode):
    check(n, v, d, dtype, label_smoothing=0.1, **options, **mode)


def dense_gradients(hidden, weight, labels, rows=1024):
    """Gradients of the mean loss at β = 0.1 in fp32, from so many tokens' logits at a time."""
    n, v = len(hidden), len(weight)
    d_hidden = torch.empty(hidden.shape, device="cuda")
    d_weight = torch.zeros(weight.shape, device="cuda")
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        states = hidden[part].float()
        dlogits = (states @ weight.float().T).softmax(1)
        dlogits[torch.arange(len(states)), labels[part]] -= 0.9
        dlogits = (dlogits - 0.1 / v) / n
        d_hidden[part] = dlogits @ weight.float()
        d_weight += dlogits.T @ states
    return d_hidden, d_weight


@each_mode
def test_addresses_past_two_to_the_31(mode):
    n, v, d = 16640, 131072, 128
    hidden, weight, labels, _ = inputs(n, v, d, torch.bfloat16, spread=3.0)
    if mode == GRAD_IN_FORWARD:
        mode = {"workspace": 2 * n * v}  # one part
    _, d_hidden, d_weight = gradients("triton", hidden, weight, labels, label_smoothing=0.1, **mode)
    expected_hidden, expected_weight = dense_gradients(hidden, weight, labels)
    bound = 0.05 if mode == FILTERED else 6e-3
    assert error(d_hidden, expected_hidden) < bound
    assert error(d_weight, expected_weight) < bound


@pytest.mark.parametrize("masked", [0.0, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(
    "mode", [*EXACT_MODES, pytest.param({"reduction": "none"}, id="without reduction")]
)
def test_masked_tokens_in_the_exact_gradient(masked, mode):
    """Packed, and spread again in the memory of the sum: all the ways that memory is used."""
    check(2000, 16384, 512, torch.bfloat16, masked=masked, label_smoothing=0.1, **mode)


@each_exact_mode
def test_equal_bits(mode):
    hidden, weight, labels, _ = inputs(8192, 65536, 1024, torch.bfloat16, masked=0.2)
    first, second = (
        gradients("triton", hidden, weight, labels, label_smoothing=0.1, **mode) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", [{"dtype": torch.float16}, {"bias": True}], ids=str)
def test_fp16_and_a_bias_stay_with_the_kernels(change):
    """fp16's gradients come after a scaler's factor, so that it reaches them unrounded."""
    hidden, weight, labels, bias = inputs(300, 9000, 128, **{"dtype": torch.bfloat16, **change})
    assert explain(hidden, weight, bias=bias).startswith("triton: ")
    options = {"label_smoothing": 0.1, "upstream": torch.tensor(65536.0)}
    _, *found = gradients("auto", hidden, weight, labels, bias, **options)
    wide_bias = None if bias is None else bias.double()
    _, *expected = gradients(
        "reference", hidden.double(), weight.double(), labels, wide_bias, **options
    )
    bound = 1.5e-3 if hidden.dtype == torch.float16 else 8e-3
    for ours, right in zip(found, expected, strict=True):
        assert error(ours, right) < bound


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_mode
def test_inputs_on_another_device_than_the_current(mode):
    data = [t.to("cuda:1") for t in inputs(500, 9000, 256, torch.bfloat16, masked=0.3)[:3]]
    for found in gradients("triton", *data, label_smoothing=0.1, **mode):
        assert found.device.index == 1
        assert torch.isfinite(found).all()


def training(n, v, d, masked=0.0, bias=False, **options):
    """Hidden states, weight, and a step that leaves their gradients."""
    hidden, weight, labels, bias = inputs(n, v, d, torch.bfloat16, masked, bias)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step():
        hidden.grad = None
        weight.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
        loss.sum().backward()
        return loss.detach()

    return hidden, weight, step


@each_mode
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_for_the_device(mode, reduction):
    """But the exact gradient for an event that precedes the forward's product."""
    options = {"reduction": reduction, "impl": "triton", **mode}
    _, _, step = training(500, 5000, 256, masked=0.3, bias=True, **options)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("masked", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("workspace", [0, 2**28, 2**30])
def test_memory_beyond_the_gradients(workspace, masked):
    hidden, weight, step = training(8192, 65536, 1024, masked, workspace=workspace)
    step()
    hidden.grad = None
    weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    gradient_bytes = hidden.grad.nbytes + weight.grad.nbytes
    beyond = torch.cuda.max_memory_allocated() - before - gradient_bytes
    assert beyond <= workspace + 128e6


@each_mode
def test_cuda_graph(mode):
    hidden, weight, step = training(2048, 20000, 256, label_smoothing=0.1, **mode)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    gradient = weight.grad
    with torch.no_grad():
        hidden.mul_(0.5)
    gradient.fill_(float("nan"))
    graph.replay()
    replayed = captured.clone()
    replayed_gradient = gradient.clone()
    plain = step()
    torch.testing.assert_close(replayed, plain)
    assert error(replayed_gradient, weight.grad) < 1e-3


@each_mode
def test_inside_a_compiled_model(mode):
    """Both are compared with fp64, for between them the roundings add up: the upstream factor 3
    comes after those of dproduct and dC in the graph, and before them without one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()).cuda().bfloat16()
    weight = torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_()
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 5000, (300,), device="cuda")

    def loss(x):
        hidden = model(x) * 2
        return linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, **mode) * 3

    (plain,) = torch.autograd.grad(loss(x), weight)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), weight)
    wide = weight.detach().double().requires_grad_()
    logits = copy.deepcopy(model).double()(x.double()) * 2 @ wide.T
    wide_loss = F.cross_entropy(logits, labels, label_smoothing=0.1) * 3
    (expected,) = torch.autograd.grad(wide_loss, wide)
    assert error(plain, expected) < 5e-3
    assert error(compiled, expected) < 5e-3


def compilations():
    """How often each kernel has been compiled for the current device."""
    device = torch.cuda.current_device()
    counts = {}
    for module in (dproduct, grad_in_forward, kernels, pairs, forward, tokens):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                counts[name] = len(kernel.device_caches[device][0])
    return counts


@pytest.mark.parametrize("mode", [*EXACT_MODES, pytest.param({"filter_eps": 0.05}, id="filtered")])
def test_compilations(mode):
    """A shape compiles a kernel a few times, not once for every number of tokens."""
    before = compilations()
    _, weight, _, _ = inputs(1, 8192 + 40, 256, torch.bfloat16)
    weight.requires_grad_()
    for n in random.Random(0).sample(range(1, 4097), 200):
        hidden, _, labels, _ = inputs(n, 1, 256, torch.bfloat16, masked=0.4)
        hidden.requires_grad_()
        weight.grad = None
        linear_cross_entropy(hidden, weight, labels, **mode, impl="triton").backward()
        assert torch.isfinite(weight.grad).all()
    after = compilations()
    more = {name: count - before[name] for name, count in after.items()}
    assert sum(after.values()) > 4
    assert max(more.values()) <= 4, (more, triton.__version__)


def curve(loss):
    """A residual network learns to tell targets from noisy hidden states of a language model's."""
    torch.manual_seed(0)
    vocabulary = 60160
    dim = 512
    hidden, weight, labels = language_like(65536, vocabulary, dim, 2.0, torch.bfloat16)
    weight = nn.Parameter(torch.randn_like(weight, dtype=torch.float32) * 0.02)
    body = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)).cuda()
    optimizer = torch.optim.AdamW([weight, *body.parameters()], 1e-3, fused=True)
    picks = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(100):
        batch = torch.randint(len(labels), (4096,), device="cuda", generator=picks)
        with torch.autocast("cuda", torch.bfloat16):
            states = hidden[batch] + body(hidden[batch])
        value = loss(states.bfloat16(), weight.bfloat16(), labels[batch], 0.1)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def test_same_curve_as_torch():
    """Filter or not: what no single step shows.

    Rounding alone drives two runs apart, a hundredfold between steps 105 and 150; so it ends
    before. Until then torch with its tokens in another order is up to 6e-4 from itself, and what
    has the filter's own noise about 2e-3."""
    theirs = curve(methods.dense)
    assert theirs[-1] < 0.8 * theirs[0]
    for mode in (GRAD_IN_FORWARD, RECOMPUTE, {"filter_eps": "auto"}):
        ours = curve(methods.ours(**mode))
        assert ((ours - theirs).abs() / ours).max() < 5e-3, mode

"""What only a GPU can show: large shapes, no waiting for the device, graphs, torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from loss_check import check, error, gradients, inputs

from smoothce import linear_cross_entropy, triton
from smoothce.options import Options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
EPS = pytest.mark.parametrize("eps", [None, 1e-12, 1e-4], ids=["exact", "keep all", "filtered"])


@pytest.mark.parametrize("eps", [None, 1e-12], ids=["exact", "keep all"])
@pytest.mark.parametrize(
    ("n", "v", "d", "options"),
    [
        (1000, 50257, 768, {}),
        (2048, 32768, 1024, {"softcap": 30.0, "masked": 0.5}),
        (777, 10007, 515, {"bias": True, "reduction": "none"}),
    ],
)
def test_large_shapes(n, v, d, options, eps):
    check(n, v, d, torch.bfloat16, filter_eps=eps, label_smoothing=0.1, **options)


@EPS
def test_addresses_past_two_to_the_31(eps):
    n, v, d = 16640, 131072, 128
    hidden, weight, labels, _ = inputs(n, v, d, torch.bfloat16, spread=3.0)
    options = Options(label_smoothing=0.1, filter_eps=eps)
    _, d_hidden, d_weight = gradients(triton.loss, hidden, weight, labels, None, options)
    want_hidden = torch.empty(n, d, device="cuda")
    want_weight = torch.zeros(v, d, device="cuda")
    for i in range(0, n, 1024):
        e, y = hidden[i : i + 1024].float(), labels[i : i + 1024]
        g = (e @ weight.float().T).softmax(1)
        g[torch.arange(len(y)), y] -= 0.9
        g = (g - 0.1 / v) / n
        want_hidden[i : i + 1024] = g @ weight.float()
        want_weight += g.T @ e
    bound = 0.05 if eps == 1e-4 else 6e-3
    assert error(d_hidden, want_hidden) < bound
    assert error(d_weight, want_weight) < bound


@EPS
@pytest.mark.parametrize("workspace", [0, 1_400_000, 2**24])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_for_the_device(eps, reduction, workspace):
    hidden, weight, labels, bias = inputs(500, 5000, 256, torch.bfloat16, masked=0.3, bias=True)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

    def step():
        loss = linear_cross_entropy(
            leaves[0],
            leaves[1],
            labels,
            bias=leaves[2],
            filter_eps=eps,
            reduction=reduction,
            workspace=workspace,
        )
        loss.sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace", [0, 2**26, 2**28, 2**30])
def test_memory_beyond_the_gradients(workspace, reduction):
    hidden, weight, labels, _ = inputs(8192, 65536, 1024, torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        settings = {"filter_eps": None, "workspace": workspace, "reduction": reduction}
        linear_cross_entropy(hidden, weight, labels, **settings).sum().backward()

    step()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    assert torch.cuda.max_memory_allocated() - before - gradients <= workspace + 128e6


@pytest.mark.parametrize("workspace", [0, 2**25, 2**27])
def test_cuda_graph_of_the_exact_loss(workspace):
    check_graph({"filter_eps": None, "workspace": workspace}, 2048, 20000)


@EPS
def test_cuda_graph(eps):
    check_graph({"filter_eps": eps}, 500, 5000)


def check_graph(options, n, v):
    hidden, weight, labels, _ = inputs(n, v, 256, torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, **options)
        loss.backward()
        return loss.detach()

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
    replayed, replayed_gradient = captured.clone(), gradient.clone()
    plain = step()
    torch.testing.assert_close(replayed, plain)
    assert error(replayed_gradient, weight.grad) < 1e-3


@EPS
def test_inside_a_compiled_model(eps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()).cuda().bfloat16()
    weight = torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_()
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 5000, (300,), device="cuda")

    def loss(x):
        hidden = model(x) * 2
        return linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, filter_eps=eps) * 3

    loss(x).backward()
    want = weight.grad.clone()
    weight.grad = None
    torch.compile(loss)(x).backward()
    assert error(weight.grad, want) < 5e-3


def test_autocast():
    hidden, weight, labels, _ = inputs(300, 3000, 128)
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1)
    want = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=0.1)
    torch.testing.assert_close(loss, want, rtol=1e-3, atol=1e-3)

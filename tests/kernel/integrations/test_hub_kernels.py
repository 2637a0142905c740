"""The `kernels` library's own loader of local folders, on the folder that build_hub.py writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loss_check import DEVICE

kernels = pytest.importorskip("kernels")
from smoothce import linear_cross_entropy  # noqa: E402

SCRIPT = Path(__file__).parents[3] / "kernel" / "build_hub.py"
WITHOUT_AN_INSTALLED_ONE = """
import sys
from pathlib import Path

sys.modules["smoothce"] = None  # makes every import of it raise ModuleNotFoundError
import kernels, torch

smoothce = kernels.get_local_kernel(Path(sys.argv[1]))
hidden, weight = torch.zeros(2, 8, requires_grad=True), torch.zeros(5, 8)
labels = torch.tensor([1, 2])
print(smoothce.explain(hidden, weight))
for impl in ("reference", "chunked", "triton"):
    smoothce.linear_cross_entropy(hidden, weight, labels, impl=impl).backward()
assert smoothce.SmoothingCallback
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "smoothce"
    subprocess.run([sys.executable, SCRIPT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    module = kernels.get_local_kernel(folder)
    assert Path(module.__file__).is_relative_to(folder)
    return module


def loss_and_gradients(function, **options):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(60, 16, generator=generator).to(DEVICE).requires_grad_()
    labels = torch.randint(60, (3, 7), generator=generator).to(DEVICE)
    labels[0, :3] = -100
    loss = function(hidden, weight, labels, label_smoothing=0.2, z_loss=0.01, **options)
    return loss.detach(), torch.autograd.grad(loss, [hidden, weight])


@pytest.mark.parametrize("impl", ["auto", "chunked", "triton"])
def test_loss_and_gradients_are_the_references(loaded, impl):
    found = loss_and_gradients(loaded.linear_cross_entropy, impl=impl)
    expected = loss_and_gradients(linear_cross_entropy, impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_its_operator_is_its_own_beside_the_installed_packages(loaded):
    assert loaded.__name__ != "smoothce"
    expected = loss_and_gradients(linear_cross_entropy, impl="reference")
    for function in (loaded.linear_cross_entropy, linear_cross_entropy):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(loss_and_gradients(compiled), expected, rtol=1e-4, atol=1e-5)
    assert hasattr(torch.ops, "smoothce")
    assert getattr(torch.ops, loaded.__name__).loss is not torch.ops.smoothce.loss


def test_it_needs_no_installed_smoothce(folder):
    command = [sys.executable, "-c", WITHOUT_AN_INSTALLED_ONE, folder]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("chunked: triton is not used because the inputs are on cpu")

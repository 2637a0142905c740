"""Every kernel fits into the shared memory of every GPU that the package serves: found by compiling
for it, which needs no GPU.

    python test_shared_memory.py CAPABILITY DTYPE       such as 89 bfloat16

Prints a JSON object: the bytes of each kernel that a training step launches. Nothing runs: inputs
are on the CPU, and every launch is compiled and left at that."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from triton import __version__ as triton_version
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from smoothce import triton as ours
from smoothce.options import Inputs, Options
from smoothce.triton import recompute_backward

# Bytes of a block, opted in: NVIDIA's CUDA C++ programming guide, compute capabilities.
# fp16 takes the tiles of bf16.
LIMITS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
FIRST = {100: (3, 3), 120: (3, 3)}  # Triton that knows the GPU
MODES = [{}, {"workspace": 0}, {"filter_eps": 0.01}, {"softcap": 30.0, "filter_eps": 0.01}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"), [*((c, "bfloat16") for c in LIMITS), (86, "float32"), (90, "float32")]
)
def test_kernels_fit(capability, dtype):
    if tuple(map(int, triton_version.split(".")[:2])) < FIRST.get(capability, (0, 0)):
        pytest.skip(f"Triton {triton_version} does not know compute capability {capability}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", __file__, str(capability), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {"forward_kernel", "recompute_kernel"} <= set(found)
    assert {k: n for k, n in found.items() if n > LIMITS[capability]} == {}


def compiled(capability: int, dtype: torch.dtype) -> dict[str, int]:
    found: dict[str, int] = {}
    run = jit.JITFunction.run

    def compile_alone(self, *args, grid, warmup, **settings):
        kernel, name = run(self, *args, grid=grid, warmup=True, **settings), self.fn.__name__
        found[name] = max(found.get(name, 0), kernel.metadata.shared)

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    driver.set_active(gpu)
    jit.JITFunction.run = compile_alone
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    recompute_backward.Counts.values = lambda self: [300] * len(self.host)  # all of them
    for mode in MODES:
        hidden, weight = (torch.zeros(n, 256, dtype=dtype, requires_grad=True) for n in (300, 1100))
        labels = torch.zeros(300, dtype=torch.int64)
        options = Options(label_smoothing=0.1, **mode)
        ours.loss(Inputs(hidden, weight, labels, None, None, None, options)).loss.backward()
    return found


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), getattr(torch, sys.argv[2]))))

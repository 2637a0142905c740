"""Every kernel fits into the shared memory of every GPU that the package serves, and computes
nothing in fp64: found by compiling for it, which needs no GPU.

    python test_shared_memory.py CAPABILITY DTYPE       such as 89 bfloat16

Prints a JSON object: the bytes of each kernel that a training step launches. Nothing runs: inputs
are on the CPU, and every launch is compiled and left at that."""

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import __version__ as triton_version
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from smoothce import triton as triton_loss
from smoothce.linear_cross_entropy import make_call
from smoothce.triton import (
    dproduct,
    forward,
    grad_in_forward,
    recompute_backward,
    tiles,
    tokens,
)
from smoothce.triton.filter import kernels, pairs

# Bytes of a block, opted in: NVIDIA's CUDA C++ programming guide, compute capabilities.
# fp16 takes the tiles of bf16.
LIMITS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
FIRST_TRITON = {100: (3, 3), 120: (3, 3)}  # the first that knows the GPU
MODES: list[dict[str, float]] = [
    {},
    {"workspace": 0},
    {"softcap": 30.0, "filter_eps": 0.01},
]
# Their kernels differ from those by a few lines, and are compiled for one GPU alone.
MODES_OF_H100: list[dict[str, float]] = [{"filter_eps": 0.01}, {"softcap": 30.0}]
N_TOKENS = 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"),
    list(itertools.product(LIMITS, ["bfloat16", "float32"])),
)
def test_kernels_fit(capability, dtype):
    version = tuple(map(int, triton_version.split(".")[:2]))
    if version < FIRST_TRITON.get(capability, (0, 0)):
        pytest.skip(f"Triton {triton_version} does not know compute capability {capability}")
    environment = {**os.environ}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", __file__, str(capability), dtype]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    shared_bytes = json.loads(process.stdout)
    assert {"forward_kernel", "recompute_kernel"} <= set(shared_bytes)
    limit = LIMITS[capability]
    too_large = {name: size for name, size in shared_bytes.items() if size > limit}
    assert too_large == {}


@pytest.mark.parametrize(
    "module", [dproduct, kernels, pairs, forward, grad_in_forward, tiles, tokens]
)
def test_constants_are_normal_numbers_of_fp32(module):
    """Triton 3.6 takes any other constant for one of fp64, and computes in fp64 from there on."""
    least = torch.finfo(torch.float32).tiny
    for name, constant in vars(module).items():
        if isinstance(constant, tl.constexpr) and isinstance(constant.value, float):
            assert least <= abs(constant.value) <= torch.finfo(torch.float32).max, name


def compile_alone(capability: int) -> dict[str, int]:
    """From here on compile every launch for this compute capability and run none; returns where
    the shared memory of each kernel is noted, in bytes."""
    shared_bytes: dict[str, int] = {}
    run = jit.JITFunction.run

    def compile_and_note(self, *args, grid, warmup, **settings):
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        name = self.fn.__name__
        assert ".f64" not in kernel.asm["ptx"], f"{name} computes in fp64"
        shared_bytes[name] = max(shared_bytes.get(name, 0), kernel.metadata.shared)

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    driver.set_active(gpu)
    jit.JITFunction.run = compile_and_note
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    # No kernel has counted the valid tokens: all of them.
    recompute_backward.ValidCounts.values = lambda self: [N_TOKENS] * len(self.host)
    return shared_bytes


def training_step(dtype: torch.dtype, mode: dict[str, float]) -> None:
    hidden = torch.zeros(N_TOKENS, 256, dtype=dtype, requires_grad=True)
    weight = torch.zeros(1100, 256, dtype=dtype, requires_grad=True)
    labels = torch.zeros(N_TOKENS, dtype=torch.int64)
    call = make_call(hidden, weight, labels, label_smoothing=0.1, **mode)
    triton_loss.loss(call).loss.backward()


def main(capability: str, dtype: str) -> None:
    shared_bytes = compile_alone(int(capability))
    modes = MODES
    if capability == "90":
        modes = MODES + MODES_OF_H100
    for mode in modes:
        training_step(getattr(torch, dtype), mode)
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:])

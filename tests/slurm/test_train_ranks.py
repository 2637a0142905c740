"""The trainer on two CPU ranks over gloo, stopped and resumed, against one process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from real import PROJECT, prepare
from safetensors.torch import load_file

from sweeps.runs.files import read_rows
from sweeps.runs.run import Run
from sweeps.training import fit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLIP = 0.5  # below every gradient norm met here
TRAIN: dict[str, Any] = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "label_smoothing": 0.1,
    "held_out": 5,
    "num_train_epochs": 2,
    "max_tokens": 60,
    "packing": True,
    "logging_steps": 1,
    "reduce_loss": "token_mean",
}
LORA: dict[str, Any] = {"lora": {"r": 4, "alpha": 8.0}, "learning_rate": 1e-2}


def train_on_two_ranks(run: Run, exit_code: int = 0) -> str:
    """What two ranks print; torchrun must say that they end with this exit code."""
    command = [sys.executable, "-m", "sweeps", "train"]
    if run.config().world.fsdp:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "sweeps.training.torchrun", "cpu_ranks"]
    finished = subprocess.run(
        [*command, str(run.path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )
    output = finished.stdout[-2000:] + finished.stderr[-4000:]
    assert (finished.returncode == 0) == (exit_code == 0), output
    if exit_code:
        assert f"exitcode  : {exit_code} " in output, output
    return finished.stdout


def zero_config(folder: Path, stage: int) -> str:
    """A DeepSpeed file of this ZeRO stage, which clips gradients."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": CLIP,
    }
    path = folder / "zero.json"
    path.write_text(json.dumps(config))
    return str(path)


def assert_same_metrics(one: Run, two: Run, tolerances: dict[str, float]) -> None:
    rows = zip(read_rows(one.metrics), read_rows(two.metrics), strict=True)
    for expected, found in rows:
        for key, tolerance in tolerances.items():
            assert (key in expected) == (key in found)
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=tolerance)


def assert_close_weights(one: Run, two: Run, absolute_tolerance: float) -> None:
    expected = load_file(one.model / "model.safetensors")
    found = load_file(two.model / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=absolute_tolerance)


@pytest.mark.parametrize(
    ("how", "lora"),
    [
        ("ddp", False),
        ("zero0", False),
        ("zero1", False),
        ("zero2", False),
        ("zero3", False),
        ("fsdp", False),
        ("zero3", True),
        ("fsdp", True),
    ],
)
def test_two_ranks_are_one_process(sweep_file, tmp_path, how, lora):
    """Stopped after its first update too. What the DeepSpeed file clips at holds by itself."""
    is_zero = how.startswith("zero")
    if is_zero and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    train = dict(TRAIN)
    if lora:
        train.update(LORA)
    one_process = {**train, "clip_grad_norm": CLIP, "per_device_train_batch_size": 8}
    one = prepare(sweep_file(grid={}, train=one_process))
    fit.fit(one)

    world: dict[str, Any] = {"processes_per_node": 2}
    if is_zero:
        world["deepspeed"] = zero_config(tmp_path, stage=int(how[-1]))
    else:
        train["clip_grad_norm"] = CLIP
    if how == "fsdp":
        world["fsdp"] = str(PROJECT / "configs" / "fsdp" / "fsdp2.json")
    two = prepare(sweep_file(grid={}, train=train, world=world))
    two.stop.touch()
    assert "stopped: step 1 of 16 is saved" in train_on_two_ranks(two, exit_code=75)
    assert two.step() == 1
    assert not two.model.exists()
    two.stop.unlink()
    assert "resumed: step 1 of 16" in train_on_two_ranks(two)

    assert len(read_rows(one.metrics)) == 16 + 2
    assert_same_metrics(one, two, {"loss": 1e-6, "held_out_loss": 1e-6, "grad_norm": 1e-5})
    # Under LoRA, Adam's first steps magnify gradients that are next to nothing.
    assert_close_weights(one, two, absolute_tolerance=1e-4 if lora else 2e-6)

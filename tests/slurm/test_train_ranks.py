"""The trainer on two CPU ranks over gloo, stopped and resumed, against one process."""

import json
import os
import subprocess
import sys

import pytest
import torch
from real import PROJECT, prepare
from safetensors.torch import load_file

from sweeps.runs.files import read_rows
from sweeps.runs.run import Run
from sweeps.training import hf_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

CLIP = 0.5  # below every norm met here
TRAIN = {"learning_rate": 1e-3, "weight_decay": 0.1, "label_smoothing": 0.1, "held_out": 5}
TRAIN |= {"num_train_epochs": 2, "max_tokens": 60, "packing": True, "logging_steps": 1}
TRAIN |= {"reduce_loss": "token_mean"}
LORA = {"lora": {"r": 4, "alpha": 8.0}, "learning_rate": 1e-2}


def launch(run: Run, code: int = 0) -> str:
    """What two ranks say."""
    words = ["-m", "sweeps", "train"]
    if run.config().world.fsdp:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words += ["-m", "sweeps.training.torchrun", "cpu_ranks"]
    done = subprocess.run(
        [sys.executable, *words, str(run.path)],
        capture_output=True, text=True, check=False, env=os.environ | {"DS_BUILD_OPS": "0"},
    )  # fmt: skip
    said = done.stdout[-2000:] + done.stderr[-4000:]
    assert bool(done.returncode) == bool(code), said
    assert not code or f"exitcode  : {code} " in said, said
    return done.stdout


@pytest.mark.parametrize(
    ("how", "lora"),
    [(how, False) for how in ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")]
    + [("zero3", True), ("fsdp", True)],
)
def test_two_ranks_are_one_process(sweep_file, tmp_path, how, lora):
    """Stopped after its first update too. What the DeepSpeed file clips at holds by itself."""
    train = TRAIN | (LORA if lora else {})
    clip = {} if how.startswith("zero") else {"clip_grad_norm": CLIP}
    alone = train | {"clip_grad_norm": CLIP, "per_device_train_batch_size": 8}
    one = prepare(sweep_file(grid={}, train=alone))
    hf_trainer.fit(one)
    world = {"processes_per_node": 2}
    if how.startswith("zero"):
        zero = {"stage": int(how[-1]), "stage3_gather_16bit_weights_on_model_save": True}
        made = {"zero_optimization": zero, "gradient_clipping": CLIP}
        (tmp_path / "zero.json").write_text(json.dumps(made))
        world["deepspeed"] = str(tmp_path / "zero.json")
    if how == "fsdp":
        world["fsdp"] = str(PROJECT / "configs" / "fsdp" / "fsdp2.json")
    path = sweep_file(grid={}, train={**train, **clip}, world=world)
    run = prepare(path)
    run.stop.touch()
    assert "stopped: step 1 of 16 is saved" in launch(run, 75)
    assert run.step() == 1 and not run.model.exists()
    run.stop.unlink()
    assert "resumed: step 1 of 16" in launch(run)
    ours, theirs = read_rows(one.metrics), read_rows(run.metrics)
    assert len(ours) == 16 + 2
    for left, right in zip(ours, theirs, strict=True):
        for key in left.keys() & right.keys() & {"loss", "held_out_loss", "grad_norm"}:
            assert right[key] == pytest.approx(left[key], rel=1e-6 if key != "grad_norm" else 1e-5)
    left, right = (load_file(path.model / "model.safetensors") for path in (one, run))
    assert left.keys() == right.keys()
    near = 1e-4 if lora else 2e-6  # Adam's first steps magnify what is next to nothing
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=1e-4, atol=near)

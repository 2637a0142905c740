"""The trainer on two CPU ranks over gloo, stopped and resumed, against one process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from sweep_tools import PROJECT, equal, prepare, programs, wait_for
from training_runs import logged
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sweeps.runs.files import read_rows
from sweeps.runs.run import Run
from sweeps.training import fit
from sweeps.training.starting_ranks import torchrun_command

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
    """What two ranks print; their process must end with this exit code."""
    world = run.config().world
    command = [sys.executable, "-m", "sweeps", "train"]
    if world.fsdp or world.deepspeed:
        command = torchrun_command(world, "cpu_ranks")
    finished = subprocess.run(
        [*command, str(run.path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )
    output = finished.stdout[-2000:] + finished.stderr[-4000:]
    assert finished.returncode == exit_code, output
    return finished.stdout + finished.stderr


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
    ("how", "lora", "is_stopped"),
    [
        ("ddp", False, True),
        ("zero2", False, True),
        ("zero3", False, False),
        ("fsdp", False, False),
        ("zero3", True, True),
        ("fsdp", True, True),
    ],
)
def test_two_ranks_are_one_process(sweep_file, tmp_path, how, lora, is_stopped):
    """Those that test_nodes.py does not stop are stopped here, after their first update. What the
    DeepSpeed file clips at holds by itself."""
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
    if is_stopped:
        two.stop_file.touch()
        assert "stopped: step 1 of 16 is saved" in train_on_two_ranks(two, exit_code=75)
        assert two.last_saved_step() == 1
        assert not two.model.exists()
        two.stop_file.unlink()
    output = train_on_two_ranks(two)
    assert ("resumed: step 1 of 16" in output) == is_stopped

    assert len(read_rows(one.metrics)) == 16 + 2
    assert_same_metrics(one, two, {"loss": 1e-6, "held_out_loss": 1e-6, "grad_norm": 1e-5})
    # Under LoRA, Adam's first steps magnify gradients that are next to nothing.
    assert_close_weights(one, two, absolute_tolerance=1e-4 if lora else 2e-6)


@pytest.fixture
def running(sweep_file) -> Iterator[tuple[Run, subprocess.Popen[str]]]:
    """A run of two ranks that was started by hand, and its process."""
    train = {**TRAIN, "held_out": 0, "max_train_steps": 100, "checkpointing_steps": 90}
    run = prepare(sweep_file(grid={}, train=train, world={"processes_per_node": 2}))
    process = subprocess.Popen(
        [sys.executable, "-m", "sweeps", "train", str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield run, process
    process.kill()
    process.communicate()


def end_of(run: Run, process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a run's process and what it has printed; nobody may be left."""
    output, _ = process.communicate(timeout=100)
    wait_for(lambda: not programs(run), 20)
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_of_two_ranks_saves_the_run(running, number):
    """As to that of one process: exit 75, and nobody is left."""
    run, process = running
    wait_for(lambda: read_rows(run.metrics), 120)
    process.send_signal(number)
    exit_code, output = end_of(run, process)
    assert exit_code == 75, output
    step = run.last_saved_step()
    assert 0 < step < 90
    assert f"stopped: step {step} of 100 is saved" in output
    assert "Traceback" not in output


def test_a_signal_before_the_ranks_train_ends_them_at_once(running):
    run, process = running
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2, 60)
    process.terminate()
    exit_code, output = end_of(run, process)
    assert exit_code == 75, output
    assert "stopped: SIGTERM came" in output
    assert "Traceback" not in output
    assert not read_rows(run.metrics)


def fsdp_run(sweep_file: Any, folder: Path, name: str, config: dict, **train: Any) -> Run:
    """A run of three updates on two ranks, with FSDP2 and these settings more."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"version": 2, "reshard_after_forward": True, **config}))
    path = sweep_file(
        grid={},
        train={**TRAIN, "max_train_steps": 3, **train},
        name=name,
        world={"processes_per_node": 2, "fsdp": str(file)},
    )
    return prepare(path)


def other_model(tiny: Path, folder: Path, **config: Any) -> str:
    """A model like the tiny one, with other settings."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny / "model", **config))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(folder)
    return str(folder)


def test_the_first_rank_alone_reads_the_model(sweep_file, tiny, tmp_path):
    """The weights that are trained are bit for bit those of ranks that all read it: of a model
    whose tied embeddings have fewer rows than its tokenizer has entries, under LoRA."""
    model = other_model(tiny, tmp_path / "other model", tie_word_embeddings=True, vocab_size=40)
    train = {**LORA, "model_name_or_path": model}
    one_reads = fsdp_run(sweep_file, tmp_path, "one", {}, **train)
    output = train_on_two_ranks(one_reads)
    assert "rank 0: weights read" in output
    assert "rank 1: weights not read" in output

    all_read = fsdp_run(sweep_file, tmp_path, "all", {"cpu_ram_efficient_loading": False}, **train)
    output = train_on_two_ranks(all_read)
    assert "rank 0: weights read" in output
    assert "rank 1: weights read" in output

    assert equal(one_reads, all_read)
    assert logged(one_reads) == logged(all_read)


def test_a_config_by_which_other_ranks_would_have_other_weights(sweep_file, tiny, tmp_path):
    """Such as one that ties what the files hold apart. Without a word the ranks would hang."""
    model = Path(other_model(tiny, tmp_path / "other model", tie_word_embeddings=False))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    run = fsdp_run(sweep_file, tmp_path, "tied", {}, model_name_or_path=str(model))
    output = train_on_two_ranks(run, exit_code=1)
    assert f"{model}: lm_head.weight has the shape " in output
    assert 'set "cpu_ram_efficient_loading" to false in the file of world.fsdp' in output

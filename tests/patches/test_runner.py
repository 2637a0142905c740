"""The runner gives an unpatched checkout the loss that the patches give a patched one."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smoothed_open_instruct.__main__ import with_flags

UPSTREAM = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.timeout(900)]
PROJECT = Path(__file__).parents[2]
# Two ranks, and epochs of eleven micro-batches, so that the last step of each is short.
SPLIT = ["--per_device_train_batch_size", 3, "--gradient_accumulation_steps", 2]
SPLIT += ["--max_train_samples", 63, "--num_train_epochs", 2, "--learning_rate", 1e-3]
SMOOTHED = ["--label_smoothing", 0.1]
HOOKED = (
    "from accelerate import Accelerator\nclass FlatArguments: pass\nArgumentParserPlus(0)\n"
    "accelerator.prepare(1)\naccelerator.accumulate(2)\noutputs.loss\n"
)


def marked(*values):
    return pytest.param(*values, marks=UPSTREAM)


@pytest.mark.parametrize(
    ("stack", "parallel", "reduce_loss", "flags"),
    [
        marked("paper", "ddp", "token_mean", SMOOTHED),
        marked("paper", "ddp", "sum", SMOOTHED),
        marked("paper", "ddp", "mean", [*SMOOTHED, "--use_lora", True]),
        marked("paper", "zero2", "sum", SMOOTHED),
        marked("paper", "zero3", "token_mean", SMOOTHED),
        marked("paper", "ddp", "sum", []),
        marked("today", "ddp", "sum", SMOOTHED),
        marked("today", "zero3", "token_mean", ["--loss_impl", "fused"]),
    ],
)
def test_weights_are_those_of_the_patched_script(
    request, numactl, unpatched, patched, tmp_path, deepspeed, stack, parallel, reduce_loss, flags
):
    stack = request.getfixturevalue(stack)
    flags = [*SPLIT, "--reduce_loss", reduce_loss, *flags]
    world = {"ranks": 2, "deepspeed": None if parallel == "ddp" else deepspeed(parallel)}
    theirs = stack.finetune(patched, tmp_path / "patched", *flags, **world)
    ours = stack.finetune(unpatched, tmp_path / "runner", *flags, **world, runner=True)
    assert list(ours.losses) == list(range(1, 13))
    assert ours.losses == theirs.losses
    assert ours.weights() == theirs.weights()


@pytest.mark.upstream
@pytest.mark.slow
def test_a_resume_within_an_epoch_counts_its_batches_too(paper, unpatched, tmp_path):
    flags = [*SPLIT, *SMOOTHED, "--reduce_loss", "token_mean", "--num_train_epochs", 1]
    flags += ["--checkpointing_steps", 4]
    given = {"runner": True}
    whole = paper.finetune(unpatched, tmp_path / "whole", *flags, **given)
    paper.finetune(unpatched, tmp_path / "killed", *flags, **given, faults=("step:6",))
    again = paper.finetune(unpatched, tmp_path / "killed", *flags, **given)
    assert min(again.losses) == 5
    assert again.weights() == whole.weights()


def train_on_main(stack, checkout, output, *flags, **options):
    flags = ["--dataset_mixer_list", stack.world / "train.jsonl", "1.0", *flags]
    flags += ["--max_train_steps", 4, "--learning_rate", 1e-3, "--lr_scheduler_type", "constant"]
    return stack.finetune(checkout, output, *flags, **options)


@pytest.mark.upstream
@pytest.mark.slow
def test_main_without_flags_is_left_as_it_is(main_stack, main_checkout, tmp_path):
    """But a sum, which main does not know, is this project's."""
    plain, ours, summed = (
        train_on_main(main_stack, main_checkout, tmp_path / name, *flags, **options)
        for name, flags, options in (
            ("plain", [], {}),
            ("ours", [], {"runner": True}),
            ("summed", ["--reduce_loss", "sum"], {"runner": True}),
        )
    )
    assert ours.weights() == plain.weights() != summed.weights()
    assert "loss: fused, beta 0, sum" in summed.log


@pytest.mark.upstream
@pytest.mark.slow
def test_main_with_smoothing_is_torchs_packed_or_not(main_stack, main_checkout, tmp_path):
    given = {"dtype": "float64", "runner": True}
    start = main_stack.world / "model"
    theirs = train_on_main(
        main_stack, main_checkout, tmp_path / "torch", dtype="float64", torch_smoothing=0.1
    ).update(start)
    flags = [*SMOOTHED, "--reduce_loss", "token_mean"]
    halves = ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]
    whole = train_on_main(main_stack, main_checkout, tmp_path / "whole", *flags, **given)
    split, packed = (
        train_on_main(
            main_stack, main_checkout, tmp_path / name, *flags, *halves, *more, **given, ranks=2
        ).update(start)
        for name, more in (("split", []), ("packed", ["--packing", True]))
    )
    whole = whole.update(start)
    assert (whole - theirs).norm() <= 1e-5 * theirs.norm()  # torch's loss is of fp32 logits
    for update in (split, packed):
        assert (update - whole).norm() <= 1e-6 * whole.norm()


def runner(*words):
    paths = os.pathsep.join(str(PROJECT / part) for part in ("kernel", "patches", "eval"))
    call = [sys.executable, "-m", "smoothed_open_instruct", *words]
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(call, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no open_instruct/finetune.py, so it is no open-instruct checkout"),
        (HOOKED + "import smoothed_open_instruct as ours\n", "apply.sh {folder} --reverse"),
        (HOOKED.replace("outputs.loss", "loss"), "no `outputs.loss`: its loss cannot be changed"),
    ],
)
def test_refuses(tmp_path, text, message):
    if text is not None:
        (tmp_path / "open_instruct").mkdir()
        (tmp_path / "open_instruct" / "finetune.py").write_text(text)
    done = runner(tmp_path, "--label_smoothing", "0.1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert message.format(folder=tmp_path) in done.stderr


def test_what_the_script_refuses_ends_it_the_same_way(capsys):
    @dataclasses.dataclass
    class FlatArguments:
        load_balancing_loss: bool = False

        def __post_init__(self):
            raise ValueError("Need either a dataset name, dataset mixer, or a training file.")

    with pytest.raises(SystemExit, match="2"):
        with_flags(FlatArguments)()
    assert capsys.readouterr().err.startswith("error: Need either a dataset name")


def test_says_how_it_is_used():
    done = runner("--label_smoothing", "0.1")
    assert done.returncode == 2 and "smoothed_open_instruct CHECKOUT ARGUMENTS" in done.stderr

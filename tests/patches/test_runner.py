"""The runner gives an unpatched checkout the loss that the patches give a patched one."""

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.timeout(900)]
# Two ranks, and epochs of eleven micro-batches, so that the last step of each is short.
SPLIT = ["--per_device_train_batch_size", 3, "--gradient_accumulation_steps", 2]
SPLIT += ["--max_train_samples", 63, "--num_train_epochs", 2, "--learning_rate", 1e-3]
SMOOTHED = ["--label_smoothing", 0.1]


@pytest.mark.parametrize(
    ("stack", "parallel", "reduce_loss", "flags"),
    [
        ("paper", "ddp", "token_mean", SMOOTHED),
        ("paper", "ddp", "mean", [*SMOOTHED, "--use_lora", True]),
        ("paper", "zero2", "sum", SMOOTHED),
        ("paper", "zero3", "token_mean", SMOOTHED),
        ("paper", "ddp", "sum", []),
        ("today", "ddp", "sum", SMOOTHED),
        ("today", "zero3", "token_mean", ["--loss_impl", "fused"]),
    ],
)
def test_weights_are_those_of_the_patched_script(
    request, unpatched, patched, tmp_path, deepspeed, stack, parallel, reduce_loss, flags
):
    stack = request.getfixturevalue(stack)
    flags = [*SPLIT, "--reduce_loss", reduce_loss, *flags]
    world = {"ranks": 2, "deepspeed": deepspeed(parallel)}
    theirs = stack.finetune(patched, tmp_path / "patched", *flags, **world)
    ours = stack.finetune(unpatched, tmp_path / "runner", *flags, **world, runner=True)
    assert list(ours.losses) == list(range(1, 13))
    assert ours.losses == theirs.losses
    assert ours.weights() == theirs.weights()


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

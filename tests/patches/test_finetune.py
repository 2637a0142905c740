"""The patched finetune.py trains as it should, on the libraries of then and of today."""

import dataclasses
import json

import pytest
import yaml

from sweeps import cli as cli

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("reduce_loss", ["mean", "sum"])
def test_flags_off_is_bit_identical(paper, unpatched, patched, tmp_path, reduce_loss):
    flags = ["--max_train_steps", 20, "--reduce_loss", reduce_loss]
    before = paper.finetune(unpatched, tmp_path / "before", *flags, dtype=None)
    after = paper.finetune(patched, tmp_path / "after", *flags, dtype=None)
    assert list(before.losses) == list(range(1, 21))
    assert after.losses == before.losses
    assert after.weights() == before.weights()


@pytest.mark.parametrize(
    ("steps", "reduce_loss", "flags"),
    [
        (50, "mean", []),
        (50, "sum", []),
        (50, "token_mean", []),
        (10, "mean", ["--use_lora", True, "--lora_rank", 4, "--lora_dropout", 0]),
        (10, "mean", ["--gradient_checkpointing", True]),  # which upstream ignores under LoRA
    ],
    ids=str,
)
def test_smoothed_curve_is_torchs(paper, unpatched, patched, tmp_path, steps, reduce_loss, flags):
    flags = [*flags, "--max_train_steps", steps, "--learning_rate", 1e-3]
    # In one micro-batch on one rank the mean over the step's tokens is torch's mean.
    theirs = [*flags, "--reduce_loss", reduce_loss.removeprefix("token_")]
    torch = paper.finetune(unpatched, tmp_path / "torch", *theirs, torch_smoothing=0.1)
    flags += ["--reduce_loss", reduce_loss, "--label_smoothing", 0.1]
    fused = paper.finetune(patched, tmp_path / "ours", *flags)
    assert list(torch.losses) == list(range(1, steps + 1))
    assert torch.losses[steps] < (0.9 if steps == 50 else 1) * torch.losses[1]
    assert fused.losses == pytest.approx(torch.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "splits"),
    [
        (["--max_train_steps", 3], [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (2, 8)]),
        # 120 chats are seven and a half updates of 16: the last one of an epoch is short.
        (["--num_train_epochs", 2], [(1, 1), (1, 8), (2, 8)]),
    ],
    ids=["whole-steps", "short-steps"],
)
def test_token_mean_does_not_depend_on_the_split(paper, patched, tmp_path, flags, splits):
    """(ranks, accumulation), in fp64: fp32 cannot hold a weight's update to 1e-6 of it."""
    flags = [*flags, "--reduce_loss", "token_mean", "--label_smoothing", 0.1]
    # Upstream's schedule counts steps of all ranks and rounds: constant, the rates agree.
    flags += ["--learning_rate", 1e-3, "--lr_scheduler_type", "constant"]
    runs = {
        (ranks, accumulation): paper.finetune(
            patched,
            tmp_path / f"{ranks}-{accumulation}",
            *flags,
            *("--per_device_train_batch_size", 16 // ranks // accumulation),
            *("--gradient_accumulation_steps", accumulation),
            ranks=ranks,
            dtype="float64",
        )
        for ranks, accumulation in splits
    }
    whole = runs[1, 1]
    update = whole.update(paper.world / "model")
    for split, run in runs.items():
        assert run.losses == pytest.approx(whole.losses, rel=1e-6), split
        error = (run.update(paper.world / "model") - update).norm() / update.norm()
        assert error <= 1e-6, (split, error)


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
@pytest.mark.parametrize("stack", ["paper", "today"])
def test_zero_trains_as_one_process_does(request, patched, tmp_path, deepspeed, stack, zero):
    stack = request.getfixturevalue(stack)
    flags = ["--max_train_steps", 10, "--learning_rate", 1e-3, "--label_smoothing", 0.1]
    flags += ["--reduce_loss", "token_mean", "--log_statistics", True]
    one = stack.finetune(patched, tmp_path / "one", *flags, "--clip_grad_norm", 1.0)
    two = stack.finetune(
        patched,
        tmp_path / "two",
        *flags,
        *("--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2),
        ranks=2,
        deepspeed=deepspeed(zero),
    )
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    norms = [[row["grad_norm"] for row in run.statistics] for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_offline_node_reaches_for_nothing(paper, patched, tmp_path):
    flags = ["--max_train_steps", 2, "--push_to_hub", True, "--try_launch_beaker_eval_jobs", True]
    run = paper.finetune(patched, tmp_path / "run", *flags)
    assert "push_to_hub and try_launch_beaker_eval_jobs are off" in run.log
    assert len(run.losses) == 2


@pytest.mark.parametrize("reduce_loss", ["mean", "sum"])
def test_a_line_is_of_all_steps_since_the_last(paper, patched, tmp_path, reduce_loss):
    """15 micro-batches an epoch, four a step: the fourth has three, and lines go over it."""
    flags = ["--num_train_epochs", 2, "--gradient_accumulation_steps", 4, "--log_statistics", True]
    flags += ["--learning_rate", 1e-6, "--reduce_loss", reduce_loss]
    one, three = (
        paper.finetune(patched, tmp_path / str(every), *flags, "--logging_steps", every)
        for every in (1, 3)
    )
    losses = [row["train_loss"] for row in one.statistics]
    micro_batches = [4, 4, 4, 3, 4, 4, 4, 3]
    if reduce_loss == "mean":
        assert losses == pytest.approx([losses[0]] * 8, rel=0.05)  # it hardly learns
    for row in three.statistics:
        since = slice(row["step"] - 3, row["step"])
        total = sum(
            loss * count for loss, count in zip(losses[since], micro_batches[since], strict=True)
        )
        assert row["train_loss"] == pytest.approx(total / sum(micro_batches[since]), rel=1e-5)
        assert three.losses[row["step"]] == row["train_loss"]
        assert row["total_tokens"] == one.statistics[row["step"] - 1]["total_tokens"]


@pytest.mark.parametrize("runner", [False, True])
def test_a_wrong_flag_stops_before_anything_is_loaded(request, paper, tmp_path, runner):
    checkout = request.getfixturevalue("unpatched" if runner else "patched")
    flags = ["--train_file", "absent.jsonl", "--model_name_or_path", "absent"]
    flags += ["--reduce_loss", "max"]
    run = paper.finetune(checkout, tmp_path / "run", *flags, faults=("none",), runner=runner)
    assert run.code == 2 and "Traceback" not in run.log
    assert "error: reduce_loss must be one of mean, sum, token_mean" in run.log


def test_todays_stack_trains_as_the_pinned_one(paper, today, unpatched, patched, tmp_path):
    flags = ["--max_train_steps", 20, "--learning_rate", 1e-3, "--reduce_loss", "sum"]
    pinned = paper.finetune(unpatched, tmp_path / "pinned", *flags)
    now = dataclasses.replace(today, world=paper.world)
    ours = now.finetune(patched, tmp_path / "today", *flags)
    assert list(ours.losses) == list(range(1, 21))
    assert ours.losses == pytest.approx(pinned.losses, rel=1e-5)


@pytest.mark.parametrize("stack", ["paper", "today"])
def test_attention_by_name_and_data_tokenised_once(request, patched, tmp_path, stack):
    stack = request.getfixturevalue(stack)
    flags = ["--max_train_steps", 3, "--max_seq_length", 57, "--preprocessing_num_workers", 2]
    eager = stack.finetune(patched, tmp_path / "eager", *flags)
    tokenised = {path: path.stat().st_mtime_ns for path in stack.world.glob("cache/**/cache-*")}
    assert tokenised
    flags += ["--label_smoothing", 0.1, "--attn_implementation", "sdpa"]
    sdpa = stack.finetune(patched, tmp_path / "sdpa", *flags)
    assert {path: path.stat().st_mtime_ns for path in stack.world.glob("cache/**/cache-*")} == (
        tokenised
    )
    assert sdpa.losses.keys() == eager.losses.keys()
    wrong = stack.finetune(patched, tmp_path / "wrong", *flags[:-1], "no-such", faults=("none",))
    assert wrong.code == 1 and "no-such" in wrong.log


def test_this_projects_trainer_has_the_same_curve(today, patched, tmp_path, monkeypatch):
    """In fp32; each update takes all 120 conversations, as the two draw different orders."""
    common = {"gradient_accumulation_steps": 15, "max_train_steps": 20, "learning_rate": 1e-3}
    common |= {"reduce_loss": "token_mean", "label_smoothing": 0.1, "chat_template_name": "tulu"}
    flags = [word for key, value in common.items() for word in (f"--{key}", value)]
    theirs = today.finetune(patched, tmp_path / "theirs", *flags).losses

    shared = ("model_name_or_path", "train_file", "max_seq_length", "logging_steps")
    train = common | {key: today.given[key] for key in (*shared, "per_device_train_batch_size")}
    sweep = {"name": "ours", "output_root": str(tmp_path), "train": train}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(sweep))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the command does, for this test alone
    assert cli.main(["launch", str(tmp_path / "ours.yaml"), "--executor", "local"]) == 0
    (metrics,) = tmp_path.glob("ours/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.open()]
    ours = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert len(theirs) == 20 and theirs[20] < 0.95 * theirs[1]
    assert ours == pytest.approx(theirs, rel=1e-6)

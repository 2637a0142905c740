"""Runs of the patched finetune.py that are killed, and end as if they had not been."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.timeout(900)]
# Two ranks, three conversations a micro-batch, two micro-batches a step: an epoch of 60 is five
# whole steps, one of 63 six, whose last has one micro-batch.
SPLIT = ["--per_device_train_batch_size", 3, "--gradient_accumulation_steps", 2]
MATRIX = itertools.product(
    (60, 63), ("paper", "today"), ("sum", "mean", "token_mean"), ("ddp", "zero2", "zero3")
)
# A quarter of the 36 cells has every pair of values.
CELLS = list(MATRIX)[:: 1 if os.environ.get("OPEN_INSTRUCT_MATRIX") == "all" else 4]


@pytest.mark.parametrize(("samples", "stack", "reduce_loss", "parallel"), CELLS)
def test_killed_four_times(
    request, patched, tmp_path, deepspeed, samples, stack, reduce_loss, parallel
):
    """In epoch 1, between a checkpoint and its COMPLETED, in epoch 2, and before the cleaning."""
    stack = request.getfixturevalue(stack)
    flags = [*SPLIT, "--max_train_samples", samples, "--num_train_epochs", 2]
    flags += ["--learning_rate", 1e-3, "--label_smoothing", 0.1, "--reduce_loss", reduce_loss]
    flags += ["--attention_dropout", 0.1, "--checkpointing_steps", 2, "--logging_steps", 3]
    flags += ["--log_statistics", True]
    world = {"ranks": 2, "deepspeed": deepspeed(parallel)}
    whole = stack.finetune(patched, tmp_path / "whole", *flags, **world)
    steps = 12 if samples == 63 else 10
    found = set()
    for fault, began in (("step:3", 0), ("saved:8", 2), ("step:9", 6), ("trained", 8)):
        run = stack.finetune(patched, tmp_path / "killed", *flags, faults=(fault,), **world)
        assert run.code == -9 and f"and step {began}." in run.log, run.log[-6000:]
        found |= {row["step"] for row in run.statistics}
    assert list(run.output.glob("step_*"))
    last = stack.finetune(patched, tmp_path / "killed", *flags, **world)
    assert "already holds the trained model" in last.log and not list(run.output.glob("step_*"))
    assert last.weights() == whole.weights()
    assert found == {row["step"] for row in whole.statistics} == set(range(3, steps + 1, 3))
    assert json.loads((run.output / "config.json").read_text())["attention_dropout"] == 0


def test_ranks_that_are_late_and_slow_deletes(paper, patched, tmp_path):
    flags = [*SPLIT, "--max_train_steps", 5, "--checkpointing_steps", 1]
    flags += ["--keep_last_n_checkpoints", 1]
    run = paper.finetune(patched, tmp_path / "run", *flags, ranks=2, faults=("skew",))
    assert run.code == 0, run.log[-6000:]


def test_killed_while_the_first_rank_saves(paper, patched, tmp_path):
    flags = [*SPLIT, "--max_train_steps", 6, "--checkpointing_steps", 2]
    whole = paper.finetune(patched, tmp_path / "whole", *flags, ranks=2)
    killed = paper.finetune(patched, tmp_path / "run", *flags, ranks=2, faults=("saving:4",))
    assert (killed.output / "step_4").is_dir()
    assert not (killed.output / "step_4" / "COMPLETED").exists()
    again = paper.finetune(patched, tmp_path / "run", *flags, ranks=2)
    assert list(again.losses) == [3, 4, 5, 6]
    assert again.weights() == whole.weights()


def test_stopped_and_killed_where_epochs_are_saved(paper, patched, tmp_path):
    stop = tmp_path / "stop"
    flags = ["--num_train_epochs", 3, "--attention_dropout", 0.1, "--stop_file", stop]
    flags += ["--checkpointing_steps", "epoch"]
    whole = paper.finetune(patched, tmp_path / "whole", *flags)
    stop.touch()
    paper.finetune(patched, tmp_path / "run", *flags)
    stop.unlink()
    killed = paper.finetune(patched, tmp_path / "run", *flags, faults=("step:35",))
    assert {path.name for path in killed.output.glob("*_*")} == {"step_1", "epoch_0", "epoch_1"}
    again = paper.finetune(patched, tmp_path / "run", *flags)
    assert list(again.losses) == list(range(31, 46))
    assert again.weights() == whole.weights()


def test_an_interrupted_sweep_ends_with_the_same_model(today, patched, tmp_path):
    """launch, status, an end by the scheduler, launch again."""
    environment = today.environment | {"OPEN_INSTRUCT_DIR": str(patched)}

    def sweeps(command, root, *options):
        file = tmp_path / f"{root}.yaml"
        own = ("push_to_hub", "try_launch_beaker_eval_jobs", "per_device_train_batch_size")
        train = {key: value for key, value in today.given.items() if key not in own}
        train |= {"max_train_steps": 80, "checkpointing_steps": 7, "reduce_loss": "sum"}
        train |= {"attention_dropout": 0.1, "clip_grad_norm": 1.0}
        settings = {"name": "tiny", "output_root": str(tmp_path / root), "train": train}
        settings |= {"backend": "open-instruct", "grid": {"label_smoothing": [0.1]}}
        file.write_text(yaml.safe_dump(settings))
        words = [sys.executable, "-m", "sweeps", command, str(file), *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)

    whole = sweeps("launch", "whole", "--executor", "local")
    assert whole.wait() == 0, whole.stderr.read()
    (whole,) = (tmp_path / "whole" / "tiny").glob("*-beta*")

    assert "1 run: 1 to do" in sweeps("status", "stopped").communicate()[0]
    stopped = sweeps("launch", "stopped", "--executor", "local")
    while not list(tmp_path.glob("stopped/tiny/*/checkpoints/step_*/COMPLETED")):
        assert stopped.poll() is None, stopped.stderr.read()
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() != 0
    (run,) = (tmp_path / "stopped" / "tiny").glob("*-beta*")
    assert not (run / "DONE").exists() and list(run.glob("checkpoints/step_*/COMPLETED"))
    again = sweeps("launch", "stopped", "--executor", "local")
    assert again.wait() == 0, again.stderr.read()
    status = sweeps("status", "stopped").communicate()[0]
    assert "1 done" in status and "step 80/80" in status

    assert (run / "DONE").is_file() and not (run / "checkpoints").exists()
    first, second = (
        [json.loads(line) for line in (folder / "metrics.jsonl").open()] for folder in (whole, run)
    )
    assert [row["step"] for row in second] == list(range(1, 81))
    assert [row["loss"] for row in second] == [row["loss"] for row in first]
    assert all(row["clipped"] == 1 and row["grad_norm"] > 1 for row in second)
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()

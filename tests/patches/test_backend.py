"""`python -m sweeps` trains with the user's open-instruct checkout."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sweeps import __main__ as cli
from sweeps import open_instruct
from sweeps.config import World
from sweeps.open_instruct import Train
from sweeps.plan import plan
from sweeps.run import Run

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def train_file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
    return path


def keys(**given):
    return Train(**{"model_name_or_path": "absent/model", "train_file": "x.jsonl"} | given)


def test_what_finetune_lacks_or_cannot_read_is_named(train_file, tmp_path, monkeypatch):
    monkeypatch.delenv("OPEN_INSTRUCT_DIR", raising=False)
    (problem,) = open_instruct.checkout_problems()
    assert problem == "OPEN_INSTRUCT_DIR is not set: reproduce.md makes a patched checkout"
    monkeypatch.setenv("OPEN_INSTRUCT_DIR", str(tmp_path / "nowhere"))
    (problem,) = open_instruct.checkout_problems()
    assert "nowhere is not a folder" in problem
    assert open_instruct.data_problems(keys(train_file=str(train_file))) == []
    (problem,) = open_instruct.data_problems(keys(train_file="chats.parquet"))
    assert "finetune.py reads .json or .jsonl" in problem
    path = tmp_path / "alpaca.json"  # which only the trainer reads
    path.write_text(json.dumps([{"instruction": "Add 1 and 1.", "input": "", "output": "2"}]))
    (problem,) = open_instruct.data_problems(keys(train_file=str(path)))
    assert f"train.train_file: {path}, row 1: finetune.py reads rows with `messages`" in problem


def test_finetune_is_given_no_key_that_it_does_not_know(train_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sweep.yaml"
    train = {"model_name_or_path": "absent/model", "train_file": str(train_file)}
    sweep = {"name": "tiny", "output_root": "out", "backend": "open-instruct", "train": train}
    file.write_text(yaml.safe_dump(sweep))
    planned = plan(file, [])
    planned.create()
    own = {"output_dir", "push_to_hub", "try_launch_beaker_eval_jobs", "stop_file"}
    own.add("log_statistics")
    known = """
        model_name_or_path train_file use_flash_attn use_slow_tokenizer add_bos
        chat_template_name use_lora lora_rank lora_alpha lora_dropout learning_rate seed
        weight_decay warmup_ratio lr_scheduler_type num_train_epochs reduce_loss clip_grad_norm
        per_device_train_batch_size gradient_accumulation_steps fused_optimizer
        gradient_checkpointing logging_steps checkpointing_steps keep_last_n_checkpoints timeout
        label_smoothing loss_impl
    """  # the last line: those of the patches
    assert set(open_instruct.finetune_arguments(planned.cells[0].run)) == {*known.split(), *own}
    more = """
        tokenizer_name max_train_samples max_train_steps
        max_seq_length attention_dropout preprocessing_num_workers attn_implementation
        model_revision filter_eps
    """  # without a value unless given
    assert set(Train.model_fields) == {*known.split(), *more.split()}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({"use_flash_attn": False}, False),
        ({"attn_implementation": "sdpa"}, False),
        ({"use_flash_attn": False, "attn_implementation": "flash_attention_2"}, True),
    ],
)
def test_flash_attention_is_asked_for_where_it_is_used(given, wanted):
    assert ("flash_attn" in open_instruct.packages(keys(**given), World())) is wanted


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3-offload"])
def test_deepspeed_clips_explicitly_and_alone(tmp_path, name):
    config = PROJECT / "configs" / "deepspeed" / f"{name}.json"
    world = World(deepspeed=str(config))
    assert open_instruct.clipping_problems(keys(), world) == []
    (problem,) = open_instruct.clipping_problems(keys(clip_grad_norm=1.0), world)
    assert "DeepSpeed ignores it" in problem
    for limit in ("auto", None, True):
        (other := tmp_path / "zero.json").write_text(json.dumps({"gradient_clipping": limit}))
        (problem,) = open_instruct.clipping_problems(keys(), World(deepspeed=str(other)))
        assert str(other) in problem and "expected a number" in problem


def test_of_a_repeated_step_the_last_row_is_kept(tmp_path):
    run = Run(tmp_path)
    steps = [(step, 1.0) for step in range(1, 10)] + [(step, 2.0) for step in range(6, 12)]
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in steps]
    run.metrics.write_text("\n".join([*rows, '{"step": 12, "lo']))  # cut short
    open_instruct.keep_rows(run)
    rows = [json.loads(line) for line in run.metrics.open()]
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["loss"] for row in rows] == [1.0] * 5 + [2.0] * 6


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trainer_has_the_same_curve(today, patched, tmp_path, monkeypatch):
    """In fp32; each update takes all 120 conversations, as the two draw different orders."""
    common = {"gradient_accumulation_steps": 15, "max_train_steps": 20, "learning_rate": 1e-3}
    common |= {"reduce_loss": "token_mean", "label_smoothing": 0.1, "chat_template_name": "tulu"}
    flags = [word for key, value in common.items() for word in (f"--{key}", value)]
    theirs = today.finetune(patched, tmp_path / "theirs", *flags).losses

    shared = ("max_seq_length", "per_device_train_batch_size", "logging_steps")
    train = common | {key: today.given[key] for key in shared}
    train |= {key: str(today.given[key]) for key in ("model_name_or_path", "train_file")}
    sweep = {"name": "ours", "output_root": str(tmp_path), "train": train}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(sweep))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the command does, for this test alone
    assert cli.main(["launch", str(tmp_path / "ours.yaml"), "--executor", "local"]) == 0
    (metrics,) = tmp_path.glob("ours/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.open()]
    ours = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert len(theirs) == 20 and theirs[20] < 0.95 * theirs[1]
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_sweep_ends_with_the_same_model(today, patched, tmp_path):
    """launch, status, an end by the scheduler, launch again; test_resume.py kills."""
    environment = today.environment | {"OPEN_INSTRUCT_DIR": str(patched)}
    environment["PYTHONPATH"] += f"{os.pathsep}{PROJECT / 'slurm'}"

    def sweeps(command, root, *options):
        file = tmp_path / f"{root}.yaml"
        own = ("push_to_hub", "try_launch_beaker_eval_jobs", "per_device_train_batch_size")
        train = {key: value for key, value in today.given.items() if key not in own}
        train |= {key: str(train[key]) for key in ("model_name_or_path", "train_file")}
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

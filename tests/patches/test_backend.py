"""`backend: open-instruct`: what it refuses, and what it hands to finetune.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from sweep_tools import PROJECT, wait_for

from smoothed_open_instruct.resume import SETTINGS
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.training import open_instruct_backend
from sweeps.training.open_instruct_backend import OpenInstructOptions

# finetune.py's arguments that are keys of this backend, and those that the patches add.
KNOWN_TO_FINETUNE = """
    tokenizer_name max_train_samples max_train_steps max_seq_length
    preprocessing_num_workers model_revision
    model_name_or_path train_file use_flash_attn use_slow_tokenizer add_bos
    chat_template_name use_lora lora_rank lora_alpha lora_dropout learning_rate seed
    weight_decay warmup_ratio lr_scheduler_type num_train_epochs reduce_loss clip_grad_norm
    per_device_train_batch_size gradient_accumulation_steps fused_optimizer
    gradient_checkpointing logging_steps checkpointing_steps keep_last_n_checkpoints timeout
"""
ADDED_BY_PATCHES = "label_smoothing loss_impl filter_eps attention_dropout attn_implementation"
# Those of them that do not decide what is trained.
NOT_DECISIVE = """
    preprocessing_num_workers use_flash_attn attn_implementation fused_optimizer loss_impl
    gradient_checkpointing logging_steps checkpointing_steps keep_last_n_checkpoints timeout
"""


def some_options(**given: Any) -> OpenInstructOptions:
    options = {"model_name_or_path": "absent/model", "train_file": "x.jsonl"}
    options.update(given)
    return OpenInstructOptions(**options)


def test_a_checkout_that_is_not_named_is_refused(monkeypatch):
    monkeypatch.delenv("OPEN_INSTRUCT_DIR", raising=False)
    (problem,) = open_instruct_backend.checkout_problems()
    assert problem == "OPEN_INSTRUCT_DIR is not set: reproduce.md makes a patched checkout"


def test_a_checkout_that_is_absent_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("OPEN_INSTRUCT_DIR", str(tmp_path / "nowhere"))
    (problem,) = open_instruct_backend.checkout_problems()
    assert "nowhere is not a folder" in problem


def test_rows_with_messages_are_read(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": []}) + "\n")
    assert open_instruct_backend.data_problems(some_options(train_file=str(path))) == []


def test_a_file_that_finetune_does_not_read_is_named():
    (problem,) = open_instruct_backend.data_problems(some_options(train_file="chats.parquet"))
    assert "finetune.py reads .json or .jsonl" in problem


@pytest.mark.parametrize(
    ("text", "place"), [("", ""), ("[]", ""), ("[1]", ", row 1"), ('["messages"]', ", row 1")]
)
def test_a_file_without_rows_of_messages_is_named(text, place, tmp_path):
    path = tmp_path / "train.json"
    path.write_text(text)
    (problem,) = open_instruct_backend.data_problems(some_options(train_file=str(path)))
    assert problem.startswith(f"train.train_file: {path}{place}: ")


def test_alpacas_rows_are_named_which_only_the_trainer_reads(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Add 1 and 1.", "input": "", "output": "2"}]))
    (problem,) = open_instruct_backend.data_problems(some_options(train_file=str(path)))
    assert f"train.train_file: {path}, row 1: finetune.py reads rows with `messages`" in problem


def planned_run(folder: Path, processes: int = 1) -> Run:
    """A run of this backend, whose folder is there."""
    train = {"model_name_or_path": "absent/model", "train_file": "absent.jsonl"}
    sweep = {"name": "tiny", "output_root": "out", "backend": "open-instruct", "train": train}
    sweep["world"] = {"processes_per_node": processes}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep))
    plan = plan_sweep(file, [])
    plan.create()
    return plan.runs[0]


def test_finetune_is_given_no_argument_that_it_does_not_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {*KNOWN_TO_FINETUNE.split(), *ADDED_BY_PATCHES.split()}
    assert set(OpenInstructOptions.model_fields) == known
    arguments = open_instruct_backend.finetune_arguments(planned_run(tmp_path))
    assert arguments.keys() - known == {
        "output_dir",
        "push_to_hub",
        "try_launch_beaker_eval_jobs",
        "stop_file",
        "log_statistics",
    }
    assert None not in arguments.values()


def test_every_option_is_another_run_or_is_known_not_to_be():
    """A checkpoint of a run with another value of a new option would be continued."""
    assert OpenInstructOptions.model_fields.keys() - set(SETTINGS) == set(NOT_DECISIVE.split())


def test_finetunes_arguments_are_the_options_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = planned_run(tmp_path)
    arguments = open_instruct_backend.finetune_arguments(run)
    options = {key: value for key, value in run.config().train.items() if value is not None}
    assert {key: arguments[key] for key in options} == options


@pytest.mark.parametrize(
    ("options", "uses_flash_attn"),
    [
        ({}, True),
        ({"use_flash_attn": False}, False),
        ({"attn_implementation": "sdpa"}, False),
        ({"use_flash_attn": False, "attn_implementation": "flash_attention_2"}, True),
    ],
)
def test_flash_attention_is_asked_for_where_it_is_used(options, uses_flash_attn):
    needed = open_instruct_backend.packages(some_options(**options), World())
    assert ("flash_attn" in needed) == uses_flash_attn


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3-offload"])
def test_this_projects_deepspeed_files_clip_explicitly(name):
    config = PROJECT / "configs" / "deepspeed" / f"{name}.json"
    world = World(deepspeed=str(config))
    assert open_instruct_backend.clipping_problems(some_options(), world) == []
    (problem,) = open_instruct_backend.clipping_problems(some_options(clip_grad_norm=1.0), world)
    assert "DeepSpeed ignores it" in problem


@pytest.mark.parametrize("limit", ["auto", None, True])
def test_deepspeed_files_that_clip_implicitly_are_refused(tmp_path, limit):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"gradient_clipping": limit}))
    world = World(deepspeed=str(path))
    (problem,) = open_instruct_backend.clipping_problems(some_options(), world)
    assert str(path) in problem
    assert "expected a number" in problem


def test_an_fsdp_file_is_refused_which_finetune_would_not_see(tmp_path, monkeypatch):
    """Every rank would silently hold all weights."""
    monkeypatch.delenv("OPEN_INSTRUCT_DIR", raising=False)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": []}) + "\n")
    options = some_options(train_file=str(path))
    problems = open_instruct_backend.missing(options, World(fsdp="configs/fsdp/fsdp2.json"))
    assert any("world.fsdp: backend open-instruct shards by DeepSpeed" in it for it in problems)


# finetune.py from the signals' point of view: it looks for the stop file alone.
SCRIPT_THAT_WAITS = """
import os, pathlib, sys, time, yaml

arguments = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
pathlib.Path(sys.argv[1]).with_name("rank" + os.environ.get("RANK", "0")).touch()
while not os.path.exists(arguments["stop_file"]):
    time.sleep(0.1)
time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_to_a_runs_process_reaches_finetune_as_the_stop_file(
    tmp_path, monkeypatch, processes, number
):
    """Sent to all processes of the command: so does a terminal with INT, and Slurm with TERM."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "open_instruct" / "finetune.py"
    script.parent.mkdir()
    script.write_text(SCRIPT_THAT_WAITS)
    run = planned_run(tmp_path, processes)
    process = subprocess.Popen(
        [sys.executable, "-m", "sweeps", "train", str(run.path.absolute())],
        env={**os.environ, "OPEN_INSTRUCT_DIR": str(tmp_path)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: len(list(run.path.glob("rank*"))) == processes, 60)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert f"{number.name}: finetune.py saves after its present update and leaves" in output
    assert not any(child.is_running() for child in children)
    assert not run.stop_file.exists()  # which would stop the next attempt too


def test_of_a_repeated_step_the_last_row_is_kept(tmp_path):
    run = Run(tmp_path)
    first_attempt = [{"step": step, "loss": 1.0} for step in range(1, 10)]
    second_attempt = [{"step": step, "loss": 2.0} for step in range(6, 12)]
    lines = [json.dumps(row) for row in first_attempt + second_attempt]
    lines.append('{"step": 12, "lo')  # cut short by a kill
    run.metrics.write_text("\n".join(lines))
    open_instruct_backend.keep_last_rows(run)
    rows = [json.loads(line) for line in run.metrics.open()]
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["loss"] for row in rows] == [1.0] * 5 + [2.0] * 6

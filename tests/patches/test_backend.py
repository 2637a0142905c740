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


ALPACA = json.dumps([{"instruction": "Add 1 and 1.", "input": "", "output": "2"}])


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("train.jsonl", '{"messages": []}\n', None),
        ("train.json", "", "train.json: "),
        ("train.json", "[1]", "train.json, row 1"),
        ("train.json", '["messages"]', "train.json, row 1"),
        ("train.json", ALPACA, "train.json, row 1"),  # which only the trainer reads
        ("train.parquet", "", "train.parquet"),
    ],
)
def test_data_that_finetune_cannot_read_is_named(name, text, named, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    problems = open_instruct_backend.data_problems(some_options(train_file=str(path)))
    assert len(problems) == (named is not None)
    assert all(named in problem and "train.train_file" in problem for problem in problems)


@pytest.mark.parametrize(
    ("checkout", "world", "named"),
    [
        (None, {}, "OPEN_INSTRUCT_DIR is not set"),
        ("nowhere", {}, "nowhere is not a folder"),
        (None, {"fsdp": "configs/fsdp/fsdp2.json"}, "world.fsdp"),  # each rank would hold all
        (None, {"deepspeed": None}, "gradient_clipping"),
        (None, {"deepspeed": "auto"}, "gradient_clipping"),
        (None, {"deepspeed": True}, "gradient_clipping"),
    ],
)
def test_what_finetune_would_do_otherwise_is_named(checkout, world, named, tmp_path, monkeypatch):
    monkeypatch.delenv("OPEN_INSTRUCT_DIR", raising=False)
    if checkout:
        monkeypatch.setenv("OPEN_INSTRUCT_DIR", str(tmp_path / checkout))
    if "deepspeed" in world:
        file = tmp_path / "zero.json"
        file.write_text(json.dumps({"gradient_clipping": world["deepspeed"]}))
        world = {"deepspeed": str(file)}
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": []}\n')
    options = some_options(train_file=str(data))
    problems = open_instruct_backend.missing(options, World(**world))
    assert any(named in problem for problem in problems)


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
    run = planned_run(tmp_path)
    arguments = open_instruct_backend.finetune_arguments(run)
    assert arguments.keys() - known == {
        "output_dir",
        "push_to_hub",
        "try_launch_beaker_eval_jobs",
        "stop_file",
        "log_statistics",
    }
    assert None not in arguments.values()
    options = {key: value for key, value in run.config().train.items() if value is not None}
    assert {key: arguments[key] for key in options} == options


def test_every_option_is_another_run_or_is_known_not_to_be():
    """A checkpoint of a run with another value of a new option would be continued."""
    assert OpenInstructOptions.model_fields.keys() - set(SETTINGS) == set(NOT_DECISIVE.split())


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3-offload"])
def test_this_projects_deepspeed_files_clip_explicitly(name):
    config = PROJECT / "configs" / "deepspeed" / f"{name}.json"
    world = World(deepspeed=str(config))
    assert open_instruct_backend.clipping_problems(some_options(), world) == []
    (problem,) = open_instruct_backend.clipping_problems(some_options(clip_grad_norm=1.0), world)
    assert "DeepSpeed ignores it" in problem


# finetune.py from the signals' point of view: it looks for the stop file alone.
SCRIPT_THAT_WAITS = """
import os, pathlib, sys, time, yaml

arguments = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
pathlib.Path(sys.argv[1]).with_name("rank" + os.environ.get("RANK", "0")).touch()
while not os.path.exists(arguments["stop_file"]):
    time.sleep(0.1)
time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("processes", "number"),
    [
        (1, signal.SIGTERM),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
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

"""`python -m sweeps` trains with the user's open-instruct checkout."""

import json

import pytest
import yaml
from real import PROJECT

from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run
from sweeps.runs.schema import DistributedConfig
from sweeps.training import open_instruct_backend
from sweeps.training.open_instruct_backend import Train


def keys(**given):
    return Train(**{"model_name_or_path": "absent/model", "train_file": "x.jsonl"} | given)


def test_what_finetune_lacks_or_cannot_read_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("OPEN_INSTRUCT_DIR", raising=False)
    (problem,) = open_instruct_backend.checkout_problems()
    assert problem == "OPEN_INSTRUCT_DIR is not set: reproduce.md makes a patched checkout"
    monkeypatch.setenv("OPEN_INSTRUCT_DIR", str(tmp_path / "nowhere"))
    (problem,) = open_instruct_backend.checkout_problems()
    assert "nowhere is not a folder" in problem
    (path := tmp_path / "train.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    assert open_instruct_backend.data_problems(keys(train_file=str(path))) == []
    (problem,) = open_instruct_backend.data_problems(keys(train_file="chats.parquet"))
    assert "finetune.py reads .json or .jsonl" in problem
    path = tmp_path / "alpaca.json"  # which only the trainer reads
    path.write_text(json.dumps([{"instruction": "Add 1 and 1.", "input": "", "output": "2"}]))
    (problem,) = open_instruct_backend.data_problems(keys(train_file=str(path)))
    assert f"train.train_file: {path}, row 1: finetune.py reads rows with `messages`" in problem


def test_finetune_is_given_no_key_that_it_does_not_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sweep.yaml"
    train = {"model_name_or_path": "absent/model", "train_file": "absent.jsonl"}
    sweep = {"name": "tiny", "output_root": "out", "backend": "open-instruct", "train": train}
    file.write_text(yaml.safe_dump(sweep))
    planned = plan_sweep(file, [])
    planned.create()
    own = {"output_dir", "push_to_hub", "try_launch_beaker_eval_jobs"}
    known = """
        tokenizer_name max_train_samples max_train_steps max_seq_length
        preprocessing_num_workers model_revision
        model_name_or_path train_file use_flash_attn use_slow_tokenizer add_bos
        chat_template_name use_lora lora_rank lora_alpha lora_dropout learning_rate seed
        weight_decay warmup_ratio lr_scheduler_type num_train_epochs reduce_loss clip_grad_norm
        per_device_train_batch_size gradient_accumulation_steps fused_optimizer
        gradient_checkpointing logging_steps checkpointing_steps keep_last_n_checkpoints timeout
        label_smoothing loss_impl filter_eps attention_dropout attn_implementation
    """  # the last line: those of the patches
    assert set(Train.model_fields) == {*known.split()}
    given = open_instruct_backend.finetune_arguments(planned.runs[0])
    assert given.keys() - Train.model_fields.keys() == {*own, "stop_file", "log_statistics"}
    assert None not in given.values()


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
    assert (
        "flash_attn" in open_instruct_backend.packages(keys(**given), DistributedConfig())
    ) is wanted


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3-offload"])
def test_deepspeed_clips_explicitly_and_alone(tmp_path, name):
    config = PROJECT / "configs" / "deepspeed" / f"{name}.json"
    world = DistributedConfig(deepspeed=str(config))
    assert open_instruct_backend.clipping_problems(keys(), world) == []
    (problem,) = open_instruct_backend.clipping_problems(keys(clip_grad_norm=1.0), world)
    assert "DeepSpeed ignores it" in problem
    for limit in ("auto", None, True):
        (other := tmp_path / "zero.json").write_text(json.dumps({"gradient_clipping": limit}))
        (problem,) = open_instruct_backend.clipping_problems(
            keys(), DistributedConfig(deepspeed=str(other))
        )
        assert str(other) in problem and "expected a number" in problem


def test_of_a_repeated_step_the_last_row_is_kept(tmp_path):
    run = Run(tmp_path)
    steps = [(step, 1.0) for step in range(1, 10)] + [(step, 2.0) for step in range(6, 12)]
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in steps]
    run.metrics.write_text("\n".join([*rows, '{"step": 12, "lo']))  # cut short
    open_instruct_backend.keep_rows(run)
    rows = [json.loads(line) for line in run.metrics.open()]
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["loss"] for row in rows] == [1.0] * 5 + [2.0] * 6

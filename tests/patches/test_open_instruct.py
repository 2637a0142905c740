"""The parts that the patches call, without a checkout: real accelerate, a tiny model, CPU."""

import copy
import dataclasses
import json
import logging
import os
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from disk_writes import DiskWrites
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, default_collate
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from smoothed_open_instruct import (
    Checkpoints,
    Monitor,
    StopFile,
    already_trained,
    check_arguments,
    mark_trained,
    set_attention_dropout,
    training_loss,
)
from smoothed_open_instruct.__main__ import RUN, RunState, main, with_flags, with_loss
from smoothed_open_instruct.resume import SETTINGS


def arguments(**given):
    defaults = {
        "label_smoothing": 0.0,
        "loss_impl": "auto",
        "filter_eps": None,
        "reduce_loss": "mean",
        "load_balancing_loss": False,
        "log_statistics": False,
        "max_train_steps": 4,
        "overwrite_output_dir": False,
        "resume_from_checkpoint": None,
    }
    return Namespace(**{**defaults, **given})


@pytest.fixture
def refused(capsys):
    """refused(function, *arguments) → the one line with which a call ends the process."""

    def call(function, *arguments):
        with pytest.raises(SystemExit, match="2"):
            function(*arguments)
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        return said

    return call


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"label_smoothing": 1.01}, "label_smoothing"),
        ({"loss_impl": "triton"}, "loss_impl"),
        ({"reduce_loss": "none"}, "reduce_loss"),
        ({"filter_eps": "few", "loss_impl": "fused"}, "filter_eps"),
        ({"filter_eps": "1e-3"}, "filter_eps"),  # belongs to the fused loss
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"load_balancing_loss": True, "label_smoothing": 0.1}, "load_balancing_loss"),
    ],
)
def test_wrong_flags_end_the_process_in_one_line(given, named, refused):
    assert named in refused(check_arguments, arguments(**given))


def test_attention_dropout_reaches_the_model():
    config = LlamaConfig()
    set_attention_dropout(config, None)(config)
    assert config.attention_dropout == 0.0
    restore = set_attention_dropout(config, 0.1)
    assert config.attention_dropout == 0.1
    restore(config)
    assert config.attention_dropout == 0.0
    with pytest.raises(SystemExit, match="2"):  # GPT-2 has none
        set_attention_dropout(GPT2Config(), 0.1)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_attention_heads=2, **sizes))


def example(seed):
    ids = torch.randint(40, (9,), generator=torch.Generator().manual_seed(seed))
    masked = torch.arange(9) < 1 + seed % 7  # from one to seven labels are masked
    return {"input_ids": ids, "labels": ids.masked_fill(masked, -100)}


def expected(model, batch, reduction):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, targets, label_smoothing=0.1, reduction=reduction)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_token_mean_is_the_mean_over_each_steps_tokens(accumulation):
    # 10 examples in micro-batches of one: the last step of an epoch is short for 3.
    examples = [example(seed) for seed in range(10)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    given = {"label_smoothing": 0.1, "gradient_accumulation_steps": accumulation}
    args = arguments(reduce_loss="token_mean", **given)
    model = llama().double().train()
    initial, plain = copy.deepcopy(model), copy.deepcopy(model)
    loss = training_loss(args, accelerator)
    loss.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    loader = DataLoader(examples, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(2):
        for batch in loss.batches(loader, model):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch, use_cache=False).loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
        for start in range(0, 10, accumulation):
            batch = default_collate(examples[start : start + accumulation])
            expected(plain, batch, "mean").backward()
            reference.step()
            reference.zero_grad()
    assert steps == 2 * -(-10 // accumulation)
    before, ours, theirs = (
        parameters_to_vector(each.parameters()).detach() for each in (initial, model, plain)
    )
    assert (ours - theirs).norm() <= 1e-6 * (theirs - before).norm()


def checkpoints(**given):
    return Checkpoints(arguments(**given), Accelerator(cpu=True), steps_per_epoch=100)


def put(folder, name, complete=True):
    (folder / name).mkdir(parents=True)
    if complete:
        (folder / name / "COMPLETED").touch()
    return str(folder / name)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6, unique=True))
def test_continues_from_the_furthest_complete_checkpoint(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("run")
    found = {step: put(folder, f"step_{step}") for step in steps}
    if 1300 not in found:  # where epoch 12 of 100 steps ends
        found[1300] = put(folder, "epoch_12")
    put(folder, f"step_{max(steps) + 3001}", complete=False)  # killed while it was written
    args = arguments(output_dir=str(folder))
    assert checkpoints().last(args) == found[max(found)]
    args.overwrite_output_dir = True
    assert checkpoints().last(args) is None
    args.resume_from_checkpoint = "elsewhere/step_3"  # where the folder has none to go on from
    assert checkpoints().last(args) == "elsewhere/step_3"


def test_keeps_the_furthest_and_marks_the_one_just_written(tmp_path):
    made = checkpoints()
    put(tmp_path, "step_1")  # by a stop-file, where epochs are saved
    put(tmp_path, "epoch_2", complete=False)
    put(tmp_path, "epoch_0")
    put(tmp_path, "step_9999.bak")
    made.finish_saving(put(tmp_path, "epoch_1"))
    os.utime(tmp_path / "step_1")  # as deleting something in it would
    assert made.last(arguments(), incomplete=True) == str(tmp_path / "epoch_1")
    made.clean(str(tmp_path), keep_last_n_checkpoints=-1)
    assert len(os.listdir(tmp_path)) == 5  # -1 for all, as upstream's flag says
    made.clean(str(tmp_path), keep_last_n_checkpoints=2)
    assert set(os.listdir(tmp_path)) == {"epoch_0", "epoch_1", "step_9999.bak"}
    made.clean(str(tmp_path), keep_last_n_checkpoints=0)
    assert set(os.listdir(tmp_path)) == {"step_9999.bak"}


def test_a_finished_run_is_recognised_until_it_is_overwritten(tmp_path, capsys):
    args = arguments(output_dir=str(tmp_path))
    assert not already_trained(args)
    mark_trained(Accelerator(cpu=True), args, 12)
    assert (tmp_path / "TRAINED").read_text() == "12\n"
    put(tmp_path, "step_12")  # killed before upstream deletes it
    assert already_trained(args) and str(tmp_path) in capsys.readouterr().out
    assert set(os.listdir(tmp_path)) == {"TRAINED", "asked.json"}
    kept = put(tmp_path, "step_6")
    assert not already_trained(arguments(output_dir=str(tmp_path), overwrite_output_dir=True))
    assert not already_trained(args)
    assert checkpoints().last(args) is None and os.listdir(kept) == []


def test_a_mark_comes_after_what_it_marks_is_on_the_disk(tmp_path, monkeypatch):
    """A mark that survived a power cut without its checkpoint would be taken for a whole one, and
    that of a model lets the checkpoints be deleted."""
    folder = tmp_path / "step_1"
    (folder / "model").mkdir(parents=True)
    for file in (folder / "model" / "weights", folder / "state", tmp_path / "model.safetensors"):
        file.write_text("x")
    writes = DiskWrites(monkeypatch)
    checkpoints().finish_saving(str(folder))
    assert {path.stat().st_ino for path in (folder, *folder.rglob("*"))} <= {*writes.flushed}
    mark_trained(Accelerator(cpu=True), arguments(output_dir=str(tmp_path)), 12)
    unflushed = writes.unflushed(tmp_path, renamed_to=tmp_path / "TRAINED")
    assert unflushed == [str(tmp_path)]
    assert writes.flushed[-1] == tmp_path.stat().st_ino  # where TRAINED has got its name since


@pytest.mark.parametrize("left", ["TRAINED", "step_3", "asked.json"])
def test_another_run_in_the_same_folder_is_refused(tmp_path, refused, monkeypatch, left):
    """Not even a finished one is taken for it, nor a checkpoint gone on from."""
    data = tmp_path / "chats.jsonl"
    data.write_text("before")
    first = {"output_dir": str(tmp_path), "train_file": str(data)}
    monkeypatch.setenv("WORLD_SIZE", "8")
    for _ in range(2):
        assert not already_trained(arguments(**first))
    if left == "step_3":
        put(tmp_path, left)
    else:
        (tmp_path / left).touch()
    for name in SETTINGS:
        if name not in ("train_file", "dataset_mixer", "dataset_mixer_list"):
            assert f" {name} " in refused(already_trained, arguments(**{**first, name: "other"}))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "number of processes 8, now 4" in refused(already_trained, arguments(**first))
    monkeypatch.setenv("WORLD_SIZE", "8")
    data.write_text("behind")
    assert "SHA-256 of the data" in refused(already_trained, arguments(**first))
    assert not already_trained(arguments(**first, overwrite_output_dir=True))
    assert not already_trained(arguments(**first))
    nothing_kept = arguments(**first, keep_last_n_checkpoints=0)
    assert "keep_last_n_checkpoints" in refused(already_trained, nothing_kept)


@pytest.mark.parametrize("flag", ["dataset_mixer", "dataset_mixer_list"])
def test_changed_data_of_a_mixture_makes_another_run(tmp_path, refused, flag):
    file = tmp_path / "chats.jsonl"
    file.write_text("before")
    named = {"dataset_mixer": {str(file): 1.0}, "dataset_mixer_list": [str(file), "1.0"]}
    args = arguments(output_dir=str(tmp_path / "run"), **{flag: named[flag]})
    assert not already_trained(args)
    file.write_text("behind")
    assert "SHA-256 of the data" in refused(already_trained, args)


def asks_to_stop(rank, path, store):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2
    )
    stop_file = StopFile(path, Namespace(is_main_process=rank == 0))
    assert not stop_file.asks_to_stop()
    if rank == 0:
        open(path, "w").close()
    else:  # a file system that shows a new file late
        os.path.exists = lambda path: False
    assert stop_file.asks_to_stop()


def test_all_processes_hear_of_the_stop_file_at_the_same_update(tmp_path, capsys):
    """Without a path nobody asks, and alone the file does."""
    path = tmp_path / "stop"
    given = (str(path), str(tmp_path / "store"))
    torch.multiprocessing.start_processes(asks_to_stop, given, nprocs=2, start_method="fork")
    assert not StopFile(None, Accelerator(cpu=True)).asks_to_stop()
    stop_file = StopFile(str(path), Accelerator(cpu=True))
    assert stop_file.asks_to_stop()
    stop_file.leave(7)
    assert f"{path} exists: stopped after step 7" in capsys.readouterr().out
    path.unlink()
    assert not stop_file.asks_to_stop()


@pytest.mark.parametrize("limit", [-1.0, 2.5])
def test_under_fp16_upstream_can_still_unscale_the_gradients(monkeypatch, limit):
    """torch's scaler refuses to do it twice in an update, and upstream does it where it clips."""
    accelerator = Accelerator(cpu=True)
    # accelerate itself takes fp16 on a GPU only.
    monkeypatch.setitem(vars(accelerator.state), "_mixed_precision", "fp16")
    monkeypatch.setattr(accelerator, "native_amp", True)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    monitor = Monitor(arguments(log_statistics=True, clip_grad_norm=limit), accelerator)
    loss = 3.0 * layer.weight.sum()
    accelerator.scaler.scale(loss).backward()
    monitor.observe(model, loss)
    assert monitor.interval.norms == [3.0]
    if limit > 0:
        assert accelerator.clip_grad_norm_(model.parameters(), limit) == 3.0
        assert monitor.interval.clipped_updates == 1
    before = layer.weight.item()
    optimizer.step()
    assert before - layer.weight.item() == pytest.approx(limit if limit > 0 else 3.0)


def test_monitor_logs_what_came_since_the_last_line(caplog, tmp_path, monkeypatch):
    """And writes it where sweeps read it, under their names."""
    monkeypatch.setenv("STATISTICS_FILE", str(tmp_path / "metrics.jsonl"))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    monitor = Monitor(arguments(log_statistics=True, clip_grad_norm=2.5), accelerator)

    def observe(loss, norm):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, norm)
        monitor.observe(model, torch.tensor(loss))
        assert all(parameter.grad.item() == norm for parameter in model.parameters())

    def logged(step, tokens):
        with caplog.at_level(logging.INFO):
            monitor.log(step, {"train_loss": 0.0, "total_tokens": tokens})
        return json.loads(caplog.messages[-1].removeprefix("training statistics: "))

    observe(2.0, norm=1.0)
    observe(3.0, norm=3.0)
    row = logged(2, tokens=11)
    assert (row["step"], row["steps"], row["train_loss"]) == (2, 4, 2.5)
    assert (row["grad_norm"], row["grad_norm_max"], row["clipped"]) == (2.0, 3.0, 0.5)
    assert row["total_tokens"] == 11 and row["tokens_per_s"] > 0
    observe(7.0, norm=1.0)
    row = logged(3, tokens=11)
    assert (row["train_loss"], row["grad_norm"], row["clipped"]) == (7.0, 1.0, 0.0)
    assert row["tokens_per_s"] == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [(of["step"], of["loss"]) for of in rows] == [(2, 2.5), (3, 7.0)]
    assert rows[1]["tokens_per_second"] == 0
    silent = {"total_tokens": 1}
    Monitor(arguments(), accelerator).log(1, silent)
    assert silent == {"total_tokens": 1}


@dataclasses.dataclass
class MeanOnlyArguments:
    """The arguments of a script that has no `reduce_loss`."""

    load_balancing_loss: bool = False

    def __post_init__(self):
        pass


MeanOnlyArguments.__name__ = "FlatArguments"


def test_a_sum_that_the_script_lacks_is_the_fused_loss_in_every_check(refused):
    make = with_flags(MeanOnlyArguments)
    make(reduce_loss="sum", filter_eps="auto")  # belongs to that loss
    assert "load_balancing_loss" in refused(
        lambda: make(reduce_loss="sum", load_balancing_loss=True)
    )
    make(reduce_loss="mean", load_balancing_loss=True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "no open-instruct checkout"),
        ("import smoothed_open_instruct as ours\n", "--reverse"),
        ("", "`outputs.loss`"),
    ],
)
def test_the_runner_refuses_other_scripts(tmp_path, text, named, refused):
    hooked = (
        "from accelerate import Accelerator\nclass FlatArguments: pass\nArgumentParserPlus(0)\n"
        "accelerator.prepare(1)\naccelerator.accumulate(2)\n"
    )
    if text is not None:
        loss = "outputs.loss\n" if text else "loss\n"
        (tmp_path / "open_instruct").mkdir()
        (tmp_path / "open_instruct" / "finetune.py").write_text(hooked + loss + text)
    assert named in refused(main, [str(tmp_path), "--label_smoothing", "0.1"])


def test_a_script_that_prepares_other_objects_is_refused(runner_state, refused):
    with_flags(MeanOnlyArguments)(label_smoothing=0.1)
    prepare = with_loss(Accelerator)(cpu=True).prepare
    assert "prepares 2 objects" in refused(prepare, llama(), DataLoader([example(0)]))


@pytest.fixture
def runner_state(monkeypatch):
    """What the runner knows of its script, as it is before a script has parsed anything."""
    for name, value in vars(RunState()).items():
        monkeypatch.setattr(RUN, name, value)
    return RUN


class ConfigTracker(GeneralTracker):
    """A tracker that keeps what it is told of a run's settings."""

    name = "config"
    requires_logging_directory = False
    tracker = None

    @on_main_process
    def store_init_configuration(self, values):
        self.shown = values


def test_trackers_show_the_reduction_that_was_asked_though_the_script_sees_mean(runner_state):
    """In whatever order the script starts trackers and makes the loss."""
    args = with_flags(MeanOnlyArguments)(reduce_loss="token_mean")
    args.gradient_accumulation_steps = 1
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    tracker = ConfigTracker()
    accelerator = with_loss(Accelerator)(cpu=True, log_with=[tracker])
    accelerator.init_trackers("before", vars(args))
    assert tracker.shown["reduce_loss"] == args.reduce_loss == "token_mean"
    accelerator.prepare(model, optimizer, DataLoader([example(0)]), scheduler)
    assert args.reduce_loss == "mean"
    accelerator.init_trackers("after", vars(args))
    assert tracker.shown["reduce_loss"] == "token_mean" and args.reduce_loss == "mean"

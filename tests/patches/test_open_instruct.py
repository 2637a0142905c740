"""The parts that the patches call, without a checkout: real accelerate, a tiny model, CPU."""

import copy
import dataclasses
import json
import logging
import os
import subprocess
import sys
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
    model_class,
    set_attention_dropout,
    training_loss,
)
from smoothed_open_instruct.__main__ import RUN, Batches, RunState, main, with_flags, with_loss
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label_smoothing": 1.01}, "label_smoothing must be a number in [0, 1], not 1.01"),
        ({"loss_impl": "triton"}, "loss_impl must be one of auto, fused, not 'triton'"),
        ({"reduce_loss": "none"}, "reduce_loss must be one of mean, sum, token_mean"),
        ({"filter_eps": "few", "loss_impl": "fused"}, "filter_eps must be 'auto', None"),
        ({"filter_eps": "1e-3"}, "filter_eps belongs to the fused loss"),
        ({"attention_dropout": 1.0}, "attention_dropout must be a number in [0, 1), not 1.0"),
        ({"load_balancing_loss": True, "label_smoothing": 0.1}, "load_balancing_loss"),
    ],
)
def test_wrong_flags_end_the_process_in_one_line(given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        check_arguments(arguments(**given))
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), (None, None), ("1e-3", 1e-3), (2**-12, 2**-12)]
)
def test_filter_eps_is_read_from_text_or_yaml(text, value):
    args = arguments(filter_eps=text, loss_impl="fused")
    check_arguments(args)
    assert args.filter_eps == value


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


def test_outputs_loss_is_torchs_sum():
    batch = default_collate([example(seed) for seed in range(4)])
    model = llama().train()
    args = arguments(label_smoothing=0.1, reduce_loss="sum")
    want = expected(model, batch, "sum")
    training_loss(args, Accelerator(cpu=True)).attach(model)
    torch.testing.assert_close(model(**batch, use_cache=False).loss, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2, 3, 8])
def test_token_mean_is_the_mean_over_each_steps_tokens(accumulation):
    # 10 examples in micro-batches of one: the last step of an epoch is short for 3 and 8.
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


def test_a_named_checkpoint_is_followed_where_the_folder_has_none(tmp_path):
    """`already_trained` has made the folder by the time that the run asks."""
    args = arguments(output_dir=str(tmp_path / "new"), resume_from_checkpoint="elsewhere/step_3")
    assert checkpoints().last(args) == "elsewhere/step_3"
    assert not already_trained(args)
    assert checkpoints().last(args) == "elsewhere/step_3"
    own = put(tmp_path / "new", "step_6")
    assert checkpoints().last(args) == own
    args.overwrite_output_dir = True
    assert checkpoints().last(args) == "elsewhere/step_3"


def test_a_model_from_a_configuration_has_the_attention_that_was_named():
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    for name in ("eager", "sdpa"):
        model = model_class(name).from_config(config)
        assert model.config._attn_implementation == name


def test_batches_can_be_copied():
    loader = [1, 2]
    batches = copy.copy(Batches(loader, loss=None, model=None))
    assert batches.loader is loader


def test_a_model_is_on_the_disk_before_it_is_marked(tmp_path, monkeypatch):
    """For the mark lets the checkpoints be deleted."""
    put(tmp_path, "step_12")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("a part of the model")
    writes = DiskWrites(monkeypatch)
    mark_trained(Accelerator(cpu=True), arguments(output_dir=str(tmp_path)), 12)
    unflushed = writes.unflushed(tmp_path, renamed_to=tmp_path / "TRAINED")
    assert {path for path in unflushed if "step_12" not in path} == {str(tmp_path)}
    assert tmp_path.stat().st_ino in writes.flushed  # where TRAINED has got its name since


@pytest.mark.parametrize("left", ["TRAINED", "step_3"])
def test_another_run_in_the_same_folder_is_refused(tmp_path, capsys, left):
    """Not even a finished one is taken for it, nor a checkpoint gone on from."""
    assert not already_trained(arguments(output_dir=str(tmp_path), learning_rate=1e-5))
    (tmp_path / left).touch() if left == "TRAINED" else put(tmp_path, left)
    other = {"output_dir": str(tmp_path), "learning_rate": 1e-5, "label_smoothing": 0.1}
    with pytest.raises(SystemExit, match="2"):
        already_trained(arguments(**other))
    said = capsys.readouterr().err
    assert f"error: {tmp_path} holds a run with label_smoothing 0.0, now 0.1: another" in said
    assert not already_trained(arguments(**other, overwrite_output_dir=True))
    assert not already_trained(arguments(**other))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_that_decides_what_is_trained_makes_another_run(tmp_path, capsys, name):
    """test_backend.py sees to it that each of the sweeps' options is a setting where it must be."""
    before = arguments(output_dir=str(tmp_path))
    assert not already_trained(before)
    with pytest.raises(SystemExit, match="2"):
        already_trained(arguments(output_dir=str(tmp_path), **{name: "other"}))
    change = f"{name} {getattr(before, name, None)}, now other"
    assert f"holds a run with {change}: another" in capsys.readouterr().err


def test_another_number_of_processes_makes_another_run(tmp_path, capsys, monkeypatch):
    """It has other global batches, of which a checkpoint's step is a number."""
    args = arguments(output_dir=str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert not already_trained(args)
    assert not already_trained(args)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="2"):
        already_trained(args)
    assert "holds a run with number of processes 8, now 4: another" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["train_file", "dataset_mixer", "dataset_mixer_list"])
def test_a_changed_data_file_makes_another_run(tmp_path, capsys, flag):
    file = tmp_path / "chats.jsonl"
    file.write_text("before")
    named = {
        "train_file": str(file),
        "dataset_mixer": {str(file): 1.0},
        "dataset_mixer_list": [str(file), "1.0"],
    }
    args = arguments(output_dir=str(tmp_path / "run"), **{flag: named[flag]})
    assert not already_trained(args)
    assert not already_trained(args)
    file.write_text("behind")
    with pytest.raises(SystemExit, match="2"):
        already_trained(args)
    assert "holds a run with SHA-256 of the data " in capsys.readouterr().err


def test_no_checkpoint_at_all_to_continue_from_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        already_trained(arguments(output_dir=str(tmp_path), keep_last_n_checkpoints=0))
    assert "keep_last_n_checkpoints: 0 keeps nothing" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_which_noted_fewer_settings_goes_on(tmp_path, capsys):
    given = {"output_dir": str(tmp_path), "weight_decay": 0.1}
    (tmp_path / "asked.json").write_text(json.dumps({"label_smoothing": "0.0"}))
    assert not already_trained(arguments(**given))
    with pytest.raises(SystemExit, match="2"):  # now all of them are noted
        already_trained(arguments(**{**given, "weight_decay": 0.2}))
    assert "weight_decay 0.1, now 0.2" in capsys.readouterr().err


def test_a_checkpoint_is_on_the_disk_before_it_is_marked(tmp_path, monkeypatch):
    """A mark that survived a power cut without its checkpoint would be taken for a whole one."""
    folder = tmp_path / "step_1"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_text("x")
    (folder / "state").write_text("y")
    flushed = set()

    def note(handle: int, fsync=os.fsync) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    checkpoints().finish_saving(str(folder))
    assert flushed == {str(path) for path in (folder, *folder.rglob("*"))}


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


def test_without_a_path_nobody_asks_to_stop_and_alone_the_file_does(tmp_path, capsys):
    accelerator = Accelerator(cpu=True)
    assert not StopFile(None, accelerator).asks_to_stop()
    stop_file = StopFile(str(tmp_path / "stop"), accelerator)
    assert not stop_file.asks_to_stop()
    (tmp_path / "stop").touch()
    assert stop_file.asks_to_stop()
    stop_file.leave(7)
    assert f"{tmp_path}/stop exists: stopped after step 7" in capsys.readouterr().out


TWO_PROCESSES = """
import os, sys
from accelerate import Accelerator
from smoothed_open_instruct import StopFile

path = sys.argv[1]
accelerator = Accelerator(cpu=True)
stop_file = StopFile(path, accelerator)
before = stop_file.asks_to_stop()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    open(path, "w").close()
else:  # a file system that shows a new file late
    os.path.exists = lambda path: False
line = f"{accelerator.process_index} {before} {stop_file.asks_to_stop()}\\n"
os.write(1, line.encode())  # at once: print writes a line in parts, between which others write
"""


def test_all_processes_hear_of_the_stop_file_at_the_same_update(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*call, script, tmp_path / "stop"], env=environment, capture_output=True, text=True
    )
    assert sorted(done.stdout.splitlines()) == ["0 False True", "1 False True"], done.stderr


HOOKED = (
    "from accelerate import Accelerator\nclass FlatArguments: pass\nArgumentParserPlus(0)\n"
    "accelerator.prepare(1)\naccelerator.accumulate(2)\noutputs.loss\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no open_instruct/finetune.py, so it is no open-instruct checkout"),
        (HOOKED + "import smoothed_open_instruct as ours\n", "apply.sh {folder} --reverse"),
        (HOOKED.replace("outputs.loss", "loss"), "no `outputs.loss`: its loss cannot be changed"),
    ],
)
def test_the_runner_refuses(tmp_path, text, message, capsys):
    if text is not None:
        (tmp_path / "open_instruct").mkdir()
        (tmp_path / "open_instruct" / "finetune.py").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--label_smoothing", "0.1"])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message.format(folder=tmp_path) in said


def test_what_the_script_refuses_ends_the_runner_the_same_way(capsys):
    @dataclasses.dataclass
    class FlatArguments:
        load_balancing_loss: bool = False

        def __post_init__(self):
            raise ValueError("Need either a dataset name, dataset mixer, or a training file.")

    with pytest.raises(SystemExit, match="2"):
        with_flags(FlatArguments)()
    assert capsys.readouterr().err.startswith("error: Need either a dataset name")


@dataclasses.dataclass
class MeanOnlyArguments:
    """The arguments of a script that has no `reduce_loss`."""

    load_balancing_loss: bool = False

    def __post_init__(self):
        pass


MeanOnlyArguments.__name__ = "FlatArguments"


def test_a_sum_that_the_script_lacks_is_the_fused_loss_in_every_check(capsys):
    with_flags(MeanOnlyArguments)(reduce_loss="sum", filter_eps="auto")  # belongs to that loss
    with pytest.raises(SystemExit, match="2"):
        with_flags(MeanOnlyArguments)(reduce_loss="sum", load_balancing_loss=True)
    assert "load_balancing_loss adds to the upstream loss alone" in capsys.readouterr().err
    with_flags(MeanOnlyArguments)(reduce_loss="mean", load_balancing_loss=True)


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


def test_arguments_that_are_made_again_ask_for_the_same(runner_state):
    """As the script's parser makes those of a YAML file, to which the command line adds some."""
    argument_class = with_flags(MeanOnlyArguments)
    first = argument_class(reduce_loss="token_mean")
    again = argument_class(**{**vars(first), "label_smoothing": 0.1})
    assert (runner_state.args, again.reduce_loss) == (again, "token_mean")


def test_a_script_that_prepares_other_objects_is_refused(runner_state, capsys):
    with_flags(MeanOnlyArguments)(label_smoothing=0.1)
    model = llama()
    with pytest.raises(SystemExit, match="2"):
        with_loss(Accelerator)(cpu=True).prepare(model, DataLoader([example(0)]))
    assert "finetune.py prepares 2 objects, and not model, optimizer" in capsys.readouterr().err


def test_the_runner_says_how_it_is_used():
    call = [sys.executable, "-m", "smoothed_open_instruct", "--label_smoothing", "0.1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "smoothed_open_instruct CHECKOUT ARGUMENTS" in done.stderr

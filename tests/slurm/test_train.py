"""The trainer in one process: losses and weights, resuming, checkpoints, saving, refusals."""

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import str_to_bool
from disk_writes import DiskWrites
from safetensors.torch import load_file
from sweep_tools import equal, logs, prepare
from torch import Tensor
from training_runs import collated, finished_run, logged, own_token_cache, windowed_gemma
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    TrainingArguments,
    get_scheduler,
)

from calibeval.io import InputError
from sweeps.launch import preflight
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.training import checkpoint, fit, model_loading, sft_trainer
from sweeps.training.callbacks import StopSignal
from sweeps.training.checkpoint import latest_checkpoint
from sweeps.training.micro_batches import Updates
from sweeps.training.model_loading import add_adapters
from sweeps.training.options import LoraOptions, TrainOptions
from sweeps.training.saving import in_precision, merge_adapters
from sweeps.training.sft_config import first_rank_reads, use_one_gpu
from sweeps.training.tokenization import IGNORE, make_tokenizer, tokenize_file

token_cache = pytest.fixture(autouse=True, scope="module")(own_token_cache)

BETA = 0.1
CLIP = 3.0
ACCUMULATION = 3
UPDATES = 10
WARMUP_UPDATES = 2


@dataclass
class PlainTraining:
    """What a loop with torch's own parts computes of a run."""

    losses: list[float]
    gradient_norms: list[float]
    model: LlamaForCausalLM


def updates_of(train_options: TrainOptions) -> Updates:
    return Updates(train_options, tokenize_file(train_options, make_tokenizer(train_options)), 1)


def train_plainly(
    model: LlamaForCausalLM, data: Updates, smoothing_target: Tensor
) -> PlainTraining:
    """Train with torch's cross-entropy and AdamW, and nothing of this project's but the order."""
    options = data.train_options
    is_norm = {name: "norm" in name for name, _ in model.named_parameters()}
    decayed = [value for name, value in model.named_parameters() if not is_norm[name]]
    spared = [value for name, value in model.named_parameters() if is_norm[name]]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate)
    schedule = get_scheduler("linear", optimizer, WARMUP_UPDATES, len(data))
    losses = []
    gradient_norms = []
    for step in range(len(data)):
        conversations = data.conversations_of(step)
        targets_of_update = int(data.target_counts[conversations].sum())
        loss_sum = 0.0
        for start in range(0, len(conversations), 4):
            batch = collated(data, conversations[start : start + 4])
            logits = model(batch["input_ids"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            learned = labels != IGNORE
            nll = F.cross_entropy(logits[learned], labels[learned], reduction="sum")
            spread = -(logits[learned].log_softmax(-1) @ smoothing_target).sum()
            loss = (1 - BETA) * nll + BETA * spread
            divisor = {
                "mean": ACCUMULATION * learned.sum(),
                "sum": ACCUMULATION,
                "token_mean": targets_of_update,
            }
            (loss / divisor[options.reduce_loss]).backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        gradient_norms.append(norm.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss_sum / targets_of_update)
    return PlainTraining(losses, gradient_norms, model)


def target_frequencies(data: Updates, vocabulary_size: int) -> Tensor:
    labels = collated(data, data.train_conversations)["labels"]
    counts = torch.bincount(labels[labels != IGNORE], minlength=vocabulary_size)
    return counts / counts.sum()


@pytest.mark.parametrize(
    ("reduce_loss", "target"), [("mean", None), ("sum", "u.npy"), ("token_mean", "unigram")]
)
def test_training_is_torchs_own_packed_or_not(sweep_file, tiny, tmp_path, reduce_loss, target):
    model = LlamaForCausalLM.from_pretrained(tiny / "model").train()
    vocabulary_size = model.config.vocab_size
    shares_of_file = np.random.default_rng(0).dirichlet(np.ones(vocabulary_size))
    np.save(tmp_path / "u.npy", shares_of_file)
    train = {
        "label_smoothing": BETA,
        "smoothing_target": f"{tmp_path}/x/../u.npy" if target == "u.npy" else target,
        "reduce_loss": reduce_loss,
        "learning_rate": 1e-3,
        "warmup_ratio": 0.2,
        "weight_decay": 0.1,
        "clip_grad_norm": CLIP,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_tokens": 80,
        "held_out": 5,
        "logging_steps": 1,
    }
    path = sweep_file(grid={}, train=train)
    runs = [finished_run(path, f"train.packing={on}") for on in ("false", "true")]

    data = updates_of(runs[0].config().train_options)
    smoothing_targets = {
        None: torch.ones(vocabulary_size) / vocabulary_size,
        "u.npy": torch.tensor(shares_of_file, dtype=torch.float32),
        "unigram": target_frequencies(data, vocabulary_size),
    }
    plain = train_plainly(model, data, smoothing_targets[target])
    rates = [1e-3 * min(step / WARMUP_UPDATES, (UPDATES - step) / 8) for step in range(UPDATES)]
    for run in runs:
        assert logged(run) == pytest.approx(plain.losses, rel=1e-6)
        assert logged(run, "grad_norm") == pytest.approx(plain.gradient_norms, rel=1e-5)
        assert logged(run, "learning_rate") == pytest.approx(rates)
        weights = load_file(run.model / "model.safetensors")
        for name, value in plain.model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-6)
        assert_held_out_loss_is_the_models(run, data)


def assert_held_out_loss_is_the_models(run: Run, data: Updates) -> None:
    """It is measured after each of two epochs, on conversations that are never trained on."""
    assert len(data.held_out_conversations) == 5
    assert not set(data.held_out_conversations) & set(data.train_conversations)
    saved = LlamaForCausalLM.from_pretrained(run.model).eval()
    batch = collated(data, data.held_out_conversations)
    with torch.no_grad():
        loss = saved(batch["input_ids"], labels=batch["labels"]).loss.item()
    assert len(logged(run, "held_out_loss")) == 2
    assert logged(run, "held_out_loss")[-1] == pytest.approx(loss, rel=1e-5)


INTERRUPTED = """
import signal, sys
from sweeps.cli import main
from sweeps.training.callbacks import ScheduleCallback

on_step_end = ScheduleCallback.on_step_end

def interrupt_first(self, args, state, control, **more):
    if state.global_step == int(sys.argv[1]):
        signal.raise_signal(int(sys.argv[2]))
    on_step_end(self, args, state, control, **more)

ScheduleCallback.on_step_end = interrupt_first
sys.exit(main(["train", sys.argv[3]]))
"""


def interrupt(run: Run, number: signal.Signals, at: int) -> int:
    """The exit code of the run's trainer, which sends itself this signal at the end of a step."""
    command = [sys.executable, "-c", INTERRUPTED, str(at), str(int(number)), str(run.path)]
    with open(run.path / "train.log", "ab") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's threads in this process as few as in those that tests start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timeout(1800)
def test_a_run_that_is_interrupted_ends_bit_for_bit(sweep_file, tmp_path, monkeypatch, one_thread):
    """Asked to leave, killed, asked at an epoch's end and in a save, one after the other."""
    train = {
        "num_train_epochs": 10,
        "gradient_accumulation_steps": 2,
        "checkpointing_steps": 5,
        "packing": True,
        "attention_dropout": 0.1,
        "held_out": 5,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    path = sweep_file(grid={}, train=train)
    calm = prepare(path)
    run = prepare(path, f"output_root={tmp_path}/disturbed")
    fit.fit(calm)

    assert interrupt(run, signal.SIGTERM, at=7) == 75, logs(run.path)
    assert run.last_saved_step() == 7
    assert not run.model.exists()

    assert interrupt(run, signal.SIGKILL, at=15) == -9, logs(run.path)
    assert run.last_saved_step() == 10

    end_of_epoch = 16
    updates_to_go = end_of_epoch - run.last_saved_step()
    answers = iter([False] * (updates_to_go - 1) + [True])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as leaving:
        patch.setattr(StopSignal, "on_any_rank", lambda self: next(answers))
        fit.fit(run)
    assert leaving.value.code == 75
    assert run.last_saved_step() == end_of_epoch

    def torn(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sft_trainer, "publish_checkpoint", torn)
        fit.fit(run)
    assert run.last_saved_step() == end_of_epoch  # Nothing is lost, and nothing is half.

    fit.fit(run)
    assert equal(run, calm)
    for key in ("step", "loss", "held_out_loss"):
        assert logged(run, key) == logged(calm, key)
    assert not list(run.checkpoints.glob(".part*"))
    assert len(list(run.checkpoints.glob("step-*"))) == 3


def test_a_stop_after_the_last_update_is_heard_before_the_scoring(sweep_file, tiny, monkeypatch):
    """Nobody sends TERM twice, and the handlers of a stop end with the training."""
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 0}
    run = prepare(
        sweep_file(
            grid={}, train={"max_train_steps": 2}, score={"tasks": [task], "engine": "transformers"}
        )
    )
    save_model = fit.save_model

    def save_and_be_asked(*arguments: Any) -> None:
        save_model(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(fit, "save_model", save_and_be_asked)
    # As if the signal had come just after `fit` has looked.
    monkeypatch.setattr(StopSignal, "on_any_rank", lambda self: False)
    with pytest.raises(SystemExit) as leaving:
        fit.train(run)
    assert leaving.value.code == 75
    assert run.model.is_dir()
    assert not list(run.scores.glob("*.jsonl"))


@pytest.fixture
def uniform_target(tiny, tmp_path) -> Path:
    """A file of shares for smoothing_target."""
    size = len(AutoTokenizer.from_pretrained(tiny / "model"))
    path = tmp_path / "u.npy"
    np.save(path, np.full(size, 1 / size))
    return path


def test_a_checkpoint_of_other_data_is_refused(sweep_file, tiny, tmp_path, uniform_target):
    """Of another smoothing target too."""
    file = tmp_path / "chat.jsonl"
    shutil.copy(tiny / "chat.jsonl", file)
    train = {"train_file": str(file), "smoothing_target": str(uniform_target)}
    train |= {"max_train_steps": 6, "checkpointing_steps": 2}
    run = finished_run(sweep_file(grid={}, train=train))
    shutil.rmtree(run.model)
    shares = np.load(uniform_target)

    np.save(uniform_target, np.eye(len(shares))[0])
    with pytest.raises(InputError, match="step-4: written with other data or smoothing_target"):
        fit.fit(run)

    np.save(uniform_target, shares)
    file.write_text(file.read_text().replace("moon ", "sun "))
    with pytest.raises(InputError, match=r"step-4: written with other .*, \w+, now \w+; restore"):
        fit.fit(run)


def make_checkpoint(checkpoints: Path, step: int) -> Path:
    """A checkpoint of two files, of the data `data`."""
    finished = checkpoints / ".part" / f"checkpoint-{step}"
    (finished / "rank0").mkdir(parents=True)
    (finished / "model.safetensors").write_bytes(b"weights" * 100)
    (finished / "rank0" / "optimizer.pt").write_bytes(b"moments" * 100)
    folder = checkpoints / f"step-{step}"
    checkpoint.publish_checkpoint(finished, folder, "data", keep_last=3)
    return folder


def test_a_power_cut_leaves_models_and_checkpoints_whole(sweep_file, monkeypatch):
    """All that they hold is on the disk before they get the names by which they are found."""
    train = {"max_train_steps": 4, "checkpointing_steps": 2}
    writes = DiskWrites(monkeypatch)
    run = finished_run(sweep_file(grid={}, train=train))
    assert (run.model / "model.safetensors").is_file()
    for folder in (run.model, run.checkpoints / "step-2"):
        assert writes.unflushed(folder) == []
    assert run.path.stat().st_ino in writes.flushed  # where model/ got its name


def test_what_a_kill_left_unfinished_goes_with_the_next_attempt(sweep_file):
    run = prepare(sweep_file(grid={}, train={"max_train_steps": 1}))
    unfinished = [run.checkpoints / ".part" / "checkpoint-9", run.path / ".model.part"]
    for folder in unfinished:
        folder.mkdir(parents=True)
    fit.fit(run)
    assert not any(folder.exists() for folder in unfinished)
    assert not (run.checkpoints / ".part").exists()


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(sweep_file, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(sft_trainer, "publish_checkpoint", fail)
    run = prepare(sweep_file(grid={}, train={"max_train_steps": 3, "checkpointing_steps": 1}))
    with pytest.raises(OSError, match="Input/output error"):
        fit.fit(run)
    assert list(run.checkpoints.iterdir()) == []


def test_whole_numbers_are_saved_as_they_are():
    weights = {"weight": torch.ones(2), "steps": torch.tensor(16_777_217)}
    converted = in_precision(weights, torch.bfloat16)
    assert converted["weight"].dtype == torch.bfloat16
    assert converted["steps"].item() == 16_777_217


def test_the_newest_checkpoints_stay(tmp_path):
    for step in (2, 4, 8, 16):
        folder = make_checkpoint(tmp_path, step)
    names = {path.name for path in tmp_path.glob("step-*")}
    assert names == {"step-4", "step-8", "step-16"}
    assert latest_checkpoint(tmp_path, "data") == folder


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("rank0/optimizer.pt", lambda file: os.truncate(file, 100)),  # cut off
        ("model.safetensors", Path.unlink),
        (checkpoint.STATE, Path.unlink),
        (checkpoint.STATE, lambda file: file.write_text("[]")),
        (checkpoint.STATE, lambda file: file.write_text("{}")),
    ],
)
def test_a_damaged_checkpoint_is_set_aside(tmp_path, capsys, file, damage):
    older = make_checkpoint(tmp_path, 2)
    damage(make_checkpoint(tmp_path, 4) / file)
    assert latest_checkpoint(tmp_path, "data") == older
    assert "step-4: damaged; set aside as damaged-step-4" in capsys.readouterr().out
    assert (tmp_path / "damaged-step-4").is_dir()


def test_a_diverging_loss_ends_the_run(sweep_file):
    path = sweep_file(grid={}, train={"max_train_steps": 9, "learning_rate": 1e30})
    with pytest.raises(InputError, match=r"the loss is (nan|inf) at step \d+; lower the learning"):
        finished_run(path)


def test_another_number_of_processes_is_refused(sweep_file):
    path = sweep_file(grid={}, train={"max_train_steps": 4}, world={"processes_per_node": 2})
    with pytest.raises(InputError, match="world asks for 2 processes, 1 started"):
        finished_run(path)


LORA = {
    "lora": {"r": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]},
    "learning_rate": 1e-2,
    "attention_dropout": 0.1,
    "logging_steps": 1,
}


def test_merged_adapters_are_an_ordinary_model(sweep_file, tiny):
    """It predicts what the model with adapters does, and only the adapted layers have changed."""
    path = sweep_file(grid={}, train=LORA)
    merged = finished_run(path, "train.lora.save=merged")
    adapter = finished_run(path, "train.lora.save=adapter")
    base = LlamaForCausalLM.from_pretrained(tiny / "model").eval()
    ordinary = LlamaForCausalLM.from_pretrained(merged.model).eval()
    adapted = AutoModelForCausalLM.from_pretrained(adapter.model).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        torch.testing.assert_close(ordinary(ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert (base(ids).logits - expected).abs().max() > 0.01
    changed_layers = {
        name.split(".")[-2]
        for name, value in base.named_parameters()
        if not value.equal(ordinary.get_parameter(name))
    }
    assert changed_layers == {"q_proj", "down_proj"}


def tiny_gpt2() -> GPT2LMHeadModel:
    """Its linear layers are Conv1D, and its classifier is its embedding."""
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", "all-linear"),
        ("gpt2", ["c_proj", "wpe"]),  # a square layer, and an embedding that is not tied
        ("llama", "all-linear"),
        ("llama", ["embed_tokens", "q_proj"]),
    ],
)
def test_merged_weights_are_those_that_peft_merges(tiny, family, targets):
    torch.manual_seed(0)
    model = tiny_gpt2() if family == "gpt2" else LlamaForCausalLM.from_pretrained(tiny / "model")
    assert family == "gpt2" or not model.config.tie_word_embeddings
    before = copy.deepcopy(model.state_dict())
    config = copy.deepcopy(model.config)
    adapted = add_adapters(model, LoraOptions(r=4, alpha=8.0, targets=targets))
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter)
    merged = merge_adapters(copy.deepcopy(adapted.state_dict()), adapted, config).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, weight in expected.items():
        assert merged[name].equal(weight), name
    assert any(not weight.equal(before[name]) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("targets", "save", "problem"),
    [
        (["wte"], "merged", "wte: its weights are the classifier's too .* train.lora.save=adapter"),
        (["lm_head"], "merged", "the classifier .* gets no adapter"),
        (["lm_head"], "adapter", "the classifier .* gets no adapter"),
    ],
)
def test_adapters_that_would_be_lost_are_refused_before_training(targets, save, problem):
    lora = LoraOptions(r=4, targets=targets, save=save)
    with pytest.raises(InputError, match=problem):
        add_adapters(tiny_gpt2(), lora)
    # Those of a tied embedding can be saved alone.
    add_adapters(tiny_gpt2(), LoraOptions(r=4, targets=["wte"], save="adapter"))


def test_adapters_resume(sweep_file, tmp_path):
    path = sweep_file(grid={}, train=LORA)
    calm = finished_run(path)
    run = prepare(path, f"output_root={tmp_path}/stopped")
    run.stop_file.touch()
    with pytest.raises(SystemExit):
        fit.fit(run)
    assert run.last_saved_step() == 1
    run.stop_file.unlink()
    fit.fit(run)
    assert equal(run, calm)
    assert logged(run) == logged(calm)


def test_a_model_is_saved_as_its_base_was(sweep_file, tiny, tmp_path):
    """Its precision, its tied classifier, its configuration, without the training's dropout."""
    base = tmp_path / "half"
    model = LlamaForCausalLM.from_pretrained(tiny / "model").to(torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(base)
    train = {"model_name_or_path": str(base), "max_train_steps": 1, "attention_dropout": 0.3}
    run = finished_run(sweep_file(grid={}, train=train))
    weights = load_file(run.model / "model.safetensors")
    assert weights.keys() == load_file(base / "model.safetensors").keys()
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(run.model).chat_template
    before = json.loads((base / "config.json").read_text())
    after = json.loads((run.model / "config.json").read_text())
    assert {key: value for key, value in after.items() if before.get(key) != value} == {}


def test_a_tokenizer_that_outgrows_its_model_gets_new_rows(sweep_file, tiny, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model_size = len(tokenizer)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    train = {"model_name_or_path": str(folder), "max_train_steps": 1}
    run = finished_run(sweep_file(grid={}, train=train))
    output = capsys.readouterr().out
    assert f"the tokenizer's {model_size + 1} entries outgrow the model's {model_size}" in output
    assert "batches: padded" in output
    saved = AutoModelForCausalLM.from_pretrained(run.model)
    assert saved.get_input_embeddings().weight.shape[0] > model_size


def test_what_would_fail_in_training_is_named_before_anything_is_queued(
    sweep_file, tiny, tmp_path, capsys
):
    mixture = tmp_path / "mixture"
    shutil.copytree(tiny / "model", mixture)
    MixtralConfig(output_router_logits=True).save_pretrained(mixture)
    os.truncate(mixture / "model.safetensors", 1000)
    path = sweep_file(grid={}, train={"max_train_steps": 1})
    of_mixture = f"train.model_name_or_path={mixture}"
    target = f"train.smoothing_target={tmp_path}/u.npy"
    for override, named in (
        (of_mixture, f"{mixture}: config.json: output_router_logits: true"),
        (target, f"train.smoothing_target: {tmp_path}/u.npy: no such file"),
    ):
        (problem,) = preflight.problems(plan_sweep(path, [override]), "local")
        assert named in problem
    with pytest.raises(InputError, match=f"{mixture}: config.json: output_router_logits: true"):
        finished_run(path, of_mixture, "train.packing=true")  # before the weights are read
    assert "packing: off" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["too few", "unnormalized", "not numbers", "text"])
def test_shares_of_other_tokens_are_refused(sweep_file, tiny, tmp_path, kind):
    size = len(AutoTokenizer.from_pretrained(tiny / "model"))
    shares = {
        "too few": np.full(3, 1 / 3),
        "unnormalized": np.ones(size),
        "not numbers": np.full(size, math.nan),
        "text": np.full(size, "a"),
    }
    np.save(tmp_path / "u.npy", shares[kind])
    target = f"train.smoothing_target={tmp_path}/u.npy"
    path = sweep_file(grid={}, train={"max_train_steps": 1})
    assert not preflight.problems(plan_sweep(path, [target]), "local")
    with pytest.raises(InputError, match=rf"u\.npy: .*; expected .* of {size} shares"):
        finished_run(path, target)


def test_one_process_uses_one_gpu(tmp_path):
    """transformers counts all that are visible, and would spread the model over them."""
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 2
    use_one_gpu(arguments)
    assert arguments.n_gpu == 1


@pytest.mark.parametrize("setting", [True, "yes", "On", 1, False, "OFF", "0"])
def test_a_setting_of_an_fsdp_file_is_true_where_transformers_takes_it_so(tmp_path, setting):
    """Else this project and transformers would not agree which rank reads the model."""
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"version": 2, "cpu_ram_efficient_loading": setting}))
    reads_on_first = first_rank_reads(World(fsdp=str(file)))
    assert reads_on_first == str_to_bool(str(setting), to_bool=True)


def test_what_packed_attention_cannot_do_is_padded(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = windowed_gemma()
    options = TrainOptions.model_construct(packing=True)
    assert not model_loading.try_packing(model, options, half_precision=False)
    model.config.attn_logit_softcapping = 50.0
    assert not model_loading.try_packing(model, options, half_precision=True)
    said = capsys.readouterr().out
    assert "16 bits" in said and "caps its scores" in said

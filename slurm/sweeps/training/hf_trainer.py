"""One run, by transformers' Trainer with smoothce's loss.

The Trainer sees one long epoch whose batches are whole updates (sweeps.training.data): packing,
ranks and an interruption change how an update is computed, not what it is.
"""

import copy
import gc
import json
import math
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast_object_list, send_to_device, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from calibeval.engines import load
from calibeval.io import InputError, sha256, write_rows
from smoothce import patch_trainer
from smoothce.dispatch import check_target
from sweeps.runs import scoring
from sweeps.runs.files import read_rows, replace_folder
from sweeps.runs.run import Run
from sweeps.runs.schema import DistributedConfig
from sweeps.runs.stages import Outcome
from sweeps.training import attention
from sweeps.training.checkpoint import keep, latest
from sweeps.training.data import TILE, Updates, make_tokenizer, tokenised
from sweeps.training.options import Lora, Train

SAME = {"learning_rate", "lr_scheduler_type", "weight_decay", "per_device_train_batch_size"}
SAME |= {"gradient_checkpointing", "seed", "logging_steps"}  # keys that the Trainer calls alike
COMPILE_FROM = 300  # updates that pay for half a minute of compiling


def train(run: Run) -> None:
    """`fit`; then score what was saved, where one process trains alone and can."""
    fit(run)
    config = run.config()
    asked = config.world.single_process and config.score
    if asked and asked.engine == "transformers" and asked.python is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # what is scored so far is kept
        gc.collect()  # what trained it is in cycles
        torch.cuda.empty_cache()
        scoring.here(run)


def fit(run: Run) -> None:
    """Train the run until model/ is there, from the newest whole checkpoint on.

    Raises SystemExit(75) once it is saved because someone asked to stop, and InputError for what
    the user can put right.
    """
    stop, config = Stop(run.stop), run.config()
    keys, world = config.train_options, config.world
    rank, precision = int(os.environ.get("RANK", "0")), world.mixed_precision
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()

    tokenizer = make_tokenizer(keys)
    data = tokenised(keys, tokenizer)
    updates = Updates(
        keys, data, ranks=world.processes_per_node, rank=rank, pad=tokenizer.pad_token_id
    )
    arguments = training_arguments(run, keys, world, len(updates))
    say(f"device: {arguments.device}, {arguments.world_size} processes")
    say(updates.summary)
    set_seed(keys.seed)  # what is not in the base model is drawn alike on all ranks
    model = load_model(keys, len(tokenizer))
    saved_as = copy.deepcopy(model.config)
    model = prepare(model, keys, updates, precision != "no")
    trainer = SweepTrainer(run, keys, saved_as, model, args=arguments, train_dataset=updates)
    trainer.add_callback(Course(trainer, stop))
    target = keys.smoothing_target and smoothing_target(keys, updates, model.config.vocab_size)
    own = {"filter_eps": keys.filter_eps, "smoothing_target": target}
    patch_trainer(trainer, reduction="sum", eval_logits=False, **own)
    set_seed(keys.seed, device_specific=True)
    found = [latest(run.checkpoints, updates.digest) if rank == 0 else None]
    (found,) = broadcast_object_list(found)
    trainer.train(resume_from_checkpoint=found and str(found))
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if step == steps:
        save_model(trainer, tokenizer)
    else:
        say(f"stopped: step {step} of {steps} is saved")
    if step < steps or stop.everywhere():
        raise SystemExit(Outcome.STOPPED.value)


def say(text: str) -> None:
    """Print on the first rank."""
    PartialState().print(text, flush=True)


def training_arguments(
    run: Run, keys: Train, world: DistributedConfig, steps: int
) -> TrainingArguments:
    """The Trainer's arguments, which also start this rank; before the model, for ZeRO-3's sake."""
    clip, gpu = keys.clip_grad_norm, torch.cuda.is_available()
    fsdp, deepspeed = world.read("fsdp"), world.read("deepspeed")
    if deepspeed is not None:
        deepspeed |= {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
        deepspeed["gradient_accumulation_steps"] = 1  # a batch of the Trainer's is a whole update
        given = deepspeed.get("gradient_clipping")
        clip = (0.0 if given == "auto" else given) if clip is None else clip
        deepspeed["gradient_clipping"] = clip or 0.0
        if not gpu:  # accelerate would not choose gloo by itself
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
    trackers = {"WANDB_PROJECT": "sweeps", "WANDB_RUN_ID": run.name, "WANDB_RESUME": "allow"}
    trackers["TENSORBOARD_LOGGING_DIR"] = str(run.path / "tensorboard")
    os.environ.update(trackers | dict(os.environ))  # a resumed run goes on in its page
    arguments = TrainingArguments(
        str(run.checkpoints / ".part"),  # where a checkpoint is made
        **keys.model_dump(include=SAME),
        label_smoothing_factor=keys.label_smoothing,
        warmup_steps=int(steps * keys.warmup_ratio),
        max_grad_norm=clip or 0.0,
        max_steps=steps,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=world.mixed_precision == "bf16",
        fp16=world.mixed_precision == "fp16",
        deepspeed=deepspeed,
        fsdp=fsdp is not None,
        fsdp_config=fsdp,
        ddp_find_unused_parameters=False,
        use_cpu=not (gpu or deepspeed or fsdp),
        accelerator_config={"use_configured_state": bool(deepspeed) and not gpu},
        save_strategy="no",  # Course says when
        logging_nan_inf_filter=False,  # it would wait for the GPU in every step
        disable_tqdm=not sys.stderr.isatty(),
        log_level="error",
        log_level_replica="error",
        report_to=keys.report_to or "none",
        run_name=run.name,
        project="sweeps",
    )
    if arguments.world_size != world.processes_per_node:
        raise InputError(
            f"{run.config_file}: world asks for {world.processes_per_node} processes, "
            f"{arguments.world_size} started; launch with `python -m sweeps train`"
        )
    return arguments


def load_model(keys: Train, tokens: int) -> nn.Module:
    """The causal LM in fp32; in its own precision if it is frozen, beside adapters in fp32."""
    name, what = keys.model_name_or_path, "a causal language model"
    config = load(AutoConfig, name, "a config")
    if keys.attention_dropout is not None:
        if not hasattr(config, "attention_dropout"):
            raise InputError(f"train.attention_dropout: {config.model_type} models have none")
        config.attention_dropout = keys.attention_dropout
    base = config.dtype or torch.float32
    kept = base if keys.lora else torch.float32
    model = load(AutoModelForCausalLM, name, what, config=config, dtype=kept)
    if tokens > (rows := model.config.vocab_size):
        say(f"note: the tokenizer's {tokens} entries outgrow the model's {rows}; the rest are new")
        model.resize_token_embeddings(tokens, pad_to_multiple_of=8)
    model.config.dtype = base  # in which it is saved, to be scored as its base is
    return model


def smoothing_target(keys: Train, updates: Updates, size: int) -> Tensor:
    """What β is spread over: a share for each of the model's tokens, (size,) fp32."""
    if (file := keys.smoothing_target) == "unigram":
        return updates.frequencies(size)
    try:
        u = torch.tensor(np.load(file), dtype=torch.float32)
        check_target(u, size)
    except (EOFError, OSError, TypeError, ValueError) as error:
        wanted = f"an .npy file of {size} shares, one for each entry of the vocabulary, padding too"
        raise InputError(f"train.smoothing_target: {file}: {error}; expected {wanted}") from error
    updates.digest += sha256(Path(file))[:8]  # a checkpoint is of these shares
    return u


def prepare(model: nn.Module, keys: Train, updates: Updates, half: bool) -> nn.Module:
    """The model with packed attention, adapters and compiled layers, as far as they are wanted."""
    gpu = torch.cuda.is_available()
    packed = gpu and half if keys.packing is None else keys.packing
    if packed and (why := attention.use(model, gpu=gpu, half=half)):
        say(f"packing: off: {why}")
        packed = False
    updates.packed, updates.tile = packed, TILE if gpu and packed else 1
    layers, compiled = model.model.layers, keys.compile
    if keys.lora:
        from peft import LoraConfig, get_peft_model

        targets = keys.lora.targets
        adapters = LoraConfig(
            task_type="CAUSAL_LM",
            r=keys.lora.r,
            lora_alpha=keys.lora.alpha,
            lora_dropout=keys.lora.dropout,
            target_modules=targets if targets == "all-linear" else list(targets),
        )
        model = get_peft_model(model, adapters)
    if compiled is None:  # nobody asked for it, so a machine without a compiler does without
        compiled = gpu and packed and len(updates) >= COMPILE_FROM
        torch._dynamo.config.suppress_errors = True
    if compiled:
        torch._dynamo.config.cache_size_limit = 64  # layers with and without a window
        for layer in layers:
            layer.compile(dynamic=True)
    say(f"batches: {'packed' if packed else 'padded'}{', compiled' * bool(compiled)}")
    return model


class SweepTrainer(Trainer):
    """transformers' Trainer where a batch is a whole update: this rank's micro-batches."""

    def __init__(self, run: Run, keys: Train, saved_as: object, *given, **more) -> None:
        super().__init__(*given, **more)
        self.run, self.keys, self.updates = run, keys, self.train_dataset
        self.saved_as = saved_as  # the configuration of model/

    def get_train_dataloader(self) -> DataLoader:
        gpu = self.args.device.type == "cuda"
        return DataLoader(self.updates, collate_fn=itemgetter(0), pin_memory=gpu)

    def training_step(self, model: nn.Module, inputs: list, num_items_in_batch=None) -> Tensor:
        """Forward and backward of an update; returns the loss summed over this rank's targets."""
        model.train()
        summed, kind = torch.zeros((), device=self.args.device), self.accelerator.distributed_type
        alone = kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
        options = {"scale_wrt_gas": False} if kind == DistributedType.DEEPSPEED else {}
        for number, (batch, divisor) in enumerate(inputs, 1):
            last = number == len(inputs)
            self.accelerator.gradient_state._set_sync_gradients(last)
            # DDP's gradients meet once, in the last; sharded ones are never kept whole.
            apart = self.accelerator.no_sync(model) if alone and not last else nullcontext()
            with apart:
                loss = model(**self.sent(batch), use_cache=False).loss
                self.accelerator.backward(loss / divisor, **options)
            summed += loss.detach()
        return summed

    def sent(self, batch: dict) -> dict:
        return send_to_device(batch, self.args.device, non_blocking=True)

    def floating_point_ops(self, inputs: list) -> int:
        return 0  # the Trainer's count is of dense batches

    def _get_grad_norm(self, model: nn.Module, grad_norm=None) -> Tensor | float | None:
        due = (self.state.global_step + 1) % self.args.logging_steps == 0
        return super()._get_grad_norm(model, grad_norm) if due or grad_norm is not None else None

    @torch.no_grad()
    def evaluate(self, *_: object, **__: object) -> dict:
        """Log the mean −log p of the targets held out, without smoothing, in nats."""
        model, total = self.model_wrapped, torch.zeros((), device=self.args.device)
        model.eval()  # where the patched loss is a plain one
        # Compiled layers would be compiled once more, without gradients.
        with torch.compiler.set_stance("force_eager"):
            for batch in self.updates.held_out():
                total += model(**self.sent(batch), use_cache=False).loss
            total = self.accelerator.reduce(total, "sum").item()
        self.log({"held_out_loss": total / int(self.updates.targets[self.updates.held].sum())})
        self.control.should_evaluate = False
        return {}

    def log(self, logs: dict, start_time: float | None = None) -> None:
        """Write a row of metrics.jsonl; a loss there is a mean over targets."""
        if not logs.keys() & {"loss", "held_out_loss"}:  # the Trainer's last words
            return
        step, steps = self.state.global_step, self.state.max_steps
        if "loss" in logs:
            done, now = step - self.step, time.monotonic()
            tokens, targets = self.updates.counts(range(self.step, step))
            logs["loss"] *= done * self.args.world_size / targets
            pace = max(now - self.clock, 1e-9) / done
            logs["tokens_per_second"] = round(tokens / done / pace, 1)
            if self.args.device.type == "cuda":
                memory = torch.cuda.max_memory_allocated() / 2**30
                logs["gpu_memory_gib"] = round(memory, 2)
            self.clock, self.step = now, step
            if not math.isfinite(logs["loss"]):
                raise InputError(
                    f"{self.run.path}: the loss is {logs['loss']} at step {step}; lower the "
                    f"learning rate ({self.keys.learning_rate:g}) or set train.clip_grad_norm"
                )
        self.state.epoch = round(step / self.updates.an_epoch, 4)
        if self.is_world_process_zero():
            row = {"step": step, "steps": steps, "epoch": self.state.epoch, **logs}
            with open(self.run.metrics, "a", encoding="utf-8") as out:
                out.write(json.dumps(row | {"time": round(time.time(), 1)}) + "\n")
        super().log(logs)

    def _save_checkpoint(self, model: nn.Module, trial: None) -> None:
        """Write checkpoints/step-N under another name first, and drop the oldest."""
        part = Path(self.args.output_dir)
        folder = part.with_name(f"step-{self.state.global_step}")
        if self.is_world_process_zero():
            shutil.rmtree(part, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            (made,) = part.iterdir()
            keep(made, folder, self.updates.digest, self.keys.keep_last_n_checkpoints)
            part.rmdir()
        self.accelerator.wait_for_everyone()  # torchrun ends all ranks with the first to leave


class Course(TrainerCallback):
    """When a run logs, measures, saves and stops."""

    def __init__(self, trainer: SweepTrainer, stop: "Stop") -> None:
        self.trainer, self.stop = trainer, stop

    def on_train_begin(self, args, state, control, **_) -> None:
        """Start the clock, and forget rows of updates that are about to be computed again."""
        self.trainer.clock, self.trainer.step = time.monotonic(), state.global_step
        metrics = self.trainer.run.metrics
        if state.is_world_process_zero:
            rows = [row for row in read_rows(metrics) if row["step"] <= state.global_step]
            write_rows(metrics, rows)
        if state.global_step:
            say(f"resumed: step {state.global_step} of {state.max_steps}")

    def on_step_end(self, args, state, control, **_) -> None:
        keys, updates, step = self.trainer.keys, self.trainer.updates, state.global_step
        done, every = step == state.max_steps, keys.checkpointing_steps
        every = updates.an_epoch if every == "epoch" else every
        stopping = self.stop.everywhere() and not done
        control.should_log |= done
        control.should_evaluate = bool(keys.held_out) and (done or step % updates.an_epoch == 0)
        control.should_save = not done and (stopping or bool(every and step % every == 0))
        control.should_training_stop |= stopping


class Stop:
    """Someone wants this run to save and leave: a stop file, or a signal."""

    def __init__(self, file: Path) -> None:
        self.file, self.seen, self.group = file, False, None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self.note)

    def note(self, *_: object) -> None:
        self.seen = True

    def everywhere(self) -> bool:
        """Whether any rank was asked: the same answer on every rank, without waiting for a GPU."""
        asked = self.seen or self.file.exists()
        if not dist.is_initialized():
            return asked
        self.group = self.group or dist.new_group(backend="gloo")
        flag = torch.tensor(float(asked))
        dist.all_reduce(flag, group=self.group)
        return bool(flag > 0)


def save_model(trainer: SweepTrainer, tokenizer) -> None:
    """Write model/ in Hugging Face's format and the base's precision, under another name first."""
    run, lora, config = trainer.run, trainer.keys.lora, trainer.saved_as
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # gathered from all ranks
    if trainer.is_world_process_zero():
        part = run.path / ".model.part"
        shutil.rmtree(part, ignore_errors=True)
        if lora and lora.save == "adapter":
            plain.save_pretrained(str(part), state_dict=state)
        else:
            if lora:
                plain, state = plain.get_base_model(), merged(state, lora)
            if config.tie_word_embeddings:
                state.pop("lm_head.weight", None)
            state = {name: value.to(config.dtype) for name, value in state.items()}
            plain.save_pretrained(str(part), state_dict=state)
            config.save_pretrained(str(part))
        tokenizer.save_pretrained(str(part))
        replace_folder(part, run.model)
    trainer.accelerator.wait_for_everyone()


def merged(state: dict[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """An ordinary model's weights, W + (alpha / r) B A, of one with adapters."""
    found = {}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        a, b = (name.replace("base_layer", f"lora_{x}.default") for x in "AB")
        if a != name and a in state:
            value = value.float() + lora.alpha / lora.r * (state[b].float() @ state[a].float())
        found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = value
    return found

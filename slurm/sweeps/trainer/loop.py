"""The training loop: accelerate for devices and ranks, smoothce for the loss, files for the rest.

Per step, over its micro-batches and ranks, with S the sum of target losses and n their number:
`mean` averages S/n of each micro-batch, `sum` averages S, `token_mean` is ΣS / Σn.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.utils import logging as transformers_logging

from smoothce import patch_model
from sweeps.backends.builtin import BuiltinKeys
from sweeps.errors import SweepError
from sweeps.files import fsync_folder, read_rows, write_text
from sweeps.rundir import RunDir
from sweeps.trainer import checkpoint
from sweeps.trainer.data import Examples, load_examples, set_template
from sweeps.trainer.order import Order

NO_DECAY = ("bias", "norm.weight", "layernorm.weight", "layer_norm.weight")


def train(run: RunDir) -> None:
    """Train the run to its end, or to the next step once `run.stop` exists or a signal came.

    Resumes from the newest whole checkpoint. Raises SweepError for what the user can put right.
    """
    asked = StopRequest(run)
    config = run.config()
    keys: BuiltinKeys = config.keys
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    on_cpu, deepspeed = not torch.cuda.is_available(), config.world.deepspeed is not None
    accelerator = Accelerator(
        # Said aloud, or several CPU processes would each train alone, with and without DeepSpeed.
        cpu=on_cpu and not deepspeed,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu and deepspeed else [],
        mixed_precision=config.world.mixed_precision,
        gradient_accumulation_steps=keys.gradient_accumulation_steps,
        log_with=keys.report_to if keys.with_tracking else None,
        project_dir=str(run.path),
    )
    if accelerator.num_processes != config.world.size:
        raise SweepError(
            f"{run.config_file}: processes: world asks for {config.world.size} (nodes × "
            f"processes_per_node: {config.world.nodes} × {config.world.processes_per_node}), "
            f"{accelerator.num_processes} started; launch with `python -m sweeps train`"
        )
    set_seed(keys.seed, device_specific=True)
    tokenizer = AutoTokenizer.from_pretrained(keys.tokenizer_name or keys.model_name_or_path)
    set_template(tokenizer, keys.chat_template_name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked: any existing token will do
    examples = load_examples(
        Path(keys.train_file), tokenizer, keys.max_seq_length, keys.max_train_samples
    )
    accelerator.print(
        f"data: {len(examples)} conversations, {len(examples.tokens)} tokens, "
        f"{int(examples.targets().sum())} targets, {examples.dropped} dropped"
    )
    model = load_model(keys, len(tokenizer))
    order = Order(
        len(examples),
        keys.seed,
        keys.per_device_train_batch_size,
        accelerator.num_processes,
        keys.gradient_accumulation_steps,
    )
    total = keys.max_train_steps or keys.num_train_epochs * order.steps_per_epoch
    optimizer = torch.optim.AdamW(
        decay_groups(model, keys.weight_decay), lr=keys.learning_rate, fused=keys.fused_optimizer
    )
    scheduler = get_scheduler(
        keys.lr_scheduler_type, optimizer, int(total * keys.warmup_ratio), total
    )
    configure_deepspeed(accelerator, keys)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)

    facts = {"processes": accelerator.num_processes, "data": fingerprint(examples)}
    found = checkpoint.latest(run, facts) if accelerator.is_main_process else None
    start = from_main(accelerator, found["step"] if found else 0)
    if start:
        threads = from_main(accelerator, found["threads"] if found else 0)
        if accelerator.device.type == "cpu":
            torch.set_num_threads(threads)  # sums split otherwise differ in their last bit
        accelerator.load_state(str(run.checkpoints / f"step-{start}"))
        accelerator.print(f"resumed: step {start} of {total}")
    log = Log(run, accelerator, start, total, keys, order.steps_per_epoch)
    every = keys.checkpointing_steps
    every = order.steps_per_epoch if every == "epoch" else every
    model.train()
    for step in range(start, total):
        rows = order.rows(step)
        count = int(log.targets_of(examples, rows))
        for number in range(keys.gradient_accumulation_steps):
            mine = order.micro(rows, number, accelerator.process_index)
            batch = examples.collate(mine, keys.per_device_train_batch_size, tokenizer.pad_token_id)
            batch = {key: value.to(accelerator.device) for key, value in batch.items()}
            with accelerator.accumulate(model):
                summed = model(**batch, use_cache=False).loss
                here = max(1, int((batch["labels"][:, 1:] != -100).sum()))
                scale = {
                    "sum": 1.0,
                    "mean": 1.0 / here,
                    "token_mean": accelerator.num_processes
                    * keys.gradient_accumulation_steps
                    / max(1, count),
                }[keys.reduce_loss]
                accelerator.backward(summed * scale)
                norm = gradient_norm(accelerator, model, keys.clip_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            log.add(summed.detach(), sum(batch["attention_mask"].sum(1).tolist()[: len(mine)]))
        scheduler.step()
        log.step(step + 1, count, norm, scheduler.get_last_lr()[0])
        stopping = asked.everywhere(accelerator) and step + 1 < total
        if stopping or (every and (step + 1) % every == 0 and step + 1 < total):
            checkpoint.save(run, accelerator, step + 1, facts, keys.keep_last_n_checkpoints)
        if stopping:
            accelerator.print(f"stopped: step {step + 1} of {total} is saved")
            log.close()
            return
    log.close()
    save_model(run, accelerator, model, tokenizer)


class StopRequest:
    """Someone wants this run to save and leave: a stop file, or a signal."""

    PERIOD = 0.5  # seconds between looks: a stat a step would tire a network file system

    def __init__(self, run: RunDir) -> None:
        self._file, self._seen, self._next = run.stop, False, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._seen = True

    def everywhere(self, accelerator: Accelerator) -> bool:
        """Whether any rank was asked; every rank gets the same answer."""
        if accelerator.is_main_process and time.monotonic() >= self._next:
            self._seen = self._seen or self._file.exists()
            self._next = time.monotonic() + self.PERIOD
        if accelerator.num_processes == 1:
            return self._seen
        flag = torch.tensor(float(self._seen), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item() > 0)


class Log:
    """metrics.jsonl, the progress bar, and a tracker if one is asked for."""

    def __init__(
        self,
        run: RunDir,
        accelerator: Accelerator,
        start: int,
        total: int,
        keys: BuiltinKeys,
        steps_per_epoch: int,
    ) -> None:
        self.run, self.accelerator, self.keys = run, accelerator, keys
        self.total, self.steps_per_epoch = total, steps_per_epoch
        self.begin, self.first = time.monotonic(), start
        self.loss = torch.zeros((), device=accelerator.device)
        self.targets = self.tokens = self.clipped = 0
        self.last = (self.begin, start)
        self._targets = None
        self.main = accelerator.is_main_process
        if self.main:  # rows after the checkpoint are about to be computed again
            kept = [row for row in read_rows(run.metrics) if row["step"] <= start]
            write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        self.bar = tqdm(
            total=total,
            initial=start,
            disable=not self.main,
            mininterval=0.1 if sys.stderr.isatty() else 5.0,
            unit="step",
            desc=run.name,
        )
        if keys.with_tracking:
            os.environ.setdefault("WANDB_MODE", "offline")  # compute nodes have no internet
            accelerator.init_trackers("sweeps", config=None)

    def targets_of(self, examples: Examples, rows: list[int]) -> int:
        if self._targets is None:
            self._targets = examples.targets()
        return self._targets[rows].sum()

    def add(self, loss: torch.Tensor, tokens: int) -> None:
        self.loss += loss.float()
        self.tokens += int(tokens)

    def step(self, step: int, targets: int, norm: float | None, learning_rate: float) -> None:
        self.targets += targets
        self.clipped += int(norm is not None and 0 < self.keys.clip_grad_norm < norm)
        self.bar.update(1)
        if step % self.keys.logging_steps and step != self.total:
            return
        summed = self.accelerator.reduce(self.loss, reduction="sum").item()
        tokens = self.accelerator.reduce(
            torch.tensor(float(self.tokens), device=self.accelerator.device), reduction="sum"
        ).item()
        if not math.isfinite(summed):
            raise SweepError(
                f"{self.run.path}: the loss is {summed} at step {step}; lower the learning rate "
                f"({self.keys.learning_rate:g}) or set train.clip_grad_norm"
            )
        clock, steps = time.monotonic(), step - self.last[1]
        speed = tokens / max(clock - self.last[0], 1e-9)
        pace = (clock - self.begin) / max(step - self.first, 1)
        row = {
            "step": step,
            "steps": self.total,
            "epoch": round(step / self.steps_per_epoch, 4),
            "loss": summed / max(1, self.targets),
            "learning_rate": learning_rate,
            "grad_norm": norm,
            "clipped": self.clipped / steps,
            "tokens_per_s": round(speed, 1),
            "eta_s": round(pace * (self.total - step), 1),
            "time": round(time.time(), 1),
        }
        self.bar.set_postfix(loss=f"{row['loss']:.4f}", tok_s=f"{speed:.0f}", refresh=False)
        if self.main:
            try:
                with open(self.run.metrics, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
            except OSError as error:
                raise SweepError(
                    f"{self.run.metrics}: cannot write ({error.strerror}); make room or fix the "
                    "rights and type the same command again"
                ) from error
        if self.keys.with_tracking:
            self.accelerator.log({k: v for k, v in row.items() if isinstance(v, float)}, step=step)
        self.loss.zero_()
        self.targets = self.tokens = self.clipped = 0
        self.last = (clock, step)

    def close(self) -> None:
        self.bar.close()
        if self.keys.with_tracking:
            self.accelerator.end_training()


def load_model(keys: BuiltinKeys, tokens: int) -> torch.nn.Module:
    """The causal LM in fp32 with its loss replaced by smoothce's, summed over the targets."""
    config = AutoConfig.from_pretrained(keys.model_name_or_path)
    if keys.attention_dropout is not None:
        if not hasattr(config, "attention_dropout"):
            raise SweepError(
                f"train.attention_dropout: {config.model_type} models have no such setting"
            )
        config.attention_dropout = keys.attention_dropout
    model = AutoModelForCausalLM.from_pretrained(keys.model_name_or_path, config=config).float()
    if tokens > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(tokens, pad_to_multiple_of=8)
    if keys.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    patch_model(model, label_smoothing=keys.label_smoothing, reduction="sum")
    return model


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on everything but biases and norms."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not n.endswith(NO_DECAY)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n.endswith(NO_DECAY)], "weight_decay": 0.0},
    ]


def configure_deepspeed(accelerator: Accelerator, keys: BuiltinKeys) -> None:
    """Fill in what DeepSpeed cannot infer without a DataLoader, clipping included."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = keys.per_device_train_batch_size
    plugin.deepspeed_config["gradient_accumulation_steps"] = keys.gradient_accumulation_steps
    plugin.deepspeed_config["gradient_clipping"] = max(0.0, keys.clip_grad_norm)


def gradient_norm(accelerator: Accelerator, model: torch.nn.Module, limit: float) -> float | None:
    """Clip where asked for and return the norm before clipping; None between optimizer steps."""
    if not accelerator.sync_gradients:
        return None
    if accelerator.state.deepspeed_plugin is not None:
        norm = model.get_global_grad_norm()
        return None if norm is None else float(norm)
    return float(accelerator.clip_grad_norm_(model.parameters(), limit if limit > 0 else math.inf))


def fingerprint(examples: Examples) -> str:
    """A digest of the tokenised data: a resume on other data would be neither run."""
    digest = hashlib.sha256(examples.tokens.tobytes())
    digest.update(examples.supervised.tobytes())
    digest.update(examples.offsets.tobytes())
    return digest.hexdigest()[:16]


def from_main(accelerator: Accelerator, value: int) -> int:
    """The main process's value, on every rank."""
    if accelerator.num_processes == 1:
        return value
    own = torch.tensor(value if accelerator.is_main_process else 0, device=accelerator.device)
    return int(accelerator.reduce(own, reduction="sum").item())


def save_model(run: RunDir, accelerator: Accelerator, model, tokenizer) -> None:
    """Write model/ in Hugging Face format under a temporary name, then rename."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        part = run.path / ".model.part"
        try:
            shutil.rmtree(part, ignore_errors=True)
            accelerator.unwrap_model(model).save_pretrained(str(part), state_dict=state)
            tokenizer.save_pretrained(str(part))
            shutil.rmtree(run.model, ignore_errors=True)
            part.rename(run.model)
            fsync_folder(run.path)
        except Exception as error:  # torch, safetensors and the OS each raise their own kind
            shutil.rmtree(part, ignore_errors=True)
            raise SweepError(checkpoint.unsaved(run.model, error)) from error
    accelerator.wait_for_everyone()

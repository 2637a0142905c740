"""transformers' Trainer, where a batch is a whole update of several micro-batches.

The Trainer sees one long epoch of such batches, dealt by `sweeps.training.global_batches`. Its own
accumulation of gradients and its evaluation are replaced by methods here, and those that log and
save are wrapped; when they happen is decided by `sweeps.training.callbacks`.
"""

import json
import math
import shutil
import time
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer, TrainingArguments

from calibeval.io import InputError, regular_file
from sweeps.runs.files import remove_folder
from sweeps.runs.run import Run
from sweeps.training.checkpoint import PART, deleted_on_failure, publish_checkpoint
from sweeps.training.global_batches import GlobalBatchDataset, MicroBatch
from sweeps.training.options import TrainOptions


class SweepTrainer(Trainer):
    """The Trainer of one run.

    `saved_config` is the configuration that the saved model gets; `data_digest` names the data in
    checkpoints.
    """

    def __init__(
        self,
        run: Run,
        train_options: TrainOptions,
        model: nn.Module,
        arguments: TrainingArguments,
        dataset: GlobalBatchDataset,
        saved_config: PreTrainedConfig,
        data_digest: str,
    ) -> None:
        super().__init__(model, args=arguments, train_dataset=dataset)
        self.run = run
        self.train_options = train_options
        self.dataset = dataset
        self.saved_config = saved_config
        self.data_digest = data_digest
        self.logged_step = 0  # the update of the last row with a loss in metrics.jsonl
        self.logged_at = 0.0  # when that row was written, in seconds of time.monotonic

    def start_clock(self) -> None:
        """Measure loss and speed from the present update on."""
        self.logged_step = self.state.global_step
        self.logged_at = time.monotonic()

    def get_train_dataloader(self) -> DataLoader:
        """Item s is this rank's part of update s: in order, one at a time.

        So a resumed Trainer, which skips as many batches as updates were made, goes on with the
        right one. The loader is not prepared by accelerate, which would deal items to ranks.
        """
        pin_memory = self.args.device.type == "cuda"
        return DataLoader(self.dataset, collate_fn=itemgetter(0), pin_memory=pin_memory)

    def training_step(  # type: ignore[override]  # whose inputs are one dictionary
        self, model: nn.Module, inputs: list[MicroBatch], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of an update; with DeepSpeed also the optimizer's step.

        What is differentiated is each micro-batch's summed loss, divided by its divisor. What is
        returned, for the log alone, is the undivided sum over this rank's targets:
        `_add_statistics` makes a mean over targets of it.
        """
        model.train()
        loss_sum = torch.zeros((), device=self.args.device)
        for number, micro_batch in enumerate(inputs, 1):
            is_last = number == len(inputs)
            with self._gradients_kept_local(model, local=not is_last):
                loss = model(**self._on_device(micro_batch.inputs), use_cache=False).loss
                self._backward(loss / micro_batch.divisor, is_last)
            loss_sum += loss.detach()
        return loss_sum

    def _gradients_kept_local(self, model: nn.Module, local: bool) -> Any:
        """A context in which DDP's ranks do not average their gradients, if `local`.

        DDP averages them once, in an update's last micro-batch. Sharded gradients (FSDP, DeepSpeed)
        are averaged in each, because no rank has room for whole ones.
        """
        is_ddp = self.accelerator.distributed_type in (
            DistributedType.MULTI_GPU,
            DistributedType.MULTI_CPU,
        )
        return self.accelerator.no_sync(model) if is_ddp and local else nullcontext()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Backward of a micro-batch; DeepSpeed's also makes the step, in an update's last one."""
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:
            self.accelerator.backward(loss)
            return
        # Where this is set, accelerate's `backward` clips DeepSpeed's gradients, makes the
        # optimizer's step and clears the gradients.
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        # The loss is divided already, by the micro-batch's divisor. `scale_wrt_gas=False` keeps
        # DeepSpeed from dividing it by its accumulation steps. (`hf_arguments` sets these to 1, so
        # that today it would change nothing.)
        self.accelerator.backward(loss, scale_wrt_gas=False)

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return send_to_device(inputs, self.args.device, non_blocking=True)

    def floating_point_ops(self, inputs: Any) -> int:
        """Nothing: the Trainer's own count assumes padded batches."""
        return 0

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient's norm: for updates that are logged, and where clipping has taken it anyway.

        Taking it for the others would wait for the GPU.
        """
        step = self.state.global_step + 1  # The Trainer counts an update after this.
        is_logged = step == self.state.max_steps or step % self.args.logging_steps == 0
        if is_logged or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)
        return None

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Log `held_out_loss`: mean −log p of the held-out targets, in nats, without smoothing.

        ScheduleCallback asks for it; the Trainer's arguments do not matter.
        """
        model = self.model_wrapped
        loss_sum = torch.zeros((), device=self.args.device)
        model.eval()  # A patched model's loss is not smoothed then.
        # Compiled layers would be compiled once more, without gradients.
        with torch.compiler.set_stance("force_eager"):
            for inputs in self.dataset.held_out_batches():
                # In eval mode a patched model's loss is a mean, whatever reduction `install_loss`
                # chose. num_items_in_batch is what that mean divides by, and 1 leaves the sum.
                outputs = model(**self._on_device(inputs), use_cache=False, num_items_in_batch=1)
                loss_sum += outputs.loss
        total = self.accelerator.reduce(loss_sum, "sum").item()
        targets = self.dataset.target_counts[self.dataset.held_out_conversations].sum()
        self.log({"held_out_loss": total / int(targets)})
        # The Trainer's own `evaluate` clears it by the event `on_evaluate`, which is missing here.
        self.control.should_evaluate = False
        return {}

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write a row of metrics.jsonl; a loss there is a mean over targets, in nats.

        The mean is over the updates since the last row or, after a resume, since the checkpoint:
        updates between the last row before a checkpoint and the checkpoint are then in no row. With
        logging_steps 10 and a checkpoint at 25, these are 21 to 25.
        Raises InputError once the loss is infinite or not a number.
        """
        if "loss" not in logs and "held_out_loss" not in logs:
            return  # This is the Trainer's summary at the end of training.
        if "loss" in logs:
            self._add_statistics(logs)
            self._refuse_infinite_loss(logs["loss"])
        step = self.state.global_step
        # The Trainer counts the whole run as one epoch, and trackers are to see the data's epochs.
        # The Trainer sets its own number again at its next update.
        self.state.epoch = round(step / self.dataset.updates_per_epoch, 4)
        if self.is_world_process_zero():
            row = {"step": step, "steps": self.state.max_steps, "epoch": self.state.epoch}
            row.update(logs)
            row["time"] = round(time.time(), 1)
            with open(self.run.metrics, "a", encoding="utf-8", opener=regular_file) as file:
                file.write(json.dumps(row) + "\n")
        super().log(logs)

    def _add_statistics(self, logs: dict[str, Any]) -> None:
        """Make the loss a mean over targets, and add speed and memory; all since the last row.

        `training_step` returns a sum over this rank's targets, and the Trainer averages that over
        ranks and over the updates since the last row. The speed includes the time of checkpoints
        and of measurements on held-out conversations between the two rows.
        """
        step = self.state.global_step
        now = time.monotonic()
        updates = step - self.logged_step
        counts = self.dataset.count_tokens(range(self.logged_step, step))
        averaged_sums = updates * self.args.world_size  # one of each rank for each update
        logs["loss"] *= averaged_sums / counts.targets
        seconds_per_update = max(now - self.logged_at, 1e-9) / updates
        logs["tokens_per_second"] = round(counts.tokens / updates / seconds_per_update, 1)
        if self.args.device.type == "cuda":
            logs["gpu_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.logged_step = step
        self.logged_at = now

    def _refuse_infinite_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"{self.run.path}: the loss is {loss} at step {self.state.global_step}; lower the "
                f"learning rate ({self.train_options.learning_rate:g}) or set train.clip_grad_norm"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write checkpoints/step-N/ under another name first, and drop the oldest ones."""
        # `TrainingArguments.output_dir` is `part`, so that the Trainer writes part/checkpoint-N.
        part = self.run.checkpoints / PART
        written = part / f"checkpoint-{self.state.global_step}"
        folder = self.run.checkpoints / f"step-{self.state.global_step}"
        if self.is_world_process_zero():
            remove_folder(part)
        self.accelerator.wait_for_everyone()
        with deleted_on_failure(part):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            keep_last = self.train_options.keep_last_n_checkpoints
            with deleted_on_failure(part):
                publish_checkpoint(written, folder, self.data_digest, keep_last)
            shutil.rmtree(part, ignore_errors=True)
        # No rank goes on before the checkpoint is published. One that has stopped exits with 75, at
        # which torchrun ends the others, the one that publishes too.
        self.accelerator.wait_for_everyone()

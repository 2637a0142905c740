"""TRL's SFTTrainer for one run of a sweep.

It trains on `sweeps.training.micro_batches`, divides the loss as `reduce_loss` says, and publishes
whole checkpoints. When it logs, evaluates, saves and stops is decided by `callbacks`.
"""

import math
import shutil
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from calibeval.io import InputError
from sweeps.runs.files import remove_folder
from sweeps.runs.run import Run
from sweeps.training.checkpoint import PART, deleted_on_failure, publish_checkpoint
from sweeps.training.micro_batches import MicroBatches, Updates
from sweeps.training.options import TrainOptions
from sweeps.training.tokenization import IGNORE

# What a rank computes where the others have a conversation more: tokens that are no targets.
NO_TARGET = {"input_ids": [0, 0], "labels": [IGNORE, IGNORE]}


class SweepTrainer(SFTTrainer):
    """The SFTTrainer of one run.

    `saved_config` is the configuration that the saved model gets; `data_digest` names the data in
    checkpoints.
    """

    def __init__(
        self,
        run: Run,
        train_options: TrainOptions,
        model: nn.Module,
        arguments: SFTConfig,
        tokenizer: PreTrainedTokenizerBase,
        micro_batches: MicroBatches,
        saved_config: PreTrainedConfig,
        data_digest: str,
    ) -> None:
        self.data: Updates = micro_batches.data
        super().__init__(
            model,  # type: ignore[arg-type]  # or one with adapters
            args=arguments,
            train_dataset=self.data.tokens,
            processing_class=tokenizer,
        )
        self.run = run
        self.train_options = train_options
        self.micro_batches = micro_batches
        self.saved_config = saved_config
        self.data_digest = data_digest
        # The loss is divided here. Where this is false the Trainer divides it once more.
        self.model_accepts_loss_kwargs = True
        self.start_clock()

    def start_clock(self) -> None:
        """Measure loss and speed from the present update on."""
        self.logged_step = self.state.global_step  # the update of metrics.jsonl's last row
        self.logged_at = time.monotonic()
        self.loss_sum = torch.zeros((), device=self.args.device)  # over this rank's targets

    def get_train_dataloader(self) -> DataLoader:
        """This rank's micro-batches of all updates, in order, as one long epoch.

        So a resumed Trainer, which skips those of the updates that were made, goes on with the
        right one. The loader is not prepared by accelerate, which would deal items to ranks.
        """
        pin_memory = self.args.device.type == "cuda"
        return DataLoader(self.micro_batches, collate_fn=self._collate, pin_memory=pin_memory)

    def _collate(self, items: list[tuple[list[dict], float]]) -> dict[str, Any]:
        """One micro-batch as tensors, by TRL's collator, and its divisor."""
        [(conversations, divisor)] = items
        batch = self.data_collator(conversations or [NO_TARGET])
        # Causal tokens never see the padding that follows them. Without a mask attention is faster.
        batch.pop("attention_mask", None)
        batch["divisor"] = divisor
        return batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The summed loss of a micro-batch, divided by its divisor (`Updates.__getitem__`).

        It is asked for by the model's own forward, without the entropy and accuracy that TRL takes
        of every micro-batch, for which the host waits for the GPU.
        """
        divisor = inputs.pop("divisor")
        # The model's loss is a mean, of which num_items_in_batch is what the sum is divided by.
        loss = model(**inputs, use_cache=False, num_items_in_batch=1).loss
        if torch.is_grad_enabled():  # which `evaluate` does without
            self.loss_sum += loss.detach()
        return loss / divisor

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Log `held_out_loss`: mean −log p of the held-out targets, in nats, without smoothing.

        ScheduleCallback asks for it; the Trainer's arguments do not matter.
        """
        model = self.model_wrapped
        mean = torch.zeros((), device=self.args.device)
        model.eval()  # A patched model's loss is not smoothed then.
        held_out = MicroBatches(
            self.data, self.data.held_out, self.micro_batches.rank, self.micro_batches.packed
        )
        # Compiled layers would be compiled once more, without gradients.
        with torch.compiler.set_stance("force_eager"):
            for index in range(len(held_out)):
                batch = self._prepare_inputs(self._collate([held_out[index]]))
                mean += self.compute_loss(model, batch)
        self.log({"held_out_loss": self.accelerator.reduce(mean, "mean").item()})
        # The Trainer's own `evaluate` clears it by the event `on_evaluate`, which is missing here.
        self.control.should_evaluate = False
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Complete a row of metrics.jsonl, whose loss is a mean over targets, in nats.

        The mean is over the updates since the last row or, after a resume, since the checkpoint:
        updates between the last row before a checkpoint and the checkpoint are then in no row. With
        logging_steps 10 and a checkpoint at 25, these are 21 to 25.
        Raises InputError once the loss is infinite or not a number.
        """
        if "loss" not in logs and "held_out_loss" not in logs:
            return  # This is the Trainer's summary at the end of training.
        if "loss" in logs:
            self._add_statistics(logs)
            if not math.isfinite(logs["loss"]):
                rate = self.train_options.learning_rate
                raise InputError(
                    f"{self.run.path}: the loss is {logs['loss']} at step "
                    f"{self.state.global_step}; lower the learning rate ({rate:g}) or set "
                    "train.clip_grad_norm"
                )
        # The Trainer counts the whole run as one epoch, and rows are to show the data's epochs.
        # The Trainer sets its own number again at its next update.
        self.state.epoch = round(self.state.global_step / self.data.updates_per_epoch, 4)
        super().log(logs, start_time)

    def _add_statistics(self, logs: dict[str, float]) -> None:
        """Make the loss a mean over targets, and add speed and memory; all since the last row.

        The speed includes the time of checkpoints and of measurements on held-out conversations
        between the two rows.
        """
        counts = self.data.count_tokens(range(self.logged_step, self.state.global_step))
        seconds = max(time.monotonic() - self.logged_at, 1e-9)
        logs["loss"] = self.accelerator.reduce(self.loss_sum, "sum").item() / counts.targets
        logs["tokens_per_second"] = round(counts.tokens / seconds, 1)
        if self.args.device.type == "cuda":
            logs["gpu_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.start_clock()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write checkpoints/step-N/ under another name first, and drop the oldest ones."""
        # `SFTConfig.output_dir` is `part`, so that the Trainer writes part/checkpoint-N.
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

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint needs none."""

    def _send_telemetry(self) -> None:
        """TRL would tell its makers of every run."""

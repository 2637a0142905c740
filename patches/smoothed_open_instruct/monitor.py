"""What a sweep needs to see of a run: loss, gradient norms, clipping, speed."""

import json
import logging
import math
import os
import time
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PREFIX = "training statistics: "
STATISTICS_FILE = "STATISTICS_FILE"  # the environment variable: a file that gets the rows too


@dataclass
class Interval:
    """What has happened since the last line of statistics."""

    first_token: int  # tokens that the run had seen when the interval began
    # The sum of this process's losses, (1,) fp32. It stays on the device, so that observing a loss
    # does not wait for the GPU.
    loss_sum: Tensor
    began: float = field(default_factory=time.monotonic)
    micro_batches: int = 0  # of this process
    updates: int = 0
    clipped_updates: int = 0
    norms: list[float] = field(default_factory=list)  # of each update's gradient, before clipping


class Monitor:
    """The statistics behind `log_statistics`; to be made after `prepare`."""

    def __init__(self, args: Namespace, accelerator: Any) -> None:
        self.args = args
        self.accelerator = accelerator
        self.interval = self._begin_interval(first_token=0)

    def _begin_interval(self, first_token: int) -> Interval:
        return Interval(first_token, torch.zeros(1, device=self.accelerator.device))

    def observe(self, model: Any, loss: Tensor) -> None:
        """Take note of a micro-batch's loss, and at the end of an update of its gradient norm.

        To be called after backward and before upstream clips.
        """
        if not self.args.log_statistics:
            return
        self.interval.loss_sum += loss.detach().float()
        self.interval.micro_batches += 1
        if not self.accelerator.sync_gradients:
            return
        self.interval.updates += 1
        if hasattr(model, "get_global_grad_norm"):  # DeepSpeed, which has updated in backward
            norm = model.get_global_grad_norm()
            limit = model.gradient_clipping()
        else:
            norm = self._gradient_norm(model)
            limit = self.args.clip_grad_norm
        if norm is not None:
            self.interval.norms.append(float(norm))
            if 0 < limit < float(norm):
                self.interval.clipped_updates += 1

    def _gradient_norm(self, model: Any) -> float:
        """The norm of an update's gradient, which stays as it is, over all ranks."""
        accelerator = self.accelerator
        # To clip at infinity scales by exactly 1, and works for every kind of sharding.
        if accelerator.scaler is None:
            return float(accelerator.clip_grad_norm_(model.parameters(), math.inf))
        # Under fp16 that would also divide the gradients by the scale of the loss. Upstream's own
        # clipping does so afterwards, and torch raises when it is done twice in an update.
        native_amp = accelerator.native_amp
        accelerator.native_amp = False  # without which accelerate leaves the scale alone
        try:
            scaled_norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
        finally:
            accelerator.native_amp = native_amp
        return float(scaled_norm) / accelerator.scaler.get_scale()

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Add this project's statistics to upstream's metrics, and log both as one JSON line.

        All of them are of the updates since the last line, or since a resume: the mean loss
        (upstream's sum begins again with each epoch), the mean gradient norm before clipping and
        the largest one, the share of updates that were clipped, and tokens per second over all
        ranks. An update of which DeepSpeed gives no norm counts in none of the three of norms.
        """
        if not self.args.log_statistics:
            return
        interval = self.interval
        losses = self.accelerator.gather(interval.loss_sum).tolist()
        divisor = interval.micro_batches
        if self.args.reduce_loss == "token_mean":
            # Each loss was made larger by the accumulation steps, by which accelerate divides: an
            # update's losses add up to that many times its mean, also where the update has fewer
            # micro-batches.
            divisor = interval.updates * self.args.gradient_accumulation_steps
        mean_over_ranks = sum(losses) / len(losses)
        metrics["train_loss"] = mean_over_ranks / divisor
        if interval.norms:
            metrics["grad_norm"] = sum(interval.norms) / len(interval.norms)
            metrics["grad_norm_max"] = max(interval.norms)
            metrics["clipped"] = interval.clipped_updates / len(interval.norms)
        tokens = metrics["total_tokens"]  # since the start or a resume
        seconds = time.monotonic() - interval.began
        metrics["tokens_per_s"] = (tokens - interval.first_token) / seconds
        self.interval = self._begin_interval(first_token=tokens)
        if self.accelerator.is_main_process:
            self._write(step, metrics)

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        row = {"step": step, "steps": self.args.max_train_steps, **metrics}
        logger.info("%s%s", PREFIX, json.dumps(row))
        if STATISTICS_FILE in os.environ:
            # `python -m sweeps` reads them under these names.
            row["loss"] = row["train_loss"]
            row["tokens_per_second"] = row["tokens_per_s"]
            file_name = os.environ[STATISTICS_FILE]
            with open(file_name, "a", encoding="utf-8", opener=_open_no_link) as file:
                file.write(json.dumps(row) + "\n")


def _open_no_link(path: str, flags: int) -> int:
    """Open a file to write it; in a shared folder a link may lead to any file of this user's."""
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o666)

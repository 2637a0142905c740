"""What a sweep needs to see of a run (loss, norms, clipping), and how it asks a run to stop."""

import json
import logging
import math
import os
import time
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PREFIX = "training statistics: "
FILE = "STATISTICS_FILE"  # in the environment: where the launcher reads them


class Monitor:
    """Statistics behind `log_statistics`, and the stop-file; make it after `prepare`."""

    def __init__(self, args: Namespace, accelerator: Any) -> None:
        self.args = args
        self.accelerator = accelerator
        self.loss = torch.zeros(1, device=accelerator.device)  # of this process's micro-batches
        self._begin(0)

    def _begin(self, tokens: int) -> None:
        self.norms, self.clipped, self.batches, self.updates = [], 0, 0, 0
        self.logged, self.time = tokens, time.monotonic()
        self.loss.zero_()

    def observe(self, model: Any, loss: Tensor) -> None:
        """After backward, before upstream clips: loss, and a whole step's gradient norm."""
        if not self.args.log_statistics:
            return
        self.loss += loss.detach().float()
        self.batches += 1
        if not self.accelerator.sync_gradients:
            return
        self.updates += 1
        if hasattr(model, "get_global_grad_norm"):  # DeepSpeed has taken its step in backward
            norm, limit = model.get_global_grad_norm(), model.gradient_clipping()
        else:
            # A limit of infinity scales by exactly 1 and works for every kind of sharding.
            norm = self.accelerator.clip_grad_norm_(model.parameters(), math.inf)
            limit = self.args.clip_grad_norm
        if norm is not None:
            self.norms.append(float(norm))
            self.clipped += 0 < limit < float(norm)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds this project's statistics to upstream's metrics, and logs both as one JSON line.

        All are of the steps since the last line, or since a resume: the mean loss (upstream's sum
        begins again with each epoch), the mean norm before clipping and the largest one, the
        fraction of steps in which the norm was clipped and tokens per second over all ranks.
        """
        if not self.args.log_statistics:
            return
        losses = self.accelerator.gather(self.loss).tolist()
        tokens = metrics["total_tokens"]  # since the start or a resume
        if self.args.reduce_loss == "token_mean":  # a short step's losses add up to its mean too
            self.batches = self.updates * self.args.gradient_accumulation_steps
        metrics["train_loss"] = sum(losses) / len(losses) / self.batches
        if self.norms:
            metrics["grad_norm"] = sum(self.norms) / len(self.norms)
            metrics["grad_norm_max"] = max(self.norms)
            metrics["clipped"] = self.clipped / len(self.norms)
        metrics["tokens_per_s"] = (tokens - self.logged) / (time.monotonic() - self.time)
        self._begin(tokens)
        if self.accelerator.is_main_process:
            row = {"step": step, "steps": self.args.max_train_steps, **metrics}
            logger.info("%s%s", PREFIX, json.dumps(row))
            if FILE in os.environ:
                row |= {"loss": row["train_loss"], "tokens_per_second": row["tokens_per_s"]}
                with open(os.environ[FILE], "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

    def stop_requested(self) -> bool:
        """Whether the stop-file exists, as the main process sees it; the same on every process."""
        if not self.args.stop_file:
            return False
        exists = self.accelerator.is_main_process and os.path.exists(self.args.stop_file)
        flag = torch.tensor(int(exists), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum").item())

    def stopped(self, step: int) -> None:
        """Says why the run ends here, after the checkpoint was written."""
        self.accelerator.print(
            f"{self.args.stop_file} exists: stopped after step {step}, checkpoint saved; "
            "the same command continues from it once the file is gone"
        )
        self.accelerator.end_training()

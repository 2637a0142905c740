"""What a sweep needs to see of a run (norms, clipping, filter), and how it asks a run to stop."""

import json
import logging
import math
import os
import time
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from smoothce.linear_cross_entropy import explain
from smoothce.options import Options

logger = logging.getLogger(__name__)

# The launcher reads the JSON that follows this from the log.
PREFIX = "training statistics: "
EVERY = 20  # micro-batches for each look at the filter


class Monitor:
    """Statistics behind `log_statistics`, and the stop-file; make it after `prepare`."""

    def __init__(self, args: Namespace, accelerator: Any, model: Any) -> None:
        self.args = args
        self.accelerator = accelerator
        self.norms: list[float] = []
        self.clipped = 0
        self.tokens, self.time = 0, time.monotonic()
        self.filter = FilterSample()
        if args.log_statistics:
            self.filter.watch(accelerator.unwrap_model(model))

    def observe_gradients(self, model: Any) -> None:
        """After backward, before upstream clips: the norm of the whole gradient of this step."""
        if not (self.args.log_statistics and self.accelerator.sync_gradients):
            return
        if hasattr(model, "get_global_grad_norm"):  # DeepSpeed has taken its step in backward
            norm, limit = model.get_global_grad_norm(), model.gradient_clipping()
        else:
            # A limit of infinity scales by exactly 1 and works for every kind of sharding.
            norm = self.accelerator.clip_grad_norm_(model.parameters(), math.inf)
            limit = self.args.clip_grad_norm
        if norm is not None:
            self.norms.append(float(norm))
            self.clipped += 0 < limit < self.norms[-1]

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds this project's statistics to upstream's metrics, and logs both as one JSON line.

        All are of the steps since the last line: the mean norm before clipping and the largest one,
        the fraction of steps in which the norm was clipped, tokens per second over all ranks, and
        what the fused loss's filter did in the last micro-batch that the main process looked at.
        """
        if not self.args.log_statistics:
            return
        if self.norms:
            metrics["grad_norm"] = sum(self.norms) / len(self.norms)
            metrics["grad_norm_max"] = max(self.norms)
            metrics["clipped"] = self.clipped / len(self.norms)
        metrics.update(self.filter.take())
        tokens, now = metrics["total_tokens"], time.monotonic()
        metrics["tokens_per_s"] = (tokens - self.tokens) / (now - self.time)
        self.norms, self.clipped, self.tokens, self.time = [], 0, tokens, now
        if self.accelerator.is_main_process:
            row = {"step": step, "steps": self.args.max_train_steps, **metrics}
            logger.info("%s%s", PREFIX, json.dumps(row))

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


class FilterSample:
    """What the gradient filter does to one micro-batch in 20, at the price of one more forward."""

    def __init__(self) -> None:
        self.calls = 0
        self.found: tuple[Tensor, Tensor] | None = None

    def watch(self, model: Any) -> None:
        head = model.get_output_embeddings()
        if getattr(head, "_smoothce", {}).get("filter_eps") is not None:
            # First of the hooks: a later one of DeepSpeed's frees the classifier again.
            head.register_forward_hook(self._after_head, prepend=True)

    def _after_head(self, head: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) < 2:
            return
        self.calls += 1
        if self.calls % EVERY != 1:
            return
        hidden, labels = (
            inputs[0].detach().flatten(0, -2).to(head.weight.dtype),
            inputs[1].flatten(),
        )
        if explain(hidden, head.weight, bias=head.bias, **head._smoothce).startswith("triton"):
            from smoothce.triton import filter_statistics

            settings = {key: value for key, value in head._smoothce.items() if key != "impl"}
            self.found = filter_statistics(
                hidden, head.weight, labels, head.bias, Options(**settings)
            )

    def take(self) -> dict[str, float]:
        """The share of (token, block) pairs kept, and the mean softmax mass of a token's others."""
        found, self.found = self.found, None
        return {"kept_pairs": found[0].item(), "dropped_mass": found[1].item()} if found else {}

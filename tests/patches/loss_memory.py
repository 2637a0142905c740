"""GPU memory of the loss step inside a training run, and of the whole run."""

import json
from pathlib import Path
from typing import Any

import torch

import smoothce.models


class LossMemory:
    """Watches `linear_cross_entropy` in a patched model for a few calls, from the `first` on.

    The peak is what the loss allocates at most, forward to the end of its backward, beyond what
    was allocated when it was called; its two gradients are part of it.
    """

    def __init__(self, first: int = 5, calls: int = 4) -> None:
        self.watched = range(first, first + calls)
        self.call = 0
        self.rows: list[dict[str, Any]] = []
        self.whole = 0
        self.loss = smoothce.models.linear_cross_entropy
        smoothce.models.linear_cross_entropy = self._watch

    def _watch(self, hidden: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.call += 1
        if self.call not in self.watched:
            return self.loss(hidden, weight, *args, **kwargs)
        before = self._reset()
        loss = self.loss(hidden, weight, *args, **kwargs)
        peak = torch.cuda.max_memory_allocated() - before
        saved = self._reset() - before
        row = {
            "tokens": hidden[..., 0].numel(),
            "gradients": weight.nbytes + hidden.nbytes,
            "forward": peak,
            "saved": saved,
            "implementation": smoothce.explain(hidden, weight, **_options(kwargs)),
        }
        self.rows.append(row)

        def begin(_: Any) -> None:
            row["before"] = self._reset()

        def end(*_: Any) -> None:
            row["backward"] = saved + torch.cuda.max_memory_allocated() - row.pop("before")

        loss.grad_fn.register_prehook(begin)
        loss.grad_fn.register_hook(end)
        return loss

    def _reset(self) -> int:
        self.whole = max(self.whole, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def write(self, path: Path) -> None:
        self._reset()
        path.write_text(json.dumps({"whole": self.whole, "loss_steps": self.rows}))


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "ignore_index"}

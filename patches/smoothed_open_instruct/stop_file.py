"""How a sweep asks a run to save and to leave."""

import os
from typing import Any

import torch
import torch.distributed as dist


class StopFile:
    """The file that asks a run to stop while it exists; without a path, nobody asks.

    To be made after `prepare`, by all processes of the run.
    """

    def __init__(self, path: str | None, accelerator: Any) -> None:
        self.path = path
        self.accelerator = accelerator
        self._group: dist.ProcessGroup | None = None
        if path and dist.is_initialized():
            # Processes ask each other over gloo. An answer that lay on the GPU would have to be
            # waited for after every update.
            self._group = dist.new_group(backend="gloo")

    def asks_to_stop(self) -> bool:
        """Whether the first process sees the file; the same answer on every process.

        All processes have to call it, each after the same updates.
        """
        if not self.path:
            return False
        is_seen = self.accelerator.is_main_process and os.path.exists(self.path)
        if not dist.is_initialized():
            return is_seen
        seen_by = torch.tensor(int(is_seen))  # how many processes see it: the first one or none
        dist.all_reduce(seen_by, group=self._group)
        return bool(seen_by > 0)

    def leave(self, step: int) -> None:
        """Say why the run ends after this step, whose checkpoint is written, and close trackers."""
        self.accelerator.print(
            f"{self.path} exists: stopped after step {step}, checkpoint saved; "
            "the same command continues from it once the file is gone"
        )
        self.accelerator.end_training()

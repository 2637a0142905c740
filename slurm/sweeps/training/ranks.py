"""What a training process knows of its place among the processes (ranks) of its run."""

import os

from accelerate import PartialState


def this_rank() -> int:
    """The number of this process among those of the run, from 0; torchrun sets it."""
    return int(os.environ.get("RANK", "0"))


def print_once(text: str) -> None:
    """Print on the first rank only."""
    if PartialState().is_main_process:  # its `print` would print once on each node
        print(text, flush=True)

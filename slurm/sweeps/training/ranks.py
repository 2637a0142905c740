"""What a training process knows of its place among the processes (ranks) of its run."""

import os
import time

import psutil


def this_rank() -> int:
    """The number of this process among those of the run, from 0; torchrun sets it."""
    return int(os.environ.get("RANK", "0"))


def print_once(text: str) -> None:
    """Print on the first rank only."""
    if this_rank() == 0:
        print(text, flush=True)


def seconds_since_start() -> float:
    """How long ago this process was started."""
    return time.time() - psutil.Process().create_time()

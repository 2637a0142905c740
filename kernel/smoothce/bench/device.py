"""Time and memory of steps, on a GPU ("cuda") and on a CPU ("cpu": of this process, by Linux)."""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

Step = Callable[[], object]


def milliseconds(step: Step, calls: int, device: str) -> float:
    """Per call of several in a row, as in training: nothing waits between them."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        return 1e3 * (time.perf_counter() - begin) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def peaks(device: str, *steps: Step) -> list[int]:
    """Most bytes held during each of these steps beyond what was there before the first."""
    tidy(device)
    before, most = _held(device), []
    for step in steps:
        if device == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        else:
            torch.cuda.reset_peak_memory_stats()
        step()
        most.append(_most(device) - before)
    return most


def tidy(device: str) -> None:
    """Give back what was freed."""
    gc.collect()
    if device == "cpu":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)  # glibc's alone
    else:
        torch.cuda.empty_cache()


def _held(device: str) -> int:
    return _status("VmRSS") if device == "cpu" else torch.cuda.memory_allocated()


def _most(device: str) -> int:
    return _status("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

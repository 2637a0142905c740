"""Which kernels a step runs on the GPU, and how long each takes, by torch's profiler."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def kernel_times(step: Callable[[], object], calls: int) -> list[dict]:
    """Launches and milliseconds of each kernel in one call: the mean of several in a row."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    return by_kernel(found.key_averages(), calls)


def by_kernel(events: Iterable, calls: int) -> list[dict]:
    """The GPU's part of the profiler's averages, which have the host's calls as well."""
    rows = [
        {
            "kernel": event.key,
            "launches": event.count / calls,
            "ms": event.self_device_time_total / 1e3 / calls,
        }
        for event in events
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(rows, key=lambda row: -row["ms"])

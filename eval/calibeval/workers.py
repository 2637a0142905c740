"""Several scoring processes on one machine, each with a part of the questions and its own GPU."""

import os
import subprocess
import sys

from calibeval.io import InputError


def run_workers(count: int, arguments: list[str]) -> None:
    """Run this command `count` times with --shard I/N; the last process to finish merges."""
    command = [sys.executable, "-m", "calibeval", *without_workers(arguments)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(count)]
    if len(gpus) < count:
        raise InputError(
            f"--workers {count}: CUDA_VISIBLE_DEVICES lists {len(gpus)} GPUs, {visible}"
        )
    processes = [
        subprocess.Popen(
            [*command, "--shard", f"{i}/{count}"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus[i]},
        )
        for i in range(count)
    ]
    try:
        failed = [i for i, process in enumerate(processes) if process.wait()]
    finally:
        for process in processes:
            process.terminate()
    if failed:
        raise InputError(
            f"worker {failed[0]} of {count} failed (its message is above); "
            f"run the same command again to go on from the finished shards"
        )


def without_workers(arguments: list[str]) -> list[str]:
    """The command line without --workers, and without --overwrite, which would race."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument == "--overwrite" or argument.startswith("--workers="):
            skip = False
        elif argument == "--workers":
            skip = True
        else:
            kept.append(argument)
    return kept

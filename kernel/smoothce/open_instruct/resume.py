"""Continuing a run: from which checkpoint and batch, and whether anything is left to do."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TRAINED = "TRAINED"


def get_last_checkpoint_path(args: Namespace, incomplete: bool = False) -> str | None:
    """The checkpoint to continue from, or with `incomplete` the one just written; None if none.

    Steps are compared as numbers (upstream compares them as text, so that step_900 comes after
    step_1000), and steps are preferred to epochs, as upstream does.
    """
    output = Path(args.output_dir) if args.output_dir else None
    if output is not None and output.is_dir() and (incomplete or not args.overwrite_output_dir):
        folders = [path for path in output.iterdir() if _number(path) is not None]
        if incomplete:
            newest = max(folders, key=lambda path: path.stat().st_mtime_ns, default=None)
        else:
            complete = [path for path in folders if (path / "COMPLETED").is_file()]
            newest = max(
                complete,
                key=lambda path: (path.name.startswith("step_"), _number(path)),
                default=None,
            )
        return None if newest is None else str(newest)
    return args.resume_from_checkpoint or None


def resumed_batches(loader: Any, epoch: int, skipped: int) -> Iterator[Any]:
    """The rest of an interrupted epoch: the order of that epoch, and the saved random numbers.

    accelerate's loader without the batches already seen shuffles as if it were epoch 0, and
    starting to iterate draws a random number: the interrupted run drew it before the checkpoint
    (unless that lay between two epochs), so drawing again would move every later dropout mask.
    """
    loader.set_epoch(epoch)
    state = torch.get_rng_state()
    for position, batch in enumerate(loader):
        if position == 0 and skipped:
            torch.set_rng_state(state)
        yield batch


def already_trained(args: Namespace) -> bool:
    """Whether this output folder holds the finished model of an earlier run of the same job.

    Where that model is to be overwritten, its mark goes first.
    """
    mark = Path(args.output_dir or os.devnull) / TRAINED
    if args.overwrite_output_dir and args.output_dir:
        mark.unlink(missing_ok=True)
    if not mark.is_file():
        return False
    print(
        f"{args.output_dir} already holds the trained model: nothing to do "
        "(--overwrite_output_dir trains it again)"
    )
    return True


def mark_trained(accelerator: Any, args: Namespace, completed_steps: int) -> None:
    """Marks the output folder as finished, before upstream deletes the checkpoints."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and args.output_dir:
        temporary = Path(args.output_dir) / f".{TRAINED}"
        with temporary.open("w") as file:
            file.write(f"{completed_steps}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(Path(args.output_dir) / TRAINED)


def _number(path: Path) -> int | None:
    match = re.fullmatch(r"(?:step|epoch)_(\d+)", path.name)
    return int(match[1]) if match and path.is_dir() else None

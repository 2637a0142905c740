"""Continuing a run: from which checkpoint and batch, and whether anything is left to do."""

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibeval.io import write_text
from smoothed_open_instruct.arguments import refuse

TRAINED = "TRAINED"
ASKED = "asked.json"  # the settings that decide the model
SETTINGS = ("model_name_or_path", "train_file", "dataset_name", "dataset_mixer_list", "seed")
SETTINGS += ("label_smoothing", "reduce_loss", "filter_eps", "learning_rate", "num_train_epochs")
SETTINGS += ("max_train_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
COMPLETED = "COMPLETED"  # in a checkpoint that every process has written


@dataclass
class Checkpoints:
    """The checkpoints of one run: which to continue from, which is whole, which are to go."""

    args: Namespace
    accelerator: Any
    steps_per_epoch: int
    written: str | None = None

    def last(self, args: Namespace, incomplete: bool = False) -> str | None:
        """The furthest complete checkpoint, or with `incomplete` the one just written; or None.

        Upstream compares numbers as text, so that step_900 comes after step_1000, prefers any step
        to any epoch, and takes the folder changed last for the one just written: while another
        process deletes an old one, that is the wrong one.
        """
        if incomplete:
            return self.written
        if os.path.isdir(args.output_dir or "") and not args.overwrite_output_dir:
            complete = [path for path in _folders(args.output_dir) if (path / COMPLETED).is_file()]
            return str(max(complete, key=self._steps)) if complete else None
        return args.resume_from_checkpoint or None

    def saved(self, folder: str) -> None:
        """Waits until every process has written its part of `folder`, which then is complete."""
        self.accelerator.wait_for_everyone()
        self.written = folder

    def clean(self, output_dir: str, keep_last_n_checkpoints: int) -> None:
        """Deletes all but the furthest checkpoints; first those that a kill left incomplete."""
        folders = sorted(
            _folders(output_dir), key=lambda path: ((path / COMPLETED).is_file(), self._steps(path))
        )
        delete(folders[: max(len(folders) - keep_last_n_checkpoints, 0)])

    def _steps(self, folder: Path) -> int:
        kind, number = folder.name.split("_")
        return int(number) if kind == "step" else (int(number) + 1) * self.steps_per_epoch


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

    One of another job, finished or not, is refused. Checkpoints that a kill has left beside the
    model go. Where the model is to be overwritten, its mark goes first, and those of checkpoints.
    """
    if not args.output_dir:
        return False
    output, asked = Path(args.output_dir), {key: str(getattr(args, key, None)) for key in SETTINGS}
    if args.overwrite_output_dir:
        for mark in (output / TRAINED, *output.glob(f"*_*/{COMPLETED}")):
            mark.unlink(missing_ok=True)
    elif (output / ASKED).is_file():
        before = json.loads((output / ASKED).read_text())
        if changed := [key for key in SETTINGS if before.get(key) != asked[key]]:
            said = ", ".join(f"{key} {before.get(key)}, now {asked[key]}" for key in changed)
            refuse(f"{output} holds a run with {said}: another --output_dir, or "
                   "--overwrite_output_dir True")  # fmt: skip
    first = os.environ.get("RANK", "0") == "0"
    if first:
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / ASKED, json.dumps(asked, indent=2))
    if not (output / TRAINED).is_file():
        return False
    if first:
        delete(_folders(output))
    print(f"{output} already holds the trained model: nothing to do "
          "(--overwrite_output_dir trains it again)")  # fmt: skip
    return True


def mark_trained(accelerator: Any, args: Namespace, completed_steps: int) -> None:
    """Marks the output folder as finished, before upstream deletes the checkpoints."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and args.output_dir:
        write_text(Path(args.output_dir) / TRAINED, f"{completed_steps}\n")


def delete(folders: Iterable[Path]) -> None:
    """Deletes checkpoints; one that is half deleted when a kill comes is no complete one."""
    for folder in folders:
        (folder / COMPLETED).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # another machine may delete it too


def _folders(output: str | Path) -> list[Path]:
    name = re.compile(r"(step|epoch)_\d+")
    return [path for path in Path(output).iterdir() if name.fullmatch(path.name) and path.is_dir()]

"""Continuing a run: from which checkpoint and batch, and whether anything is left to do."""

import hashlib
import json
import os
import re
import secrets
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothed_open_instruct.arguments import refuse

TRAINED = "TRAINED"  # in the output folder, once it holds the finished model
COMPLETED = "COMPLETED"  # in a checkpoint that every process has written
SETTINGS_FILE = "asked.json"
# The flags that decide what is trained, apart from how it is computed: precision, and kernels that
# are exact, as each `loss_impl` is. `filter_eps` is among them: it draws parts of gradients at
# random. Another value of one of them is another run. A flag that the script does not have counts
# as None.
SETTINGS = (
    "model_name_or_path",
    "model_revision",
    "config_name",
    "additional_model_arguments",
    "tokenizer_name",
    "tokenizer_revision",
    "use_slow_tokenizer",
    "chat_template_name",
    "add_bos",
    "train_file",
    "dataset_name",
    "dataset_mixer",
    "dataset_mixer_list",
    "dataset_mixer_list_splits",
    "dataset_transform_fn",
    "max_train_samples",
    "max_seq_length",
    "packing",
    "seed",
    "label_smoothing",
    "reduce_loss",
    "filter_eps",
    "load_balancing_loss",
    "load_balancing_weight",
    "attention_dropout",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_ratio",
    "final_lr_ratio",
    "weight_decay",
    "clip_grad_norm",
    "num_train_epochs",
    "max_train_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "use_lora",
    "use_qlora",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
)
# What decides it besides: an update has per_device_train_batch_size conversations of each process,
# and the number of a checkpoint's step says which batches come next.
PROCESSES = "number of processes"
DATA = "SHA-256 of the data"


@dataclass
class Checkpoints:
    """The checkpoints of one run: which to continue from, which is whole, which are to go.

    `last` and `clean` take the places of upstream's `get_last_checkpoint_path` and
    `clean_last_n_checkpoints`, and so have their parameters.
    """

    args: Namespace
    accelerator: Any
    steps_per_epoch: int
    written: str | None = None  # the folder of the checkpoint that was written last

    def last(self, args: Namespace, incomplete: bool = False) -> str | None:
        """What upstream asks `get_last_checkpoint_path` for.

        With `incomplete` that is the checkpoint that was just written, to mark it COMPLETED.
        Upstream takes the folder that was changed last, which is wrong while another process
        deletes an old one. Without, it is where the run continues.
        """
        return self.written if incomplete else self.furthest(args)

    def furthest(self, args: Namespace) -> str | None:
        """Where the run continues: the folder of a checkpoint, or None to begin from scratch.

        That is the furthest complete checkpoint of the output folder, unless it is to be
        overwritten; where there is none, the one that `--resume_from_checkpoint` names. Upstream
        looks at that flag only where there is no output folder, which `already_trained` has made by
        now. Upstream also compares numbers as text, so that step_900 comes after step_1000, and
        prefers any step to any epoch.
        """
        complete: list[Path] = []
        if os.path.isdir(args.output_dir or "") and not args.overwrite_output_dir:
            folders = checkpoint_folders(args.output_dir)
            complete = [folder for folder in folders if _is_complete(folder)]
        if complete:
            return str(max(complete, key=self._steps))
        return args.resume_from_checkpoint or None

    def finish_saving(self, folder: str) -> None:
        """Wait until every process has written its part of `folder`, and all of it is on the disk.

        All processes have to call it. Upstream's next lines mark the folder COMPLETED, and that
        mark must not survive a power cut that the checkpoint itself does not survive.
        """
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            flush_to_disk(Path(folder))
        self.accelerator.wait_for_everyone()
        self.written = folder

    def clean(self, output_dir: str, keep_last_n_checkpoints: int) -> None:
        """Delete all but the furthest checkpoints; first those that a kill left incomplete.

        A negative number keeps all of them, as upstream's flag says of -1, with which its own
        function would delete them all. Upstream calls this with 0 once the model is saved.
        """
        if keep_last_n_checkpoints < 0:
            return
        folders = checkpoint_folders(output_dir)
        folders.sort(key=lambda folder: (_is_complete(folder), self._steps(folder)))
        surplus = max(len(folders) - keep_last_n_checkpoints, 0)
        delete(folders[:surplus])

    def _steps(self, folder: Path) -> int:
        """The optimizer steps that a checkpoint step_N or epoch_N (from 0) comes after."""
        kind, number = folder.name.split("_")
        if kind == "step":
            return int(number)
        return (int(number) + 1) * self.steps_per_epoch


def resumed_batches(loader: Any, epoch: int, skipped: int) -> Iterator[Any]:
    """Iterate what is left of an epoch as the uninterrupted run would have.

    `loader` is what `accelerator.skip_first_batches` has just given upstream, and `skipped` the
    number of the epoch's first batches that it leaves out. It is 0 where the run continues from the
    end of an epoch.

    `skip_first_batches` makes a new loader, which knows of no epoch, and would shuffle as in epoch
    0. So it is told the epoch.

    To start iterating draws one random number. Where batches are skipped, the interrupted run had
    drawn it before its checkpoint; drawn once more it would move every later dropout mask, so that
    the random state is put back after the first batch. Where none is skipped, the checkpoint lay
    between two epochs, and the uninterrupted run draws the number here too.
    """
    loader.set_epoch(epoch)
    state = torch.get_rng_state()
    for position, batch in enumerate(loader):
        if position == 0 and skipped > 0:
            torch.set_rng_state(state)
        yield batch


def already_trained(args: Namespace) -> bool:
    """Claim the output folder for this job, and tell whether the job's finished model is there.

    That is the model of an earlier run of the same job, beside which a kill may have left
    checkpoints: they are deleted. `_claim_output_folder` says what else is written and refused.
    """
    if not args.output_dir:
        return False
    output = Path(args.output_dir)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    _claim_output_folder(output, args, is_first_rank=is_first_rank)
    if not (output / TRAINED).is_file():
        return False
    if is_first_rank:
        delete(checkpoint_folders(output))
    print(
        f"{output} already holds the trained model: nothing to do "
        "(--overwrite_output_dir trains it again)"
    )
    return True


def _claim_output_folder(output: Path, args: Namespace, *, is_first_rank: bool) -> None:
    """Note in the output folder which job's it is, or end the process where it is another one's.

    The first rank makes the folder, and writes the job's settings to its SETTINGS_FILE. Other
    settings that an earlier run has noted there are another job's, and end the process, whether
    that run is finished or not. With `--overwrite_output_dir` the folder may be any job's: the
    marks of its model and of its checkpoints are deleted, so that none of these is taken for this
    job's. A `keep_last_n_checkpoints` of 0 or None ends the process too, whatever is in the folder.
    """
    if getattr(args, "keep_last_n_checkpoints", 1) in (None, 0):
        refuse(
            "keep_last_n_checkpoints: 0 keeps nothing to continue from; 1 or more, or -1 for all"
        )
    settings = settings_of(args)
    if args.overwrite_output_dir:
        for mark in (output / TRAINED, *output.glob(f"*_*/{COMPLETED}")):
            mark.unlink(missing_ok=True)
    else:
        _refuse_another_run(output, settings)
    if is_first_rank:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / SETTINGS_FILE, json.dumps(settings, indent=2))


def settings_of(args: Namespace) -> dict[str, str]:
    """What decides a run, each as text: the flags, the number of processes, the data's bytes."""
    settings = {name: str(getattr(args, name, None)) for name in SETTINGS}
    settings[PROCESSES] = os.environ.get("WORLD_SIZE", "1")  # by torchrun and accelerate launch
    digest = data_digest(args)
    if digest is not None:
        settings[DATA] = digest
    return settings


def data_digest(args: Namespace) -> str | None:
    """16 hexadecimal digits of the SHA-256 of all local data files that the flags name, in order.

    None where no flag names a file, as with data of the hub.
    """
    names = [
        getattr(args, "train_file", None),
        *(getattr(args, "dataset_mixer", None) or []),
        *(getattr(args, "dataset_mixer_list", None) or []),
    ]
    files = [name for name in names if isinstance(name, str) and os.path.isfile(name)]
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def _refuse_another_run(output: Path, settings: dict[str, str]) -> None:
    """End the process if the folder was begun by a run with other settings."""
    if not (output / SETTINGS_FILE).is_file():
        return
    before = json.loads((output / SETTINGS_FILE).read_text())
    changes = [
        f"{name} {before.get(name)}, now {setting}"
        for name, setting in settings.items()
        if before.get(name) != setting
    ]
    if changes:
        refuse(
            f"{output} holds a run with {', '.join(changes)}: another --output_dir, or "
            "--overwrite_output_dir True"
        )


def mark_trained(accelerator: Any, args: Namespace, completed_steps: int) -> None:
    """Mark the output folder as finished, before upstream deletes the checkpoints.

    The model reaches the disk before the mark does: after a power cut nothing else is left of it.
    """
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and args.output_dir:
        output = Path(args.output_dir)
        checkpoints = checkpoint_folders(output)
        for path in output.iterdir():
            if path not in checkpoints:
                flush_to_disk(path)
        write_whole(output / TRAINED, f"{completed_steps}\n")


def delete(folders: Iterable[Path]) -> None:
    """Delete checkpoints; one that is half deleted when a kill comes is no complete one."""
    for folder in folders:
        (folder / COMPLETED).unlink(missing_ok=True)
        # A process on another machine may be deleting the same folder.
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_folders(output: str | Path) -> list[Path]:
    """The folders step_N and epoch_N of an output folder, whole or not."""
    name = re.compile(r"(step|epoch)_\d+")
    return [path for path in Path(output).iterdir() if name.fullmatch(path.name) and path.is_dir()]


def _is_complete(folder: Path) -> bool:
    return (folder / COMPLETED).is_file()


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a folder with all that it holds, has reached the disk."""
    for part in [*path.rglob("*"), path]:
        if not part.is_symlink():
            _flush_one(part)


def _flush_one(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that a kill leaves either whole or as it was."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _flush_one(path.parent)

"""Checkpoints that are either whole or not there.

How a run of backend trainer is stopped and goes on:

1. `sweeps.launch.worker` touches the file `stop` in the run's folder, or a signal arrives.
2. After the update, all ranks agree (`callbacks.StopSignal`), and the Trainer saves.
3. `sft_trainer` writes checkpoints/.part/, which `publish_checkpoint` renames to step-N.
4. `fit` exits with 75, by which worker and job tell a stop from an end; on Slurm the job requeues.
5. The next attempt takes the newest whole step-N (`latest_checkpoint`), and skips N updates: which
   conversations an update has follows from its number (`micro_batches`). `callbacks` drops rows
   of metrics.jsonl after N, which are about to be repeated.
6. At the end `saving` writes model/, and the worker deletes checkpoints/ and writes DONE.

The last update has no checkpoint: whoever asks for a stop after it gets the model. Only a kill or a
full disk before model/ is there makes the next attempt repeat the updates since the last
checkpoint. One more checkpoint of 12 bytes a weight in every run would be dearer than that.

A checkpoint is a folder checkpoints/step-N/ on the file system that all nodes share. It gets this
name once the first node has flushed its files to the disk. What ranks on other nodes have written
is flushed by those nodes themselves, which nobody waits for.

Its state.json lists the sizes of the other files. A full disk, a power cut or a copy that was
interrupted cuts files off, which their sizes show. A SHA-256 of 15 GB would keep all ranks waiting
for eight seconds.

It holds what transformers saves: weights, or adapters alone; the optimizer, the schedule and the
random state of each rank; under DeepSpeed and FSDP in parts. Not in it, because it follows from
the step and the config: which conversations come next.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibeval.io import InputError, parse_json, read_text, write_text
from sweeps.runs.files import is_disk_full, replace_folder

STATE = "state.json"
PART = ".part"  # the folder in checkpoints/ in which the next checkpoint is being written


@contextlib.contextmanager
def deleted_on_failure(part: Path) -> Iterator[None]:
    """Delete the unfinished folder `part` if writing it fails, so that it does not fill the disk.

    Raises InputError where the disk is full, and else what the writing has raised.
    """
    try:
        yield
    except Exception as error:
        # Asked before the deleting, which makes room. Even the folder that is to hold `part` may be
        # missing, where the disk was too full to make it.
        existing_folder = next(folder for folder in part.absolute().parents if folder.exists())
        was_full = is_disk_full(existing_folder)
        shutil.rmtree(part, ignore_errors=True)
        if was_full:
            raise InputError(
                f"{part}: the disk is full ({error}); make room and launch again, which goes on "
                "from the newest checkpoint"
            ) from error
        raise


def publish_checkpoint(source: Path, destination: Path, data_digest: str, keep_last: int) -> None:
    """Turn the folder `source` into the checkpoint `destination`, and delete older ones.

    `data_digest` names what the run trains on; `latest_checkpoint` refuses checkpoints of other
    data. `keep_last` is the number of checkpoints that stay. The older ones go last, so that for a
    moment one more than `keep_last` lies on the disk.
    """
    state = {"data": data_digest, "sizes": file_sizes(source)}
    write_text(source / STATE, json.dumps(state))
    replace_folder(source, destination)
    for old in checkpoints_newest_first(destination.parent)[keep_last:]:
        shutil.rmtree(old, ignore_errors=True)


def latest_checkpoint(checkpoints: Path, data_digest: str) -> Path | None:
    """The newest whole checkpoint, or None; damaged ones are set aside with a message.

    Raises InputError if the newest whole one was written with other data.
    """
    for folder in checkpoints_newest_first(checkpoints):
        state = _read_state(folder)
        if not _is_whole(folder, state):
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            print(f"checkpoint: {folder}: damaged; set aside as {aside.name}", flush=True)
            continue
        if state["data"] != data_digest:
            raise InputError(
                f"{folder}: written with other data or smoothing_target, {state['data']}, now "
                f"{data_digest}; restore that (after an upgrade of transformers or tokenizers the "
                f"former version), or delete {checkpoints.parent} to train from the start"
            )
        return folder
    return None


def checkpoints_newest_first(checkpoints: Path) -> list[Path]:
    """The checkpoint folders in `checkpoints`, whole or not, by descending step."""
    steps = {}
    for folder in checkpoints.glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdigit():
            steps[int(number)] = folder
    return [steps[step] for step in sorted(steps, reverse=True)]


def file_sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of every file of a checkpoint but state.json."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != STATE
    }


def _read_state(folder: Path) -> dict[str, Any]:
    """What state.json holds; empty where it is absent or damaged."""
    try:
        state = parse_json(read_text(folder / STATE))
    except (InputError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _is_whole(folder: Path, state: dict[str, Any]) -> bool:
    """Whether the folder holds exactly the files that its state.json lists, none of them cut."""
    return state.get("sizes") == file_sizes(folder)

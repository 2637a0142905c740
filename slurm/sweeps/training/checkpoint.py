"""Checkpoints that are either whole or not there: checkpoints/step-N/ with its files' checksums."""

import contextlib
import json
import shutil
from pathlib import Path

from calibeval.io import InputError, read_text, sha256, write_text
from sweeps.runs.files import replace_folder

STATE = "state.json"  # written last: of what data, and what each file's SHA-256 must be


def keep(made: Path, folder: Path, data: str, newest: int) -> None:
    """Make the finished folder `made` the checkpoint `folder`; only the `newest` ones stay."""
    write_text(made / STATE, json.dumps({"data": data, "files": sums(made)}))
    replace_folder(made, folder)
    for old in saved(folder.parent)[newest:]:
        shutil.rmtree(old, ignore_errors=True)


def latest(checkpoints: Path, data: str) -> Path | None:
    """The newest whole checkpoint; damaged ones are set aside with a message.

    Raises InputError if it was written with other `data`.
    """
    for folder in saved(checkpoints):
        found = {}
        with contextlib.suppress(InputError, ValueError):
            found = json.loads(read_text(folder / STATE))
        if found.get("files") != sums(folder):
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            print(f"checkpoint: {folder}: damaged; set aside as {aside.name}", flush=True)
            continue
        if found["data"] != data:
            raise InputError(
                f"{folder}: written with other data or smoothing_target, {found['data']}, now "
                f"{data}; restore that, or delete {checkpoints.parent} to train from the start"
            )
        return folder
    return None


def saved(checkpoints: Path) -> list[Path]:
    """Checkpoints, newest first."""
    found = [p for p in checkpoints.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != STATE)
    return {str(path.relative_to(folder)): sha256(path) for path in files}

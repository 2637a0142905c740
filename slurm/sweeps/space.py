"""Disk space: what a sweep will need at its fullest, and what the disk and the quotas leave."""

import getpass
import json
import os
import shutil
import subprocess
from pathlib import Path

from calibeval.io import counted
from sweeps.assets import hub_snapshot
from sweeps.config import Sweep
from sweeps.grid import Cell
from sweeps.rundir import RunDir

LEAST = 50 << 20  # below this nothing sensible can be written
WIDTHS = {"float32": 4, "float64": 8}  # bytes a parameter of other types: 2


def size(count: float) -> str:
    """Bytes as people say them."""
    return f"{count / (1 << 20):.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


def parameters(model: str) -> int:
    """Parameters of a model on this disk, from its files' sizes; 0 if it is not here."""
    folder = Path(model) if Path(model).is_dir() else hub_snapshot(model)
    if folder is None:
        return 0
    for pattern in ("*.safetensors", "*.bin"):
        total = sum(path.stat().st_size for path in folder.glob(pattern))
        if total:
            config = folder / "config.json"
            read = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
            return total // WIDTHS.get(read.get("dtype") or read.get("torch_dtype"), 2)
    return 0


def needed(sweep: Sweep, cells: list[Cell], at_once: int) -> tuple[int, str]:
    """Bytes that the runs still to do write at their fullest, and how that comes about.

    A checkpoint holds fp32 weights and two AdamW moments, 12 bytes a parameter (with DeepSpeed's
    bf16 copy 14); a run holds one more than it keeps while it writes the next. A model: 4 bytes.
    """
    todo = [cell for cell in cells if not RunDir(cell.folder).done]
    if not todo:
        return 0, ""
    sizes = {}
    for cell in todo:
        name = cell.config.train["model_name_or_path"]
        if name not in sizes:
            sizes[name] = parameters(name)
    each = [sizes[cell.config.train["model_name_or_path"]] for cell in todo]
    width = 14 if sweep.world.deepspeed else 12
    kept = [
        width * count * (cell.config.train.get("keep_last_n_checkpoints", 3) + 1)
        for count, cell in zip(each, todo, strict=True)
    ]
    busy = sorted(kept, reverse=True)[:at_once]
    if sweep.keep == "scores":
        each = sorted(each, reverse=True)[:at_once]
    why = (
        f"checkpoints of {counted(len(busy), 'run')} at a time {size(sum(busy))}, "
        f"{counted(len(each), 'model')} {size(4 * sum(each))}"
    )
    return max(LEAST, sum(busy) + 4 * sum(each)), why


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place


def free(folder: Path) -> tuple[int, str]:
    """Bytes that may still be written below `folder`, and what says so: the disk, or a quota."""
    found = [(shutil.disk_usage(folder).free, "free on the disk")]
    mount = folder
    while not os.path.ismount(mount):
        mount = mount.parent
    user = getpass.getuser()
    for command in (
        ["lfs", "quota", "-q", "-u", user, str(mount)],
        ["quota", "--no-wrap", "--filesystem", str(mount)],
    ):
        left = _quota(command)
        if left is not None:
            found.append((left, f"left of the quota ({' '.join(command)})"))
    return min(found)


def _quota(command: list[str]) -> int | None:
    """What both tools print: a line of file system, KiB used, soft limit, hard limit, …"""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in done.stdout.splitlines():
        numbers = [word.rstrip("*") for word in line.split()[1:4]]
        if len(numbers) == 3 and all(word.isdigit() for word in numbers):
            used, soft, hard = map(int, numbers)
            if soft or hard:
                return max(0, (hard or soft) - used) << 10
    return None

"""Disk space: what a sweep will need at its fullest, and what the disk and the quotas leave."""

import getpass
import os
import re
import shutil
from pathlib import Path

from calibeval.io import counted
from sweeps.assets import hub_snapshot
from sweeps.config import Sweep
from sweeps.files import read_json
from sweeps.plan import Cell
from sweeps.provenance import output
from sweeps.rundir import RunDir

LEAST = 50 << 20  # below this nothing sensible can be written
WIDTHS = {"float32": 4, "float64": 8}  # bytes a parameter of other types: 2


def size(count: float) -> str:
    """Bytes as people say them."""
    return f"{count / (1 << 20):.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


def parameters(model: str) -> int:
    """Parameters of a model on this disk, from its files' sizes; 0 if it is not here."""
    folder = Path(model) if Path(model).is_dir() else hub_snapshot(model)
    if folder is None or not (folder / "config.json").is_file():
        return 0
    config = read_json(folder / "config.json")
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    width = WIDTHS.get(config.get("dtype") or config.get("torch_dtype"), 2)
    return sum(path.stat().st_size for path in files) // width


def needed(sweep: Sweep, cells: list[Cell], at_once: int) -> tuple[int, str]:
    """Bytes that the runs still to do write at their fullest, and how that comes about.

    A checkpoint holds fp32 weights and two AdamW moments, 12 bytes a parameter (with DeepSpeed's
    bf16 copy 14); a run holds one more than it keeps while it writes the next. A model: 4 bytes.
    """
    todo = [cell.config.train for cell in cells if not RunDir(cell.folder).done]
    if not todo:
        return 0, ""
    models = {train["model_name_or_path"] for train in todo}
    sizes = {model: parameters(model) for model in models}
    each = [sizes[train["model_name_or_path"]] for train in todo]
    width = 14 if sweep.world.deepspeed else 12
    kept = [
        width * count * (train.get("keep_last_n_checkpoints", 3) + 1)
        for count, train in zip(each, todo, strict=True)
    ]
    busy = sorted(kept, reverse=True)[:at_once]
    if sweep.keep == "scores":
        each = sorted(each, reverse=True)[:at_once]
    why = (
        f"checkpoints of {counted(len(busy), 'run')} at a time {size(sum(busy))}, "
        f"{counted(len(each), 'model')} {size(4 * sum(each))}"
    )
    return max(LEAST, sum(busy) + 4 * sum(each)), why


def free(folder: Path) -> tuple[int, str]:
    """Bytes that may still be written below `folder`, and what says so: the disk, or a quota."""
    found = [(shutil.disk_usage(folder).free, "free on the disk")]
    mount = next(str(place) for place in (folder, *folder.parents) if os.path.ismount(place))
    lustre = ["lfs", "quota", "-q", "-u", getpass.getuser(), mount]
    for command in (lustre, ["quota", "--no-wrap", "--filesystem", mount]):
        # Both print a line of file system, KiB used, soft limit, hard limit, …
        for numbers in re.findall(
            r"^\s*\S+\s+(\d+)\*?\s+(\d+)\*?\s+(\d+)", output(*command) or "", re.M
        ):
            used, soft, hard = map(int, numbers)
            if soft or hard:
                left = max(0, (hard or soft) - used) << 10
                found.append((left, f"left of the quota ({' '.join(command)})"))
    return min(found)

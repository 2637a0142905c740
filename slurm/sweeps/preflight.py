"""Everything that would stop a sweep later, found and named before anything is queued."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

from sweeps import assets
from sweeps.backends import get_backend
from sweeps.cluster import Cluster, load_cluster
from sweeps.config import Sweep
from sweeps.grid import Cell
from sweeps.rundir import RunDir

FREE_BYTES = 50 << 20  # below this nothing sensible can be written


def problems(sweep: Sweep, cells: list[Cell], executor: str) -> list[str]:
    """One sentence a problem; empty when everything is there."""
    cluster = load_cluster(sweep.cluster) if executor == "slurm" else Cluster()
    assets.use_cache(cluster)
    found: list[str] = assets.missing(assets.of_sweep(sweep, cells))
    kinds = {}  # runs that differ in a number only need the same things
    for cell in cells:
        if not RunDir(cell.folder).done:
            kinds.setdefault(_needs(cell), cell.config)
    for config in kinds.values():
        found += get_backend(config.backend).missing(config.keys, config.world)
    for task in sweep.score.tasks if sweep.score else ():
        if not Path(task.data).exists():
            found.append(f"score.tasks: {task.key}: data: {task.data}: no such file or folder")
    found += _folder(Path(sweep.output_root))
    if executor == "slurm":
        found += _slurm(cluster) + _secrets(cluster)
    return list(dict.fromkeys(found))


def _needs(cell: Cell) -> str:
    numbers = ("seed", "learning_rate", "label_smoothing")
    return repr({k: v for k, v in cell.config.train.items() if k not in numbers})


def _folder(root: Path) -> list[str]:
    place = root.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return [f"output_root: {root}: {place} is a file"]
    if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        return [f"output_root: {root}: {place} is not writable"]
    free = shutil.disk_usage(place).free
    if free < FREE_BYTES:
        return [f"output_root: {root}: {free >> 20} MiB free, {FREE_BYTES >> 20} MiB expected"]
    return []


def _slurm(cluster: Cluster) -> list[str]:
    for tool in ("sbatch", "squeue", "scontrol"):
        if shutil.which(tool) is None:
            return [f"{tool} is not on the PATH: run this on a login node, or --executor local"]
    found = []
    if cluster.partition:
        known = _lines("sinfo", "--noheader", "--format=%R")
        if known is not None and cluster.partition not in known:
            found.append(
                f"cluster.partition: {cluster.partition}: unknown; known: {', '.join(known)}"
            )
    if cluster.account and shutil.which("sacctmgr"):
        known = _lines(
            "sacctmgr", "--noheader", "--parsable2", "show", "associations",
            f"user={os.environ.get('USER', '')}", "format=account",
        )  # fmt: skip
        if known and cluster.account not in known:
            found.append(
                f"cluster.account: {cluster.account}: not yours; yours: "
                + ", ".join(sorted(set(known)))
            )
    return found


def _secrets(cluster: Cluster) -> list[str]:
    if not cluster.secrets_file:
        return []
    path = Path(os.path.expandvars(cluster.secrets_file)).expanduser()
    if not path.is_file():
        return [f"cluster.secrets_file: {path}: no such file"]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode != 0o600:
        return [f"cluster.secrets_file: {path}: mode {mode:o}, expected 600; chmod 600 {path}"]
    return []


def _lines(*arguments: str) -> list[str] | None:
    """A command's output, or None where it does not answer (no accounting, no controller)."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split() if done.returncode == 0 else None

"""The code that a launch runs: a copy in the sweep's folder.

A checkout that changes while jobs are queued then changes nothing about them. Only our own packages
are copied: a backend of the user's own runs as it is when a job begins.
"""

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from sweeps.runs.processes import run_or_empty

PACKAGES = ("smoothce", "smoothed_open_instruct", "calibeval", "sweeps")
IGNORED = ("__pycache__", "*.pyc")


def snapshot(sweep: Path) -> Path:
    """Copy our packages to `<sweep>/code/<hash of their files>/`, unless they are there.

    Returns that folder. COMMIT in it says which commit the packages are at, and DIFF what was
    changed since in files that git tracks.
    """
    folders = _package_folders()
    made = (sweep / "code" / _digest(folders)[:8]).absolute()
    if made.exists():
        return made
    part = made.with_name(".part")
    shutil.rmtree(part, ignore_errors=True)  # of a launch that was killed
    for name, folder in folders.items():
        shutil.copytree(folder, part / name, ignore=shutil.ignore_patterns(*IGNORED))
    git = ("git", "-C", str(folders["sweeps"]))
    commit = run_or_empty(*git, "rev-parse", "HEAD") or "not in git\n"
    (part / "COMMIT").write_text(commit)
    difference = run_or_empty(*git, "diff", "HEAD")
    # git apply wants the newline at the end, which is stripped from the output of commands.
    (part / "DIFF").write_bytes(os.fsencode(f"{difference}\n" if difference else ""))
    part.rename(made)
    return made


def _package_folders() -> dict[str, Path]:
    """The folders of those of our packages that are installed, by name."""
    folders = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(spec.submodule_search_locations[0])
    return folders


def _digest(folders: dict[str, Path]) -> str:
    """The SHA-256 of the names and contents of all files that are copied."""
    digest = hashlib.sha256()
    for folder in folders.values():
        for path in _copied_files(folder):
            name = path.relative_to(folder.parent)
            digest.update(f"{name}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _copied_files(folder: Path) -> list[Path]:
    """The files below a folder that a snapshot of it has, in an order that does not change."""
    ignored = shutil.ignore_patterns(*IGNORED)
    files = []
    for parent, subfolders, names in os.walk(folder):
        left_out = ignored(parent, [*subfolders, *names])
        subfolders[:] = [name for name in subfolders if name not in left_out]
        files += [Path(parent, name) for name in names if name not in left_out]
    return sorted(files)

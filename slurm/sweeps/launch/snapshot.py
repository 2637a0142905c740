"""The code that a launch runs: a copy in the sweep's folder.

A checkout that changes while jobs are queued then changes nothing about them. Only our own packages
are copied: a backend of the user's own runs as it is when a job begins.
"""

import hashlib
import os
import secrets
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from sweeps.runs.processes import run_or_empty

PACKAGES = ("smoothce", "smoothed_open_instruct", "calibeval", "sweeps")
IGNORED = ("__pycache__", "*.pyc")
NOTES = {"COMMIT", "DIFF"}  # files beside the copied packages
WRITABLE_BY_OTHERS = 0o022


def snapshot(sweep: Path) -> Path:
    """Copy our packages to `<sweep>/code/<hash of their files>/`, unless they are there.

    Returns that folder. COMMIT in it says which commit the packages are at, and DIFF, which its
    owner alone can read, what was changed since in those of their files that git tracks. A copy
    that somebody else can have changed is not used: another one is made beside it.
    """
    folders = _package_folders()
    digest = _digest(folders)
    code = (sweep / "code").absolute()
    made = code / digest[:8]
    for copy in sorted(code.glob(f"{made.name}*")):
        if _is_own(copy) and _is_unchanged(copy, list(folders), digest):
            return copy
    if os.path.lexists(made):
        made = code / f"{made.name}-{secrets.token_hex(3)}"
        reason = f"{code / digest[:8]}: is not yours alone, or was changed since it was made"
        print(f"warning: {reason}; this launch runs {made.name}", file=sys.stderr)
    code.mkdir(parents=True, exist_ok=True)
    for left_over in code.glob(".part*"):  # of a launch that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    part = code / f".part-{secrets.token_hex(8)}"
    part.mkdir()
    for name, folder in folders.items():
        shutil.copytree(folder, part / name, ignore=shutil.ignore_patterns(*IGNORED))
    _note_commit(folders, part)
    for path in (part, *part.rglob("*")):
        path.chmod(path.stat().st_mode & ~WRITABLE_BY_OTHERS)
    part.rename(made)
    return made


def _note_commit(folders: dict[str, Path], part: Path) -> None:
    """Write COMMIT and DIFF of those packages that git tracks into the folder `part`.

    The packages may lie in an environment within a repository of other things, whose changes are
    nobody's business here.
    """
    git = ("git", "-C", str(folders["sweeps"]))
    top = run_or_empty(*git, "rev-parse", "--show-toplevel")
    tracked = []
    for folder in folders.values():
        path = folder.resolve()
        if top and path.is_relative_to(top) and run_or_empty(*git, "ls-files", "--", str(path)):
            tracked.append(str(path))
    commit = "not in git\n"
    difference = ""
    if tracked:
        commit = run_or_empty(*git, "rev-parse", "HEAD")
        difference = run_or_empty(*git, "diff", "HEAD", "--", *tracked)
    (part / "COMMIT").write_text(commit)
    (part / "DIFF").touch(mode=0o600)
    # git apply wants the newline at the end, which is stripped from the output of commands.
    (part / "DIFF").write_bytes(os.fsencode(f"{difference}\n" if difference else ""))


def _is_own(copy: Path) -> bool:
    """Whether a copy is this user's, and nobody else can have changed it."""
    if copy.is_symlink() or copy.stat().st_uid != os.getuid():
        return False
    # Jobs have left compiled modules, which are in no digest. They are made again.
    for folder in list(copy.rglob("__pycache__")):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (copy, *copy.rglob("*")):
        status = path.lstat()
        is_link = path.is_symlink()
        if is_link or status.st_uid != os.getuid() or status.st_mode & WRITABLE_BY_OTHERS:
            return False
    return True


def _is_unchanged(copy: Path, packages: list[str], digest: str) -> bool:
    """Whether a copy still holds the files of this digest, and nothing else to import."""
    names = {path.name for path in copy.iterdir()}
    if names != {*packages, *NOTES}:
        return False
    return _digest({name: copy / name for name in packages}) == digest


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

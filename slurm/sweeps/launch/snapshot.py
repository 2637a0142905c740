"""The code that a launch runs: a copy in the sweep's folder, so that a checkout that changes
meanwhile changes nothing."""

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from sweeps.runs.processes import run_or_empty

PACKAGES = ("smoothce", "smoothed_open_instruct", "calibeval", "sweeps", "studies")
UNUSED = ("__pycache__", "*.pyc", "records")  # the last a study's, which no run reads


def snapshot(sweep: Path) -> Path:
    """`<sweep>/code/<hash of its files>/`: our packages, and the commit and diff they are at."""
    found = {name: find_spec(name) for name in PACKAGES}
    folders = {name: Path(one.submodule_search_locations[0]) for name, one in found.items() if one}
    digest = hashlib.sha256()
    for folder in folders.values():
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder.parent)}\n".encode() + path.read_bytes())
    made = (sweep / "code" / digest.hexdigest()[:8]).absolute()
    if made.exists():
        return made
    part = made.with_name(".part")  # of a launch that was killed
    shutil.rmtree(part, ignore_errors=True)
    for name, folder in folders.items():
        shutil.copytree(folder, part / name, ignore=shutil.ignore_patterns(*UNUSED))
    git = ("git", "-C", str(folders["sweeps"]))
    (part / "COMMIT").write_text(run_or_empty(*git, "rev-parse", "HEAD") or "not in git\n")
    (part / "DIFF").write_bytes(os.fsencode(run_or_empty(*git, "diff", "HEAD")))
    part.rename(made)
    return made

"""Where code and machine come from, for the manifest; no environment variable is ever copied."""

import os
import platform
import shlex
import subprocess
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TYPED_IN = Path.cwd()  # the command line goes on in PROJECT, where relative paths of configs start


def command(script: str, *words: object) -> str:
    """A script of slurm/ with its arguments, as it would be typed where this process began."""
    path = PROJECT / "slurm" / script
    if path.is_relative_to(TYPED_IN):
        path = path.relative_to(TYPED_IN)
    return shlex.join(["bash", str(path), *map(str, words)])


def shown(path: Path) -> Path:
    """A path as it would be typed where this process began."""
    path = Path(os.path.abspath(path))
    return path.relative_to(TYPED_IN) if path.is_relative_to(TYPED_IN) else path


def output(*command: str) -> str | None:
    """What a program prints; None where it is absent, fails or does not answer."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def provenance() -> dict:
    """Commit and state of this project, Python, GPUs of this machine."""
    commit = output("git", "-C", str(PROJECT), "rev-parse", "HEAD")
    changed = output("git", "-C", str(PROJECT), "status", "--porcelain", "--untracked-files=no")
    gpus = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "commit": commit,
        "modified": bool(changed) if commit else None,
        "python": platform.python_version(),
        "gpus": gpus.splitlines() if gpus else [],
    }

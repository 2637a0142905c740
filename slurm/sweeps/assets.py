"""Where models fetched from the Hugging Face hub lie on this machine."""

import os
from pathlib import Path


def hub_cache() -> Path:
    """The hub's cache folder, from the variables that huggingface_hub reads."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def hub_snapshot(name: str, kind: str = "models") -> Path | None:
    """The newest complete-looking snapshot of `owner/name`, or None; reads the disk only."""
    folder = hub_cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in folder.glob("*") if any(path.iterdir())] if folder.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)

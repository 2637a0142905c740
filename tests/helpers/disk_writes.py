"""What a power cut would leave: which files had reached the disk when a folder got its name."""

import os
from pathlib import Path
from typing import Any

import pytest


class DiskWrites:
    """Every flush and every rename of this process, in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.flushed: list[int] = []  # inodes, which a rename does not change
        self.flushed_before: dict[str, set[int]] = {}  # for each name that a rename gave
        fsync = os.fsync

        def note_flush(handle: int) -> None:
            fsync(handle)
            self.flushed.append(os.fstat(handle).st_ino)

        def noting(rename: Any) -> Any:
            def note_rename(source: Any, destination: Any, **more: Any) -> None:
                self.flushed_before[os.path.abspath(destination)] = set(self.flushed)
                rename(source, destination, **more)

            return note_rename

        patch.setattr(os, "fsync", note_flush)
        for name in ("rename", "replace"):
            patch.setattr(os, name, noting(getattr(os, name)))

    def unflushed(self, folder: Path, renamed_to: Path | None = None) -> list[str]:
        """What of a folder had not reached the disk when a rename gave something its name.

        That is the path `renamed_to`, or the folder itself where it is None.
        """
        flushed = self.flushed_before[os.path.abspath(renamed_to or folder)]
        paths = [folder, *folder.rglob("*")]
        return [str(path) for path in paths if path.stat().st_ino not in flushed]

"""The one error, files that are never seen half-written, and locks that need no flock.

A lock is a file made with O_EXCL and kept fresh by a heartbeat. A holder on this machine counts as
dead when its process is gone; one elsewhere after LEASE_SECONDS without a heartbeat, measured on
the contender's own clock.
"""

import contextlib
import errno
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from filelock import SoftFileLease

from calibeval.io import InputError

LEASE_SECONDS = 120.0  # every contender must use the same value


class SweepError(InputError):
    """Something the user can put right: file, key or row, what was found, what was expected."""


# A disk that is full, over quota or read-only, and folders of other people.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def disk_error(error: OSError, path: Path | None = None) -> str:
    """The message for an error of the file system, at `path` or where it says itself."""
    where = path or error.filename or "the file system"
    said = f"{where}: {error.strerror}"
    return f"{said}; make room or fix the rights and type the same command again"


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the file system offers that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` to a temporary name in the same folder, fsync (if `durable`), rename.

    Raises SweepError naming the path when the disk is full or the folder cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    try:
        with open(part, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            if durable:
                os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise SweepError(disk_error(error, path)) from error
    if durable:
        fsync_folder(path.parent)


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


def read_json(path: Path) -> dict:
    """Read a JSON object; raises SweepError naming the file when it is not one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: not JSON ({error}); move the file away and repeat") from error


def make_folder(path: Path) -> None:
    """Create a folder with its parents; raises SweepError naming the path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(disk_error(error, path)) from error


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A path beside `target` to make a file or folder at, which then takes its place, whole."""
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        yield Path(scratch, "made")
        Path(scratch, "made").rename(target)
    fsync_folder(target.parent)


def read_rows(path: Path) -> list[dict]:
    """Read a JSON-lines file, leaving out a last line that a killed writer cut short."""
    if not path.exists():
        return []
    rows = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def tail(path: Path | None, count: int, size: int = 16384) -> list[str]:
    """The last `count` lines that say something, without progress bars' overwritten states."""
    if path is None or not path.exists():
        return []
    with open(path, "rb") as data:
        data.seek(max(0, os.path.getsize(path) - size))
        text = data.read().decode("utf-8", "replace")
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n") if line.strip()]
    return lines[-count:]


def last_error(said: str, *marks: str) -> str:
    """The last line of a program's output that has one of `marks` in it, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no output"]
    return ([line for line in lines if any(mark in line for mark in marks)] or lines)[-1]


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write JSON lines, atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def lease(path: Path, *, timeout: float, lost: Callable[[], None] | None = None) -> SoftFileLease:
    """A lease on `path`; waits `timeout` seconds for it (-1: for ever), then filelock.Timeout.

    `lost` is called from the heartbeat's thread if another process took the lease over, which
    can only happen while this one was frozen or cut off from the file system.
    """
    return SoftFileLease(
        path,
        lease_duration=LEASE_SECONDS,
        heartbeat_interval=LEASE_SECONDS / 8,
        on_compromise=(lambda _: lost()) if lost else None,
        timeout=timeout,
        thread_local=False,
    )


def held(path: Path) -> bool:
    """Whether a process keeps the lease on `path`; one just killed seems to for LEASE_SECONDS."""
    try:
        return time.time() - path.stat().st_mtime < LEASE_SECONDS
    except OSError:
        return False


def unlockable(path: Path, error: OSError) -> SweepError:
    """The message for a lock file that cannot even be created."""
    return SweepError(f"this lock cannot be made: {disk_error(error, path)}")

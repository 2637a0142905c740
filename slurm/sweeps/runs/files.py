"""Files that several processes share: locks, JSON lines, logs, folders that appear whole."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from calibeval.io import InputError


@contextlib.contextmanager
def locked(path: Path, patience: float, busy: str) -> Iterator[None]:
    """Hold a lock, which the kernel lets go of when the process ends, however it does.

    InputError, saying `busy`, if another process still holds it after `patience` seconds. Where
    the file system knows no locks, nothing is held.
    """
    with open(path, "a") as file:
        os.set_inheritable(file.fileno(), True)  # torchrun may take this process's place
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock's would be every fork's
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InputError(busy) from None
                time.sleep(0.3)
            except OSError:
                break
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock."""
    with contextlib.suppress(OSError), open(path) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_rows(path: Path, size: int | None = None) -> list[dict]:
    """The objects of a JSON-lines file, or of its last `size` bytes, without damaged ones."""
    rows = []
    for line in _text(path, size).split("\n"):
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill, or by `size`
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _text(path: Path, size: int | None) -> str:
    """The last `size` bytes of a file, which may be absent."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as data:
        data.seek(max(0, os.path.getsize(path) - size) if size else 0)
        return data.read().decode("utf-8", "replace")
    return ""


def tail(path: Path, count: int, size: int = 16384) -> list[str]:
    """The last `count` lines that say something, without progress bars' overwritten states."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in _text(path, size).split("\n")]
    return [line for line in lines if line][-count:]


def last_error(lines: list[str]) -> str:
    """The last line of a program's output that looks like an error, else the last one."""
    # A progress bar leaves no line of its own for what is said after it.
    wrong = [found[0] for line in lines if (found := re.search("error: .*|.*Error.*", line))]
    own = [line for line in wrong if "ChildFailedError" not in line]  # torchrun's
    return (own or wrong or lines or ["no output"])[-1].strip()[:500]


def replace_folder(made: Path, folder: Path) -> None:
    """Give a finished folder its name, in a way that survives a power cut."""
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)

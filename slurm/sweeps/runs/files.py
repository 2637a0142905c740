"""Files that several processes share: locks, JSON lines, logs, folders that appear whole."""

import contextlib
import errno
import fcntl
import os
import pwd
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibeval.io import WHOLE_FILE, InputError, parse_json, regular_file, show

# The folder above slurm/ in a checkout. This package may lie elsewhere, installed or as a snapshot
# that a job runs: then there is no slurm/ in it.
PROJECT = Path(__file__).resolve().parents[3]
SILENT_SECONDS = 3  # seconds that a wait for a lock takes before a message tells the user of it
# Errors that follow from another one: what torchrun and srun say of a program that has failed, and
# before them what a rank says that has lost its connection to one that has.
OF_LAUNCHERS = re.compile("ChildFailedError|^srun: |^slurmstepd")
OF_OTHER_RANKS = re.compile("Connection (closed|reset) by|Broken pipe|remote process exited")
MOST_ROWS = 256 << 20  # bytes of a JSON-lines file that are read of it
FULL_DISK = 1 << 20  # a disk with fewer bytes left than these is called full
RETRY_SECONDS = 0.3  # seconds between two attempts to take a lock that another process holds

# The locks that this process holds. The kernel does not tell a process of its own locks, and drops
# one as soon as the process closes any handle of the file, so nobody may open these to look.
_held_here: set[tuple[int, int]] = set()


@contextlib.contextmanager
def locked(path: Path, patience: float, busy_message: str) -> Iterator[None]:
    """Hold a lock, which the kernel releases when the process ends, however it ends.

    Raises InputError with the words of `busy_message` if another process still holds the lock after
    `patience` seconds; the same words are printed when the wait has taken SILENT_SECONDS. Where
    the file system knows no locks, a warning says so, and only this process knows of the lock.
    """
    with open(path, "a", opener=regular_file) as file:
        os.set_inheritable(file.fileno(), True)  # torchrun may take this process's place
        began = time.monotonic()
        told = False
        while True:
            try:
                # lockf, because a lock by flock would be shared with every forked process.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited > patience:
                    raise InputError(busy_message) from None
                if waited > SILENT_SECONDS and not told:
                    told = True
                    show(f"waiting: {busy_message}", to_stderr=True)
                time.sleep(RETRY_SECONDS)
            except OSError as error:
                reason = f"{path}: {error.strerror}: nothing keeps two processes apart here"
                show(f"warning: {reason}", to_stderr=True)
                break
        identity = _identity(os.fstat(file.fileno()))
        _held_here.add(identity)
        try:
            yield
        finally:
            _held_here.discard(identity)


def _identity(status: os.stat_result) -> tuple[int, int]:
    """What tells one file from another, whatever path leads to it."""
    return status.st_dev, status.st_ino


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock, be it this one."""
    with contextlib.suppress(OSError):
        if _identity(path.stat()) in _held_here:
            return True  # and the file stays closed: see `_held_here`
    with contextlib.suppress(OSError), open(path, opener=regular_file) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def found_path(typed: str) -> Path:
    """A path as it was typed; if nothing is there, one of the checkout's, whose files come with it.

    So `configs/sweeps/beta.yaml` and the profiles can be named from any folder.
    """
    path = Path(os.path.expanduser(typed))  # bash leaves the ~ of --cluster=~/x
    shipped = PROJECT / typed
    if not os.path.exists(path) and (PROJECT / "slurm").is_dir() and os.path.exists(shipped):
        return shipped
    return path


def touch(path: Path) -> None:
    """Make an empty file unless one is there."""
    with open(path, "a", opener=regular_file):
        pass


def unlinked_file(path: str | Path, flags: int) -> int:
    """Open a file of a sweep's folder to read, as the `opener` of `open` does.

    A link raises OSError: somebody else may have put it there, to a file that only its reader sees.
    """
    return regular_file(path, flags | os.O_NOFOLLOW)


def text_of(path: Path) -> str:
    """The text of a file; raises OSError, FileNotFoundError among it, where it cannot be read."""
    with open(path, encoding="utf-8", errors="replace", opener=unlinked_file) as file:
        if os.fstat(file.fileno()).st_size > WHOLE_FILE:
            raise OSError(errno.EFBIG, f"is larger than {WHOLE_FILE:,} bytes", os.fspath(path))
        return file.read()


def read_rows(path: Path, size: int = MOST_ROWS) -> list[dict]:
    """The objects in the last `size` bytes of a JSON-lines file.

    Lines that are damaged are left out: a kill may have cut one off, as `size` may. An absent file
    has no rows.
    """
    rows = []
    for line in _last_text(path, size).split("\n"):
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """The values of a row that are numbers, as all of metrics are; the file may be anybody's."""
    numbers = {}
    for key, value in row.items():
        if isinstance(value, (int, float)):
            with contextlib.suppress(OverflowError):
                numbers[key] = float(value)
    return numbers


def _last_text(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text; nothing if it is absent."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=unlinked_file) as data:
        data.seek(max(0, os.fstat(data.fileno()).st_size - size))
        return data.read(size).decode("utf-8", "replace")
    return ""


def tail(path: Path, count: int, size: int = 16384) -> list[str]:
    """The last `count` lines that say something among the last `size` bytes of a log.

    A progress bar overwrites its line behind carriage returns; only its last state is kept.
    """
    lines = []
    for line in _last_text(path, size).split("\n"):
        shown = line.rstrip().rsplit("\r", 1)[-1]  # a line may end in \r\n
        if shown:
            lines.append(shown)
    return lines[-count:]


def last_error(lines: list[str]) -> str:
    """The last line of a program's output that looks like an error, else its last line.

    The line is cut at 500 characters. Where it says `error: `, what stands before that is left out,
    such as a progress bar.
    """
    errors_of_launchers = []
    errors_of_other_ranks = []
    own_errors = []
    for line in lines:
        match = re.search("error: .*|.*Error.*", line)
        if not match:
            continue
        if OF_LAUNCHERS.search(line):
            errors_of_launchers.append(match[0])
        elif OF_OTHER_RANKS.search(line):
            errors_of_other_ranks.append(match[0])
        else:
            own_errors.append(match[0])
    best = own_errors or errors_of_other_ranks or errors_of_launchers or lines or ["no output"]
    return best[-1].strip()[:500]


def closed_by_owner(error: BaseException, folder: Path | None = None) -> str:
    """Say whose file is closed to this user, and what opens it; say nothing of another error.

    `folder` is what that user is to open, by default what is closed.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, PermissionError) or cause.filename is None:
        return ""
    file = Path(os.path.abspath(cause.filename))
    for place in (file, *file.parents):
        with contextlib.suppress(OSError):
            owner = place.stat().st_uid
            break
    if owner == os.geteuid():
        return ""
    name = str(owner)
    with contextlib.suppress(KeyError):
        name = pwd.getpwuid(owner).pw_name
    if folder is None:
        folder = place if place.is_dir() else place.parent
    opens = shlex.quote(str(folder.absolute()))
    return (
        f"belongs to {name} and is closed to you: {place}: {name} types `chmod -R g+rwX {opens}`, "
        "and `umask 002` before each launch"
    )


def is_disk_full(folder: Path) -> bool:
    """Whether the disk on which this folder lies has no room for another file."""
    return shutil.disk_usage(folder).free < FULL_DISK


def remove_folder(folder: Path) -> None:
    """Delete a folder, or what stands in its place, and nothing that a link leads to."""
    if not folder.is_dir() or folder.is_symlink():
        with contextlib.suppress(OSError):
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def publish_folder(source: Path, destination: Path) -> None:
    """Copy the files of a private folder to where others may write; `destination` appears whole.

    Whoever may write there could put a link in place of a folder that is being filled. So its name
    cannot be guessed, and what is written through is the opened folder itself.
    """
    part = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}.part")
    part.mkdir()
    try:
        folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(folder).st_uid != os.geteuid() or os.listdir(folder):
                raise InputError(f"{part}: somebody else has put a folder there: try again")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            for file in source.iterdir():
                handle = os.open(file.name, flags, 0o666, dir_fd=folder)
                with open(handle, "wb") as written:
                    written.write(file.read_bytes())
        finally:
            os.close(folder)
        replace_folder(part, destination)
    finally:
        remove_folder(part)


def replace_folder(source: Path, destination: Path) -> None:
    """Rename a finished folder, over an older one too, in a way that survives a power cut.

    All that it holds reaches the disk first. A file system may write a rename down before the bytes
    of the files, and a power cut between the two would leave the new name with empty files. The
    older folder has another name meanwhile, and is deleted last.
    """
    flush_folder(source)
    for left_over in destination.parent.glob(f".{destination.name}.*.replaced"):  # after a kill
        remove_folder(left_over)
    replaced = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}.replaced")
    with contextlib.suppress(FileNotFoundError):
        destination.rename(replaced)
    source.rename(destination)
    _flush_to_disk(destination.parent)
    remove_folder(replaced)


def flush_folder(folder: Path) -> None:
    """Wait until a folder and all that it holds have reached the disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _flush_to_disk(path)
    _flush_to_disk(folder)


def _flush_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, have reached the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Reading and writing files, and how a command ends.

The modules of this package, and other packages too, read text and write through these functions.
Only an unfinished record file (`store`), which may be cut short, is read otherwise. They keep four
promises:

- Whatever the user can mend raises `InputError`, whose message is one line that names the file,
  the place in it, what was found there and what to do. `finish` prints it for a command.
- A file is written whole or not at all (`atomic_write`, `write_text`, `write_rows`).
- What another user has put into a shared folder is neither waited for nor written through
  (`regular_file`).
- Text is UTF-8, and JSON lines are read with the place of each (`read_text`, `reading`,
  `json_lines`).
"""

import argparse
import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, overload

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = [
    "CONTINUES",
    "LARGE_FILE",
    "WHOLE_FILE",
    "CommandLine",
    "InputError",
    "atomic_write",
    "counted",
    "finish",
    "hanging",
    "import_matplotlib",
    "is_planted_link",
    "json_lines",
    "json_object",
    "one_line",
    "open_to_write",
    "parse_json",
    "placed_lines",
    "printable",
    "progress",
    "read_text",
    "reading",
    "refuse_larger",
    "refuse_what_is_waited_for",
    "regular_file",
    "sha256",
    "show",
    "write_rows",
    "write_text",
]

# What a command says after Ctrl-C if it goes on where it was when it is given again.
CONTINUES = "stopped; the same command continues"
BAD_INPUT = 2  # exit status of a command whose input cannot be used
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C has ended
STDOUT = 1  # file descriptor
HASH_BUFFER = 1 << 20  # bytes
PROGRESS_AFTER = 5  # seconds, after which a bar shows how far a command is
PROGRESS_STEP = 1 << 22  # characters of a file between two looks at the clock
WHOLE_FILE = 64 << 20  # bytes of the largest file that `read_text` reads unless it is told another
LARGE_FILE = 4 << 30  # bytes of the largest file of records, or log of them, that is read
MESSAGE_CHARACTERS = 10_000  # of an error that is printed, which may quote somebody's long value
LINE_CHARACTERS = 64 << 20  # of the longest line of a JSON-lines file
# What a terminal obeys, the marks among it that turn the direction of writing or are not seen, and
# the halves of surrogate pairs, which no terminal can be sent. The joiners U+200C and U+200D, which
# some languages need, are none of it.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
# The pipes that a user may name for a file, as a shell does for <(command).
NAMED_PIPES = re.compile(r"/dev/stdin|/(dev|proc/self)/fd/\d+")


class InputError(ValueError):
    """The user gave something unusable; the message names the file, the row and the remedy."""


def finish(work: Callable[[], int | None], if_stopped: str = "stopped") -> int:
    """Do a command's work and return its exit status.

    The status is what `work` returns, where None means 0. After `InputError`, or an error of the
    operating system that names a file, one line goes to stderr and the status is 2. After Ctrl-C
    `if_stopped` goes to stderr and the status is 130. After a broken pipe, such as `| head` leaves,
    the status is 0. Other exceptions pass through; if they end the program, their traceback has its
    control characters spelled out.
    """
    try:
        status = work()
        sys.stdout.flush()
    except InputError as error:
        _show_error(str(error))
        return BAD_INPUT
    except BrokenPipeError:
        # The reader of `… | head` has read enough. The interpreter flushes stdout once more when
        # it ends, which would fail too; it goes to the null device instead.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        _show_error(f"{error.filename}: {error.strerror}")
        return BAD_INPUT
    except MemoryError:
        _show_error("this needs more memory than there is")
        return BAD_INPUT
    except KeyboardInterrupt:
        print(if_stopped, file=sys.stderr)
        return INTERRUPTED
    except Exception:
        sys.excepthook = _show_traceback
        raise
    return status or 0


def _show_traceback(
    kind: type[BaseException], error: BaseException, place: TracebackType | None
) -> None:
    """Print a traceback as Python does, see `printable`."""
    show("".join(traceback.format_exception(kind, error, place)), to_stderr=True, end="")


def _show_error(message: str) -> None:
    if len(message) > MESSAGE_CHARACTERS:
        half = MESSAGE_CHARACTERS // 2
        message = f"{message[:half]} … {message[-half:]}"
    show(hanging(f"error: {message}"), to_stderr=True)


@overload
def atomic_write(path: str | Path, mode: Literal["w"] = "w") -> AbstractContextManager[IO[str]]: ...


@overload
def atomic_write(path: str | Path, mode: Literal["wb"]) -> AbstractContextManager[IO[bytes]]: ...


@contextmanager
def atomic_write(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` that becomes `path` only if the block succeeds.

    Folders above `path` are made. `mode` is "w" for UTF-8 text or "wb" for bytes. The contents
    are on the disk before the name is; a file that cannot be written raises `InputError`. What
    else goes wrong in the block passes through.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with _told_as_unwritten(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        creating: Literal["x", "xb"] = "x" if mode == "w" else "xb"
        with open_to_write(temporary, creating, told_as=path) as file:
            yield file
            file.flush()
            with _told_as_unwritten(path):
                os.fsync(file.fileno())
        with _told_as_unwritten(path):
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def open_to_write(
    path: Path, mode: Literal["x", "xb", "a"], told_as: Path | None = None
) -> IO[Any]:
    """Open a file as `open` does; where it cannot be written, `InputError` says so.

    A link is not followed: in a folder of several users it may lead to any file of this one's.

    `told_as` is the file that the message names instead, such as the one that a temporary file is
    to become. The error rises from the very write that fails. A handler around the whole of a
    block that writes would tell a lost connection in it as a full disk.
    """
    buffered = io.BufferedWriter(_RawFile(path, mode.removesuffix("b"), told_as or path))
    if mode == "xb":
        return buffered
    return io.TextIOWrapper(buffered, encoding="utf-8")


class _RawFile(io.FileIO):
    """The bytes of a file on their way to the disk, without a buffer."""

    def __init__(self, path: Path, mode: str, told_as: Path):
        self.told_as = told_as
        with _told_as_unwritten(told_as):
            super().__init__(path, mode, opener=regular_file)

    def write(self, data: Any) -> int:
        """Write some of the bytes, and say how many."""
        with _told_as_unwritten(self.told_as):
            return super().write(data)

    def close(self) -> None:
        """Close the file; some file systems tell only now that a write has failed."""
        with _told_as_unwritten(self.told_as):
            super().close()


def regular_file(path: str | Path, flags: int) -> int:
    """Open a regular file, as the `opener` of `open` does; returns its descriptor.

    Anything else that a shared folder may hold raises OSError: a pipe, which a reader would wait
    for, a device, and a link, which may lead to any file of this user's: where the file is written,
    and where another user's link leads to one of this user's. A pipe is read where the user names
    it as /dev/stdin or as a shell names <(command).
    """
    may_be_pipe = False
    if flags & (os.O_WRONLY | os.O_RDWR):
        if os.path.islink(path):
            target = os.readlink(path)
            reason = f"a link to {target}, which would be written: delete the link"
            raise OSError(errno.ELOOP, reason, os.fspath(path))
        flags |= os.O_NOFOLLOW
    else:
        may_be_pipe = NAMED_PIPES.fullmatch(os.fspath(path)) is not None
    handle = os.open(path, flags | os.O_NONBLOCK, mode=0o666)
    opened = os.fstat(handle)
    kind = opened.st_mode
    if may_be_pipe and stat.S_ISFIFO(kind):
        os.set_blocking(handle, True)
        return handle
    if is_planted_link(path, opened):
        os.close(handle)
        reason = f"another user's link to {os.path.realpath(path)}, which is yours: name that file"
        raise OSError(errno.ELOOP, reason, os.fspath(path))
    if not stat.S_ISREG(kind):
        os.close(handle)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        reason = "a pipe or a device, which would be waited for: delete it"
        raise OSError(errno.ENXIO, reason, os.fspath(path))
    return handle


def refuse_what_is_waited_for(folder: Path) -> None:
    """Raise `InputError` for a pipe or a device in a folder, which a library would wait for."""
    for path in folder.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: a pipe or a device, which would be waited for: delete it")


def is_planted_link(path: str | Path, opened: os.stat_result) -> bool:
    """Whether the file of this user's that was opened is not what stands there, but led to by it.

    What stands there is another user's then. The administrator's links are trusted.
    """
    entry = os.lstat(path)
    is_led_to = not os.path.samestat(entry, opened)
    return is_led_to and opened.st_uid == os.geteuid() and entry.st_uid not in (0, os.geteuid())


@contextmanager
def _told_as_unwritten(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into "could not be written" of a file."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: could not be written ({error.strerror or error})") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with atomic_write(path) as file:
        file.write(text)


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes; an unreadable file raises `InputError`."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_BUFFER))
    try:
        with open(path, "rb", buffering=0, opener=regular_file) as file:
            while True:
                count = file.readinto(buffer)
                if not count:
                    break
                digest.update(buffer[:count])
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror})") from error
    except ValueError as error:  # no file can be called so
        raise InputError(f"{path}: could not be read ({error})") from error
    return digest.hexdigest()


@contextmanager
def reading(path: str | Path) -> Iterator[IO[str]]:
    """Open a UTF-8 file, newlines untouched; unreadable files raise `InputError`."""
    try:
        opened = open(  # noqa: SIM115 it is closed below
            path, encoding="utf-8-sig", newline="\n", opener=regular_file
        )
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror})") from error
    except ValueError as error:  # no file can be called so
        raise InputError(f"{path}: could not be read ({error})") from error
    try:
        with opened as file:
            yield file
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"{path}: not UTF-8 text (byte {byte:#04x})") from error
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror})") from error


def refuse_larger(path: str | Path, size: int, most: int) -> None:
    """Raise `InputError` for a file of more than `most` bytes, before it fills the memory.

    `size` is the file's, or of what is packed in it.
    """
    if size > most:
        raise InputError(f"{path}: is larger than {most:,} bytes, the most that is read of it")


def read_text(path: str | Path, most: int = WHOLE_FILE) -> str:
    """A UTF-8 file's text, newlines untouched; unreadable files raise `InputError`.

    So do files of more than `most` bytes, which somebody may have planted to fill the memory.
    """
    with reading(path) as file:
        refuse_larger(path, os.fstat(file.fileno()).st_size, most)
        return file.read()


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError where it is none, or is nested without end."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def json_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("path, line number", object) of a JSON-lines file; blank lines are skipped.

    A line that holds no JSON object raises `InputError` with its number.
    """
    for place, line in placed_lines(path):
        yield place, json_object(place, line)


def placed_lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield ("path, line number", line) of a UTF-8 file; blank lines are skipped.

    A file that takes long has a bar on a terminal.
    """
    with reading(path) as lines, progress(f"{path}", os.path.getsize(path), unit="B") as bar:
        unshown = 0
        whole_lines = iter(lambda: lines.readline(LINE_CHARACTERS), "")
        for number, line in enumerate(whole_lines, start=1):
            unshown += len(line)
            if unshown > PROGRESS_STEP:
                bar.update(unshown)
                unshown = 0
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            if len(line) == LINE_CHARACTERS:
                raise InputError(f"{place}: is longer than {LINE_CHARACTERS:,} characters")
            yield place, line


def json_object(place: str, line: str) -> dict[str, Any]:
    """The JSON object of a line; `InputError` names the place of one that holds none."""
    try:
        value = parse_json(line)
    except json.JSONDecodeError as error:
        # Its own sentence counts lines within this line.
        reason = f"{error.msg}, column {error.colno}"
        raise InputError(f"{place}: not JSON ({reason})") from error
    except ValueError as error:
        raise InputError(f"{place}: not JSON ({error})") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise InputError(f"{place}: expected a JSON object, found {kind}")
    return value


def progress(name: str, total: int, unit: str = "it") -> "tqdm[NoReturn]":
    """A bar on a terminal's stderr, of work that takes longer than PROGRESS_AFTER seconds."""
    from tqdm import tqdm

    return tqdm(
        desc=printable(name),
        total=total,
        unit=unit,
        unit_scale=True,
        disable=None,  # where stderr is no terminal
        delay=PROGRESS_AFTER,
        leave=False,
    )


def import_matplotlib() -> None:
    """Import matplotlib without a `matplotlibrc` of the current folder.

    That folder may be anybody's, and matplotlib reads the file when it is imported, by pandas too:
    it could name a preamble for LaTeX. So call this before anything that may import it.
    """
    folder = os.getcwd()
    os.chdir("/")
    try:
        import matplotlib  # noqa: F401
    finally:
        os.chdir(folder)


class CommandLine(argparse.ArgumentParser):
    """A grammar whose errors spell out control characters: `*` may bring anybody's file names."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def printable(text: str) -> str:
    r"""A text without control characters other than line breaks and tabs.

    A terminal obeys them: a name in somebody's file could clear the screen, or write a line that no
    program has said. They are written as JSON writes them, \u001b; see `CONTROL_CHARACTERS`.
    """
    return CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def hanging(text: str) -> str:
    """A text whose lines after the first are indented.

    So a line that somebody's file has put into a message is not taken for one of the command's.
    """
    return "\n       ".join(line.lstrip() for line in text.splitlines())


def one_line(text: str) -> str:
    """Return a text without line breaks and other control characters, which would end a row."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)


def show(text: str, *, to_stderr: bool = False, end: str = "\n") -> None:
    """Print what may have come from a file, see `printable`."""
    print(printable(text), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=to_stderr)


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 run", "24 runs"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"

"""What every module reads and writes with: whole files or none, JSON lines, the one error and what
a command makes of it."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


class InputError(ValueError):
    """The user gave something unusable; the message names the file, the row and the remedy."""


def finish(work: Callable[[], int | None]) -> int:
    """Do a command's work; returns its exit code, after one message for bad input or Ctrl-C."""
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nor may the interpreter's last flush fail
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    return 2


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path` that becomes `path` only if the block succeeds."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: could not be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    with atomic_write(path) as file:
        file.write(text)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes; an unreadable file raises `InputError`."""
    total, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total.update(buffer[:count])
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror})") from error
    return total.hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 file, newlines untouched; unreadable files raise `InputError`."""
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            yield file
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise InputError(f"{path}: not UTF-8 text (byte {found:#04x})") from error
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror})") from error


def read_text(path: Path) -> str:
    """A UTF-8 file's text, newlines untouched; unreadable files raise `InputError`."""
    with reading(path) as file:
        return file.read()


def json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield ("path, line number", object) of a JSON-lines file; blank lines are skipped."""
    with reading(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({error})") from error
            if not isinstance(value, dict):
                found = type(value).__name__
                raise InputError(f"{where}: expected a JSON object, found {found}")
            yield where, value


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write JSON lines, whole or not at all."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def counted(number: int, noun: str) -> str:
    """1 run, 24 runs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

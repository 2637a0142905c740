"""Studies: users of the library, each a folder with a page, a config and one command."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from calibeval.io import InputError
from calibeval.request import Strict, checked
from sweeps.config import read_yaml


def command(
    doc: str, kind: type[Strict], study: Callable, folder: Path, words: list[str] | None = None
) -> int:
    """Do `study(config)`, of the folder's config.yaml or another; returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m studies.{folder.name}", description=doc)
    parser.add_argument("--config", type=Path, default=folder / "config.yaml")
    file = parser.parse_args(words).config
    return finish(lambda: study(checked(kind, read_yaml(file)[0], str(file), strict=False)))


def finish(work: Callable[[], None]) -> int:
    """Do it; returns the exit code, after one message for bad input or Ctrl-C."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nor may the interpreter's last flush fail
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0

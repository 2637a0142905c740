"""Studies: users of the library, each a folder with a page, a config and one command."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from calibeval.io import InputError, read_text


class Config(BaseModel, extra="forbid", frozen=True):
    """The keys of a study's config.yaml."""


def command(
    doc: str, kind: type[Config], study: Callable, folder: Path, words: list[str] | None
) -> int:
    """Do `study(config)`, of the folder's config.yaml or another; returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m studies.{folder.name}", description=doc)
    parser.add_argument("--config", type=Path, default=folder / "config.yaml")
    file = parser.parse_args(words).config
    return finish(lambda: study(kind(**yaml.safe_load(read_text(file)))), f"{file}: ")


def finish(work: Callable[[], None], where: str = "") -> int:
    """Do it; returns the exit code, after one message for bad input or Ctrl-C."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nor may the interpreter's last flush fail
    except (InputError, ValidationError, yaml.YAMLError) as error:
        print(f"error: {where}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0

"""Studies: users of the library, each a folder with a page, a config and one command."""

import argparse
from collections.abc import Callable
from pathlib import Path

from calibeval.io import finish
from calibeval.request import Strict, checked
from sweeps.runs.yaml_io import read_yaml


def command(
    doc: str, kind: type[Strict], study: Callable, folder: Path, words: list[str] | None = None
) -> int:
    """Do `study(config)`, of the folder's config.yaml or another; returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m studies.{folder.name}", description=doc)
    parser.add_argument("--config", type=Path, default=folder / "config.yaml")
    file = parser.parse_args(words).config
    return finish(lambda: study(checked(kind, read_yaml(file)[0], str(file), strict=False)))

"""Studies: users of the library, each a folder with a page.

`command` is the command line of the studies that are configured by a file of their own: countdown,
gguf and sequence_sets. The demo has no options, and the configs of claims and written are sweep
files.
"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from calibeval.io import CONTINUES, InputError, finish, read_text, write_text
from calibeval.validation import Strict, checked
from sweeps.runs.yaml_io import read_yaml

Config = TypeVar("Config", bound=Strict)


def command(
    doc: str | None,
    kind: type[Config],
    study: Callable[[Config], None],
    folder: Path,
    words: list[str] | None = None,
    goes_on: bool = False,
) -> int:
    """Do `study(config)`, of the folder's config.yaml or another; returns the exit code.

    `kind` is the model of the config, `doc` the help, `words` the command line. With `goes_on` the
    study keeps what is finished, and Ctrl-C says that the same command continues.
    """
    parser = argparse.ArgumentParser(f"python -m studies.{folder.name}", description=doc)
    parser.add_argument("--config", type=Path, default=folder / "config.yaml")
    file = parser.parse_args(words).config

    def read_and_do() -> None:
        raw, _ = read_yaml(file)
        # `strict` would refuse the texts of YAML where a config has a Path.
        study(checked(kind, raw, str(file), strict=False))

    if goes_on:
        return finish(read_and_do, CONTINUES)
    return finish(read_and_do)


def refuse_other_versions(output: Path, sources: Sequence[Path], made_by: str) -> None:
    """Note in an output folder which sources write to it; raise InputError if others have.

    What is finished there is kept, which must not mix results of different programs. `made_by` is
    what the message calls the sources.
    """
    recipe = output / "recipe.sha256"
    contents = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.sha256(contents).hexdigest()
    if recipe.exists() and read_text(recipe) != digest:
        raise InputError(
            f"{output}: was made by another version of {made_by}; move it away "
            f"(`mv {output} {output}-old`) and repeat"
        )
    write_text(recipe, digest)

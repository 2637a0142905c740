"""Packages that runs need: what is wrong with the installed ones, which wheels are there."""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from sweeps.files import SweepError, last_error, make_folder, write_text

PROJECT = "calibrated-tuning"
VERSIONS = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def requirements(*extras: str) -> list[str]:
    """What this project and its `extras` require, as pip writes it: jobs run the checkout itself.

    Raises SweepError where the project is not installed.
    """
    from packaging.requirements import Requirement

    try:
        every = [Requirement(text) for text in requires(PROJECT)]
    except PackageNotFoundError:
        install = f"{sys.executable} -m pip install --editable '.[train,eval]'"
        raise SweepError(f"package {PROJECT} is not installed: {install}") from None

    def applies(marker) -> bool:
        return marker is None or any(marker.evaluate({"extra": name}) for name in extras)

    asked = (f"{one.name}{one.specifier}" for one in every if applies(one.marker))
    return list(dict.fromkeys(asked))


def problems(needed: Iterable[str], python: str = "auto", key: str = "cluster.python") -> list[str]:
    """A sentence naming the requirements that the interpreter `python` does not meet, or none.

    `auto` is this one; a path with variables is only known inside a job and is not looked at.
    """
    if "$" in python:
        return []
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in dict.fromkeys(needed)]
    words = [sys.executable] if python == "auto" else shlex.split(python)
    asked = [*words, "-c", VERSIONS, *(one.name for one in wanted)]
    try:
        done = subprocess.run(asked, text=True, capture_output=True, check=False, timeout=60)
        found = json.loads(last_error(done.stdout))  # behind what a module may print
    except OSError as error:
        return [f"{key}: {python}: does not start ({error.strerror})"]
    except subprocess.TimeoutExpired:
        return [f"{key}: {python}: does not start (nothing for a minute)"]
    except ValueError:
        return [f"{key}: {python}: does not start ({last_error(done.stderr or done.stdout)})"]
    there = {one: found[one.name] for one in wanted}
    fits = {one for one, v in there.items() if v and one.specifier.contains(v, prereleases=True)}
    wrong = [one for one in wanted if one not in fits]
    said = ", ".join(f"{one} (found {there[one] or 'none'})" for one in wrong)
    install = shlex.join([*words, "-m", "pip", "install", *map(str, wrong)])
    return [f"packages that runs need: {said}: {install}"] if wrong else []


def missing_wheels(needed: Iterable[str], folder: Path) -> list[str]:
    """The requirements that `folder` does not list; its list is written when all is there."""
    lines = _listed(folder)
    return [text for text in dict.fromkeys(needed) if text not in lines]


def _listed(folder: Path) -> list[str]:
    path = folder / "requirements.txt"
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def fetch_wheels(needed: Iterable[str], folder: Path, modules: Iterable[str]) -> None:
    """Download wheels for `needed` and all that they need, and list them in requirements.txt.

    With the Python of the profile's modules, since wheels are made for one version of it.
    """
    make_folder(folder)
    wanted = sorted({*_listed(folder), *needed})
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        arguments = ["-m", "pip", "download", "--quiet", "--prefer-binary", "--dest", scratch]
        command = shlex.join(["python" if modules else sys.executable, *arguments, *wanted])
        if modules:  # -l: the login shell defines `module`
            command = f"module load {shlex.join(modules)} && {command}"
        call = ["bash", "-lc" if modules else "-c", command]
        done = subprocess.run(call, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise SweepError(last_error(done.stderr, "ERROR", "not found"))
        for path in Path(scratch).iterdir():
            path.replace(folder / path.name)
    write_text(folder / "requirements.txt", "\n".join(wanted) + "\n")

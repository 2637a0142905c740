"""Packages that runs need: what is wrong with the installed ones, which wheels are there."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sweeps.errors import SweepError
from sweeps.files import make_folder, write_text

# pyproject's dependencies and its extras `train` and `eval`: jobs run this checkout, not a wheel.
TRAIN = ("torch>=2.4", "numpy>=1.24", "pyyaml>=6", "pydantic>=2.4", "tqdm>=4.60")
TRAIN += (
    "transformers>=4.43",
    "accelerate>=0.31",
    "datasets>=3.0",
    "filelock>=3.30",
    "submitit>=1.5.4",
)
SCORE = ("transformers>=4.43", "scipy>=1.10", "tabulate>=0.9", "matplotlib>=3.7")


def problems(needed: Iterable[str], python: str = "auto") -> list[str]:
    """One sentence for each requirement that the interpreter `python` does not meet.

    `auto` is this one; a path with variables is only known inside a job and is not looked at.
    """
    if "$" in python:
        return []
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in dict.fromkeys(needed)]
    names = [one.name for one in wanted]
    try:
        found = _versions(names) if python == "auto" else _versions_of(python, names)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [f"cluster.python: {python}: does not start ({error})"]
    install = f"{sys.executable if python == 'auto' else python} -m pip install"
    lines = []
    for one in wanted:
        if found[one.name] is None:
            lines.append(f"package {one.name} is not installed: {install} '{one}'")
        elif not one.specifier.contains(found[one.name], prereleases=True):
            lines.append(
                f"package {one.name}: found {found[one.name]}, expected {one.specifier}: "
                f"{install} '{one}'"
            )
    return lines


def _versions(names: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _versions_of(python: str, names: list[str]) -> dict[str, str | None]:
    code = (
        "import json, sys\nfrom importlib.metadata import distributions\n"
        "print(json.dumps({d.metadata['Name']: d.version for d in distributions()}))"
    )
    done = subprocess.run(
        [os.path.expanduser(word) for word in shlex.split(python)] + ["-c", code],
        text=True, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    from packaging.utils import canonicalize_name

    there = {canonicalize_name(k): v for k, v in json.loads(done.stdout).items() if k}
    return {name: there.get(canonicalize_name(name)) for name in names}


def missing_wheels(needed: Iterable[str], folder: Path) -> list[str]:
    """The requirements that `folder` cannot serve: no wheel that fits, or not in its list."""
    from packaging.requirements import Requirement
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    there: dict[str, list] = {}
    for path in folder.glob("*.whl"):
        try:
            name, number, *_ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        there.setdefault(name, []).append(number)
    listed = folder / "requirements.txt"
    lines = listed.read_text(encoding="utf-8").split() if listed.is_file() else []
    return [
        text
        for text in dict.fromkeys(needed)
        if text not in lines
        or not any(
            Requirement(text).specifier.contains(number, prereleases=True)
            for number in there.get(canonicalize_name(Requirement(text).name), ())
        )
    ]


def fetch_wheels(needed: Iterable[str], folder: Path, modules: Iterable[str]) -> None:
    """Download wheels for `needed` and all that they need, and list them in requirements.txt.

    With the Python of the profile's modules, since wheels are made for one version of it.
    """
    make_folder(folder)
    listed = folder / "requirements.txt"
    before = listed.read_text(encoding="utf-8").split() if listed.is_file() else []
    wanted = sorted({*before, *needed})
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        arguments = ["-m", "pip", "download", "--quiet", "--prefer-binary", "--dest", scratch]
        command = shlex.join(["python" if modules else sys.executable, *arguments, *wanted])
        if modules:  # -l: the login shell defines `module`
            command = f"module load {shlex.join(modules)} && {command}"
        done = subprocess.run(
            ["bash", "-lc" if modules else "-c", command],
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
            wrong = [line for line in lines if "ERROR" in line or "not found" in line]
            raise SweepError((wrong or lines)[-1].strip())
        for path in Path(scratch).iterdir():
            path.replace(folder / path.name)
    write_text(listed, "\n".join(wanted) + "\n")

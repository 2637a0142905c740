"""A sweep is a folder: sweep.yaml in it says which runs it holds, with every override.

`<output_root>/sweeps/<name>/`, or `<name>-<hash>` where that one holds other runs already, so that
no sweep ever writes into another's tables.
"""

import re
import secrets
import shutil
from pathlib import Path

from sweeps.config import Sweep, dump_yaml, load_sweep
from sweeps.errors import SweepError
from sweeps.files import make_folder, write_text
from sweeps.grid import Cell, expand, runs_folder, sweep_folder, sweep_hash

FILE = "sweep.yaml"
HEAD = re.compile(r"# sweep ([0-9a-f]{8}): (.*)")


def recorded(folder: Path) -> tuple[str, str] | None:
    """The hash of the sweep that `folder` holds and how it was asked for, or None."""
    try:
        with open(folder / FILE, encoding="utf-8") as lines:
            first = lines.readline()
    except FileNotFoundError:
        return None
    if not first:  # whoever claims it was killed, or is about to write
        return None
    head = HEAD.fullmatch(first.rstrip("\n"))
    if head is None:
        raise SweepError(f"{folder / FILE}: line 1: expected `# sweep <hash>: …`; was it edited?")
    return head[1], head[2]


def placed(sweep: Sweep, cells: list[Cell]) -> Sweep:
    """The sweep under its folder's name."""
    mine = sweep_hash(cells)
    other = sweep.model_copy(update={"name": f"{sweep.name}-{mine}"})
    if recorded(sweep_folder(other)) is not None:
        return other
    found = recorded(sweep_folder(sweep))
    return sweep if found is None or found[0] == mine else other


def claim(sweep: Sweep, cells: list[Cell], asked: str) -> None:
    """Write sweep.yaml; a launch that took the folder for other runs meanwhile is a SweepError."""
    folder, mine = sweep_folder(sweep), sweep_hash(cells)
    text = f"# sweep {mine}: {asked}\n" + dump_yaml(sweep.model_dump(mode="json"))
    make_folder(folder)
    if recorded(folder) is None:
        try:
            with open(folder / FILE, "x", encoding="utf-8") as out:  # not where another was quicker
                out.write(text)
        except FileExistsError:
            if recorded(folder) is None:
                write_text(folder / FILE, text)
    found = recorded(folder)
    if found is None or found[0] != mine:
        raise SweepError(f"{folder}: another sweep took this name just now; type the same again")
    if (folder / FILE).read_text(encoding="utf-8").partition("\n")[2] != text.partition("\n")[2]:
        write_text(folder / FILE, text)  # the same runs with other scores or another cluster


def read(folder: Path, assignments: list[str]) -> tuple[Sweep, list[Cell]]:
    """The sweep of a folder. Overrides may change how it runs and what is scored, not its runs."""
    found = recorded(folder)
    if found is None:
        raise SweepError(f"{folder}: no {FILE} in this folder; a sweep's own folder, or its file?")
    sweep, origins = load_sweep(folder / FILE, assignments)
    cells = expand(sweep, str(folder / FILE), origins)
    if sweep_hash(cells) != found[0] or Path(sweep_folder(sweep)).name != folder.name:
        why = f"with {' '.join(assignments)} it" if assignments else "its runs changed: it"
        raise SweepError(
            f"{folder}: {why} would be another sweep; launch the sweep file ({found[1]}) anew"
        )
    return sweep, cells


def namesakes(sweep: Sweep, name: str) -> list[Path]:
    """The other folders of the sweeps called `name`."""
    found = sweep_folder(sweep).parent.glob(f"{name}*/{FILE}")
    pattern = re.compile(re.escape(name) + "(-[0-9a-f]{8})?")
    return sorted(
        path.parent
        for path in found
        if pattern.fullmatch(path.parent.name) and path.parent.name != sweep.name
    )


def orphans(sweep: Sweep) -> list[Path]:
    """Run folders in the sweep's output_root that no sweep folder there holds any more."""
    held = set()
    for folder in sweep_folder(sweep).parent.glob("*/"):
        path = folder / FILE
        if recorded(folder) is None:
            if not (folder / "jobs").exists():
                continue
            raise SweepError(f"{folder}: has jobs but no {FILE}, so nobody knows its runs")
        one, _ = load_sweep(path)
        held |= {cell.folder.name for cell in expand(one, str(path))}
    return sorted(p for p in runs_folder(sweep).glob("*") if p.is_dir() and p.name not in held)


def remove(run: Path) -> None:
    """Delete a run folder; under another name first, so that a kill leaves no half of a run."""
    going = run.with_name(f".{run.name}.{secrets.token_hex(3)}.removed")
    run.rename(going)
    shutil.rmtree(going)

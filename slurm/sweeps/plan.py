"""A sweep as it was asked for, by its file and overrides or by its folder → its runs.

The sweep's folder is `<output_root>/sweeps/<name>/`, or `<name>-<hash>` where that one holds other
runs already, so that no sweep ever writes into another's tables.
"""

import hashlib
import itertools
import re
import secrets
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from calibeval.tasks import SPLITS
from sweeps.backends import REGISTRY, get_backend
from sweeps.cluster import expand as expand_path
from sweeps.config import (
    HELD_OUT,
    Entropy,
    Prefetch,
    Score,
    Sweep,
    World,
    check,
    dump_yaml,
    each_text,
    override,
    read_yaml,
    refuse_other,
)
from sweeps.files import SweepError, make_folder, write_text
from sweeps.provenance import command, shown
from sweeps.rundir import RunConfig

FILE = "sweep.yaml"
HEAD = re.compile(r"# sweep ([0-9a-f]{8}): (.*)")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its folder, its config and the grid values that it stands for."""

    folder: Path
    config: RunConfig
    values: dict


@dataclass(frozen=True)
class Plan:
    """A sweep, read and expanded; `name` is its file's, the sweep has its folder's."""

    source: Path
    assignments: tuple[str, ...]
    name: str
    sweep: Sweep
    cells: list[Cell]

    @property
    def folder(self) -> Path:
        return sweep_folder(self.sweep)

    @property
    def typed(self) -> list[str]:
        """The sweep as it was typed."""
        return [str(self.source), *self.assignments]

    def again(self, what: str) -> str:
        """A command on this sweep's folder, as it would be typed here."""
        return command("sweeps.sh", what, shown(self.folder))

    @property
    def launched(self) -> bool:
        return recorded(self.folder) is not None


def dotted_keys(backend: object) -> list[str]:
    """Where the keys of a sweep file stand: train.learning_rate, world.nodes, workers, …"""
    train = get_backend(backend if backend in REGISTRY else "builtin").Train
    sections = {"train": train, "world": World, "score": Score, "prefetch": Prefetch}
    inner = [f"{name}.{key}" for name, model in sections.items() for key in model.model_fields]
    return [*inner, *Sweep.model_fields]


def load_sweep(path: Path, assignments: Iterable[str] = ()) -> tuple[Sweep, dict[str, str]]:
    """Read a sweep file and apply overrides; returns it and {overridden key: assignment}.

    `train` and `grid` are checked against the backend when the grid is expanded.
    """
    raw = read_yaml(path)
    expected = "a sweep is expected, for example configs/sweeps/beta.yaml"
    refuse_other(raw, Sweep, expected, str(path))
    origins = override(raw, assignments)
    train = raw.get("train")
    for key in origins:  # an axis that is typed replaces the file's one value
        section, _, name = key.partition(".")
        if section == "grid" and f"train.{name}" not in origins and isinstance(train, dict):
            train.pop(name, None)

    def expanded(key: str, text: str) -> str:  # here: the jobs have not all of the variables
        typed = next((a for at, a in origins.items() if f"{key}.".startswith(f"{at}.")), None)
        return expand_path(f"{f'command line ({typed})' if typed else path}: {key}", text)

    raw = each_text(raw, expanded)
    elsewhere = dotted_keys(raw.get("backend"))
    sweep = check(Sweep, raw, str(path), origins=origins, elsewhere=elsewhere)
    if sweep.keep == "scores" and sweep.score is None:
        raise SweepError(f"{path}: keep: found 'scores', but this sweep has no `score` section")
    if sweep.score is not None:
        names = [task.key for task in sweep.score.tasks]
        if Entropy.key in names:
            raise SweepError(f"{path}: score.tasks: a task is called entropy; give it another name")
        if len(set(names)) != len(names):
            raise SweepError(
                f"{path}: score.tasks: two tasks share a name: {names}; give each a `name`"
            )
        if sweep.score.select_on == HELD_OUT and not {**sweep.train, **sweep.grid}.get("held_out"):
            raise SweepError(f"{path}: score.select_on: {HELD_OUT} needs train.held_out")
        names.append(HELD_OUT)
        if sweep.score.select_on not in (None, *names):
            raise SweepError(
                f"{path}: score.select_on: found {sweep.score.select_on!r}, expected one of {names}"
            )
        for task in sweep.score.tasks:
            shown, other = SPLITS.get(task.task, (None, None))
            if shown and task.key == sweep.score.select_on and task.split in (None, shown):
                asks = f"{task.key} asks the {shown} split, whose figures the tables show"
                expected = f"expected a task with split: {other}, or null"
                raise SweepError(f"{path}: score.select_on: {asks}; {expected}")
    return sweep, origins


def runs_folder(sweep: Sweep) -> Path:
    """Where runs live; sweeps with the same output_root share the runs they have in common."""
    return Path(sweep.output_root) / "runs"


def sweep_folder(sweep: Sweep) -> Path:
    """Where this sweep's own files live: sweep.yaml, index, jobs, results."""
    return Path(sweep.output_root) / "sweeps" / sweep.name


def sweep_hash(cells: list[Cell]) -> str:
    """Which sweep this is: eight digits of the hash of its runs' hashes.

    What is scored, and on which cluster, may change; another run makes another sweep.
    """
    digests = sorted(cell.config.digest for cell in cells)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:8]


def expand(sweep: Sweep, source: str, origins: dict[str, str] | None = None) -> list[Cell]:
    """Every combination of `grid`, in the order of the file, the last axis fastest.

    Raises SweepError naming the file and the key for a value that the backend refuses, a key given
    in both `train` and `grid`, or two cells with the same config.
    """
    backend = get_backend(sweep.backend, source)
    for key in sweep.grid.keys() & sweep.train.keys():
        one, many = sweep.train[key], list(sweep.grid[key])
        raise SweepError(
            f"{source}: {key!r} is given in both `train` ({one!r}) and `grid` ({many!r}); keep "
            f"one, on the command line 'grid.{key}=[{one}]'"
        )

    def section(key: str) -> str:
        return "grid" if key in sweep.grid else "train"

    cells, seen, known = [], {}, dotted_keys(sweep.backend)
    for combination in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, combination, strict=True))
        raw, where = sweep.train | values, {"section": section, "origins": origins}
        train = check(backend.Train, raw, source, elsewhere=known, **where)
        config = RunConfig(backend=sweep.backend, train=train.model_dump(), world=sweep.world)
        if config.name in seen:
            raise SweepError(
                f"{source}: grid: {values} and {seen[config.name]} are the same run; drop one"
            )
        seen[config.name] = values
        cells.append(Cell(runs_folder(sweep) / config.name, config, values))
    return cells


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


def plan(source: Path, assignments: list[str]) -> Plan:
    """Read, override, check and expand a sweep file, or a sweep's folder; touches nothing else."""
    if source.is_dir():
        sweep, cells = read(source, assignments)
        return Plan(source, tuple(assignments), sweep.name, sweep, cells)
    sweep, origins = load_sweep(source, assignments)
    cells = expand(sweep, str(source), origins)
    return Plan(source, tuple(assignments), sweep.name, placed(sweep, cells), cells)


def claim(planned: Plan) -> None:
    """Write sweep.yaml; SweepError where a launch took the folder for other runs meanwhile."""
    folder, mine = planned.folder, sweep_hash(planned.cells)
    if planned.name != planned.sweep.name and not planned.launched:
        taken = folder.with_name(planned.name)
        here = f"this sweep is {shown(folder)}"
        print(f"{shown(taken)} holds other runs ({recorded(taken)[1]}); {here}", flush=True)
    known = recorded(folder) if planned.source.is_dir() else None
    asked = known[1] if known else shlex.join(planned.typed)
    text = f"# sweep {mine}: {asked}\n" + dump_yaml(planned.sweep.model_dump(mode="json"))
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


def launched_in(folder: Path) -> list[Path]:
    """The sweeps' folders in a folder: sweeps, an output_root, or a folder of those."""
    patterns = (f"*/{FILE}", f"sweeps/*/{FILE}", f"*/sweeps/*/{FILE}")
    return sorted(path.parent for pattern in patterns for path in folder.glob(pattern))


def read(folder: Path, assignments: list[str]) -> tuple[Sweep, list[Cell]]:
    """The sweep of a folder. Overrides may change how it runs and what is scored, not its runs."""
    found = recorded(folder)
    if found is None:
        there = " ".join(str(shown(path)) for path in launched_in(folder))
        expected = f"there are: {there}" if there else "a sweep's own folder, or its file?"
        raise SweepError(f"{folder}: no {FILE} in this folder; {expected}")
    sweep, origins = load_sweep(folder / FILE, assignments)
    cells = expand(sweep, str(folder / FILE), origins)
    here = sweep_folder(sweep)
    if here.name == folder.name and not (here.exists() and here.samefile(folder)):
        now = folder.absolute().parents[1]
        raise SweepError(
            f"{folder}: its runs would be in {runs_folder(sweep)}; was it moved? say where it is: "
            f"output_root={now}"
        )
    if sweep_hash(cells) != found[0] or here.name != folder.name:
        why = f"with {' '.join(assignments)} it" if assignments else "its runs changed: it"
        raise SweepError(
            f"{folder}: {why} would be another sweep; launch the sweep file ({found[1]}) anew"
        )
    return sweep, cells


def namesakes(planned: Plan) -> str:
    """Where to look if this very sweep was never launched, but one of its name was; or nothing."""
    if planned.launched:
        return ""
    pattern = re.compile(re.escape(planned.name) + "(-[0-9a-f]{8})?")
    folders = [path.parent for path in planned.folder.parent.glob(f"{planned.name}*/{FILE}")]
    found = sorted(path for path in folders if pattern.fullmatch(path.name))
    others = "".join(f"\n  {shown(path)}  ({recorded(path)[1]})" for path in found)
    typed = " ".join(planned.typed)
    return others and f"{typed} was never launched; of this name there are:{others}\n"


def neighbours(sweep: Sweep) -> Iterator[tuple[Sweep, list[Cell]]]:
    """The sweeps launched in this one's output_root, which may share its runs."""
    for folder in sweep_folder(sweep).parent.glob("*/"):
        path = folder / FILE
        if recorded(folder) is not None:
            one, _ = load_sweep(path)
            yield one, expand(one, str(path))
        elif (folder / "jobs").exists():
            raise SweepError(f"{folder}: has jobs but no {FILE}, so nobody knows its runs")


def orphans(sweep: Sweep) -> list[Path]:
    """Run folders in the sweep's output_root that no sweep folder there holds any more."""
    held = {cell.folder.name for _, cells in neighbours(sweep) for cell in cells}
    return sorted(p for p in runs_folder(sweep).glob("*") if p.is_dir() and p.name not in held)


def remove(run: Path) -> None:
    """Delete a run folder; under another name first, so that a kill leaves no half of a run."""
    going = run.with_name(f".{run.name}.{secrets.token_hex(3)}.removed")
    run.rename(going)
    shutil.rmtree(going)

"""A sweep from file to table: plan → run folders → train → score → collect."""

from dataclasses import dataclass
from pathlib import Path

from sweeps import collect, score
from sweeps.backends import get_backend
from sweeps.config import Sweep, load_sweep
from sweeps.errors import SweepError
from sweeps.grid import Cell, expand
from sweeps.rundir import RunDir


@dataclass(frozen=True)
class Plan:
    """A sweep file, read and expanded."""

    source: Path
    assignments: tuple[str, ...]
    sweep: Sweep
    cells: list[Cell]


def plan(source: Path, assignments: list[str]) -> Plan:
    """Read, override, check and expand; touches nothing but the file."""
    sweep, origins = load_sweep(source, assignments)
    return Plan(source, tuple(assignments), sweep, expand(sweep, str(source), origins))


def describe(planned: Plan) -> str:
    """Every run of the plan, with what is already there."""
    lines = []
    for cell in planned.cells:
        state = "done" if RunDir(cell.folder).done else "to do"
        values = " ".join(f"{key}={value}" for key, value in cell.values.items())
        lines.append(f"{state:6} {cell.folder}  {values}".rstrip())
    done = sum(RunDir(cell.folder).done for cell in planned.cells)
    lines.append(f"{len(planned.cells)} runs, {done} done, {len(planned.cells) - done} to do")
    return "\n".join(lines)


def check_assets(planned: Plan) -> None:
    """Raise SweepError naming everything that is missing, before any job starts."""
    sweep = planned.sweep
    problems: list[str] = []
    for cell in planned.cells:
        if not RunDir(cell.folder).done:
            backend = get_backend(cell.config.backend)
            problems += backend.missing(cell.config.keys, cell.config.world)
    for task in sweep.score.tasks if sweep.score else ():
        if not Path(task.data).exists():
            problems.append(f"score.tasks: {task.key}: data: {task.data}: no such file or folder")
    if problems:
        raise SweepError(f"{planned.source}: " + "\n       ".join(dict.fromkeys(problems)))


def launch_local(planned: Plan) -> int:
    """Run everything here; returns the exit code."""
    from sweeps.executors import local

    for cell in planned.cells:
        RunDir(cell.folder).create(cell.config)
    problems = local.launch(planned.sweep, planned.cells)
    if planned.sweep.score is None:
        return 1 if problems else 0
    gaps = collect.collect(planned.sweep, planned.cells)
    if gaps:
        print(collect.report(gaps))
    return 1 if gaps or problems else 0


def subjects(planned: Plan) -> list[score.Subject]:
    """Everything that is scored: base models, then runs."""
    bases = list(score.bases(planned.sweep, planned.cells).values())
    return bases + [score.of_cell(cell) for cell in planned.cells]

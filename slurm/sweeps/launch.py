"""A sweep from file to table: plan → run folders → train → score → collect."""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from calibeval.io import counted
from sweeps import collect, folder, preflight, score, status
from sweeps.config import Sweep, load_sweep
from sweeps.errors import SweepError
from sweeps.grid import Cell, expand, sweep_folder
from sweeps.provenance import command, shown
from sweeps.rundir import RunDir


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
    def launched(self) -> bool:
        return folder.recorded(self.folder) is not None


def plan(source: Path, assignments: list[str]) -> Plan:
    """Read, override, check and expand a sweep file, or a sweep's folder; touches nothing else."""
    if source.is_dir():
        sweep, cells = folder.read(source, assignments)
        return Plan(source, tuple(assignments), sweep.name, sweep, cells)
    sweep, origins = load_sweep(source, assignments)
    cells = expand(sweep, str(source), origins)
    return Plan(source, tuple(assignments), sweep.name, folder.placed(sweep, cells), cells)


def claim(planned: Plan) -> None:
    """Write down in the sweep's folder what it holds."""
    if planned.name != planned.sweep.name and not planned.launched:
        taken = planned.folder.with_name(planned.name)
        print(
            f"{shown(taken)} holds other runs ({folder.recorded(taken)[1]}); "
            f"this sweep is {shown(planned.folder)}",
            flush=True,
        )
    asked = folder.recorded(planned.folder) if planned.source.is_dir() else None
    folder.claim(planned.sweep, planned.cells, asked[1] if asked else shlex.join(_typed(planned)))


def namesakes(planned: Plan) -> str | None:
    """Where to look if this very sweep was never launched, but one of its name was."""
    found = [] if planned.launched else folder.namesakes(planned.sweep, planned.name)
    if not found:
        return None
    others = "".join(f"\n  {shown(path)}  ({folder.recorded(path)[1]})" for path in found)
    return f"{' '.join(_typed(planned))} was never launched; of this name there are:{others}"


def describe(planned: Plan) -> str:
    """Every run of the plan, with what is already there."""
    lines = []
    for cell in planned.cells:
        state = "done" if RunDir(cell.folder).done else "to do"
        values = " ".join(f"{key}={value}" for key, value in cell.values.items())
        lines.append(f"{state:6} {cell.folder}  {values}".rstrip())
    done = sum(RunDir(cell.folder).done for cell in planned.cells)
    total = len(planned.cells)
    lines.append(f"{counted(total, 'run')}, {done} done, {total - done} to do")
    return "\n".join(lines)


def prefetch_command(planned: Plan) -> str:
    """What fetches this very sweep's assets, as it would be typed here."""
    return command("prefetch.sh", "--config", *_typed(planned))


def check_assets(planned: Plan, executor: str, cells: list[Cell] | None = None) -> None:
    """Raise SweepError naming everything that is missing, before any job starts."""
    cells = planned.cells if cells is None else cells
    problems = preflight.problems(planned.sweep, cells, executor, prefetch_command(planned))
    if problems:
        raise SweepError(f"{planned.source}: " + "\n       ".join(problems))


def pick_executor(name: str, *, dry_run: bool = False) -> str:
    """`auto` is Slurm where there is an sbatch, this machine elsewhere.

    A dry run shows the cluster's scripts on a laptop too.
    """
    if name != "auto":
        return name
    return "slurm" if dry_run or shutil.which("sbatch") else "local"


def dry_run(planned: Plan, executor: str) -> str:
    """What a launch would do."""
    if executor == "local":
        return describe(planned)
    from sweeps.executors import slurm

    return slurm.dry_run(planned.sweep, planned.cells) + describe(planned)


def launch_local(planned: Plan, cells: list[Cell] | None = None) -> int:
    """Run what is missing, of `cells` or of all, here; returns the exit code."""
    from sweeps.executors import local

    claim(planned)
    cells = planned.cells if cells is None else cells
    for cell in cells:
        RunDir(cell.folder).create(cell.config)
    problems = local.launch(planned.sweep, cells)
    gaps = collect.collect(planned.sweep, planned.cells)
    return 1 if gaps or problems else 0


def launch_slurm(planned: Plan, cells: list[Cell] | None = None, *, train: bool = True) -> int:
    """Queue what is missing, of `cells` or of all; returns the exit code.

    Without `train` only what is trained already is scored.
    """
    from sweeps.executors import slurm

    claim(planned)
    ids = slurm.submit(planned.sweep, planned.cells if cells is None else cells, train=train)
    if not ids:
        every = "every run is done or queued" if train else "every trained run is scored or queued"
        print(f"nothing to submit: {every}")
        return 0
    print("submitted: " + " ".join(f"{stage}={job}" for stage, job in ids.items()))
    print(f"watch: {again(planned, 'status')}")
    return 0


def again(planned: Plan, what: str) -> str:
    """A command on this sweep, as it would be typed here, with or without an environment."""
    return command("sweeps.sh", what, shown(planned.folder))


def _typed(planned: Plan) -> list[str]:
    """The sweep as it was typed."""
    return [str(planned.source), *planned.assignments]


def to_score(planned: Plan) -> str:
    """What `score` would do."""
    lines = [
        f"{subject.name}: {', '.join(task.key for task in tasks)}"
        for subject in trained(planned)
        if (tasks := score.missing(subject, planned.sweep.score))
    ]
    return "\n".join([*lines, f"{len(lines)} to score"])


def queue_scores(planned: Plan) -> int:
    """Queue the scoring of what is trained; returns the exit code."""
    check_assets(planned, "slurm")
    return launch_slurm(planned, train=False)


def resubmit(planned: Plan) -> bool:
    """Queue the runs that died without a word (their node did); True if any was queued.

    A run that is lost again and again without a new checkpoint in between fails instead.
    """
    from sweeps.executors import slurm

    found = status.of_sweep(planned.sweep, planned.cells)
    lost = [
        cell
        for cell, one in zip(planned.cells, found, strict=True)
        if one.lost and not RunDir(cell.folder).lost_again(planned.sweep.max_idle_restarts)
    ]
    if not lost:
        return False
    print("again: " + ", ".join(cell.config.name for cell in lost), flush=True)
    return bool(slurm.submit(planned.sweep, lost, ready=False))


def collect_job(planned: Plan) -> int:
    """What the job at the end of a submission does; returns the exit code."""
    if resubmit(planned):
        return 0  # the new submission ends with a collect of its own
    return 1 if collect.collect(planned.sweep, planned.cells) else 0


def dead(planned: Plan) -> tuple[list[Cell], list[str]]:
    """What was begun or queued, is neither finished nor under way, and will not go on by itself.

    Returns the cells that stand for it, and the names of the runs and base models.
    """
    sweep, cells = planned.sweep, planned.cells
    found = zip(cells, status.of_sweep(sweep, cells), strict=True)
    chosen = {one.name: cell for cell, one in found if one.again}
    for model, one in status.of_bases(sweep, cells).items():
        if one.again:  # a launch scores the base models of its runs
            chosen[one.name] = next(
                c for c in cells if c.config.train["model_name_or_path"] == model
            )
    return [c for c in cells if any(c is x for x in chosen.values())], list(chosen)


def bases(planned: Plan) -> dict[str, score.Subject]:
    """The base models that are scored, by model_name_or_path."""
    return score.bases(planned.sweep, planned.cells)


def trained(planned: Plan) -> list[score.Subject]:
    """What can be scored: base models, then finished runs."""
    return list(bases(planned).values()) + [
        score.of_cell(c) for c in planned.cells if RunDir(c.folder).done
    ]

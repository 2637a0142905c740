"""A sweep from file to table: plan → run folders → train → score → collect."""

import os
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from calibeval.io import counted
from sweeps import collect, preflight, score, status
from sweeps.config import Sweep, load_sweep
from sweeps.errors import SweepError
from sweeps.grid import Cell, expand
from sweeps.provenance import PROJECT
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
    total = len(planned.cells)
    lines.append(f"{counted(total, 'run')}, {done} done, {total - done} to do")
    return "\n".join(lines)


def prefetch_command(planned: Plan) -> str:
    """What fetches this very sweep's assets, as it would be typed here."""
    script = os.path.relpath(PROJECT / "slurm" / "prefetch.sh")
    script = script if not script.startswith("..") else str(PROJECT / "slurm" / "prefetch.sh")
    return shlex.join(["bash", script, "--config", *_typed(planned)])


def check_assets(planned: Plan, executor: str) -> None:
    """Raise SweepError naming everything that is missing, before any job starts."""
    problems = preflight.problems(planned.sweep, planned.cells, executor, prefetch_command(planned))
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


def launch_local(planned: Plan) -> int:
    """Run everything here; returns the exit code."""
    from sweeps.executors import local

    for cell in planned.cells:
        RunDir(cell.folder).create(cell.config)
    problems = local.launch(planned.sweep, planned.cells)
    gaps = collect.collect(planned.sweep, planned.cells)
    return 1 if gaps or problems else 0


def launch_slurm(planned: Plan) -> int:
    """Queue what is missing; returns the exit code."""
    return _submit(planned)


def _submit(planned: Plan, *, train: bool = True) -> int:
    from sweeps.executors import slurm

    ids = slurm.submit(planned.sweep, planned.cells, train=train)
    if not ids:
        every = "every run is done or queued" if train else "every trained run is scored or queued"
        print(f"nothing to submit: {every}")
        return 0
    print("submitted: " + " ".join(f"{stage}={job}" for stage, job in ids.items()))
    print(f"watch: {shlex.join(['python', '-m', 'sweeps', 'status', *_typed(planned)])}")
    return 0


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
    return _submit(planned, train=False)


def failed(planned: Plan) -> list[Cell]:
    """Runs that gave up, and runs that died without a word."""
    return [
        cell
        for cell, state in zip(planned.cells, _states(planned), strict=True)
        if state in ("failed", "interrupted")
    ]


def only(planned: Plan, cells: list[Cell]) -> Plan:
    """The plan cut to some of its runs."""
    return replace(planned, cells=cells)


def resubmit(planned: Plan) -> bool:
    """Queue runs that died without a word (their node did); True if any was queued."""
    from sweeps.executors import slurm

    states = _states(planned)
    lost = [c for c, state in zip(planned.cells, states, strict=True) if state == "interrupted"]
    if not lost:
        return False
    print("again: " + ", ".join(cell.config.name for cell in lost), flush=True)
    return bool(slurm.submit(planned.sweep, planned.cells))


def _states(planned: Plan) -> list[str]:
    return [found.state for found in status.of_sweep(planned.sweep, planned.cells)]


def trained(planned: Plan) -> list[score.Subject]:
    """What can be scored: base models, then finished runs."""
    bases = list(score.bases(planned.sweep, planned.cells).values())
    return bases + [score.of_cell(c) for c in planned.cells if RunDir(c.folder).done]

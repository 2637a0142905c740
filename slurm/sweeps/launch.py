"""A sweep from file to table: plan → run folders → train → score → collect."""

import shutil

from calibeval.io import counted
from sweeps import preflight, status
from sweeps.executors import local, slurm
from sweeps.files import SweepError
from sweeps.plan import Cell, Plan, claim
from sweeps.plan import plan as plan
from sweeps.provenance import shown
from sweeps.rundir import RunDir


def describe(planned: Plan) -> str:
    """Every run of the plan, with what is already there."""
    lines, total, done = [], len(planned.cells), 0
    for cell in planned.cells:
        finished = RunDir(cell.folder).done
        done += finished
        values = " ".join(f"{key}={value}" for key, value in cell.values.items())
        lines.append(f"{'done' if finished else 'to do':6} {shown(cell.folder)}  {values}".rstrip())
    return "\n".join([*lines, f"{counted(total, 'run')}, {done} done, {total - done} to do"])


def check_assets(planned: Plan, executor: str, cells: list[Cell] | None = None) -> None:
    """Raise SweepError naming everything that is missing, before any job starts."""
    if problems := preflight.problems(planned, executor, cells):
        raise SweepError(f"{planned.source}: " + "\n       ".join(problems))


def pick_executor(name: str) -> str:
    """`auto` is Slurm where there is an sbatch, this machine elsewhere."""
    return name if name != "auto" else "slurm" if shutil.which("sbatch") else "local"


def dry_run(planned: Plan, executor: str) -> str:
    """What a launch would do; for `auto` a cluster's scripts on a laptop too."""
    if executor == "local":
        return describe(planned)
    note = ""
    if executor == "auto" and pick_executor("auto") == "local":
        note = (
            "# There is no sbatch here: a cluster gets the following; without --dry-run these "
            f"runs would train on this machine, {local.at_once(planned.sweep)} at a time.\n"
        )
    return note + slurm.dry_run(planned.sweep, planned.cells) + describe(planned)


def start(
    planned: Plan, executor: str, cells: list[Cell] | None = None, *, train: bool = True
) -> int:
    """Do what is missing, of `cells` or of all, and collect it; returns the exit code.

    Without `train` only what is trained already is scored, and on this machine nothing collected.
    """
    claim(planned)
    cells = planned.cells if cells is None else cells
    if executor == "local":
        from sweeps import results  # with NumPy, for which every command would wait

        for cell in cells if train else ():
            RunDir(cell.folder).create(cell.config)
        problems = local.launch(planned.sweep, cells, train=train)
        gaps = results.collect(planned.sweep, planned.cells) if train else []
        return 1 if gaps or problems else 0
    if ids := slurm.submit(planned.sweep, cells, train=train):
        print("submitted: " + " ".join(f"{stage}={job}" for stage, job in ids.items()))
        print(f"watch: {planned.again('status')}")
    else:
        every = "every run is done or queued" if train else "every trained run is scored or queued"
        print(f"nothing to submit: {every}; tables: {planned.again('collect')}")
    return 0


def resubmit(planned: Plan) -> bool:
    """Queue the runs that died without a word (their node did); True if any was queued.

    A run that is lost again and again without a new checkpoint in between fails instead.
    """
    found, _ = status.of_sweep(planned.sweep, planned.cells)
    if error := found[0].error:
        print(f"{error}; nothing is queued again")
    lost = [
        cell
        for cell, one in zip(planned.cells, found, strict=True)
        if one.lost and not RunDir(cell.folder).lost_again(planned.sweep.max_idle_restarts)
    ]
    if not lost:
        return False
    print("again: " + ", ".join(cell.config.name for cell in lost), flush=True)
    return bool(slurm.submit(planned.sweep, lost, ready=False))


def dead(planned: Plan) -> tuple[list[Cell], list[str]]:
    """What was begun or queued, is neither finished nor under way, and will not go on by itself.

    Returns the cells that stand for it, and the names of the runs and base models; raises
    SweepError if the queue does not answer.
    """
    sweep, cells = planned.sweep, planned.cells
    found, bases = status.of_sweep(sweep, cells)
    if error := found[0].error:
        raise SweepError(f"{error}; what is queued is not known")
    chosen = {one.name: cell for cell, one in zip(cells, found, strict=True) if one.trouble}
    for model, one in bases.items():
        if one.trouble:  # a launch scores the base models of its runs
            its = (c for c in cells if c.config.train["model_name_or_path"] == model)
            chosen[one.name] = next(its)
    return [c for c in cells if any(c is x for x in chosen.values())], list(chosen)

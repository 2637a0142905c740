"""`python -m sweeps COMMAND`: parsing and messages.

Each command is a function here, which imports what it needs: nobody who asks for `--help` or
`status` waits for packages that only training needs.
"""

import argparse
import contextlib
import io
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweeps.runs.grid import SweepPlan
    from sweeps.runs.run import Run

CLEAR_SCREEN = "\033[H\033[2J"
FOLLOW_PAUSE = 30  # seconds between the tables of `status --follow`
RUN_PATIENCE = 30  # seconds to wait for another process that trains or scores the same run
# The commands that enter the folder where anybody has launched a sweep; the others only look.
ENTERING = ("launch", "prefetch", "train", "score")

Command = Callable[[argparse.Namespace], int | None]


def parser() -> argparse.ArgumentParser:
    """All commands and their options; each sets `function`, which does it."""
    from calibeval.io import CommandLine

    top = CommandLine(prog="python -m sweeps", description="Sweeps of fine-tunes.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, function: Command, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(function=function)
        return command

    launch = add(
        "launch",
        _launch,
        "train, score and collect what is not done yet; again: whatever did not get there",
    )
    status = add(
        "status", _status, "every run of a sweep: to do, what it is doing, done, or why it died"
    )
    status.add_argument(
        "--follow", action="store_true", help=f"again every {FOLLOW_PAUSE} s, until all have ended"
    )
    logs = add("logs", _logs, "the last lines of one run's logs: its job's, and of its stages")
    cancel = add("cancel", _cancel, "scancel its jobs on Slurm; running trainers save first")
    collect = add("collect", _collect, "make the tables; exit 1 while there are gaps")
    prefetch = add("prefetch", _prefetch, "fetch models and data, where there is internet")
    for command in (launch, status, logs, cancel, collect, prefetch):
        _add_sweep(command)
    launch.add_argument(
        "--executor",
        choices=("auto", "local", "slurm"),
        default="auto",
        help="auto: Slurm where there is an sbatch, this machine elsewhere",
    )
    launch.add_argument("--dry-run", action="store_true", help="print what would be done")
    launch.add_argument(
        "--scripts", action="store_true", help="with --dry-run: also print what sbatch would get"
    )

    keys = add("keys", _keys, "every key of sweep files and cluster profiles")
    keys.add_argument("backend", nargs="?", default="trainer", help="whose `train:` keys")
    for name, function in (("train", _train), ("score", _score)):
        command = add(name, function, f"{name} one run, here")
        command.add_argument("folder", metavar="RUN_DIR", type=lambda text: Path(text).absolute())
    return top


def _add_sweep(command: argparse.ArgumentParser) -> None:
    """Let a command take a sweep and overrides."""
    command.add_argument(
        "sweep",
        metavar="SWEEP",
        type=_typed_path,
        help="a sweep file, for example configs/sweeps/beta.yaml, or a sweep's or a run's folder",
    )
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides", default=[]
    )
    command.add_argument("--cluster", type=_typed_path, help="a profile of configs/cluster")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0: done. 1: something failed, or is missing in the tables. 2: an error with its reason on
    stderr, of the input or of a run that cannot go on: a loss that is not a number, another process
    at the same run. 75: saved, because somebody asked. 130 and 143: ended by Ctrl-C or TERM.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no β
    parsed = _parse(arguments)
    if parsed.command != "prefetch":  # all is on the disk; the hub would be asked, and waited for
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tables use a thread for each record file
    from calibeval.io import CONTINUES, finish

    after_ctrl_c = CONTINUES if parsed.command == "launch" else "stopped"
    return finish(lambda: _run_command(parsed), after_ctrl_c)


def _run_command(parsed: argparse.Namespace) -> int | None:
    """Run the command; of another user's files that are closed, say whose they are."""
    from calibeval.io import InputError
    from sweeps.runs.files import closed_by_owner

    command: Command = parsed.function
    try:
        _enter_launch_folder(parsed)
        return command(parsed)
    except (InputError, OSError) as error:
        words = closed_by_owner(error)
        if words:
            raise InputError(words) from error
        raise


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command and its options; leaves with exit code 2 where they make no sense.

    argparse takes positional words in one stretch only. What is left over may be overrides that
    follow an option.
    """
    top = parser()
    parsed, rest = top.parse_known_args(arguments)
    takes_overrides = hasattr(parsed, "overrides")
    if takes_overrides:
        words = [*parsed.overrides, *rest]
        wrong = [word for word in words if word.startswith("-") or "=" not in word]
    else:
        words = []
        wrong = rest
    if wrong:
        top.error(f"unrecognized arguments: {shlex.join(wrong)}")
    if takes_overrides:
        if parsed.cluster:
            from sweeps.runs.yaml_io import assignment

            words.append(assignment("cluster", str(parsed.cluster.absolute())))
        parsed.overrides = words
    return parsed


def _typed_path(typed: str) -> Path:
    """A path of the command line: see `found_path`."""
    from sweeps.runs.files import found_path

    return found_path(typed)


def _enter_launch_folder(parsed: argparse.Namespace) -> None:
    """Go where the launch of a folder was typed: relative paths of its sweep begin there.

    Those of a sweep file begin where this command is typed. That folder may be anybody's, and
    libraries and the system's loader may look for code in it. So commands that only look, and a dry
    run, go only where their own user has launched.
    """
    from calibeval.io import hanging, show
    from sweeps.runs.grid import launch_folder

    folder = getattr(parsed, "sweep", None) or getattr(parsed, "folder", None)
    if folder is None or not os.path.isdir(folder):
        return
    folder = folder.absolute()
    if hasattr(parsed, "sweep"):
        parsed.sweep = folder
    only_looks = parsed.command not in ENTERING or getattr(parsed, "dry_run", False)
    place, is_own = launch_folder(folder)
    if place is None or place == Path.cwd():
        return
    if is_own or not only_looks:
        os.chdir(place)
    else:
        note = (
            f"note: relative paths of this sweep begin in {place}, which is not entered, since "
            f"another user has launched it: if any is missing, cd {shlex.quote(str(place))}"
        )
        show(hanging(note), to_stderr=True)


def _plan(parsed: argparse.Namespace) -> "SweepPlan":
    """The sweep that was typed, with its overrides."""
    from sweeps.runs.grid import plan_sweep

    return plan_sweep(parsed.sweep, parsed.overrides)


def _plan_to_try(parsed: argparse.Namespace) -> "SweepPlan":
    """The sweep of a dry run, which imports no backend that only a folder names."""
    from calibeval.io import InputError
    from sweeps.runs.backend_modules import built_in_backends
    from sweeps.runs.grid import plan_to_look_at

    plan = plan_to_look_at(parsed.sweep, parsed.overrides)
    backend = plan.sweep.backend
    if parsed.sweep.is_dir() and backend not in built_in_backends():
        raise InputError(
            f"{parsed.sweep}: backend: {backend!r} would be imported, which --dry-run of a folder "
            "does not: type the sweep's file"
        )
    return plan


def _plan_to_look_at(parsed: argparse.Namespace) -> "SweepPlan":
    """The sweep that was typed, or what its folder holds where its backend cannot be imported."""
    from calibeval.io import hanging, show
    from sweeps.runs.backend_modules import NoBackend
    from sweeps.runs.grid import plan_from_folder, plan_to_look_at

    try:
        return plan_to_look_at(parsed.sweep, parsed.overrides)
    except NoBackend as error:
        plan = plan_from_folder(parsed.sweep, parsed.overrides)
        if not plan.runs:
            raise
        message = f"warning: {error}; this is what its folder holds"
        show(hanging(message), to_stderr=True)
        return plan


def _launch(parsed: argparse.Namespace) -> int:
    from calibeval.io import InputError, hanging, show
    from sweeps.launch import preflight

    plan = _plan_to_try(parsed) if parsed.dry_run else _plan(parsed)
    executor = parsed.executor
    if executor == "auto":
        executor = "slurm" if shutil.which("sbatch") else "local"
    if parsed.scripts and parsed.executor == "local":
        raise InputError("--scripts: without Slurm there are none; leave out --executor local")
    note = plan.joined_sweep()
    if note:
        show(hanging(note), to_stderr=True)
    problems = preflight.problems(plan, executor, runs_programs=not parsed.dry_run)
    if parsed.dry_run:
        _dry_run(plan, problems)
        # The executor as it was typed: without Slurm, `auto` shows what a cluster would get.
        if parsed.executor != "local":
            _planned_jobs(plan, parsed.scripts)
        return 0
    if parsed.scripts:
        raise InputError("--scripts: prints what --dry-run would submit; add --dry-run")
    if problems:
        raise InputError("\n       ".join([f"{parsed.sweep}:", *problems]))
    show(f"folder: {plan.folder.absolute()}")
    sys.stdout.flush()
    if executor == "slurm":
        return _launch_on_slurm(plan)
    return _launch_here(plan)


def _dry_run(plan: "SweepPlan", problems: list[str]) -> None:
    """Print every run's state, and what a launch would refuse."""
    from calibeval.io import hanging, show
    from sweeps.results import status

    show(status.table(plan))
    for problem in problems:
        show(hanging(f"a launch would refuse: {problem}"))
    if not problems:
        print("a launch would refuse nothing")


def _planned_jobs(plan: "SweepPlan", scripts: bool) -> None:
    """Print which jobs a launch would hand to Slurm, or their whole scripts."""
    from calibeval.io import show
    from sweeps.launch import slurm

    print("\nOn Slurm, if nothing is queued:")
    if scripts:
        show(slurm.planned_scripts(plan), end="")
    else:
        show(slurm.planned_jobs(plan), end="")
        print("Add --scripts to see what sbatch gets.")


def _launch_on_slurm(plan: "SweepPlan") -> int:
    from calibeval.io import show
    from sweeps.launch import slurm
    from sweeps.runs.processes import cli_command

    submission = slurm.submit(plan)
    for job_id, job in submission.jobs.items():
        show(f"submitted job {job_id}: {job.describe()}")
    problems = submission.problems(plan)
    if not submission.jobs and not problems:
        show(f"{submission.describe_present(plan)}, nothing to add")
    for line in [*problems, *submission.notes(plan)]:
        show(line, to_stderr=True)
    show(f"watch: {cli_command('status', plan.folder)}")
    return 1 if problems else 0


def _launch_here(plan: "SweepPlan") -> int:
    from sweeps.launch import local
    from sweeps.results import collect

    end = local.launch_here(plan)
    if end.stop_signal is not None:
        print("stopped; the same command continues", file=sys.stderr)
        return 128 + end.stop_signal
    gaps = collect.collect(plan)
    return 1 if gaps or end.unfinished else 0


def _status(parsed: argparse.Namespace) -> None:
    from calibeval.io import show
    from sweeps.results import status

    plan = _plan_to_look_at(parsed)
    text, goes_on = status.table_of_now(plan)
    clear = CLEAR_SCREEN if parsed.follow and sys.stdout.isatty() else ""
    while parsed.follow and goes_on:
        print(clear, end="")
        show(text)
        time.sleep(FOLLOW_PAUSE)
        text, goes_on = status.table_of_now(plan)
    print(clear, end="")
    show(text)


def _logs(parsed: argparse.Namespace) -> None:
    from calibeval.io import InputError, show
    from sweeps.results import status

    plan = _plan_to_look_at(parsed)
    runs = plan.baselines_and_runs
    if len(runs) != 1:
        names = "".join(f"\n       {run.path.absolute()}" for run in runs)
        raise InputError(f"{parsed.sweep}: {len(runs)} runs; type the folder of one:{names}")
    show(status.logs(plan.folder, runs[0]))


def _cancel(parsed: argparse.Namespace) -> None:
    from calibeval.io import show
    from sweeps.launch import slurm
    from sweeps.runs.processes import cli_command

    plan = _plan_to_look_at(parsed)
    is_whole_folder = parsed.sweep == plan.folder and not parsed.overrides
    cancelled, left = slurm.cancel(plan, is_whole_folder)
    for element in cancelled:
        show(f"cancelled {element.label}: {element.run or 'the job that makes the tables'}")
    if not cancelled:
        print("cancelled: no job")
    if left:
        show(f"still queued or running, and not asked for: {', '.join(left)}", to_stderr=True)
        show(f"to cancel all: {cli_command('cancel', plan.folder)}", to_stderr=True)
    sys.stdout.flush()
    # A launch that runs without Slurm is not cancelled: the command ends with how to end that one.
    slurm.refuse_a_launch_here(plan)


def _collect(parsed: argparse.Namespace) -> int:
    from sweeps.results import collect

    gaps = collect.collect(_plan_to_look_at(parsed))
    return 1 if gaps else 0


def _prefetch(parsed: argparse.Namespace) -> int:
    from calibeval.io import hanging, show
    from sweeps.launch import assets
    from sweeps.launch.hub_cache import use_cache
    from sweeps.runs.schema import load_cluster

    plan = _plan(parsed)
    assets.refuse_foreign_places(plan)
    use_cache(load_cluster(plan.sweep.cluster))
    problems = assets.fetch(assets.assets(plan))
    for problem in problems:
        show(hanging(f"failed: {problem}"), to_stderr=True)
    return 1 if problems else 0


def _keys(parsed: argparse.Namespace) -> None:
    from sweeps.runs.backend import load_backend
    from sweeps.runs.schema import Cluster, Sweep, documentation

    for title, model in (
        ("A sweep file (configs/sweeps)", Sweep),
        (f"`train:` and `grid:` of backend {parsed.backend}", load_backend(parsed.backend).Train),
        ("A cluster profile (configs/cluster)", Cluster),
    ):
        schema = model.model_json_schema()
        print(f"# {title}", *documentation(schema, schema.get("$defs", {})), "", sep="\n")


def _train(parsed: argparse.Namespace) -> None:
    """Train a run; or score it, if it is trained already and trains on a single node.

    This process may have waited for another one that held the run's lock. If that one has trained
    the run meanwhile and has not scored it, this one scores it.
    """
    from sweeps.runs.backend import load_backend
    from sweeps.runs.processes import node_number
    from sweeps.runs.run import Run

    run = Run(parsed.folder)
    config = run.config()
    # Of the processes of a training the first holds the lock for all. The others are the ranks of
    # its torchrun, and on other nodes what its srun has started.
    is_rank = "LOCAL_RANK" in os.environ
    is_other_node = config.world.nodes > 1 and node_number() > 0
    lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not is_rank and not is_other_node:
        lock = _locked(run)
    with lock:
        if run.trained:
            # This command runs on each node of a training; to score, one process suffices, and it
            # is started apart.
            if config.world.nodes == 1:
                _score_if_asked(run)
        else:
            assert config.backend is not None  # a model before fine-tuning counts as trained
            load_backend(config.backend).train(run)


def _score(parsed: argparse.Namespace) -> None:
    """Score the tasks of a run that are still to be scored."""
    from sweeps.runs.run import Run

    run = Run(parsed.folder)
    run.config()  # raises InputError where the folder is no run's, before a lock is made in it
    with _locked(run):
        _score_if_asked(run)


def _score_if_asked(run: "Run") -> None:
    from sweeps.runs import scoring

    if run.config().score is not None:
        scoring.score_here(run)


def _locked(run: "Run") -> contextlib.AbstractContextManager[None]:
    """Hold a run's lock while this process works on it."""
    from sweeps.runs.files import locked

    busy_message = (
        f"{run.path}: another process is at this run; `touch {run.stop_file.absolute()}` lets it "
        "save and leave"
    )
    return locked(run.lock_file, RUN_PATIENCE, busy_message)

"""The command line: parsing and messages, nothing else."""

import argparse
import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from calibeval.io import InputError, counted
from sweeps import assets, launch, plan, preflight, score, smoke, status
from sweeps.cluster import load_cluster
from sweeps.config import read_yaml
from sweeps.executors import local, slurm
from sweeps.files import DISK_ERRORS, SweepError, disk_error, tail
from sweeps.provenance import PROJECT, TYPED_IN, command, shown
from sweeps.rundir import RunDir
from sweeps.supervise import train

SWEEP = "a sweep file, for example configs/sweeps/beta.yaml, or a sweep's folder"
OVERRIDE = "dotted overrides, for example train.num_train_epochs=1 grid.seed=[1,2]"
YES = {"action": "store_true"}
OPTIONS = {
    "--executor": {
        "choices": ("auto", "local", "slurm"),
        "default": "auto",
        "help": "auto: Slurm where there is an sbatch, this machine elsewhere",
    },
    "--dry-run": YES | {"help": "print what would be done, and stop"},
    "--run": {"default": "", "metavar": "TEXT", "help": "only runs whose name contains TEXT"},
    "--resubmit": YES | {"help": "queue again what died without a word"},
    "--delete": YES | {"help": "and delete them"},
}


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="python -m sweeps", description="Sweeps of fine-tunes.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what, options) in COMMANDS.items():
        sub = commands.add_parser(name, help=what, description=what)
        if name == "train":
            sub.add_argument("folder", metavar="RUN_DIR")
            continue
        sub.add_argument("config", nargs="?", metavar="SWEEP", help=SWEEP)
        sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDE)
        sub.add_argument("--cluster", help="a profile of configs/cluster")
        for option in options.split():
            sub.add_argument(f"--{option}", **OPTIONS[f"--{option}"])
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 something failed, 2 bad input."""
    top = parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0][:1] != "-" and arguments[0] not in COMMANDS:
        hint = _near(arguments[0], COMMANDS) or f"; commands: {' '.join(COMMANDS)}"
        top.error(f"unknown command {arguments[0]!r}{hint}")
    parsed, rest = top.parse_known_args(arguments)
    # argparse takes positionals in one stretch only; overrides may also follow an option.
    takes = hasattr(parsed, "overrides")
    if wrong := [r for r in rest if not takes or "=" not in r or r[0] == "-"]:
        known = [f"--{name}" for name in ["cluster", *COMMANDS[parsed.command][2].split()]]
        hints = "".join(_near(r.partition("=")[0], known) for r in wrong if r[:1] == "-")
        top.error(f"unrecognized arguments: {' '.join(wrong)}{hints}")
    parsed.overrides = getattr(parsed, "overrides", []) + rest
    if parsed.command != "prefetch":  # all is on the disk; the hub would be asked, and waited for
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    for name in ("config", "cluster", "folder"):  # typed paths start where they are typed
        if (value := getattr(parsed, name, None)) is not None:
            setattr(parsed, name, _place(value))
    if (PROJECT / "slurm").is_dir():
        os.chdir(PROJECT)  # those inside a sweep file at the project
    try:
        code = COMMANDS[parsed.command][0](parsed)
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nor may the interpreter's last flush fail
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        print(f"error: {disk_error(error)}", file=sys.stderr)
        return 2


def _near(typed: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(typed, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _place(typed: Path | str) -> Path:
    """A path as the project sees it: from the folder where it was typed, or else the project's."""
    path = TYPED_IN / os.path.expanduser(typed)  # bash leaves the ~ of --config=~/x
    if not path.exists() and (PROJECT / typed).exists():
        return Path(typed)
    path = Path(os.path.abspath(path))
    return path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path


def _planned(a: argparse.Namespace):
    # Overrides only: argparse took the first.
    if a.config is None or ("=" in str(a.config) and not a.config.exists()):
        found = sorted((PROJECT / "configs").glob("sweeps/*.yaml"))
        found += plan.launched_in(PROJECT / "runs")
        there = " ".join(str(shown(path)) for path in found)
        example = command("sweeps.sh", a.command)
        raise SweepError(f"{a.command}: of which sweep? {example} SWEEP; there are: {there}")
    if a.cluster is None:
        return plan.plan(a.config, a.overrides)
    read_yaml(a.cluster)  # a local launch needs none, but who types one means it
    return plan.plan(a.config, [*a.overrides, f"cluster={a.cluster}"])


def _plan(a: argparse.Namespace) -> int:
    print(launch.describe(_planned(a)))
    return 0


def _checked(a: argparse.Namespace) -> tuple[plan.Plan, str]:
    """The plan, of which nothing is missing, and where it is to run; says what a step will need."""
    planned, executor = _planned(a), launch.pick_executor(a.executor)
    launch.check_assets(planned, executor)
    for line in preflight.estimates(planned, executor):
        print(line)
    return planned, executor


def _launch(a: argparse.Namespace) -> int:
    if a.dry_run:
        print(launch.dry_run(_planned(a), a.executor))
        print("Nothing was checked: preflight, given the same, names what a launch would refuse.")
        return 0
    planned, executor = _checked(a)
    runs = counted(len(planned.cells), "run")
    print(f"{planned.sweep.name}: {runs}, executor {executor}", flush=True)
    return launch.start(planned, executor)


def _smoke(a: argparse.Namespace) -> int:
    return smoke.run(*_checked(a))


def _status(a: argparse.Namespace) -> int:
    planned = _planned(a)
    runs, bases = status.of_sweep(planned.sweep, planned.cells)
    text = status.table(runs, planned.sweep.name, [*bases.values()])
    why = status.troubles([*bases.values(), *runs], planned)
    print("\n\n".join(filter(None, (text, why, plan.namesakes(planned).rstrip()))))
    return 0


def _cancel(a: argparse.Namespace) -> int:
    planned = _planned(a)
    runs, scored = local.cancel(planned.sweep, planned.cells)
    if runs:
        print(f"asked to save and stop: {', '.join(runs)}", flush=True)
    if scored:
        print(f"a launch without Slurm starts nothing more after scoring {', '.join(scored)}")
    jobs = slurm.cancel(planned.sweep)
    if jobs:
        print(f"cancelled: {', '.join(jobs)}")
    if not runs and not scored and not jobs:
        print("nothing of this sweep is queued or running")
        print(plan.namesakes(planned), end="")
    return 0


def _retry(a: argparse.Namespace) -> int:
    planned = _planned(a)
    cells, names = launch.dead(planned)
    if not names:
        print("nothing to retry: no run and no scoring is dead")
        print(plan.namesakes(planned), end="")
        return 0
    print("again: " + ", ".join(names), flush=True)
    here = a.executor == "auto" and not slurm.submitted(planned.sweep)  # where the launch went
    executor = "local" if here else launch.pick_executor(a.executor)
    launch.check_assets(planned, executor, cells)
    return launch.start(planned, executor, cells)


def _logs(a: argparse.Namespace) -> int:
    planned = _planned(a)
    runs, bases = status.of_sweep(planned.sweep, planned.cells)
    subjects = score.bases(planned.sweep, planned.cells)
    logs = [(bases[model], [one.log]) for model, one in subjects.items()]
    for cell, found in zip(planned.cells, runs, strict=True):
        logs.append((found, [cell.folder / "train.log", cell.folder / "score.log"]))
    chosen = [(found, files) for found, files in logs if a.run in found.name]
    if not chosen:
        one = logs[-1][0].name
        raise SweepError(f"{a.config}: no run's name has {a.run!r} in it; one is {one}")
    for found, files in chosen:
        if found.trouble and found.trouble.file and found.trouble.file not in files:
            files.append(found.trouble.file)  # what its job printed
        there = [path for path in files if path.exists()]
        for path in there:
            print("\n".join([f"==> {shown(path)} <==", *tail(path, 20)]))
        if not there:
            print(f"{found.name}: has not started")
        if found.trouble:
            print(f"{found.name}: {found.state}: {found.trouble.cause}")
    return 0


def _score(a: argparse.Namespace) -> int:
    planned = _planned(a)
    if planned.sweep.score is None:
        raise SweepError(f"{a.config}: has no `score` section")
    executor = launch.pick_executor(a.executor)
    launch.check_assets(planned, executor)
    return launch.start(planned, executor, train=False)


def _train(a: argparse.Namespace) -> int:
    run = RunDir(a.folder.absolute())
    if run.done:
        print(f"{shown(run.path)}: is finished already")
    return train(run, echo=sys.stderr.isatty()).value


def _collect(a: argparse.Namespace) -> int:
    from sweeps import results  # with NumPy, for which every command would wait

    planned = _planned(a)
    if a.resubmit and launch.resubmit(planned):
        return 0  # the new submission ends with a collect of its own
    if any(cell.folder.exists() for cell in planned.cells):
        plan.claim(planned)
    return 1 if results.collect(planned.sweep, planned.cells) else 0


def _prefetch(a: argparse.Namespace) -> int:
    planned = _planned(a)
    cluster = load_cluster(planned.sweep.cluster)
    assets.use_cache(cluster)
    wanted = [x for x in assets.of_sweep(planned.sweep, planned.cells, cluster) if x.used]
    if not wanted:
        print("nothing to fetch: this sweep names files of this machine only", flush=True)
        if absent := preflight.files(planned, planned.cells, cluster):
            raise SweepError("\n       ".join(absent))
    if a.dry_run:
        for asset in wanted:
            print(f"{'here' if asset.here() else 'to fetch'}: {asset.name}")
        return 0
    problems = assets.fetch(wanted)
    for problem in problems:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _gc(a: argparse.Namespace) -> int:
    planned = _planned(a)
    found = plan.orphans(planned.sweep)
    for run in found:
        total = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        print(f"{preflight.size(total)}  {shown(run)}")
        if a.delete:
            plan.remove(run)
    root = shown(planned.folder.parent)
    print(f"{counted(len(found), 'run')} that no sweep of {root} holds", end="")
    print(": deleted" if found and a.delete else ": --delete deletes" if found else "")
    return 0


def _preflight(a: argparse.Namespace) -> int:
    print(f"preflight: nothing is missing (executor {_checked(a)[1]})")
    return 0


COMMANDS = {  # name → what does it, what it does, its options
    "plan": (_plan, "list the runs of a sweep and what is already done", ""),
    "launch": (_launch, "train, score and collect what is missing", "executor dry-run"),
    "smoke": (_smoke, "before a launch: one run's whole chain, ten steps of it", "executor"),
    "status": (_status, "what every run is doing", ""),
    "cancel": (_cancel, "end it, queued or on this machine; running trainers save first", ""),
    "retry": (_retry, "start again what is dead", "executor"),
    "logs": (_logs, "the end of the runs' logs", "run"),
    "score": (_score, "score what is trained and not yet scored", "executor"),
    "collect": (_collect, "make tables; exit 1 while there are gaps", "resubmit"),
    "prefetch": (_prefetch, "fetch models, data and packages", "dry-run"),
    "gc": (_gc, "list the runs beside this sweep's that no sweep holds any more", "delete"),
    "preflight": (_preflight, "name all that is missing, before anything is queued", "executor"),
    "train": (_train, "train one run", ""),
}

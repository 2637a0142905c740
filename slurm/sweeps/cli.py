"""`python -m sweeps COMMAND`: parsing and messages, nothing else."""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SWEEP = "a sweep file, for example configs/sweeps/beta.yaml, or a sweep's folder"
COMMANDS = {
    "launch": "train, score and collect what is missing; again: whatever did not get there",
    "status": "every run of a sweep: to do, what it is doing, done, or why it died",
    "cancel": "scancel its jobs; running trainers save first",
    "collect": "make the tables; exit 1 while there are gaps",
    "prefetch": "fetch models and data, where there is internet",
    "keys": "every key of sweep files and cluster profiles",
    "train": "train one run, here",
    "score": "score one run, here",
}


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="python -m sweeps", description="Sweeps of fine-tunes.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        sub = commands.add_parser(name, help=what, description=what)
        if name in ("train", "score"):
            sub.add_argument("folder", metavar="RUN_DIR", type=lambda x: Path(x).absolute())
        elif name == "keys":
            sub.add_argument("backend", nargs="?", default="trainer", help="whose `train:` keys")
        else:
            sub.add_argument("sweep", metavar="SWEEP", type=_place, help=SWEEP)
            overrides = {"metavar": "key=value", "help": "dotted overrides", "default": []}
            sub.add_argument("overrides", nargs="*", **overrides)
            sub.add_argument("--cluster", type=_place, help="a profile of configs/cluster")
        if name == "launch":
            where = {"choices": ("auto", "local", "slurm"), "default": "auto"}
            where["help"] = "auto: Slurm where there is an sbatch, this machine elsewhere"
            sub.add_argument("--executor", **where)
            sub.add_argument("--dry-run", action="store_true", help="print what would be done")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 something failed, 2 bad input."""
    sys.stdout.reconfigure(errors="replace")  # of a terminal without β
    top = parser()
    parsed, rest = top.parse_known_args(arguments)
    # argparse takes positionals in one stretch only; overrides may also follow an option.
    takes = hasattr(parsed, "overrides")
    words = [*parsed.overrides, *rest] if takes else rest
    if wrong := [w for w in words if not takes or w.startswith("-") or "=" not in w]:
        top.error(f"unrecognized arguments: {shlex.join(wrong)}")
    if parsed.command != "prefetch":  # all is on the disk; the hub would be asked, and waited for
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a record file has a thread
    if takes:
        parsed.overrides = words + ([f"cluster={parsed.cluster}"] if parsed.cluster else [])
    if (PROJECT / "slurm").is_dir():
        os.chdir(PROJECT)  # paths inside a sweep file begin there
    from calibeval.io import finish

    def work() -> int | None:
        if takes:
            from sweeps.runs.grid import plan_sweep

            parsed.plan = plan_sweep(parsed.sweep, parsed.overrides)
        return globals()[f"_{parsed.command}"](parsed)

    return finish(work)


def _place(typed: str) -> Path:
    """A path as the project sees it: from the folder where it was typed, or else the project's."""
    path = Path(os.path.abspath(os.path.expanduser(typed)))  # bash leaves the ~ of --cluster=~/x
    if not os.path.exists(path) and os.path.exists(PROJECT / typed):
        return Path(typed)
    return path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path


def _launch(a: argparse.Namespace) -> int:
    import shutil

    from calibeval.io import InputError
    from sweeps.launch import local, preflight, slurm
    from sweeps.results import collect, status
    from sweeps.runs.yaml_io import cli_command

    plan, here = a.plan, shutil.which("sbatch") is None
    executor = a.executor if a.executor != "auto" else "local" if here else "slurm"
    problems = preflight.problems(plan, executor)
    if a.dry_run:
        if a.executor != "local":
            print(slurm.dry_run(plan), end="")
        refused = [f"a launch would refuse: {line}" for line in problems]
        print(status.table(plan), *(refused or ["nothing is missing"]), sep="\n")
        return 0
    if problems:
        raise InputError("\n       ".join([f"{a.sweep}:", *problems]))
    if executor == "slurm":
        ids = slurm.submit(plan)
        if not ids:
            print("nothing to submit: every run is done or queued")
        for job, what in ids.items():
            print(f"submitted: {job} {what}")
        print(f"watch: {cli_command('status', plan.folder)}")
        return 0
    number, lost = local.launch(plan)
    if number:
        print("stopped; the same command continues", file=sys.stderr)
        return 128 + number
    return 1 if collect.collect(plan) or lost else 0


def _status(a: argparse.Namespace) -> None:
    from sweeps.results import status

    print(status.table(a.plan))


def _cancel(a: argparse.Namespace) -> None:
    from sweeps.launch import slurm

    print(f"cancelled: {', '.join(slurm.cancel(a.plan.folder)) or 'no job'}")


def _collect(a: argparse.Namespace) -> int:
    from sweeps.results import collect

    return 1 if collect.collect(a.plan) else 0


def _prefetch(a: argparse.Namespace) -> int:
    from sweeps.launch import assets
    from sweeps.runs.schema import load_cluster

    assets.use_cache(load_cluster(a.plan.sweep.cluster))
    problems = assets.fetch(assets.assets(a.plan))
    for problem in problems:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _keys(a: argparse.Namespace) -> None:
    from sweeps.runs.backend import load_backend
    from sweeps.runs.schema import Cluster, Sweep, documentation

    for title, model in (
        ("A sweep file (configs/sweeps)", Sweep),
        (f"`train:` and `grid:` of backend {a.backend}", load_backend(a.backend).Train),
        ("A cluster profile (configs/cluster)", Cluster),
    ):
        schema = model.model_json_schema()
        print(f"# {title}", *documentation(schema, schema.get("$defs", {})), "", sep="\n")


def _train(a: argparse.Namespace) -> None:
    """Train a run, unless it is; with `score` as the command, or then, score it."""
    from sweeps.runs import scoring
    from sweeps.runs.backend import load_backend
    from sweeps.runs.files import locked
    from sweeps.runs.run import Run

    run = Run(a.folder)
    config, busy = run.config(), f"{a.folder}: another process is at this run"
    rank = "LOCAL_RANK" in os.environ  # of a torchrun, which has taken this lock
    with contextlib.nullcontext() if rank else locked(run.lock, 30, busy):
        if a.command == "train" and not run.trained:
            load_backend(config.backend).train(run)
        elif config.score:
            scoring.here(run)


_score = _train


if __name__ == "__main__":
    sys.exit(main())

"""The command line: parsing and messages, nothing else."""

import argparse
import sys
from pathlib import Path

from sweeps.errors import SweepError

SWEEP = "a sweep file, for example configs/sweeps/beta.yaml"
OVERRIDE = "dotted overrides, for example train.num_train_epochs=1 grid.seed=[1,2]"


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="python -m sweeps", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def sweep_command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("config", type=Path, metavar="SWEEP.yaml", help=SWEEP)
        sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDE)
        return sub

    sweep_command("plan", "list the runs of a sweep and what is already done")
    sub = sweep_command("launch", "train, score and collect whatever is missing")
    sub.add_argument("--executor", choices=("local",), default="local")
    sub.add_argument("--dry-run", action="store_true", help="show what would happen, do nothing")
    sweep_command("collect", "make tables and diagrams; exit 1 while there are gaps")
    sub = commands.add_parser("train", help="train one run")
    sub.add_argument("run", type=Path, metavar="RUN_DIR")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 something failed, 2 bad input."""
    top = parser()
    parsed, rest = top.parse_known_args(arguments)
    # argparse takes positionals in one stretch only; overrides may also follow an option.
    if rest and (
        not hasattr(parsed, "overrides") or any("=" not in r or r[0] == "-" for r in rest)
    ):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest
    try:
        return COMMANDS[parsed.command](parsed)
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1


def _plan(a: argparse.Namespace) -> int:
    from sweeps import launch

    print(launch.describe(launch.plan(a.config, a.overrides)))
    return 0


def _launch(a: argparse.Namespace) -> int:
    from sweeps import launch

    planned = launch.plan(a.config, a.overrides)
    if a.dry_run:
        print(launch.describe(planned))
        return 0
    launch.check_assets(planned)
    print(f"{planned.sweep.name}: {len(planned.cells)} runs, executor {a.executor}")
    return launch.launch_local(planned)


def _train(a: argparse.Namespace) -> int:
    from sweeps.rundir import RunDir
    from sweeps.supervise import train

    return train(RunDir(a.run), echo=sys.stderr.isatty()).value


def _collect(a: argparse.Namespace) -> int:
    from sweeps import collect, launch

    planned = launch.plan(a.config, a.overrides)
    gaps = collect.collect(planned.sweep, planned.cells)
    if gaps:
        print(collect.report(gaps))
    return 1 if gaps else 0


COMMANDS = {"plan": _plan, "launch": _launch, "train": _train, "collect": _collect}

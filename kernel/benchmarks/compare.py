"""How fast two checkouts of this repository compute the loss, on one GPU.

    git worktree add ../before 3073665
    python kernel/benchmarks/compare.py --before ../before --after .

A process measures one checkout and ends; then another measures the other, and so on, in turns whose
order changes each round, so that what slows a GPU for a while slows both alike. Both are called as
`smoothce.linear_cross_entropy`, on the same inputs and by the same script, `compare_worker.py`
beside this one, which says what a sample is. Times are in products: the unit is one E Cᵀ by cuBLAS,
timed around every sample.

The table has the median over the rounds, and in brackets the least and the most of them. The same
folder given twice shows how much of a difference means nothing.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from compare_worker import CALLS, Job, Measured

from smoothce.bench.__main__ import MODELS, classifier_shape, positive
from smoothce.bench.measure import ClassifierShape
from smoothce.bench.table import MISSING, describe_hardware, markdown_table

WORKER = Path(__file__).with_name("compare_worker.py")
SHAPES = [MODELS["gemma2-2b"], MODELS["llama3-8b"], MODELS["qwen2.5-1.5b"]]
VERSIONS = ("before", "after")
SHOWN_LINES = 15  # of what a process that failed has said last


class WorkerFailed(Exception):
    """A process has measured nothing; the message says what it said."""


class Round(TypedDict):
    """What one process measured."""

    version: str  # of VERSIONS
    measured: list[Measured]


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for."""

    folders: dict[str, Path]  # by VERSIONS
    shapes: list[ClassifierShape]
    calls: list[str]
    tokens: int
    label_smoothing: float
    softcap: float | None
    rounds: int
    seconds: float
    limit: float

    def job(self) -> Job:
        """What each process is to measure."""
        return {
            "shapes": [[shape.name, shape.vocabulary, shape.features] for shape in self.shapes],
            "calls": self.calls,
            "tokens": self.tokens,
            "label_smoothing": self.label_smoothing,
            "softcap": self.softcap,
            "seconds": self.seconds,
        }


def checkout(text: str) -> Path:
    """A folder that holds this repository."""
    folder = Path(text).resolve()
    if not (folder / "kernel" / "smoothce" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is no checkout of this repository: it has no kernel/smoothce/__init__.py"
        )
    return folder


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for version in VERSIONS:
        parser.add_argument(f"--{version}", type=checkout, required=True, metavar="FOLDER")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=classifier_shape,
        default=SHAPES,
        metavar="SHAPE",
        help=f"of {', '.join(MODELS)}, or VxD ({' '.join(shape.name for shape in SHAPES)})",
    )
    parser.add_argument(
        "--calls",
        nargs="+",
        choices=CALLS,
        default=list(CALLS),
        metavar="CALL",
        help=f"of {', '.join(CALLS)} (all)",
    )
    parser.add_argument("--tokens", type=positive, default=8192, metavar="N", help="(8192)")
    parser.add_argument("--label-smoothing", type=float, default=0.1, metavar="β", help="(0.1)")
    parser.add_argument("--softcap", type=float, metavar="X", help="cap of the logits (none)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="processes for each checkout (3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long a process samples a call (1)"
    )
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds that a process may take (600)"
    )
    return parser


def parse(words: list[str] | None = None) -> Arguments:
    parser = make_parser()
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU; this compares GPU kernels, which no CPU runs")
    return Arguments(
        folders={version: getattr(args, version) for version in VERSIONS},
        shapes=args.shapes,
        calls=args.calls,
        tokens=args.tokens,
        label_smoothing=args.label_smoothing,
        softcap=args.softcap,
        rounds=args.rounds,
        seconds=args.seconds,
        limit=args.limit,
    )


def run_worker(folder: Path, job: Job, limit: float) -> list[Measured]:
    """Measure one checkout in a process of its own. Raises WorkerFailed."""
    environment = dict(os.environ)
    paths = [str(folder / "kernel"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, str(WORKER), str(folder), json.dumps(job)]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise WorkerFailed(
            f"{folder} took more than {limit:g} seconds: give a higher --limit, or fewer --shapes"
        ) from None
    if ended.returncode != 0:
        last_lines = "\n".join(ended.stderr.splitlines()[-SHOWN_LINES:])
        raise WorkerFailed(f"{folder} could not be measured:\n{last_lines}")
    return json.loads(ended.stdout.splitlines()[-1])


def measure(
    args: Arguments, run: Callable[[Path, Job, float], list[Measured]] = run_worker
) -> list[Round]:
    """All rounds, the two checkouts in turn. Which of them comes first changes with each round."""
    rounds: list[Round] = []
    order = list(VERSIONS)
    for _ in range(args.rounds):
        for version in order:
            measured = run(args.folders[version], args.job(), args.limit)
            rounds.append({"version": version, "measured": measured})
            print(f"measured {version}", file=sys.stderr, flush=True)
        order.reverse()
    return rounds


def products_of(rounds: list[Round], version: str, shape: str, call: str) -> list[float]:
    """What the rounds measured of a call, in products; empty where it failed in one of them."""
    products = []
    for one_round in rounds:
        if one_round["version"] != version:
            continue
        for measured in one_round["measured"]:
            if measured["shape"] != shape or measured["call"] != call:
                continue
            if measured["products"] is None:
                return []
            products.append(measured["products"])
    return products


def cell(products: list[float]) -> str:
    """The median, and the least and the most."""
    if not products:
        return MISSING
    return f"{statistics.median(products):.3f} ({min(products):.3f}–{max(products):.3f})"


def change(before: list[float], after: list[float]) -> str:
    """By how much the medians differ."""
    if not before or not after:
        return MISSING
    return f"{statistics.median(after) / statistics.median(before) - 1:+.1%}"


def reasons(rounds: list[Round]) -> list[str]:
    """Why calls failed, each reason once."""
    lines = []
    for one_round in rounds:
        for measured in one_round["measured"]:
            if measured["failed"] is not None:
                where = f"{measured['call']}, {one_round['version']}, {measured['shape']}"
                lines.append(f"- {where}: {measured['failed']}")
    return list(dict.fromkeys(lines))


def table(args: Arguments, rounds: list[Round]) -> str:
    """Three rows for each call: before, after, and the change."""
    names = [shape.name for shape in args.shapes]
    rows = []
    for call in args.calls:
        changes = [f"{call}, change"]
        for version in VERSIONS:
            cells = [cell(products_of(rounds, version, name, call)) for name in names]
            rows.append([f"{call}, {version}", *cells])
        for name in names:
            before = products_of(rounds, "before", name, call)
            after = products_of(rounds, "after", name, call)
            changes.append(change(before, after))
        rows.append(changes)
    softcap = "no softcap" if args.softcap is None else f"softcap {args.softcap:g}"
    title = (
        f"In products: N = {args.tokens}, bf16, β = {args.label_smoothing:g}, {softcap}; medians "
        f"of {args.rounds}"
    )
    return "\n".join([markdown_table(title, ["call", *names], rows), *reasons(rounds)])


def commit_of(folder: Path) -> str:
    """The commit that a checkout is at, and whether its files have changed since."""
    described = subprocess.run(
        [
            "git",
            "-C",
            str(folder),
            "describe",
            "--always",
            "--exclude=*",
            "--dirty=, changed since",
        ],
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() if described.returncode == 0 else "no commit"


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    try:
        rounds = measure(args)
    except WorkerFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    command = shlex.join(sys.argv[1:] if words is None else words)
    print(f"python kernel/benchmarks/compare.py {command}")
    print(f"{describe_hardware('cuda')}, torch {torch.__version__}")
    for version in VERSIONS:
        print(f"{version}: {commit_of(args.folders[version])}")
    print(table(args, rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())

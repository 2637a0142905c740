"""Time, memory and gradient error of the loss beside other methods, on the same inputs.

    python -m smoothce.bench --models gemma2-2b llama3-8b --tokens 8192 --json out.json
    python -m smoothce.bench --models 8192x2048 --only ours --masked 0 0.5 --softcap none 30
    python -m smoothce.bench --device cpu --models 32000x512 --tokens 2048

Inputs are bf16 on a GPU and fp32 on a CPU. Methods take turns in a random order, each for the same
time. Each sample is beside one of the matrix product E Cᵀ, whose time is the unit of the column
"× E Cᵀ". Where an option is given several values, every combination is measured, a table each.
"""

import argparse
import itertools
import json
import platform
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from smoothce.bench.measure import ClassifierShape, Row, make_problem, measure
from smoothce.bench.methods import METHODS, Method
from smoothce.bench.table import describe_hardware, markdown_table, number

MODELS = {
    "gemma2-2b": ClassifierShape("gemma2-2b", 256000, 2304),
    "gemma3-270m": ClassifierShape("gemma3-270m", 262144, 640),
    "llama3-8b": ClassifierShape("llama3-8b", 128256, 4096),
    "llama3.2-1b": ClassifierShape("llama3.2-1b", 128256, 2048),
    "qwen2.5-1.5b": ClassifierShape("qwen2.5-1.5b", 151936, 1536),
    "qwen2.5-7b": ClassifierShape("qwen2.5-7b", 152064, 3584),
    "mistral-7b": ClassifierShape("mistral-7b", 32768, 4096),
}
COLUMNS = {  # of the printed table: the key of a row, and its format
    "forward ms": ("forward_ms", ".2f"),
    "forward + backward ms": ("both_ms", ".2f"),
    "× E Cᵀ": ("both_products", ".2f"),
    "MB beyond inputs and gradients": ("extra_mb", ".0f"),
    "dE error": ("error_hidden", ".1e"),
    "dC error": ("error_weight", ".1e"),
}
OUR_COLOR = "#0072B2"
OTHER_COLOR = "#999999"


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for."""

    device: str
    models: list[ClassifierShape]
    tokens: list[int]
    label_smoothing: list[float]
    contexts: list[float]
    masked: list[float]
    softcap: list[float | None]
    frozen: bool
    methods: list[Method]
    repeats: int
    seconds: float
    json: Path | None
    plot: Path | None


def classifier_shape(text: str) -> ClassifierShape:
    """The shape of a model that is named, or of "VxD"."""
    if text in MODELS:
        return MODELS[text]
    vocabulary, features = map(int, text.split("x"))
    return ClassifierShape(text, vocabulary, features)


def softcap_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


def users_method(text: str) -> Method:
    """A loss of the user's: "module:function" as (hidden, weight, labels, label_smoothing=)."""
    try:
        return Method(text, resolve_name(text))
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no module:function ({error})") from None


def positive(text: str) -> int:
    """A whole number above 0: without a sample there is no time."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smoothce.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=METHODS, default="cuda", help="(cuda)")
    add_problem_options(parser)
    add_measurement_options(parser)
    return parser


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """What is measured on. Each option may have several values."""
    parser.add_argument(
        "--models",
        nargs="+",
        type=classifier_shape,
        default=[MODELS["gemma2-2b"]],
        metavar="MODEL",
        help=f"the classifier's shape: {', '.join(MODELS)}, or VxD, such as 8192x2048",
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], metavar="N")
    parser.add_argument("--label-smoothing", nargs="+", type=float, default=[0.1], metavar="β")
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=float,
        default=[2.0],
        metavar="X",
        help="standard deviation over the vocabulary of what a position adds to a logit; about 2",
    )
    parser.add_argument(
        "--masked",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="SHARE",
        help="which share of the labels is ignored (0)",
    )
    parser.add_argument(
        "--softcap",
        nargs="+",
        type=softcap_or_none,
        default=[None],
        metavar="X",
        help='cap of the logits, or "none" (none)',
    )
    parser.add_argument(
        "--frozen",
        action="store_true",
        help="the classifier needs no gradient, as under LoRA",
    )


def add_measurement_options(parser: argparse.ArgumentParser) -> None:
    """Which methods are measured, how long, and where the figures go."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        help="measure the methods alone whose names contain one of these (all)",
    )
    parser.add_argument(
        "--method",
        nargs="+",
        type=users_method,
        default=[],
        metavar="MODULE:FUNCTION",
        help="measure losses of yours too, called as loss(hidden, weight, labels, "
        "label_smoothing=), which return the mean",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=3,
        metavar="K",
        help="how many samples are behind each median (3)",
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a sample takes (0.3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw memory against time there; several combinations get FILE-2 and so on",
    )


def parse(words: list[str] | None = None) -> Arguments:
    """The arguments, checked: what cannot work is said now and not when all is measured."""
    parser = make_parser()
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        on_cpu = "--device cpu --models 32000x512 --tokens 2048"
        parser.error(f"torch finds no CUDA GPU; for a CPU: {on_cpu}")
    for file in (args.json, args.plot):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{file}: no such folder")
    if args.plot and not (args.device == "cuda" and find_spec("matplotlib")):
        parser.error("--plot needs a GPU, where memory is measured, and matplotlib")
    methods = []
    for method in METHODS[args.device]:
        if args.only is None or any(part in method.name for part in args.only):
            methods.append(method)
    methods += args.method
    if not methods:
        parser.error(f"--only {' '.join(args.only)}: in no method's name that runs here")
    return Arguments(
        device=args.device,
        models=args.models,
        tokens=args.tokens,
        label_smoothing=args.label_smoothing,
        contexts=args.contexts,
        masked=args.masked,
        softcap=args.softcap,
        frozen=args.frozen,
        methods=methods,
        repeats=args.repeats,
        seconds=args.seconds,
        json=args.json,
        plot=args.plot,
    )


def format_table(title: str, rows: list[Row]) -> str:
    """A Markdown table. What was not measured is a dash; why a method failed is in the first
    column of figures."""
    rows_of_cells = []
    for row in rows:
        values: dict[str, Any] = {**row}
        figures = [number(values.get(key), form) for key, form in COLUMNS.values()]
        if "failed" in row:
            figures[0] = row["failed"]
        rows_of_cells.append([row["method"], number(row["beta"], "g"), *figures])
    return markdown_table(title, ["method", "β", *COLUMNS], rows_of_cells)


def plot(rows: list[Row], file: Path) -> None:
    """Draw memory against time: a method below and left of another is better in both."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        if "failed" in row:
            continue
        point = (row["both_ms"], max(row["extra_mb"], 1))
        color = OUR_COLOR if row["method"].startswith("ours") else OTHER_COLOR
        axes.scatter(*point, s=50, color=color, zorder=2)
        axes.annotate(row["method"], point, xytext=(6, 4), textcoords="offset points", size=8)
    # How the hidden states are drawn says nothing to who reads the plot.
    title = re.sub(r", context [^,]+", "", rows[0]["problem"])
    axes.set(yscale="log", xlabel="time of forward and backward, ms", title=title)
    axes.set_ylabel("memory beyond inputs and gradients, MB")
    axes.margins(x=0.25)
    axes.set_xlim(0)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def numbered(file: Path, count: int) -> Path:
    """The file itself for the first plot, then FILE-2 and so on, with its suffix."""
    return file if count == 1 else file.with_stem(f"{file.stem}-{count}")


def main() -> None:
    """Measure every combination of the options' values; print a table of each."""
    args = parse()
    source = {
        "command": f"python -m smoothce.bench {shlex.join(sys.argv[1:])}".rstrip(),
        "hardware": describe_hardware(args.device),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
    }
    print(" · ".join(source.values()))
    all_rows: list[Row] = []
    plots = 0
    cases = itertools.product(args.models, args.tokens, args.contexts, args.masked, args.softcap)
    for shape, tokens, context, masked, softcap in cases:
        problem = make_problem(shape, tokens, context, masked, softcap, args.device, args.frozen)
        rows = measure(problem, args.methods, args.label_smoothing, args.repeats, args.seconds)
        print(format_table(problem.name, rows), flush=True)
        all_rows += rows
        if args.json:
            args.json.write_text(json.dumps({**source, "results": all_rows}, indent=1) + "\n")
        if args.plot:
            plots += 1
            plot(rows, numbered(args.plot, plots))


if __name__ == "__main__":
    main()

"""python -m smoothce.bench --models gemma2-2b llama3-8b --tokens 8192 --json out.json
python -m smoothce.bench --models 8192x2048 --only ours --masked 0 0.5 --softcap none 30
python -m smoothce.bench --device cpu --models 32000x512 --tokens 2048

Time, memory and gradient error of the loss beside other methods, on the same inputs: bf16 on a
GPU, fp32 on a CPU. Methods take turns in a random order, each for the same time, each sample beside
one of the product E Cᵀ, whose time is the unit. Of an option's several values all are measured."""

import argparse
import itertools
import json
import platform
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import torch

from smoothce.bench import measure
from smoothce.bench.peers import PEERS, Peer

MODELS = {  # vocabulary and hidden size of the classifier
    "gemma2-2b": (256000, 2304),
    "gemma3-270m": (262144, 640),
    "llama3-8b": (128256, 4096),
    "llama3.2-1b": (128256, 2048),
    "qwen2.5-1.5b": (151936, 1536),
    "qwen2.5-7b": (152064, 3584),
    "mistral-7b": (32768, 4096),
}
COLUMNS = {  # of the printed table: key of a row, format
    "forward ms": ("forward_ms", ".2f"),
    "forward + backward ms": ("both_ms", ".2f"),
    "… in products": ("both_products", ".2f"),
    "MB beyond inputs and gradients": ("extra_mb", ".0f"),
    "dE error": ("error_hidden", ".1e"),
    "dC error": ("error_weight", ".1e"),
}


def shape(text: str) -> tuple[str, int, int]:
    """A model's name, vocabulary and hidden size, or those of "VxD"."""
    v, d = MODELS[text] if text in MODELS else map(int, text.split("x"))
    return text, v, d


def method(text: str) -> Peer:
    """A loss of the user's: "module:function" as (hidden, weight, labels, label_smoothing=)."""
    try:
        return Peer(text, resolve_name(text))
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no module:function ({error})") from None


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m smoothce.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many, add = {"nargs": "+"}, parser.add_argument
    add("--device", choices=PEERS, default="cuda", help="(cuda)")
    names = f"the classifier's shape: {', '.join(MODELS)}, or VxD, such as 8192x2048"
    add("--models", **many, type=shape, default=[shape("gemma2-2b")], metavar="MODEL", help=names)
    add("--tokens", **many, type=int, default=[8192], metavar="N")
    add("--label-smoothing", **many, type=float, default=[0.1], metavar="β")
    spread = "standard deviation over the vocabulary of what a position adds to a logit; about 2"
    add("--contexts", **many, type=float, default=[2.0], metavar="X", help=spread)
    add("--masked", **many, type=float, default=[0.0], metavar="SHARE", help="of ignored labels")
    cap = {"type": lambda x: None if x == "none" else float(x), "default": [None], "metavar": "X"}
    add("--softcap", **many, **cap, help='of the logits, or "none"')
    add("--frozen", action="store_true", help="the classifier needs no gradient, as under LoRA")
    add("--only", **many, default=[""], metavar="PART", help="methods with one in the name")
    own = "losses of yours besides, (hidden, weight, labels, label_smoothing=) → mean"
    add("--method", **many, type=method, default=[], metavar="MODULE:FUNCTION", help=own)
    add("--repeats", type=int, default=3, metavar="K", help="samples behind each median (3)")
    add("--seconds", type=float, default=0.3, help="that a sample takes (0.3)")
    add("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add("--plot", type=Path, metavar="FILE", help="draw memory against time there")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        on = "--device cpu --models 32000x512 --tokens 2048"
        parser.error(f"torch finds no CUDA GPU; for a CPU: {on}")
    for file in (args.json, args.plot):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{file}: no such folder")  # now, not when all is measured
    if args.plot and not (args.device == "cuda" and find_spec("matplotlib")):
        parser.error("--plot needs a GPU, where memory is measured, and matplotlib")
    args.peers = [p for p in PEERS[args.device] if any(part in p.name for part in args.only)]
    args.peers += args.method
    if not args.peers:
        parser.error(f"--only {' '.join(args.only)}: in no method's name that runs here")
    return args


def table(name: str, rows: list[dict]) -> str:
    lines = [f"\n### {name}\n", "| method | β | " + " | ".join(COLUMNS) + " |"]
    lines.append("|---" * (2 + len(COLUMNS)) + "|")
    for row in rows:
        cells = ["–" if row.get(k) is None else format(row[k], f) for k, f in COLUMNS.values()]
        cells[0] = row.get("failed", cells[0])
        lines.append(f"| {row['method']} | {row['beta']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict], file: Path) -> None:
    """Memory against time: a method below and left of another is better in both."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        if "failed" not in row:
            ours = row["method"].startswith("ours")
            at = row["both_ms"], max(row["extra_mb"], 1)
            axes.scatter(*at, s=50, color="#0072B2" if ours else "#999999", zorder=2)
            axes.annotate(row["method"], at, xytext=(6, 4), textcoords="offset points", size=8)
    axes.set(yscale="log", xlabel="forward + backward, milliseconds", title=rows[0]["problem"])
    axes.set_ylabel("MB beyond inputs and gradients")
    axes.margins(x=0.25)
    axes.set_xlim(0)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def main() -> None:
    args = parse()
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    source = {
        "command": f"python -m smoothce.bench {shlex.join(sys.argv[1:])}".rstrip(),
        "hardware": torch.cuda.get_device_name() if args.device == "cuda" else cpu,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
    }
    print(" · ".join(source.values()))
    rows = []
    cases = itertools.product(args.models, args.tokens, args.contexts, args.masked, args.softcap)
    for case in cases:
        problem = measure.problem(*case, args.device, args.frozen)
        own = measure.rows(problem, args.peers, args.label_smoothing, args.repeats, args.seconds)
        print(table(problem.name, own), flush=True)
        rows += own
        if args.json:
            args.json.write_text(json.dumps({**source, "results": rows}, indent=1) + "\n")
    if args.plot:
        plot(own, args.plot)


if __name__ == "__main__":
    main()

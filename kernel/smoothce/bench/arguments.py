"""The command's options, for both devices, and what is wrong with them."""

import argparse
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from smoothce.bench.inputs import CLASSIFIERS, classifier

# What is measured where nothing is said.
DEFAULTS = {
    "cuda": {
        "models": ["gemma2-2b"],
        "tokens": [8192],
        "label_smoothing": [0.1],
        "repeats": 5,
        "in_a_row": 3,
    },
    "cpu": {
        "models": ["small"],
        "tokens": [2048],
        "label_smoothing": [0.0, 0.1],
        "repeats": 7,
        "in_a_row": 1,
    },
}


def parse(arguments: list[str] | None, gpu: bool, description: str) -> argparse.Namespace:
    """The checked options of a run; `gpu`: whether there is one here."""
    parser = _parser(description)
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if gpu else "cpu")
    if args.device == "cuda" and not gpu:
        parser.error("--device cuda, but torch finds no CUDA GPU; use --device cpu")
    if args.device == "cpu" and args.filter_eps:
        parser.error("--filter-eps is for --device cuda: no filter runs on a CPU")
    if args.tensors is not None:
        for name in ("models", "tokens", "contexts"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} is for inputs that are made; --tensors has its own")
        if not args.tensors.is_file():
            parser.error(f"--tensors {args.tensors}: no such file")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder")  # now, not when all is measured
    for name, default in {"contexts": [2.0], **DEFAULTS[args.device]}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def asked(name: str, only: Collection[str]) -> bool:
    """Whether one of the parts `only` is in the name."""
    return any(part in name for part in only)


def select(names: Collection[str], only: list[str], missing: Collection[str] = ()) -> list[str]:
    """The names with one of the parts `only` in them; ends the run where a part is in none."""
    for part in only:
        if not any(asked(name, [part]) for name in (*names, *missing)):
            fail(f"--only {part!r}: in no method's name; they are {'; '.join(names)}")
    found = [name for name in names if asked(name, only)]
    if not found:
        absent = (name for name in missing if asked(name, only))
        fail(f"--only: none of {'; '.join(absent)} can be imported here")
    return found


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smoothce.bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many = {"nargs": "+"}
    add = parser.add_argument
    add("--device", choices=tuple(DEFAULTS), help="default: cuda where there is a GPU, else cpu")
    add(
        "--models",
        **many,
        type=_model,
        metavar="MODEL",
        help=f"the classifier's shape: {', '.join(CLASSIFIERS)}, or VxD, such as 8192x2048 "
        + _default("models"),
    )
    add("--tokens", **many, type=_count, metavar="N", help=_default("tokens"))
    add("--label-smoothing", **many, type=_beta, metavar="β", help=_default("label_smoothing"))
    add(
        "--only", **many, default=[""], metavar="PART", help="methods with one of these in the name"
    )
    add(
        "--repeats",
        type=_count,
        metavar="K",
        help="samples behind each median " + _default("repeats"),
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add(
        "--contexts",
        **many,
        type=_context,
        metavar="X",
        help="standard deviation over the vocabulary of what a position adds to a logit (2)",
    )
    add(
        "--tensors", type=Path, metavar="FILE", help="a torch file as input: hidden, weight, labels"
    )
    add(
        "--masked",
        **many,
        default=[0.0],
        type=_share,
        metavar="SHARE",
        help="of labels that are ignored",
    )
    add(
        "--softcap",
        **many,
        default=[None],
        type=_softcap,
        metavar="X",
        help='caps of the logits, or "none"',
    )
    add(
        "--in-a-row",
        type=_count,
        metavar="K",
        help="calls that a sample times, back to back " + _default("in_a_row"),
    )
    add(
        "--filter-eps",
        **many,
        default=[],
        type=_threshold,
        metavar="EPS",
        help='on a GPU, methods more: our filters at this threshold, such as 2^-8.6, beside "auto"',
    )
    return parser


def _default(name: str) -> str:
    """For a help text: (8192; on a CPU 2048)."""
    values = (DEFAULTS[device][name] for device in ("cuda", "cpu"))
    gpu, cpu = (" and ".join(map(str, v)) if isinstance(v, list) else v for v in values)
    return f"({gpu}; on a CPU {cpu})"


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _model(text: str) -> str:
    try:
        classifier(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _number(
    convert: Callable[[str], float], allowed: Callable[[float], bool], wanted: str
) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = convert(text)
            fine = allowed(value)
        except (ValueError, OverflowError):
            fine = False
        if not fine:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {wanted}")
        return value

    return number


def _power(text: str) -> float:
    """0.00257, or 2^-8.6."""
    found = re.fullmatch(r"2\^(.+)", text)
    return 2.0 ** float(found[1]) if found else float(text)


_count = _number(int, lambda n: n >= 1, "an integer, 1 or more")
_beta = _number(float, lambda x: 0 <= x <= 1, "a number in [0, 1]")
_context = _number(float, lambda x: 0 <= x < float("inf"), "a number, 0 or more")
_share = _number(float, lambda x: 0 <= x < 1, "a number in [0, 1)")
_threshold = _number(_power, lambda x: 0 < x < 1, "a number in (0, 1), or 2^-X")
_softcap = _number(
    lambda text: None if text == "none" else float(text),
    lambda x: x is None or 0 < x < float("inf"),
    'a positive number or "none"',
)

"""python -m smoothce.bench --device cpu --tokens 2048 --label-smoothing 0 0.1 --json out.json

Time, memory and gradient error on a CPU; random inputs."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from smoothce.bench import measure, report
from smoothce.bench.inputs import CLASSIFIERS, Case
from smoothce.bench.methods import METHODS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smoothce.bench --device cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=CLASSIFIERS, default=["small"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048], help="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--label-smoothing", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=7, help="samples behind each median")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args(arguments)
    if not all(0 <= beta <= 1 for beta in args.label_smoothing):
        parser.error(f"--label-smoothing {args.label_smoothing}: expected numbers in [0, 1]")
    if args.repeats < 1 or any(tokens < 1 for tokens in args.tokens):
        parser.error("--tokens and --repeats must be at least 1")
    cases = [
        Case(model, tokens, args.dtype, beta)
        for model in args.models
        for tokens in args.tokens
        for beta in args.label_smoothing
    ]
    results = [run(case, args.methods, args.repeats) for case in cases]
    source = report.provenance("cpu")
    print(report.markdown(results, source))
    if args.json:
        args.json.write_text(json.dumps({**source, "results": results}, indent=1) + "\n")


def run(case: Case, methods: list[str], repeats: int) -> dict:
    print(f"measuring {case}", file=sys.stderr)
    rows = measure.times(case, methods, repeats)
    errors = measure.gradient_errors(case, methods)
    for name in methods:
        rows[name] |= {"peak": measure.peak_megabytes(case, name), "errors": errors[name]}
    return {
        "case": str(case),
        **asdict(case),
        "rows": [{"method": name, **row} for name, row in rows.items()],
    }

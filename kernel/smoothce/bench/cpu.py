"""Time, memory and gradient error on a CPU; random inputs."""

import argparse
import json
import sys
from dataclasses import asdict

from smoothce.bench import measure, report
from smoothce.bench.arguments import select
from smoothce.bench.inputs import Case
from smoothce.bench.methods import METHODS


def main(args: argparse.Namespace) -> None:
    methods = select(METHODS, args.only)
    cases = [
        Case(model, tokens, args.dtype, beta)
        for model in args.models
        for tokens in args.tokens
        for beta in args.label_smoothing
    ]
    results = [run(case, methods, args.repeats) for case in cases]
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

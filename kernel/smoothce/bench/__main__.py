"""python -m smoothce.bench --device cpu
python -m smoothce.bench --device cuda --models gemma2-2b llama3-8b --tokens 8192 --json out.json"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from smoothce.bench import measure, report
from smoothce.bench.inputs import CLASSIFIERS, Case
from smoothce.bench.methods import METHODS


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m smoothce.bench", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--models", nargs="+", choices=CLASSIFIERS, help="default: small on a CPU")
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="N; default: 2048 on a CPU, else 8192"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--label-smoothing", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=7, help="samples behind each median")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    if args.device == "cuda" and not gpu:
        parser.error("--device cuda, but torch finds no CUDA GPU")
    if not all(0 <= beta <= 1 for beta in args.label_smoothing):
        parser.error(f"--label-smoothing {args.label_smoothing}: expected numbers in [0, 1]")
    if args.repeats < 1 or any(tokens < 1 for tokens in args.tokens or []):
        parser.error("--tokens and --repeats must be at least 1")
    on_cpu = args.device == "cpu"
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    cases = [
        Case(model, tokens, dtype, args.device, beta)
        for model in args.models or (["small"] if on_cpu else ["gemma2-2b"])
        for tokens in args.tokens or [2048 if on_cpu else 8192]
        for beta in args.label_smoothing
    ]
    results = [run(case, args.methods, args.repeats) for case in cases]
    source = report.provenance(args.device)
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


if __name__ == "__main__":
    main()

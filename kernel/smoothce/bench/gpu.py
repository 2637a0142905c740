"""python -m smoothce.bench --models gemma2-2b --tokens 8192 --contexts 0.15 2.0 --json out.json
python -m smoothce.bench --tensors lm.pt          (hidden, weight, labels of a real last layer)
python -m smoothce.bench --models llama3-8b mistral-7b --tokens 2048 8192 --only ours

Every method on the same inputs, in turns with the product E Cᵀ by cuBLAS: its time is the unit."""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smoothce.bench import report
from smoothce.bench.inputs import CLASSIFIERS
from smoothce.bench.language import language_like
from smoothce.bench.peers import Peer, peers

MEGABYTE = 1e6
IN_A_ROW = 3


@dataclass
class Problem:
    """Inputs and their name."""

    name: str
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    labels: Tensor  # (N,)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smoothce.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=CLASSIFIERS, default=["gemma2-2b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--contexts", nargs="+", type=float, default=[2.0])
    parser.add_argument("--tensors", type=Path, help="a torch file instead: hidden, weight, labels")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="methods whose name has one of these in it"
    )
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("error: this needs a CUDA GPU; python -m smoothce.bench --device cpu does not")
    found, missing = peers()
    found = [peer for peer in found if any(part in peer.name for part in args.only)]
    source = report.provenance("cuda")
    print(" · ".join(f"{k}: {v}" for k, v in source.items() if isinstance(v, str)))
    for name, why in missing.items():
        print(f"not measured: {name} ({why})", file=sys.stderr)
    results = []
    for problem in problems(args):
        rows = [
            {"problem": problem.name, **row}
            for row in measure(problem, found, args.label_smoothing, args.repeats)
        ]
        print(table(problem.name, rows), flush=True)
        results += rows
        del problem
        tidy()
    if args.json:
        args.json.write_text(json.dumps({**source, "results": results}, indent=1) + "\n")


def problems(args: argparse.Namespace):
    if args.tensors:
        tensors = torch.load(args.tensors, map_location="cuda")
        yield Problem(args.tensors.stem, *(tensors[k] for k in ("hidden", "weight", "labels")))
        return
    for model in args.models:
        for tokens in args.tokens:
            for context in args.contexts:
                shape = tokens, *CLASSIFIERS[model]
                name = f"{model}, N={tokens}, V={shape[1]}, D={shape[2]}, context {context:g}"
                yield Problem(name, *language_like(*shape, context, torch.bfloat16))


def measure(problem: Problem, found: list[Peer], beta: float, repeats: int) -> list[dict]:
    """One row a method and β: its own β is 0 where it cannot smooth."""
    rows = []
    truth = {b: reference(problem, b) for b in {beta} | {0.0 for p in found if not p.smooths}}
    for peer in found:
        b = beta if peer.smooths else 0.0
        row = {"method": peer.name, "beta": b}
        try:
            row |= one(problem, peer, b, repeats, truth[b])
        except Exception as error:  # out of memory, an unsupported shape: a row, not the end
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        rows.append(row)
        tidy()
    return rows


def one(
    problem: Problem, peer: Peer, beta: float, repeats: int, truth: tuple[Tensor, Tensor]
) -> dict:
    e, c = (t.detach().clone().requires_grad_() for t in (problem.hidden, problem.weight))
    y = problem.labels

    def forward() -> None:
        with torch.no_grad():
            peer.loss(e, c, y, beta)

    def both() -> None:
        e.grad = c.grad = None
        peer.loss(e, c, y, beta).backward()

    both()  # compiles
    forward()
    errors = [relative(leaf.grad, want) for leaf, want in zip((e, c), truth, strict=True)]
    unseen = torch.ones(len(c), dtype=torch.bool, device=c.device)
    unseen[y] = False
    tail = relative(c.grad[unseen], truth[1][unseen])
    e.grad = c.grad = None
    tidy()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    gradients = e.grad.nbytes + c.grad.nbytes
    peak = torch.cuda.max_memory_allocated() - before - gradients
    e.grad = c.grad = None
    with torch.no_grad():
        out = torch.empty(min(len(e), 8192), len(c), device=e.device, dtype=e.dtype)
        share = len(e) / len(out)
        samples = [
            [milliseconds(step) for step in (lambda: torch.mm(e[:8192], c.T, out=out), forward)]
            for _ in range(repeats)
        ]
        unit = share * statistics.median(s[0] for s in samples)
        forward_ms = statistics.median(s[1] for s in samples)
    out = None  # its memory is wanted
    both_ms = statistics.median(milliseconds(both) for _ in range(repeats))
    return {
        "gemm_ms": unit,
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward_gemms": forward_ms / unit,
        "both_gemms": both_ms / unit,
        "extra_mb": peak / MEGABYTE,
        "error_hidden": errors[0],
        "error_weight": errors[1],
        "error_unseen": tail,
    }


def reference(problem: Problem, beta: float, rows: int = 1024) -> tuple[Tensor, Tensor]:
    """Gradients of the mean loss from fp32 logits, some tokens at a time."""
    e, c, y = problem.hidden.float(), problem.weight.float(), problem.labels
    d_hidden, d_weight = torch.empty_like(e), torch.zeros_like(c)
    for i in range(0, len(e), rows):
        part, target = e[i : i + rows], y[i : i + rows]
        g = (part @ c.T).softmax(1).sub_(beta / len(c))
        g[torch.arange(len(target)), target] -= 1 - beta
        g /= len(e)
        d_hidden[i : i + rows] = g @ c
        d_weight.addmm_(g.T, part)
    return d_hidden, d_weight


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def milliseconds(step: Callable[[], object]) -> float:
    """Per call of several in a row, as in training: nothing waits between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(IN_A_ROW):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / IN_A_ROW


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table(name: str, rows: list[dict]) -> str:
    lines = [
        f"\n### {name}\n",
        "| method | β | forward ms | fwd+bwd ms | forward / GEMM | fwd+bwd / GEMM "
        "| MB beyond inputs and gradients | dE error | dC error | dC error, no targets |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "failed" in r:
            lines.append(f"| {r['method']} | {r['beta']:g} | {r['failed']} |" + " |" * 7)
            continue
        lines.append(
            f"| {r['method']} | {r['beta']:g} | {r['forward_ms']:.2f} | {r['both_ms']:.2f} "
            f"| {r['forward_gemms']:.2f} | {r['both_gemms']:.2f} | {r['extra_mb']:.0f} "
            f"| {r['error_hidden']:.1e} | {r['error_weight']:.1e} | {r['error_unseen']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

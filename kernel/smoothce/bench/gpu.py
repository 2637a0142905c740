"""Time, memory and gradient error on a GPU, of every method on the same inputs."""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from smoothce.bench import report
from smoothce.bench.arguments import fail, select
from smoothce.bench.inputs import IGNORED, relative
from smoothce.bench.peers import Peer, peers
from smoothce.bench.problems import Problem, gradients, problems
from smoothce.triton import filter_statistics

PRODUCT_ROWS = 8192  # most tokens of the product that is the unit; more tokens count as several


def main(args: argparse.Namespace) -> None:
    found, missing = chosen(args)
    source = report.provenance("cuda")
    print(" · ".join(f"{k}: {v}" for k, v in source.items() if isinstance(v, str)))
    for name, why in missing.items():
        print(f"not measured: {name} ({why})", file=sys.stderr)
    results = []
    for problem in problems(args):
        rows = [{"problem": problem.name, **row} for row in measure(problem, found, args)]
        print(report.comparison(problem.name, rows), flush=True)
        results += rows
        del problem
        tidy()
    if args.json:
        args.json.write_text(json.dumps({**source, "results": results}, indent=1) + "\n")


def chosen(args: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The methods, and why others are missing."""
    found, missing = peers(args.filter_eps)
    names = select([peer.name for peer in found], args.only, missing)
    if args.filter_eps and not any("2^" in name for name in names):
        fail("--only leaves out all that --filter-eps adds")
    return [peer for peer in found if peer.name in names], missing


def measure(problem: Problem, found: list[Peer], args: argparse.Namespace) -> list[dict]:
    """One row a method and β; β is 0 where it cannot smooth."""
    rows = []
    betas = {peer.name: args.label_smoothing if peer.smooths else [0.0] for peer in found}
    truth = {beta: gradients(problem, beta) for beta in set().union(*betas.values())}
    for peer in found:
        for beta in betas[peer.name]:
            row = {"method": peer.name, "beta": beta}
            if problem.softcap is not None and not peer.softcaps:
                rows.append(row | {"failed": "knows no softcap"})
                continue
            try:
                row |= one(problem, peer, beta, truth[beta], args)
            except Exception as error:  # out of memory, an unsupported shape: a row, not the end
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            rows.append(row)
            tidy()
    return rows


def one(
    problem: Problem,
    peer: Peer,
    beta: float,
    truth: tuple[Tensor, Tensor],
    args: argparse.Namespace,
) -> dict:
    """The figures of one method at one β."""
    e, c = (t.detach().clone().requires_grad_() for t in (problem.hidden, problem.weight))
    y, cap = problem.labels, {} if problem.softcap is None else {"softcap": problem.softcap}

    def forward() -> None:
        with torch.no_grad():
            peer.loss(e, c, y, beta, **cap)

    def both() -> None:
        e.grad = c.grad = None
        peer.loss(e, c, y, beta, **cap).backward()

    both()  # compiles
    forward()
    errors = [relative(leaf.grad, want) for leaf, want in zip((e, c), truth, strict=True)]
    unseen = torch.ones(len(c), dtype=torch.bool, device=c.device)
    unseen[y[y != IGNORED]] = False
    tail = relative(c.grad[unseen], truth[1][unseen])
    gradient_bytes = e.grad.nbytes + c.grad.nbytes
    e.grad = c.grad = None
    extra = peak(both) - gradient_bytes
    e.grad = c.grad = None
    with torch.no_grad():
        rows = e[:PRODUCT_ROWS]
        out = torch.empty(len(rows), len(c), device=e.device, dtype=e.dtype)
        steps = (lambda: torch.mm(rows, c.T, out=out)), forward
        samples = [
            [milliseconds(step, args.in_a_row) for step in steps] for _ in range(args.repeats)
        ]
        unit = len(e) / len(rows) * statistics.median(s[0] for s in samples)
        forward_ms = statistics.median(s[1] for s in samples)
    out = None  # its memory is wanted
    both_ms = statistics.median(milliseconds(both, args.in_a_row) for _ in range(args.repeats))
    row = {
        "gemm_ms": unit,
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward_gemms": forward_ms / unit,
        "both_gemms": both_ms / unit,
        "extra_mb": extra / 1e6,
        "error_hidden": errors[0],
        "error_weight": errors[1],
        "error_unseen": tail,
        "pairs": None,
    }
    if peer.filter:
        options = replace(peer.filter, **cap)
        row["pairs"] = filter_statistics(e, c, y, None, options)[0].item()
    return row


def peak(step: Callable[[], object]) -> int:
    """Most bytes that a call holds beyond what was there before it."""
    tidy()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def milliseconds(step: Callable[[], object], calls: int) -> float:
    """Per call of several in a row, as in training: nothing waits between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()

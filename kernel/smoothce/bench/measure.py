"""Time, memory and gradient error of every method on the same inputs."""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from smoothce.bench import report
from smoothce.bench.arguments import asked, fail, select
from smoothce.bench.device import milliseconds, peaks, tidy
from smoothce.bench.inputs import IGNORED, relative
from smoothce.bench.peers import Peer, peers
from smoothce.bench.problems import Problem, gradients, problems

PRODUCT_ROWS = 8192  # most tokens of the product that is the unit; more tokens count as several


def main(args: argparse.Namespace) -> None:
    found, missing = chosen(args)
    source = report.provenance(args.device)
    print(" · ".join(f"{k}: {v}" for k, v in source.items() if isinstance(v, str)))
    for name, why in missing.items():
        if asked(name, args.only):
            print(f"not measured: {name} ({why})", file=sys.stderr)
    results = []
    for problem in problems(args):
        rows = [{"problem": problem.name, **row} for row in measure(problem, found, args)]
        print(report.comparison(problem.name, rows), flush=True)
        results += rows
        del problem
        tidy(args.device)
    if args.json:
        args.json.write_text(json.dumps({**source, "results": results}, indent=1) + "\n")


def chosen(args: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The methods, and why others are missing."""
    found, missing = peers(args.device, args.filter_eps, args.only)
    names = select([peer.name for peer in found], args.only, missing)
    if args.filter_eps and not any("2^" in name for name in names):
        fail("--only leaves out all that --filter-eps adds")
    return [peer for peer in found if peer.name in names], missing


def measure(problem: Problem, found: list[Peer], args: argparse.Namespace) -> list[dict]:
    """One row a method and β, which is 0 where it cannot smooth.

    First memory and errors of each method; then times, the methods in another order each repeat."""
    betas = {peer.name: args.label_smoothing if peer.smooths else [0.0] for peer in found}
    runs = [Run(problem, peer, beta) for peer in found for beta in betas[peer.name]]
    wanted = {run.beta for run in runs if not run.peer.floor}
    truth = {beta: gradients(problem, beta) for beta in wanted}
    for run in runs:
        run.attempt(run.figures, truth.get(run.beta))
    del truth
    rows = problem.hidden[:PRODUCT_ROWS]
    out = rows.new_empty(len(rows), len(problem.weight))  # there for all: part of what is used
    order = random.Random(0)
    for _ in range(args.repeats):
        for run in order.sample(runs, len(runs)):
            run.attempt(run.sample, lambda: torch.mm(rows, problem.weight.T, out=out), args)
    products = [product for run in runs for product, *_ in run.samples]
    if products:
        unit = statistics.median(products) * len(problem.hidden) / len(rows)
        for run in runs:
            run.attempt(run.summarise, unit)
    return [run.row for run in runs]


class Run:
    """One method at one β on a problem: its steps, its samples and its row of the table."""

    def __init__(self, problem: Problem, peer: Peer, beta: float) -> None:
        self.problem, self.peer, self.beta = problem, peer, beta
        self.device = problem.hidden.device.type
        leaves = problem.hidden, problem.weight
        self.hidden, self.weight = (t.detach().requires_grad_() for t in leaves)
        self.cap = {} if problem.softcap is None else {"softcap": problem.softcap}
        self.samples: list[list[float]] = []  # milliseconds: product, forward, both
        self.row: dict = {"method": peer.name, "beta": beta}
        if self.cap and not peer.softcaps:
            self.row["failed"] = "knows no softcap"

    def attempt(self, step: Callable[..., None], *given: object) -> None:
        """What fails, for want of memory or another reason, is a row, not the end."""
        if "failed" in self.row:
            return
        try:
            step(*given)
        except Exception as error:
            self.row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        self.hidden.grad = self.weight.grad = None
        tidy(self.device)

    def loss(self) -> Tensor:
        given = self.hidden, self.weight, self.problem.labels, self.beta
        return self.peer.loss(*given, **self.cap)

    def forward(self) -> None:
        """An evaluation's: nothing is kept for a backward."""
        with torch.no_grad():
            self.loss()

    def both(self) -> None:
        self.hidden.grad = self.weight.grad = None
        self.loss().backward()

    def figures(self, truth: tuple[Tensor, Tensor] | None) -> None:
        """Gradient errors, memory in training and the share of pairs that are computed."""
        e, c, y = self.hidden, self.weight, self.problem.labels
        self.both()  # compiles
        self.forward()
        self.row |= dict.fromkeys(("error_hidden", "error_weight", "error_unseen", "pairs"))
        if not self.peer.floor:
            unseen = torch.ones(len(c), dtype=torch.bool, device=c.device)
            unseen[y[y != IGNORED]] = False
            self.row["error_hidden"] = relative(e.grad, truth[0])
            self.row["error_weight"] = relative(c.grad, truth[1])
            self.row["error_unseen"] = relative(c.grad[unseen], truth[1][unseen])
        made = e.grad.nbytes + c.grad.nbytes
        e.grad = c.grad = None
        kept: list[Tensor] = []
        held = peaks(self.device, lambda: kept.append(self.loss()), lambda: kept.pop().backward())
        self.row |= {"forward_mb": held[0] / 1e6, "backward_mb": held[1] / 1e6}
        self.row["extra_mb"] = (max(held) - made) / 1e6
        if self.peer.filter:
            from smoothce.triton import filter_statistics  # a CPU's machine may lack Triton

            options = replace(self.peer.filter, **self.cap)
            share, _ = filter_statistics(e.detach(), c.detach(), y, None, options)
            self.row["pairs"] = share.item()

    def sample(self, product: Callable[[], object], args: argparse.Namespace) -> None:
        self.both()  # fills the allocator's cache, which tidy() emptied
        steps = product, self.forward, self.both
        self.samples.append([milliseconds(step, args.in_a_row, self.device) for step in steps])

    def summarise(self, unit: float) -> None:
        _, forward, both = (statistics.median(column) for column in zip(*self.samples, strict=True))
        self.row |= {"gemm_ms": unit, "forward_ms": forward, "both_ms": both}
        self.row |= {"forward_gemms": forward / unit, "both_gemms": both / unit}

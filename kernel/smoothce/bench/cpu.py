"""Time, memory and gradient error on a CPU; random inputs.

Medians of methods that take turns, peak memory beyond the inputs, errors against fp64."""

import argparse
import json
import multiprocessing
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy
from smoothce.bench import report
from smoothce.bench.arguments import select
from smoothce.bench.inputs import classifier, relative

METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "torch": lambda e, c, y, beta: F.cross_entropy(e @ c.T, y, label_smoothing=beta),
    "chunked": lambda e, c, y, beta: linear_cross_entropy(
        e, c, y, label_smoothing=beta, impl="chunked"
    ),
}


@dataclass(frozen=True)
class Case:
    """One problem in fp32: N tokens, V entries, D features, and the smoothing β."""

    model: str
    tokens: int
    label_smoothing: float

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.tokens, *classifier(self.model)

    def __str__(self) -> str:
        n, v, d = self.shape
        return f"{self.model} (N={n}, V={v}, D={d}), float32 on cpu, β={self.label_smoothing:g}"


def tensors(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden (N, D), weight (V, D), both of which require grad, and labels (N,)."""
    n, v, d = case.shape
    settings = {"generator": torch.Generator().manual_seed(seed)}
    hidden = torch.randn(n, d, **settings)
    weight = torch.randn(v, d, **settings) / d**0.5
    labels = torch.randint(v, (n,), **settings)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def main(args: argparse.Namespace) -> None:
    methods = select(METHODS, args.only)
    cases = [
        Case(model, tokens, beta)
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
    rows = times(case, methods, repeats)
    errors = gradient_errors(case, methods)
    for name in methods:
        rows[name] |= {"peak": peak_megabytes(case, name), "errors": errors[name]}
    return {
        "case": str(case),
        **asdict(case),
        "rows": [{"method": name, **row} for name, row in rows.items()],
    }


def times(case: Case, names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of forward (no gradients) and forward+backward, by method.

    "matmul" is the floor: the product E Cᵀ, once, and three times. All take turns, in another order
    each turn, so that a change in the machine's load meets all of them."""
    hidden, weight, labels = tensors(case)
    out = torch.empty(hidden.shape[0], weight.shape[0])

    def matmul() -> None:
        with torch.no_grad():
            torch.mm(hidden, weight.T, out=out)

    def forward(name: str) -> None:
        with torch.no_grad():
            METHODS[name](hidden, weight, labels, case.label_smoothing)

    def both(name: str) -> None:
        METHODS[name](hidden, weight, labels, case.label_smoothing).backward()
        hidden.grad = weight.grad = None

    steps = {("matmul", "forward"): matmul}
    for name in names:
        steps[name, "forward"] = lambda name=name: forward(name)
        steps[name, "both"] = lambda name=name: both(name)
    samples, order = {key: [] for key in steps}, random.Random(0)
    for turn in range(repeats + 1):
        for key in order.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[key]()
            elapsed = 1e3 * (time.perf_counter() - start)
            if turn:  # the first turn warms up
                samples[key].append(elapsed)
    median = {key: statistics.median(values) for key, values in samples.items()}
    table = {
        name: {"forward": median[name, "forward"], "both": median[name, "both"]} for name in names
    }
    floor = median["matmul", "forward"]
    return {"matmul": {"forward": floor, "both": 3 * floor}, **table}


def peak_megabytes(case: Case, name: str) -> float:
    """Most memory that one forward+backward holds beyond its inputs; the two gradients count.

    Growth of the resident set of a fresh process, so scratch memory counts as well."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_resident_growth, (case, name))


def _resident_growth(case: Case, name: str) -> float:
    tiny = Case("small", 1, case.label_smoothing)
    METHODS[name](*tensors(tiny), case.label_smoothing).backward()  # loads the libraries' code
    inputs = tensors(case)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    METHODS[name](*inputs, case.label_smoothing).backward()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """A line of /proc/self/status, in KiB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def gradient_errors(case: Case, names: list[str]) -> dict[str, tuple[float, float]]:
    """‖g − g*‖ / ‖g*‖ for hidden and for weight, g* from the reference in fp64."""
    hidden, weight, labels = tensors(case)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(
        linear_cross_entropy(*wide, labels, label_smoothing=case.label_smoothing, impl="reference"),
        wide,
    )
    errors = {}
    for name in names:
        loss = METHODS[name](hidden, weight, labels, case.label_smoothing)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        errors[name] = tuple(relative(g, t) for g, t in zip(gradients, truth, strict=True))
    return errors

"""A process of compare.py: measures the loss of one checkout, and prints JSON as its last line.

    PYTHONPATH=FOLDER/kernel python compare_worker.py FOLDER JOB

A sample runs E Cᵀ, the call, the call and E Cᵀ, timed by CUDA events. Its result is the time of the
two calls divided by that of the two products. Samples follow each other for `seconds`, and their
median is what is measured.

Of the checkout it calls `linear_cross_entropy` alone, so that older ones can be measured. Inputs
come from smoothce/bench/language.py of the checkout that this script lies in, whatever the measured
one has.
"""

import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

import smoothce  # the checkout that PYTHONPATH names

LANGUAGE = Path(__file__).resolve().parents[1] / "smoothce" / "bench" / "language.py"
# CONTEXT and MAX_REASON are those of all_peers.py and smoothce/bench/measure.py. They are written
# out here, since the smoothce that this process imports is another checkout's.

# The standard deviation over the vocabulary of what a position adds to its logits
# (smoothce/bench/language.py), as in real models.
CONTEXT = 2.0
LEAST_SAMPLES = 5
MAX_REASON = 160  # characters of an error's message that are kept

# Options of `linear_cross_entropy` by the name of the call.
CALLS: dict[str, dict[str, Any]] = {
    "forward": {},  # alone, without a graph
    "default": {},
    "workspace=0": {"workspace": 0},
    "filtered": {"filter_eps": "auto"},
}


class Job(TypedDict):
    """What is to be measured."""

    shapes: list[list[Any]]  # of each its name, V and D
    calls: list[str]  # of CALLS
    tokens: int
    label_smoothing: float
    softcap: float | None
    seconds: float  # that a call is sampled


class Measured(TypedDict):
    """What was measured of one call at one shape."""

    shape: str
    call: str
    products: float | None  # the median of the samples; None where the call failed
    failed: str | None  # why


def language_like(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The benchmark's inputs: hidden states (N, D), a classifier (V, D) and labels (N,)."""
    spec = importlib.util.spec_from_file_location("language", LANGUAGE)
    assert spec is not None and spec.loader is not None  # it is a file of Python's
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.language_like(*args)


def measure_shape(
    job: Job, name: str, vocabulary: int, features: int, loss: Callable[..., Any]
) -> list[Measured]:
    """Every call at one shape. One that fails does not keep the others from being measured."""
    hidden, weight, labels = language_like(
        job["tokens"], vocabulary, features, CONTEXT, torch.bfloat16
    )
    logits = torch.empty(job["tokens"], vocabulary, device="cuda", dtype=torch.bfloat16)

    def product() -> None:
        torch.mm(hidden.detach(), weight.detach().T, out=logits)

    def forward(options: dict[str, Any]) -> None:
        with torch.no_grad():
            loss(hidden.detach(), weight.detach(), labels, **options)

    def forward_and_backward(options: dict[str, Any]) -> None:
        hidden.grad = None
        weight.grad = None
        loss(hidden, weight, labels, **options).backward()

    hidden.requires_grad_()
    weight.requires_grad_()
    measured: list[Measured] = []
    for call in job["calls"]:
        options = {"label_smoothing": job["label_smoothing"], **CALLS[call]}
        if job["softcap"] is not None:
            options["softcap"] = job["softcap"]
        step = functools.partial(forward if call == "forward" else forward_and_backward, options)
        products = None
        failed = None
        try:
            products = median_of_samples(product, step, job["seconds"])
        except Exception as error:
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:MAX_REASON]
        measured.append({"shape": name, "call": call, "products": products, "failed": failed})
    return measured


def median_of_samples(
    product: Callable[[], None], step: Callable[[], None], seconds: float
) -> float:
    """The time of a step in products."""
    sample(product, step)  # the first one compiles
    samples: list[float] = []
    begin = time.monotonic()
    while len(samples) < LEAST_SAMPLES or time.monotonic() - begin < seconds:
        samples.append(sample(product, step))
    return statistics.median(samples)


def sample(product: Callable[[], None], step: Callable[[], None]) -> float:
    """One sample, as the module's docstring has it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    begin, first_product_done, steps_done, second_product_done = events
    begin.record()
    product()
    first_product_done.record()
    step()
    step()
    steps_done.record()
    product()
    second_product_done.record()
    torch.cuda.synchronize()
    steps = first_product_done.elapsed_time(steps_done)
    products = begin.elapsed_time(first_product_done) + steps_done.elapsed_time(second_product_done)
    return steps / products  # two steps, and two products


def main(folder: Path, job: Job) -> None:
    found = Path(smoothce.__file__).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise RuntimeError(f"smoothce was imported from {found}, not from {folder}")
    measured: list[Measured] = []
    for name, vocabulary, features in job["shapes"]:
        measured += measure_shape(job, name, vocabulary, features, smoothce.linear_cross_entropy)
        torch.cuda.empty_cache()
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

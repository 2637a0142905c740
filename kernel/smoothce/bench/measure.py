"""Measures losses: inputs, their true gradients, and each method's time, memory and error on them.

`make_problem` makes inputs. `measure` measures methods on a problem in two passes: each method's
memory and gradient error first, then the times, for which the methods take turns.

The hidden states, or features, are E (N, D), one row for each of N tokens; the weight, or
classifier, is C (V, D), one row for each entry of the vocabulary. dE and dC are their gradients.
The unit of times, beside milliseconds, is a single product E Cᵀ, timed beside every sample. The
bound is the products that an exact gradient takes: three, or two where the classifier is frozen. It
is a method with a row of its own, and nothing here divides by it.
"""

import gc
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from smoothce import linear_cross_entropy
from smoothce.bench.language import language_like
from smoothce.bench.methods import IGNORE_INDEX, Method

# The unit E Cᵀ is timed on at most so many tokens and scaled up: its (N, V) output has to fit.
PRODUCT_ROWS = 8192
MAX_REASON = 160  # characters of an error's message that are kept


class ClassifierShape(NamedTuple):
    """The shape of a model's classifier."""

    name: str
    vocabulary: int
    features: int


class Problem(NamedTuple):
    """Inputs of a loss. Both matrices are leaves; a frozen classifier requires no gradient."""

    name: str
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    labels: Tensor  # (N,), `IGNORE_INDEX` where a token is masked
    softcap: float | None


class Row(TypedDict, total=False):
    """One method's figures on a problem, as they are printed and written.

    Where a step fails, `failed` says why, and the figures of later steps are missing."""

    problem: str
    method: str
    beta: float | None  # label smoothing; the bound has none
    failed: str
    error_hidden: float  # ‖g − g*‖ / ‖g*‖, where g is dE and g* is that of `true_gradients`
    error_weight: float  # the same of dC; missing where the classifier is frozen
    extra_mb: float  # 10⁶ bytes held at most beyond inputs and gradients; GPUs only
    product_ms: float  # one product E Cᵀ, the same for all methods that are timed together
    forward_ms: float  # without a graph, as in an evaluation
    both_ms: float  # forward and backward
    forward_products: float  # forward_ms / product_ms
    both_products: float  # both_ms / product_ms


class Sample(NamedTuple):
    """Milliseconds of three steps, measured one right after the other."""

    product: float
    forward: float
    both: float


def make_problem(
    shape: ClassifierShape,
    tokens: int,
    context: float,
    masked: float,
    softcap: float | None,
    device: str,
    frozen: bool = False,
) -> Problem:
    """Inputs like a language model's, in bf16 on a GPU and in fp32 on a CPU.

    `context` is `language_like`'s; `masked` is the share of labels that are ignored.
    """
    name = (
        f"{shape.name}, N={tokens}, V={shape.vocabulary}, D={shape.features}, context {context:g}"
    )
    if masked:
        name += f", {masked:.0%} of labels masked"
    if softcap:
        name += f", softcap {softcap:g}"
    if frozen:
        name += ", frozen classifier"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hidden, weight, labels = language_like(
        tokens, shape.vocabulary, shape.features, context, dtype, device=device
    )
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    return Problem(name, hidden, weight, with_masked_share(labels, masked), softcap)


def with_masked_share(labels: Tensor, share: float) -> Tensor:
    """A copy of the labels (N,) of which this share is masked, always the same ones."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    masked = order[: int(share * len(labels))].to(labels.device)
    return labels.index_fill(0, masked, IGNORE_INDEX)


class Measurement:
    """One method at one β on a problem, and its row of the table."""

    def __init__(self, problem: Problem, method: Method, beta: float | None) -> None:
        self.problem = problem
        self.method = method
        self.beta = beta
        self.row: Row = {"problem": problem.name, "method": method.name, "beta": beta}
        self.samples: list[Sample] = []

    @property
    def failed(self) -> bool:
        return "failed" in self.row

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step, unless an earlier one failed.

        An exception becomes the row's reason. Gradients are dropped afterwards either way."""
        if self.failed:
            return
        try:
            step()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.row["failed"] = reason[:MAX_REASON]
        self.clear()

    def clear(self) -> None:
        """Free the gradients, and what PyTorch keeps of freed memory."""
        self.problem.hidden.grad = None
        self.problem.weight.grad = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def loss_of(self, hidden: Tensor, weight: Tensor) -> Tensor:
        problem = self.problem
        beta = 0.0 if self.beta is None else self.beta
        if problem.softcap is None:  # then a method need not know what a softcap is
            return self.method.loss(hidden, weight, problem.labels, label_smoothing=beta)
        return self.method.loss(
            hidden, weight, problem.labels, label_smoothing=beta, softcap=problem.softcap
        )

    def forward(self) -> None:
        """An evaluation's step: nothing is kept for a backward.

        Inputs are detached as well, since some methods make gradients wherever an input requires
        one, with a graph or without."""
        with torch.no_grad():
            self.loss_of(self.problem.hidden.detach(), self.problem.weight.detach())

    def forward_and_backward(self) -> None:
        """A training step's."""
        self.problem.hidden.grad = None
        self.problem.weight.grad = None
        self.loss_of(self.problem.hidden, self.problem.weight).backward()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that the last backward left, by the name of their input."""
        found = {}
        if self.problem.hidden.grad is not None:
            found["hidden"] = self.problem.hidden.grad
        if self.problem.weight.grad is not None:
            found["weight"] = self.problem.weight.grad
        return found

    def measure_errors(self, truth: dict[str, Tensor]) -> None:
        """Compare the gradients of the last backward with the true ones, by the inputs' names."""
        gradients = self.gradients()
        self.row["error_hidden"] = relative_error(gradients["hidden"], truth["hidden"])
        if "weight" in truth:
            self.row["error_weight"] = relative_error(gradients["weight"], truth["weight"])

    def measure_memory(self) -> None:
        """Find the memory that a training step holds at most. PyTorch counts it on GPUs only."""
        if not self.problem.hidden.is_cuda:
            return
        self.clear()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.forward_and_backward()
        peak = torch.cuda.max_memory_allocated()
        of_gradients = sum(gradient.nbytes for gradient in self.gradients().values())
        self.row["extra_mb"] = (peak - before - of_gradients) / 1e6

    def take_sample(self, product: Callable[[], object], seconds: float) -> None:
        """Time the product and the method, `seconds` for each step."""
        sample = Sample(
            product=milliseconds(product, seconds),
            forward=milliseconds(self.forward, seconds),
            both=milliseconds(self.forward_and_backward, seconds),
        )
        self.samples.append(sample)

    def summarize(self, product_ms: float) -> None:
        """Put medians of the samples into the row."""
        forward = statistics.median(sample.forward for sample in self.samples)
        both = statistics.median(sample.both for sample in self.samples)
        self.row["product_ms"] = product_ms
        self.row["forward_ms"] = forward
        self.row["both_ms"] = both
        self.row["forward_products"] = forward / product_ms
        self.row["both_products"] = both / product_ms


def measure(
    problem: Problem,
    methods: list[Method],
    betas: list[float],
    repeats: int,
    seconds: float,
) -> list[Row]:
    """One row for each method and β; the bound has no β and is measured once."""
    torch.compiler.reset()  # so that each problem is compiled for its own shape
    measurements = []
    for method in methods:
        if method.is_bound:
            measurements.append(Measurement(problem, method, None))
            continue
        for beta in betas:
            measurements.append(Measurement(problem, method, beta))
    truths = {beta: true_gradients(problem, beta) for beta in betas}
    for measurement in measurements:
        truth = None if measurement.beta is None else truths[measurement.beta]
        measure_error_and_memory(measurement, truth)
    del truths
    measure_times(problem, measurements, repeats, seconds)
    return [measurement.row for measurement in measurements]


def measure_error_and_memory(measurement: Measurement, truth: dict[str, Tensor] | None) -> None:
    """Run a method for the first time, with its compilation, and fill in what needs no clock.

    `truth` None: no gradients to compare with, as for the bound."""

    def step() -> None:
        measurement.forward_and_backward()
        if truth is not None:
            measurement.measure_errors(truth)
        measurement.measure_memory()

    measurement.attempt(step)


def measure_times(
    problem: Problem,
    measurements: list[Measurement],
    repeats: int,
    seconds: float,
    before_turn: Callable[[Measurement], None] | None = None,
) -> None:
    """Fill in times. The methods take turns, in another order each repeat, and each sample is
    beside one of the product E Cᵀ, whose time is the unit.

    `before_turn` is called with each method whose turn begins, unless it has failed."""
    rows = problem.hidden.detach()[:PRODUCT_ROWS]
    weight = problem.weight.detach()
    # It stays while the methods are timed, so that all of them find as much memory in use.
    out = rows.new_empty(len(rows), len(weight))

    def product() -> Tensor:
        return torch.mm(rows, weight.T, out=out)

    shuffled = random.Random(0)
    for _ in range(repeats):
        for measurement in shuffled.sample(measurements, len(measurements)):
            if before_turn is not None and not measurement.failed:
                before_turn(measurement)
            measurement.attempt(partial(measurement.take_sample, product, seconds))
    times = [sample.product for m in measurements for sample in m.samples]
    if not times:
        return
    product_ms = statistics.median(times) * len(problem.hidden) / len(rows)
    for measurement in measurements:
        measurement.attempt(partial(measurement.summarize, product_ms))


def true_gradients(problem: Problem, beta: float) -> dict[str, Tensor]:
    """Gradients of the mean loss by the name of their input, in fp32, or fp64 for fp32 inputs.

    They are this package's chunked path, since a dense loss in the wider dtype would not fit. It
    may be trusted here: tests/kernel/test_chunked.py compares it with the reference, and
    tests/kernel/test_reference.py the reference with `F.cross_entropy`. Of the row "ours, chunked"
    the error shows rounding alone."""
    wider = torch.float64 if problem.hidden.dtype == torch.float32 else torch.float32
    hidden = problem.hidden.detach().to(wider).requires_grad_()
    weight = problem.weight.detach().to(wider).requires_grad_(problem.weight.requires_grad)
    loss = linear_cross_entropy(
        hidden,
        weight,
        problem.labels,
        label_smoothing=beta,
        softcap=problem.softcap,
        impl="chunked",
    )
    wanted = {"hidden": hidden}
    if weight.requires_grad:
        wanted["weight"] = weight
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return dict(zip(wanted, gradients, strict=True))


def relative_error(gradient: Tensor, truth: Tensor) -> float:
    """‖g − g*‖ / ‖g*‖, in the dtype of the truth."""
    return ((gradient.to(truth.dtype) - truth).norm() / truth.norm()).item()


def milliseconds(step: Callable[[], object], seconds: float) -> float:
    """A call's mean time, over as many in a row as take `seconds`. Nothing waits between them, and
    each method keeps a GPU at its power limit as long."""
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    calls = max(int(seconds / timer.timeit(1).mean), 1)
    return 1e3 * timer.timeit(calls).mean

"""Time, memory and gradient error of the loss beside other methods, on the same inputs.

    python kernel/benchmarks/bench.py --models gemma2-2b llama3-8b --json out.json
    python kernel/benchmarks/bench.py --methods all --softcap none 30
    python kernel/benchmarks/bench.py --methods ours --beside ../before   # two checkouts, in turn
    python kernel/benchmarks/bench.py --methods filtered --models 65536x512 --draws 1 16 64
    python kernel/benchmarks/bench.py --device cpu --models 32000x512 --tokens 2048

Inputs are bf16 on a GPU and fp32 on a CPU. Methods take turns in a random order, each for the same
time. Each sample is beside one of the matrix product E Cᵀ, whose time is the unit of the column
"× E Cᵀ". Where an option is given several values, every combination is measured, a table each. A
method that lacks smoothing in chunks is measured at β = 0.

dE and dC are the gradients of the hidden states E (N, D) and of the classifier C (V, D). Their
error is ‖g − g*‖ / ‖g*‖, where g* is from inputs in a wider dtype. With --draws K, g is the mean
over K calls, each of the tokens in another order: the filter draws anew by it, so that its error
falls with K as long as it is right on average.

Libraries need not be installed into the environment: `pip install --target DIR --no-deps` and DIR
on PYTHONPATH are enough. QuACK and Liger's CuTe DSL also take nvidia-cutlass-dsl with its
libs-base, libs-core and libs-cu13, and DIR/nvidia_cutlass_dsl/dsl_packages on PYTHONPATH; QuACK
takes cuda-bindings, apache-tvm-ffi, torch-c-dlpack-ext and einops besides.
"""

import argparse
import gc
import importlib
import itertools
import json
import platform
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import torch
from language import language_like
from methods import IGNORE_INDEX, METHODS, Loss, Method, ours
from torch import Tensor
from torch.utils.benchmark import Timer

from smoothce import linear_cross_entropy

MODELS = {  # V and D of the classifier
    "gemma2-2b": (256000, 2304),
    "gemma3-270m": (262144, 640),
    "llama3-8b": (128256, 4096),
    "llama3.2-1b": (128256, 2048),
    "qwen2.5-1.5b": (151936, 1536),
    "qwen2.5-7b": (152064, 3584),
    "mistral-7b": (32768, 4096),
    "trl": (151936, 4096),  # at this shape TRL publishes its own figures
}
DEFAULT_METHODS = {
    "cuda": ["ours", "workspace=0", "filtered", "torch", "torch-compile", "bound"],
    "cpu": ["ours", "torch", "bound"],
}
# The unit E Cᵀ is timed on at most so many tokens and scaled up: its (N, V) output has to fit.
PRODUCT_ROWS = 8192
MAX_REASON = 160  # characters of an error's message that are kept
MISSING = "–"  # stands where something was not measured


@dataclass(frozen=True)
class Problem:
    """Inputs of a loss. Both matrices are leaves; a frozen classifier requires no gradient."""

    name: str
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    labels: Tensor  # (N,), `IGNORE_INDEX` where a token is masked
    label_smoothing: float
    softcap: float | None


@dataclass
class Row:
    """One method's figures on a problem, as they are printed and written; None: not measured."""

    problem: str
    method: str
    lacks: tuple[str, ...]
    label_smoothing: float | None = None  # the bound has none
    failed: str | None = None
    error_hidden: float | None = None
    error_weight: float | None = None
    same_bits: bool | None = None  # whether equal inputs give equal gradients twice
    extra_mb: float | None = None  # 10⁶ bytes held at most beyond inputs and gradients; GPUs only
    forward_ms: float | None = None  # without a graph, as in an evaluation
    both_ms: float | None = None  # forward and backward
    product_ms: float | None = None  # of one E Cᵀ
    both_products: float | None = None  # both_ms / product_ms


@dataclass(frozen=True)
class Truth:
    """The loss and the gradients of a problem in a wider dtype."""

    loss: float
    gradients: dict[str, Tensor]  # by the names of `Problem`


@dataclass
class Measurement:
    """One method on a problem, and its row of the table."""

    problem: Problem
    method: Method
    row: Row
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step, unless an earlier one failed. An exception becomes the row's reason."""
        if self.row.failed is not None:
            return
        try:
            step()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.row.failed = reason[:MAX_REASON]
        self.clear()

    def clear(self) -> None:
        """Free the gradients, and what PyTorch keeps of freed memory."""
        self.problem.hidden.grad = None
        self.problem.weight.grad = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def loss(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        label_smoothing = self.row.label_smoothing or 0.0
        softcap = self.problem.softcap
        if softcap is None:  # then a method need not know what a softcap is
            return self.method.loss(hidden, weight, labels, label_smoothing=label_smoothing)
        if "softcap" in self.method.lacks:
            raise ValueError("knows no softcap")
        return self.method.loss(
            hidden, weight, labels, label_smoothing=label_smoothing, softcap=softcap
        )

    def forward(self) -> None:
        """An evaluation's step: nothing is kept for a backward.

        Inputs are detached as well, since some methods make gradients wherever an input requires
        one, with a graph or without."""
        problem = self.problem
        with torch.no_grad():
            self.loss(problem.hidden.detach(), problem.weight.detach(), problem.labels)

    def forward_and_backward(self) -> None:
        """A training step's."""
        problem = self.problem
        problem.hidden.grad = None
        problem.weight.grad = None
        self.loss(problem.hidden, problem.weight, problem.labels).backward()

    def gradients(self, order: Tensor) -> dict[str, Tensor]:
        """The gradients of the tokens in this order, those of hidden states in the problem's."""
        problem = self.problem
        hidden = problem.hidden.detach()[order].requires_grad_()
        weight = problem.weight.detach().requires_grad_(problem.weight.requires_grad)
        self.loss(hidden, weight, problem.labels[order]).backward()
        assert hidden.grad is not None
        found = {"hidden": torch.empty_like(hidden).index_copy_(0, order, hidden.grad)}
        if weight.grad is not None:
            found["weight"] = weight.grad
        return found

    def measure_errors(self, truth: Truth, draws: int) -> None:
        """Compare the mean gradients of so many draws with the true ones."""
        generator = torch.Generator().manual_seed(0)
        means = {name: torch.zeros_like(g) for name, g in truth.gradients.items()}
        for _ in range(draws):
            order = torch.randperm(len(self.problem.labels), generator=generator)
            order = order.to(self.problem.labels.device)
            gradients = self.gradients(order)
            for name, mean in means.items():
                mean += gradients[name].to(mean.dtype) / draws
        again = self.gradients(order)
        self.row.same_bits = all(torch.equal(again[name], gradients[name]) for name in means)
        self.row.error_hidden = relative_error(means["hidden"], truth.gradients["hidden"])
        if "weight" in means:
            self.row.error_weight = relative_error(means["weight"], truth.gradients["weight"])

    def measure_memory(self) -> None:
        """Find the memory that a training step holds at most. PyTorch counts it on GPUs only."""
        problem = self.problem
        self.forward_and_backward()  # which compiles
        if not problem.hidden.is_cuda:
            return
        self.clear()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.forward_and_backward()
        peak = torch.cuda.max_memory_allocated()
        gradients = (problem.hidden.grad, problem.weight.grad)
        gradient_bytes = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        self.row.extra_mb = (peak - before - gradient_bytes) / 1e6

    def take_sample(self, product: Callable[[], object], seconds: float) -> None:
        """Time the product and the method, `seconds` for each step."""
        steps = (product, self.forward, self.forward_and_backward)
        product_ms, forward_ms, both_ms = [milliseconds(step, seconds) for step in steps]
        self.samples.append((product_ms, forward_ms, both_ms))

    def summarize(self, product_ms: float) -> None:
        """Put medians of the samples into the row."""
        _, forward_ms, both_ms = map(statistics.median, zip(*self.samples, strict=True))
        self.row.forward_ms = forward_ms
        self.row.both_ms = both_ms
        self.row.product_ms = product_ms
        self.row.both_products = both_ms / product_ms


def make_problem(
    device: str,
    model: str,
    tokens: int,
    inputs: tuple[str, float],
    masked: float,
    label_smoothing: float,
    softcap: float | None,
    frozen: bool = False,
) -> Problem:
    """Inputs like a language model's, or random ones, in bf16 on a GPU and in fp32 on a CPU.

    `inputs` is ("context", a standard deviation as in `language_like`), or ("deviation", that of
    hidden states, with labels drawn evenly). `masked` is the share of labels that are ignored."""
    vocabulary, features = classifier_shape(model)
    kind, deviation = inputs
    name = f"{model}, N={tokens}, V={vocabulary}, D={features}, {kind} {deviation:g}"
    name += f", β={label_smoothing:g}"
    if masked:
        name += f", {masked:.0%} of labels masked"
    if softcap is not None:
        name += f", softcap {softcap:g}"
    if frozen:
        name += ", frozen classifier"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if kind == "context":
        hidden, weight, labels = language_like(
            tokens, vocabulary, features, deviation, dtype, device=device
        )
    else:
        generator = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(tokens, features, device=device, generator=generator)
        weight = torch.randn(vocabulary, features, device=device, generator=generator)
        labels = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
        hidden = (hidden * deviation).to(dtype)
        weight = (weight / features**0.5).to(dtype)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(device)
    labels = labels.index_fill(0, order[: int(masked * tokens)], IGNORE_INDEX)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    return Problem(name, hidden, weight, labels, label_smoothing, softcap)


def make_measurement(problem: Problem, method: Method) -> Measurement:
    name = method.name
    if method.package is not None:
        with suppress(metadata.PackageNotFoundError):  # then its import says so
            name += f" {metadata.version(method.package)}"
    row = Row(problem.name, name, method.lacks, problem.label_smoothing)
    if method.is_bound:
        row.label_smoothing = None
    elif {"smoothing", "chunked smoothing"}.intersection(method.lacks):
        row.label_smoothing = 0.0
    return Measurement(problem, method, row)


def true_gradients(problem: Problem, label_smoothing: float) -> Truth:
    """Loss and gradients in fp32, or fp64 for fp32 inputs.

    They are this package's chunked path, since a dense loss in the wider dtype would not fit. It
    may be trusted here: tests/kernel/test_chunked.py compares it with the reference, and
    tests/kernel/test_reference.py the reference with `F.cross_entropy`."""
    wider = torch.float64 if problem.hidden.dtype == torch.float32 else torch.float32
    hidden = problem.hidden.detach().to(wider).requires_grad_()
    weight = problem.weight.detach().to(wider).requires_grad_(problem.weight.requires_grad)
    loss = linear_cross_entropy(
        hidden,
        weight,
        problem.labels,
        label_smoothing=label_smoothing,
        softcap=problem.softcap,
        impl="chunked",
    )
    loss.backward()
    gradients = {"hidden": hidden.grad, "weight": weight.grad}
    return Truth(loss.item(), {name: g for name, g in gradients.items() if g is not None})


def measure(
    problem: Problem, methods: list[Method], draws: int, repeats: int, seconds: float
) -> tuple[float, list[Row]]:
    """The mean loss, and one row for each method."""
    torch.compiler.reset()  # so that each problem is compiled for its own shape
    truth = true_gradients(problem, problem.label_smoothing)
    truths = {problem.label_smoothing: truth}
    measurements = [make_measurement(problem, method) for method in methods]
    for measurement in measurements:
        label_smoothing = measurement.row.label_smoothing
        if label_smoothing is not None:
            if label_smoothing not in truths:
                truths[label_smoothing] = true_gradients(problem, label_smoothing)
            step = partial(measurement.measure_errors, truths[label_smoothing], draws)
            measurement.attempt(step)
        measurement.attempt(measurement.measure_memory)
    del truths
    measure_times(problem, measurements, repeats, seconds)
    return truth.loss, [measurement.row for measurement in measurements]


def measure_times(
    problem: Problem, measurements: list[Measurement], repeats: int, seconds: float
) -> None:
    """Fill in times. The methods take turns, in another order each repeat, and each sample is
    beside one of the product E Cᵀ, whose time is the unit."""
    rows = problem.hidden.detach()[:PRODUCT_ROWS]
    weight = problem.weight.detach()
    # It stays while the methods are timed, so that all of them find as much memory in use.
    out = rows.new_empty(len(rows), len(weight))

    def product() -> Tensor:
        return torch.mm(rows, weight.T, out=out)

    shuffled = random.Random(0)
    for _ in range(repeats):
        for measurement in shuffled.sample(measurements, len(measurements)):
            measurement.attempt(partial(measurement.take_sample, product, seconds))
    times = [product_ms for m in measurements for product_ms, _, _ in m.samples]
    if not times:
        return
    product_ms = statistics.median(times) * len(problem.hidden) / len(rows)
    for measurement in measurements:
        measurement.attempt(partial(measurement.summarize, product_ms))


def relative_error(gradient: Tensor, truth: Tensor) -> float:
    return ((gradient - truth).norm() / truth.norm()).item()


def milliseconds(step: Callable[[], object], seconds: float) -> float:
    """A call's mean time, over as many in a row as take `seconds`. Nothing waits between them, and
    each method keeps a GPU at its power limit as long."""
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    calls = max(int(seconds / timer.timeit(1).mean), 1)
    return 1e3 * timer.timeit(calls).mean


def format_table(title: str, rows: list[Row]) -> str:
    """A Markdown table. What was not measured is a dash; why a method failed is in the column of
    the forward's time."""
    lines = [f"\n### {title}\n"]
    lines.append(
        "| method | β | forward ms | forward + backward ms | × E Cᵀ "
        "| MB beyond inputs and gradients | dE error | dC error | same bits twice | lacks |"
    )
    lines.append("|---" * 10 + "|")
    for row in rows:
        same_bits = {None: MISSING, True: "yes", False: "no"}[row.same_bits]
        cells = [
            row.method,
            number(row.label_smoothing, "g"),
            number(row.forward_ms, ".2f") if row.failed is None else row.failed,
            number(row.both_ms, ".2f"),
            number(row.both_products, ".2f"),
            number(row.extra_mb, ",.0f"),
            number(row.error_hidden, ".1e"),
            number(row.error_weight, ".1e"),
            same_bits,
            ", ".join(row.lacks) or MISSING,
        ]
        # A bar would end a cell, so that a slash stands for it.
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def plot(rows: list[Row], file: Path) -> None:
    """Draw memory against time: a method below and left of another is better in both."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        if row.both_ms is None or row.extra_mb is None:
            continue
        point = (row.both_ms, max(row.extra_mb, 1))
        color = "#0072B2" if row.method.startswith("ours") else "#999999"
        axes.scatter(*point, s=50, color=color, zorder=2)
        axes.annotate(row.method, point, xytext=(6, 4), textcoords="offset points", size=8)
    axes.set(yscale="log", xlabel="time of forward and backward, ms", title=rows[0].problem)
    axes.set_ylabel("memory beyond inputs and gradients, MB")
    axes.margins(x=0.25)
    axes.set_xlim(0)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def classifier_shape(text: str) -> tuple[int, int]:
    """V and D of a model that is named, or of "VxD"."""
    if text in MODELS:
        return MODELS[text]
    vocabulary, features = map(int, text.split("x"))
    return vocabulary, features


def model_name(text: str) -> str:
    classifier_shape(text)  # raises ValueError, which the parser tells
    return text


def softcap_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


def users_loss(text: str) -> Loss:
    """A loss of the user's, as (hidden, weight, labels, label_smoothing=)."""
    try:
        return resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(METHODS)}, all, and no module:function ({error})"
        ) from None


def method_of(text: str) -> Method:
    return METHODS[text] if text in METHODS else Method(text, users_loss(text))


def loss_of_checkout(text: str) -> Callable[..., Tensor]:
    """`linear_cross_entropy` of another checkout, imported as a package of another name."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from build_hub import relative_sources

    folder = Path(text).resolve() / "kernel" / "smoothce"
    if not (folder / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout: it has no kernel/smoothce")
    copy = Path(tempfile.mkdtemp(prefix="smoothce-beside-"))
    for module, source in relative_sources(folder).items():
        file = copy / "smoothce_beside" / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    sys.path.insert(0, str(copy))
    return importlib.import_module("smoothce_beside").linear_cross_entropy


def positive(text: str) -> int:
    """A whole number above 0: without a sample there is no time."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked: what cannot work is said now and not when all is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = partial(parser.add_argument, nargs="+")
    one = parser.add_argument
    one("--device", choices=DEFAULT_METHODS, default="cuda", help="(cuda)")
    several("--models", type=model_name, default=["gemma2-2b"], help=f"{', '.join(MODELS)} or VxD")
    several("--tokens", type=positive, default=[8192], metavar="N")
    several("--label-smoothing", type=float, default=[0.1], metavar="β")
    several("--masked", type=float, default=[0.0], metavar="SHARE", help="of labels, ignored (0)")
    several("--softcap", type=softcap_or_none, default=[None], metavar="X", help="or none (none)")
    several("--contexts", type=float, default=[2.0], metavar="X", help="see language.py (2)")
    several("--deviations", type=float, metavar="X", help="random inputs: that of hidden states")
    one("--frozen", action="store_true", help="the classifier needs no gradient, as under LoRA")
    several("--methods", help=f"{', '.join(METHODS)}, all, or a loss of yours as module:function")
    one("--beside", type=loss_of_checkout, metavar="FOLDER", help="another checkout's loss too")
    several("--draws", type=positive, default=[1], metavar="K", help="behind each error (1)")
    one("--repeats", type=positive, default=3, metavar="K", help="samples of each median (3)")
    one("--seconds", type=float, default=0.3, help="how long a sample takes (0.3)")
    one("--json", type=Path, metavar="FILE", help="write the figures there as well")
    one("--plot", type=Path, metavar="FILE", help="draw memory against time; of the last table")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        on_cpu = "--device cpu --models 32000x512 --tokens 2048"
        parser.error(f"torch finds no CUDA GPU; for a CPU: {on_cpu}")
    for file in (args.json, args.plot):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{file}: no such folder")
    if args.plot and not (args.device == "cuda" and find_spec("matplotlib")):
        parser.error("--plot needs a GPU, where memory is measured, and matplotlib")
    names = args.methods or DEFAULT_METHODS[args.device]
    if names == ["all"]:
        names = list(METHODS)
    try:
        args.methods = [method_of(name) for name in names]
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --methods: {error}")
    if args.beside is not None:
        modes = {"ours": {}, "workspace=0": {"workspace": 0}, "filtered": {"filter_eps": "auto"}}
        for name, options in modes.items():
            if name in names:
                loss = ours(args.beside, **options)
                args.methods.append(Method(f"{METHODS[name].name}, beside", loss))
    return args


def main(words: list[str] | None = None) -> None:
    """Measure every combination of the options' values; print a table of each."""
    args = parse(words)
    words = sys.argv[1:] if words is None else words
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if args.device == "cuda":
        hardware = torch.cuda.get_device_name()
    source = {
        "command": f"python kernel/benchmarks/bench.py {shlex.join(words)}".rstrip(),
        "hardware": hardware,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
    }
    print(" · ".join(source.values()))
    inputs = [("context", context) for context in args.contexts]
    if args.deviations:
        inputs = [("deviation", deviation) for deviation in args.deviations]
    all_rows: list[Row] = []
    for *values, draws in itertools.product(
        args.models,
        args.tokens,
        inputs,
        args.masked,
        args.label_smoothing,
        args.softcap,
        args.draws,
    ):
        problem = make_problem(args.device, *values, frozen=args.frozen)
        loss, rows = measure(problem, args.methods, draws, args.repeats, args.seconds)
        title = f"{problem.name}, mean loss {loss:,.1f} nats"
        if draws > 1:
            title += f", errors of the mean of {draws} draws"
        print(format_table(title, rows), flush=True)
        all_rows += rows
        if args.json:
            figures = {**source, "results": [asdict(row) for row in all_rows]}
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
        if args.plot:
            plot(rows, args.plot)


if __name__ == "__main__":
    main()

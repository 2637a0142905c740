"""A table for each shape of the fused linear cross-entropies of `peers.py` and our own, in one run:

    python kernel/benchmarks/all_peers.py --out peers.jsonl
    python kernel/benchmarks/all_peers.py --out peers.jsonl --shapes llama3-8b --methods ours quack

Methods are this package's three modes, PyTorch's, and the other libraries' in `peers.py`. Each gets
a row at each shape: times of forward and backward together and of the forward alone, memory beyond
inputs and gradients, the gradients' error against fp32 ones, the same where a quarter of the labels
is masked, whether equal inputs gave equal bits twice, and what it lacks. Everything but that second
error is measured without masked labels. A method that knows no smoothing, or only one that makes
all logits, is timed at β = 0. One that cannot be imported, or fails, has the reason in its row.

Inputs, clocks and errors are those of `python -m smoothce.bench` (smoothce/bench/measure.py). Each
shape has a process of its own, and a method that breaks the GPU's context, crashes or hangs costs
its own row only: the others are measured again without it. Where the methods together need more
than --limit, each is timed as often as there is time for, and no method is blamed. Lines are
appended to --out as figures are made, and of several lines for a shape and a method the last one
counts. The table is printed at the end.

Libraries need not be installed into the environment. Where they are installed with
`pip install --target DIR --no-deps`, put DIR on PYTHONPATH. QuACK and Liger's CuTe DSL also take
nvidia-cutlass-dsl with its libs-base, libs-core and libs-cu13. Then put
DIR/nvidia_cutlass_dsl/dsl_packages on PYTHONPATH as well, since .pth files are not read there.
QuACK takes cuda-bindings, apache-tvm-ffi, torch-c-dlpack-ext and einops besides.

`--tiny` tries the script out, on a CPU if need be.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import peers
import torch
import triton
from torch import Tensor

from smoothce.bench.__main__ import MODELS, positive
from smoothce.bench.measure import (
    ClassifierShape,
    Measurement,
    Problem,
    Row,
    make_problem,
    measure_error_and_memory,
    measure_times,
    true_gradients,
    with_masked_share,
)
from smoothce.bench.methods import Loss, Method, dense, matrix_products, ours
from smoothce.bench.table import MISSING, describe_hardware, markdown_table, number

# The standard deviation over the vocabulary of what a position adds to its logits
# (smoothce/bench/language.py), as in real models.
CONTEXT = 2.0
MASKED = 0.25  # the share of labels that are masked where masking is checked
SHARE_TO_BEGIN = 2 / 3  # of the time limit, after which no further method is begun
HANGING = 60.0  # seconds; a turn to be timed takes a few, and one that has taken so long has hung
BROKEN_DEVICE = 3  # exit code of a shape's process whose GPU has become unusable
BOUND = "bound"  # the method that is no loss, but the products that every exact gradient takes


@dataclass(frozen=True)
class Shape:
    """A classifier, tokens, and the cap of the logits."""

    classifier: ClassifierShape
    tokens: int = 8192
    softcap: float | None = None


TINY = ClassifierShape("tiny", 640, 32)
SHAPES = {
    "gemma2-2b": Shape(MODELS["gemma2-2b"]),
    "gemma2-2b-softcap": Shape(MODELS["gemma2-2b"], softcap=30.0),
    "llama3-8b": Shape(MODELS["llama3-8b"]),
    "qwen2.5-1.5b": Shape(MODELS["qwen2.5-1.5b"]),
    "mistral-7b": Shape(MODELS["mistral-7b"]),
    # At this one TRL publishes its own figures.
    "trl": Shape(ClassifierShape("trl", 151936, 4096)),
}
TINY_SHAPES = {
    "tiny": Shape(TINY, tokens=64),
    "tiny-softcap": Shape(TINY, tokens=64, softcap=30.0),
}


@dataclass(frozen=True)
class Contender:
    """A loss, and what is known of it beforehand. Its `Method` has the version in its name."""

    name: str
    loss: Loss
    package: str | None = None  # whose version is printed, by the name that pip knows

    @property
    def lacking_features(self) -> tuple[peers.Feature, ...]:
        return peers.features_lacking_of(self.loss)


CONTENDERS = {
    BOUND: Contender("*the products alone (bound)*", matrix_products),
    "ours": Contender("**ours**", ours()),
    "ours-low-memory": Contender("ours, `workspace=0`", ours(workspace=0)),
    "ours-filtered": Contender("ours, filtered", ours(filter_eps="auto")),
    "torch": Contender("torch, F.cross_entropy", dense),
    "torch-compile": Contender("torch.compile", torch.compile(dense, dynamic=False)),
    "torch-linear": Contender("torch, F.linear_cross_entropy", peers.torch_linear_cross_entropy),
    "quack": Contender("QuACK, scaled-exp", peers.quack, "quack-kernels"),
    "quack-large": Contender("QuACK, chunks of 8192", peers.quack_large_chunk, "quack-kernels"),
    "liger": Contender("Liger", peers.liger, "liger_kernel"),
    "liger-cute": Contender("Liger, CuTe cross-entropy", peers.liger_cute, "liger_kernel"),
    "liger-cute-sm90": Contender("Liger, CuTe for SM90", peers.liger_cute_sm90, "liger_kernel"),
    "trl": Contender("TRL, chunked", peers.trl, "trl"),
    "cut": Contender("cut-cross-entropy, filtered", peers.cut, "cut-cross-entropy"),
    "paper": Contender("paper's algorithm, our untuned rewrite", peers.paper_rewrite),
    "unsloth": Contender("Unsloth", peers.unsloth, "unsloth_zoo"),
}
# Importing these changes torch. So they are imported only after all others have been timed.
CHANGES_TORCH = ("unsloth",)

# How far a method has come at a shape, as its last line of the output says. The shape's process
# writes these lines, and the process that started it reads them once the other has ended, for
# whatever reason:
#   "started"   its first call has begun, which may compile;
#   "measured"  its error and memory are known, and it waits for its next turn to be timed;
#   "timing"    a turn of it has begun;
#   "timed"     all its times are known; nothing follows;
#   "failed"    the row says why; nothing follows.
# One method runs at a time. Where the process ended before its end, the method of its last line ran
# if that line is "started" or "timing".
State = Literal["started", "measured", "timing", "timed", "failed"]
RUNNING: tuple[State, ...] = ("started", "timing")
FINISHED: tuple[State, ...] = ("timed", "failed")


class PeerRow(Row, total=False):
    """A line of the output: the figures of a method at a shape as far as they are known."""

    state: State
    shape: str
    contender: str
    lacks: list[peers.Feature]
    same_bits: bool  # whether two backwards on equal inputs gave equal gradients
    masked_error: float  # the larger of the two errors where a quarter of the labels is masked
    masked_failed: str  # why there is none
    timings: int  # samples behind the medians: --repeats, or fewer where the limit was near
    clock: float  # seconds from the end of the imports of the shape's process to this line
    hardware: str
    versions: str


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for."""

    shapes: list[str]
    methods: list[str]
    label_smoothing: float
    repeats: int
    seconds: float
    limit: float
    out: Path
    worker: bool


def parse(words: list[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every_shape = [*SHAPES, *TINY_SHAPES]
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=every_shape,
        metavar="SHAPE",
        help=f"of {', '.join(every_shape)} (all but the tiny ones)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=CONTENDERS,
        metavar="METHOD",
        help=f"of {', '.join(CONTENDERS)} (all); the bound is always measured",
    )
    parser.add_argument("--label-smoothing", type=float, default=0.1, metavar="β", help="(0.1)")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="samples behind each median (3)"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="that a sample takes (0.2)")
    parser.add_argument(
        "--limit",
        type=float,
        default=480,
        metavar="SECONDS",
        help="after which a shape's process is ended; compilation counts, and after two thirds no "
        "further method is begun (480)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, one short sample")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"{args.out}: no such folder")
    if not torch.cuda.is_available() and not args.tiny:
        parser.error("torch finds no CUDA GPU; --tiny needs none")
    shapes = args.shapes
    if shapes is None:
        shapes = list(TINY_SHAPES) if args.tiny else list(SHAPES)
    methods = list(CONTENDERS)
    if args.methods is not None:
        asked = set(args.methods)
        if not args.worker:  # a worker leaves out a bound that was given up
            asked.add(BOUND)
        methods = [key for key in CONTENDERS if key in asked]
    return Arguments(
        shapes=shapes,
        methods=methods,
        label_smoothing=args.label_smoothing,
        repeats=1 if args.tiny else args.repeats,
        seconds=0.01 if args.tiny else args.seconds,
        limit=args.limit,
        out=args.out,
        worker=args.worker,
    )


# ---- A shape's own process -----------------------------------------------------------------------


class Recorder:
    """Appends rows of one shape to the output."""

    def __init__(self, shape: str, out: Path, began: float) -> None:
        self.shape = shape
        self.out = out
        self.began = began
        self.hardware = describe_hardware("cuda" if torch.cuda.is_available() else "cpu")
        self.versions = f"torch {torch.__version__}, triton {triton.__version__}"

    def record(
        self, contender: str, row: Row, reached: State, checks: PeerRow | None = None
    ) -> None:
        """Write how far a method has come. A row with a reason counts as failed in any case.

        `checks` has the figures that `Row` does not know."""
        line: PeerRow = {
            **row,
            **(checks or {}),
            "state": "failed" if "failed" in row else reached,
            "shape": self.shape,
            "contender": contender,
            "lacks": list(CONTENDERS[contender].lacking_features),
            "hardware": self.hardware,
            "versions": self.versions,
            "clock": round(time.monotonic() - self.began, 1),
        }
        append_line(self.out, line)


def measure_shape(shape_name: str, args: Arguments) -> int:
    """Measure the methods at one shape. Returns the exit code of the process."""
    began = time.monotonic()
    shape = {**SHAPES, **TINY_SHAPES}[shape_name]
    recorder = Recorder(shape_name, args.out, began)
    problem = make_problem(
        shape.classifier._replace(name=shape_name),
        tokens=shape.tokens,
        context=CONTEXT,
        masked=0.0,
        softcap=shape.softcap,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    measurements = {
        key: make_measurement(key, problem, args.label_smoothing) for key in args.methods
    }
    # Before any library is imported that might change how torch computes.
    betas = {each.beta for each in measurements.values() if each.beta is not None}
    masked_problem = with_masked_labels(problem)
    truths = {}
    for beta in betas:
        truths[beta] = Truth(true_gradients(problem, beta), true_gradients(masked_problem, beta))
    undisturbed = {key: m for key, m in measurements.items() if key not in CHANGES_TORCH}
    disturbing = {key: m for key, m in measurements.items() if key in CHANGES_TORCH}
    for group in (undisturbed, disturbing):
        group_run = GroupRun(args, recorder, problem, masked_problem, began)
        if not group_run.measure(group, truths):
            return BROKEN_DEVICE
    return 0


@dataclass(frozen=True)
class Truth:
    """The true gradients at one β by the names of their inputs, without and with masked labels."""

    gradients: dict[str, Tensor]
    masked: dict[str, Tensor]


class GroupRun:
    """Measures methods whose timings may take turns, as one group of a shape's process.

    What changes torch is in a later group of the same process."""

    def __init__(
        self,
        args: Arguments,
        recorder: Recorder,
        problem: Problem,
        masked_problem: Problem,
        began: float,
    ) -> None:
        self.args = args
        self.recorder = recorder
        self.problem = problem
        self.masked_problem = masked_problem
        self.began = began
        self.checks: dict[str, PeerRow] = {}

    def measure(self, measurements: dict[str, Measurement], truths: dict[float, Truth]) -> bool:
        """Fill in the methods' rows. Returns False where one has made the GPU unusable.

        `truths` are by β."""
        for key, measurement in measurements.items():
            reason = self.reason_to_leave_out(key)
            if reason is not None:
                measurement.row["failed"] = reason
                self.recorder.record(key, measurement.row, "failed")
                continue
            self.recorder.record(key, measurement.row, "started")
            truth = None if measurement.beta is None else truths[measurement.beta]
            works = self.measure_without_clock(key, measurement, truth)
            # `record` writes "failed" in place of "measured" where the row has a reason by now.
            self.recorder.record(key, measurement.row, "measured", self.checks.get(key))
            if not works:
                return False
        self.time(measurements)
        return True

    def reason_to_leave_out(self, key: str) -> str | None:
        if self.problem.softcap is not None and "softcap" in CONTENDERS[key].lacking_features:
            return "knows no softcap"
        if time.monotonic() - self.began > SHARE_TO_BEGIN * self.args.limit:
            return f"not begun, since --limit {self.args.limit:g} was near"
        return None

    def measure_without_clock(
        self, key: str, measurement: Measurement, truth: Truth | None
    ) -> bool:
        """Find errors, memory and equal bits. Returns whether the GPU still works.

        `attempt` catches what a method raises. What still comes here is CUDA failing in `clear` or
        `check_device`: its context is lost, and this process can measure nothing more."""
        try:
            measure_error_and_memory(measurement, truth.gradients if truth else None)
            self.checks[key] = self.check(measurement, truth)
            measurement.attempt(measurement.forward)  # which compiles kernels of its own
            check_device()
        except Exception:
            measurement.row.setdefault("failed", "it left the GPU unusable")
            return False
        return True

    def check(self, measurement: Measurement, truth: Truth | None) -> PeerRow:
        """Whether equal inputs give equal bits, and the error with masked labels."""
        checks = PeerRow()
        same_bits = compare_bits(measurement)
        if same_bits is not None:
            checks["same_bits"] = same_bits
        if truth is not None and not measurement.failed:
            masked = Measurement(self.masked_problem, measurement.method, measurement.beta)
            measure_error_and_memory(masked, truth.masked)
            if masked.failed:
                checks["masked_failed"] = masked.row["failed"]
            else:
                errors = (masked.row["error_hidden"], masked.row["error_weight"])
                checks["masked_error"] = max(errors)
        return checks

    def time(self, measurements: dict[str, Measurement]) -> None:
        """Time the methods --repeats times, or as often as the limit allows."""
        to_time = {key: m for key, m in measurements.items() if not m.failed}
        key_of = {id(measurement): key for key, measurement in to_time.items()}

        def record_turn(measurement: Measurement) -> None:
            key = key_of[id(measurement)]
            self.recorder.record(key, measurement.row, "timing", self.checks.get(key))

        shuffled = random.Random(0)
        longest_repeat = 0.0
        timings = 0
        while timings < self.args.repeats:
            repeat_began = time.monotonic()
            if timings and repeat_began - self.began + longest_repeat > self.args.limit:
                break
            # `measure_times` shuffles what it is given, but by the same seed in each call: without
            # another order here, every repeat would have the same one.
            order = shuffled.sample(list(to_time.values()), len(to_time))
            measure_times(self.problem, order, 1, self.args.seconds, record_turn)
            longest_repeat = max(longest_repeat, time.monotonic() - repeat_began)
            timings += 1
        for key, measurement in to_time.items():
            checks: PeerRow = {**self.checks.get(key, PeerRow()), "timings": timings}
            self.recorder.record(key, measurement.row, "timed", checks)


def with_masked_labels(problem: Problem) -> Problem:
    """The same problem with a share of its labels masked."""
    return problem._replace(labels=with_masked_share(problem.labels, MASKED))


def make_measurement(key: str, problem: Problem, label_smoothing: float) -> Measurement:
    contender = CONTENDERS[key]
    beta: float | None = label_smoothing
    if key == BOUND:
        beta = None
    elif {"smoothing", "chunked smoothing"}.intersection(contender.lacking_features):
        beta = 0.0
    name = contender.name
    if contender.package is not None:
        with suppress(metadata.PackageNotFoundError):  # then its import says so
            name += f" {metadata.version(contender.package)}"
    method = Method(name, contender.loss, is_bound=key == BOUND)
    return Measurement(problem, method, beta)


def compare_bits(measurement: Measurement) -> bool | None:
    """Whether two backwards on equal inputs give equal gradients; None where there are none."""
    if measurement.method.is_bound or measurement.failed:
        return None
    same: list[bool] = []

    def step() -> None:
        measurement.forward_and_backward()
        first = measurement.gradients()
        measurement.forward_and_backward()
        second = measurement.gradients()
        same.append(all(torch.equal(first[name], second[name]) for name in first))

    measurement.attempt(step)
    return same[0] if same else None


def check_device() -> None:
    """Raise where the GPU has become unusable, as it is after an illegal access."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").add_(1).item()


# ---- The process that starts them ----------------------------------------------------------------


def append_line(out: Path, line: PeerRow) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(out: Path, start: int) -> dict[tuple[str, str], PeerRow]:
    """The last line of each shape and method, of those from byte `start` on.

    They are in the order in which they were written, so that the last one is the latest."""
    latest: dict[tuple[str, str], PeerRow] = {}
    if not out.exists():
        return latest
    with open(out) as file:
        file.seek(start)
        for text in file:
            row = json.loads(text)
            key = (row["shape"], row["contender"])
            latest.pop(key, None)
            latest[key] = row
    return latest


@dataclass(frozen=True)
class EarlyEnd:
    """Why a shape's process ended before all methods were measured."""

    reason: str
    # Seconds from the start of the process, its imports included, until it was ended from outside;
    # None where it ended by itself.
    killed_after: float | None = None


def run_worker(shape: str, methods: list[str], args: Arguments) -> EarlyEnd | None:
    """Measure methods at a shape in a process of its own. Returns why it ended early, or None."""
    command = [sys.executable, __file__, "--worker", "--out", str(args.out)]
    command += ["--shapes", shape, "--methods", *methods]
    command += ["--label-smoothing", str(args.label_smoothing), "--limit", str(args.limit)]
    command += ["--repeats", str(args.repeats), "--seconds", str(args.seconds)]
    if shape in TINY_SHAPES:
        command.append("--tiny")
    # A session of its own, so that what the process has started ends with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(args.limit)
    except subprocess.TimeoutExpired:
        return EarlyEnd(f"no result within {args.limit:g} s", killed_after=args.limit)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return None
    if code == BROKEN_DEVICE:
        return EarlyEnd("it left the GPU unusable")
    return EarlyEnd(f"the process ended with code {code}")


def measure_shape_apart(
    shape: str,
    args: Arguments,
    run: Callable[[str, list[str], Arguments], EarlyEnd | None] = run_worker,
) -> None:
    """Measure a shape, and where a method ends the process measure the others again without it.

    Afterwards every method has a last line that is "timed" or "failed". Each further process has a
    method less, so that there is an end."""
    start = args.out.stat().st_size if args.out.exists() else 0
    left = args.methods
    while left:
        ended = run(shape, left, args)
        rows = [
            row for (of_shape, _), row in read_lines(args.out, start).items() if of_shape == shape
        ]
        finished = {row["contender"] for row in rows if row["state"] in FINISHED}
        unfinished = [key for key in left if key not in finished]
        if not unfinished:
            return
        if ended is None:
            ended = EarlyEnd("the process ended without a result")
        latest = rows[-1] if rows else None
        given_up, reason = whose_end(latest, unfinished, left, ended)
        row_of = {row["contender"]: row for row in rows}
        for key in given_up:
            row = row_of.get(key, unmeasured_row(shape, key))
            append_line(args.out, {**row, "state": "failed", "failed": reason})
        left = [key for key in unfinished if key not in given_up]


def whose_end(
    latest: PeerRow | None, unfinished: list[str], asked: list[str], ended: EarlyEnd
) -> tuple[list[str], str]:
    """The methods that are given up after a process ended early, and the reason in their rows."""
    if latest is not None and latest["state"] in RUNNING:
        if ran_out_of_time(latest, ended):
            # Nobody is to blame, and all would end so again. Rows keep what is known without a
            # clock.
            took = f"{ended.killed_after:g} s"
            return unfinished, f"not timed: all methods together took {took}; raise --limit"
        # This method ran when the process ended by itself or hung: it is to blame, and the others
        # are tried again.
        return [latest["contender"]], ended.reason
    # No method ran when the process ended, so that no unfinished one is to blame.
    if len(unfinished) < len(asked):
        # At least one of this process's methods has finished. If it broke the GPU, it has written
        # "failed" into its own row. The unfinished ones are tried again in a process without it.
        return [], ended.reason
    # None has finished either: a further process would be the same, and end so again.
    return unfinished, ended.reason


def ran_out_of_time(latest: PeerRow, ended: EarlyEnd) -> bool:
    """Whether a process was ended while its methods were timed, and the latest of them went on."""
    if latest["state"] != "timing" or ended.killed_after is None:
        return False
    # These are two clocks: the limit counts from the start of the process, and the clock of its
    # lines from the end of its imports. So this is some seconds too long, for which HANGING leaves
    # room.
    seconds_since_latest_line = ended.killed_after - latest["clock"]
    return seconds_since_latest_line < HANGING


def unmeasured_row(shape: str, contender: str) -> PeerRow:
    """A row of nothing but names."""
    return {
        "shape": shape,
        "contender": contender,
        "method": CONTENDERS[contender].name,
        "lacks": list(CONTENDERS[contender].lacking_features),
    }


# ---- The table -----------------------------------------------------------------------------------

HEAD = (
    "method",
    "β",
    "forward + backward ms",
    "× E Cᵀ",
    "forward ms",
    "MB",
    "dE / dC error",
    "error, a quarter masked",
    "same bits",
    "lacks",
)


def format_table(shape_name: str, rows: list[PeerRow]) -> str:
    """A Markdown table of one shape."""
    shape = {**SHAPES, **TINY_SHAPES}[shape_name]
    classifier = shape.classifier
    title = f"{shape_name}: N = {shape.tokens}, V = {classifier.vocabulary}"
    title += f", D = {classifier.features}"
    title += f", softcap {shape.softcap:g}" if shape.softcap else ", no softcap"
    return markdown_table(title, list(HEAD), [cells_of(row) for row in rows])


def cells_of(row: PeerRow) -> list[str]:
    errors = MISSING
    if "error_hidden" in row and "error_weight" in row:
        errors = f"{row['error_hidden']:.1e} / {row['error_weight']:.1e}"
    same_bits = MISSING
    if "same_bits" in row:
        same_bits = "yes" if row["same_bits"] else "no"
    return [
        row["method"],
        number(row.get("beta"), "g"),
        row.get("failed", number(row.get("both_ms"), ".1f")),
        number(row.get("both_products"), ".2f"),
        number(row.get("forward_ms"), ".1f"),
        number(row.get("extra_mb"), ",.0f"),
        errors,
        row.get("masked_failed", number(row.get("masked_error"), ".1e")),
        same_bits,
        ", ".join(row["lacks"]) or MISSING,
    ]


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    if args.worker:
        return measure_shape(args.shapes[0], args)
    start = args.out.stat().st_size if args.out.exists() else 0
    for shape in args.shapes:
        began = time.monotonic()
        measure_shape_apart(shape, args)
        print(f"{shape}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    rows = read_lines(args.out, start)
    sources = {
        f"{row['hardware']}, {row['versions']}" for row in rows.values() if "hardware" in row
    }
    print(" · ".join(sorted(sources)))
    for shape in args.shapes:
        of_shape = [rows[shape, key] for key in args.methods if (shape, key) in rows]
        print(format_table(shape, of_shape))
    return 0


if __name__ == "__main__":
    sys.exit(main())

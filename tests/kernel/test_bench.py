"""The benchmark: its options, what it measures, and its tables; all peers in one table."""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import all_peers
import paper
import peers
import pytest
import torch
from all_peers import EarlyEnd
from loss_check import DEVICE

from smoothce.bench import __main__ as command
from smoothce.bench.measure import ClassifierShape, make_problem, measure
from smoothce.bench.methods import METHODS, Method, dense
from smoothce.triton import plan


def test_table_and_json(tmp_path, capsys, monkeypatch):
    file = tmp_path / "bench.json"
    options = ["--device", "cpu", "--models", "640x32", "--tokens", "16", "--repeats", "1"]
    options += ["--seconds", "0.01", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    command.main()
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert "torch" in written["versions"] and "--models 640x32" in written["command"]
    rows = {row["method"]: row for row in written["results"]}
    assert list(rows) == ["ours, chunked", "torch", "the products alone (bound)"]
    for name, row in rows.items():
        assert "failed" not in row and row["both_ms"] > 0 and row["forward_ms"] > 0
        assert f"| {name} |" in printed
    for name in ("ours, chunked", "torch"):
        assert rows[name]["error_weight"] < 1e-4
    assert rows["the products alone (bound)"]["beta"] is None
    assert "| the products alone (bound) | – |" in printed


def test_a_bar_in_a_reason_leaves_the_table_whole():
    row = {"method": "torch", "beta": 0.1, "failed": "TypeError: int | None"}
    lines = command.format_table("made", [row]).splitlines()
    assert len({line.count("|") for line in lines[3:]}) == 1
    assert "TypeError: int / None" in lines[-1]


def test_each_problem_gets_a_plot_of_its_own(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(command, "plot", lambda rows, file: drawn.append((rows, file.name)))
    options = ["--device", "cpu", "--models", "640x32", "96x16", "--tokens", "16", "--repeats", "1"]
    options += ["--seconds", "0.01", "--only", "chunked"]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    parse = command.parse
    monkeypatch.setattr(
        command, "parse", lambda: dataclasses.replace(parse(), plot=tmp_path / "p.png")
    )
    command.main()
    assert [name for _, name in drawn] == ["p.png", "p-2.png"]
    assert [rows[0]["problem"].split(",")[0] for rows, _ in drawn] == ["640x32", "96x16"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cuda", "no CUDA GPU"),
        ("--device cpu --json nowhere/out.json", "no such folder"),
        ("--device cpu --only magic", "in no method's name"),
        ("--device cpu --repeats 0", "must be at least 1, not 0"),
        ("--method nowhere:loss", "'nowhere:loss' is no module:function"),
    ],
)
def test_bad_options_are_named(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        command.parse(options.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def loss_without_softcap(hidden, weight, labels, label_smoothing):
    return dense(hidden, weight, labels, label_smoothing)


def test_a_loss_of_ones_own():
    own = f"{__name__}:loss_without_softcap"
    args = command.parse(["--device", "cpu", "--only", "chunked", "--method", own])
    assert [method.name for method in args.methods] == ["ours, chunked", own]
    problem = make_problem(ClassifierShape("64x8", 64, 8), 24, 1.0, 0.0, 2.0, "cpu")
    rows = measure(problem, args.methods, [0.1], repeats=0, seconds=0)
    assert rows[0]["error_weight"] < 1e-4
    assert "softcap" in rows[1]["failed"]
    assert rows[1]["failed"] in command.format_table("made", rows).splitlines()[-1]


EXACT = 1e-2 if DEVICE == "cuda" else 1e-4  # errors of exact gradients in the inputs' dtype


def small_problem(softcap):
    vocabulary, features = (96, 32) if DEVICE == "cpu" else (8192, 64)
    shape = ClassifierShape("small", vocabulary, features)
    return make_problem(shape, 24, 1.0, 0.4, softcap, DEVICE)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_methods_are_right(softcap, monkeypatch):
    # The small problems of Triton's interpreter shall be filtered by "auto" too.
    monkeypatch.setattr(plan, "LEAST_FILTERED_ENTRIES", 2)
    losses = [m for m in METHODS["cuda"] if "compile" not in m.name and not m.is_bound]
    rows = measure(small_problem(softcap), losses, [0.1], repeats=0, seconds=0)
    errors = {row["method"]: row["error_hidden"] for row in rows}
    assert set(errors) == {"ours", "ours, workspace 0", "ours, filtered", "torch"}
    assert errors.pop("ours, filtered") < 0.2
    assert max(errors.values()) < EXACT


@pytest.mark.parametrize("sort", [False, True])
def test_the_papers_algorithm_is_right_unfiltered(sort):
    unfiltered = Method("paper", functools.partial(paper.loss, filter_eps=None, sort=sort))
    (row,) = measure(small_problem(None), [unfiltered], [0.1], repeats=0, seconds=0)
    # Its sums are in the inputs' dtype.
    assert max(row["error_hidden"], row["error_weight"]) < 50 * EXACT
    (row,) = measure(small_problem(3.0), [unfiltered], [0.1], repeats=0, seconds=0)
    assert "softcap" in row["failed"]


def test_a_peer_that_knows_no_smoothing_or_softcap_says_so():
    inputs = small_problem(None)[1:4]
    with pytest.raises(ValueError, match="knows no smoothing: --label-smoothing 0"):
        peers.quack(*inputs, label_smoothing=0.1)
    with pytest.raises(ValueError, match="knows no softcap: --softcap none"):
        peers.quack(*inputs, softcap=30.0)


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch has it since 2.13"
)
def test_torchs_own_linear_loss_smooths():
    """It makes all logits then, so that it lacks chunked smoothing alone."""
    problem = small_problem(None)
    inputs = problem.hidden, problem.weight, problem.labels
    for beta in (0.0, 0.1):
        found = peers.torch_linear_cross_entropy(*inputs, label_smoothing=beta)
        torch.testing.assert_close(found, dense(*inputs, beta), rtol=EXACT, atol=EXACT)
    assert peers.features_lacking_of(peers.torch_linear_cross_entropy) == (
        "chunked smoothing",
        "softcap",
    )


def test_all_peers_tiny(tmp_path, capsys):
    """A real run of the script: what can be imported is measured, what cannot is a row."""
    out = tmp_path / "peers.jsonl"
    methods = ["ours", "ours-low-memory", "ours-filtered", "torch", "torch-linear", "quack"]
    words = ["--tiny", "--out", str(out), "--methods", *methods]
    assert all_peers.main(words) == 0
    rows = all_peers.read_lines(out, 0)
    assert set(rows) == {
        (shape, method) for shape in ("tiny", "tiny-softcap") for method in ["bound", *methods]
    }
    for (_, method), row in rows.items():
        if method in ("bound", "ours", "ours-low-memory", "torch"):
            assert row["state"] == "timed" and row["both_ms"] > 0 and row["forward_ms"] > 0
        if method in ("ours", "ours-low-memory", "torch"):
            assert row["error_hidden"] < EXACT and row["same_bits"]
    if find_spec("quack") is None:
        assert rows["tiny", "quack"]["failed"].startswith("ModuleNotFoundError")
    assert rows["tiny", "torch-linear"]["beta"] == 0
    for method in ("torch-linear", "quack"):
        assert rows["tiny-softcap", method]["failed"] == "knows no softcap"
    assert rows["tiny", "bound"]["beta"] is None
    printed = capsys.readouterr().out
    assert "### tiny: N = 64, V = 640, D = 32, no softcap" in printed
    assert "### tiny-softcap: N = 64, V = 640, D = 32, softcap 30" in printed
    assert "| knows no softcap | – | – | – | – | – | – | smoothing, softcap, bias |" in printed


def test_all_peers_takes_a_sample_at_least(tmp_path, capsys):
    """Without one a row would be "timed" and have no time."""
    with pytest.raises(SystemExit):
        all_peers.parse(["--tiny", "--out", str(tmp_path / "peers.jsonl"), "--repeats", "0"])
    assert "argument --repeats: must be at least 1, not 0" in capsys.readouterr().err


def arguments(out, methods):
    return all_peers.parse(["--tiny", "--out", str(out), "--methods", *methods])


def write_states(out, **states):
    """What a shape's process writes of each method."""
    for key, state in states.items():
        row = all_peers.unmeasured_row("tiny", key.replace("_", "-"))
        all_peers.append_line(out, {**row, "state": state})


def test_a_method_that_ends_the_process_costs_its_own_row_alone(tmp_path):
    out = tmp_path / "peers.jsonl"
    runs = []

    def run(shape, methods, args):
        runs.append(methods)
        if "quack" in methods:
            write_states(out, bound="measured", ours="measured", quack="started")
            return EarlyEnd("the process ended with code -11")
        write_states(out, bound="timed", ours="timed", liger="failed")
        return None

    all_peers.measure_shape_apart("tiny", arguments(out, ["ours", "quack", "liger"]), run)
    assert runs == [["bound", "ours", "quack", "liger"], ["bound", "ours", "liger"]]
    rows = all_peers.read_lines(out, 0)
    assert rows["tiny", "quack"]["failed"] == "the process ended with code -11"
    assert rows["tiny", "ours"]["state"] == "timed"


def test_a_bound_that_ends_the_process_is_not_tried_again(tmp_path):
    out = tmp_path / "peers.jsonl"
    runs = []

    def run(shape, methods, args):
        runs.append(methods)
        assert len(runs) < 5
        words = ["--tiny", "--worker", "--out", str(out), "--methods", *methods]
        if "bound" in all_peers.parse(words).methods:
            write_states(out, bound="started")
            return EarlyEnd("the process ended with code -11")
        write_states(out, ours="timed")
        return None

    all_peers.measure_shape_apart("tiny", arguments(out, ["ours"]), run)
    assert runs == [["bound", "ours"], ["ours"]]
    rows = all_peers.read_lines(out, 0)
    assert rows["tiny", "bound"]["failed"] == "the process ended with code -11"
    assert rows["tiny", "ours"]["state"] == "timed"


def test_a_crash_while_times_are_taken_costs_one_row(tmp_path):
    """A real process of a shape, in which a method ends the process in its turn to be timed."""
    out = tmp_path / "peers.jsonl"
    args = dataclasses.replace(arguments(out, ["ours", "torch"]), limit=120)
    folder = str(Path(all_peers.__file__).parent)
    runs = []

    def run(shape, methods, args):
        runs.append(methods)
        code = CRASH_IN_TIMING.format(folder=folder, out=str(out), methods=methods)
        done = subprocess.run([sys.executable, "-c", code], timeout=120)
        if done.returncode == 0:
            return None
        return EarlyEnd(f"the process ended with code {done.returncode}")

    all_peers.measure_shape_apart("tiny", args, run)
    assert runs == [["bound", "ours", "torch"], ["bound", "ours"]]
    rows = {method: row for (_, method), row in all_peers.read_lines(out, 0).items()}
    assert rows["torch"]["failed"] == "the process ended with code 7"
    for method in ("bound", "ours"):
        assert rows[method]["state"] == "timed" and rows[method]["both_ms"] > 0


CRASH_IN_TIMING = """
import os, sys
sys.path.insert(0, {folder!r})
import all_peers
from smoothce.bench.measure import Measurement

take_sample = Measurement.take_sample

def crash(measurement, *arguments):
    if measurement.method.name == "torch, F.cross_entropy":
        os._exit(7)
    take_sample(measurement, *arguments)

Measurement.take_sample = crash
words = ["--tiny", "--out", {out!r}, "--methods", *{methods!r}]
sys.exit(all_peers.measure_shape("tiny", all_peers.parse(words)))
"""


def test_a_method_that_breaks_the_gpu_is_not_tried_again(tmp_path):
    out = tmp_path / "peers.jsonl"
    runs = []

    def run(shape, methods, args):
        runs.append(methods)
        if "quack" in methods:
            write_states(out, bound="measured", quack="failed")
            return EarlyEnd("it left the GPU unusable")
        write_states(out, bound="timed", liger="timed")
        return None

    all_peers.measure_shape_apart("tiny", arguments(out, ["quack", "liger"]), run)
    assert runs == [["bound", "quack", "liger"], ["bound", "liger"]]
    rows = all_peers.read_lines(out, 0)
    assert {row["state"] for row in rows.values()} == {"timed", "failed"}


def time_out_in(out, method, clock, whole_after):
    """A `run` whose methods take 300 s; the last line is of `method`, whose turn began at `clock`.

    With `whole_after` methods or fewer there is time for all of them."""
    runs = []

    def run(shape, methods, args):
        runs.append(methods)
        if len(methods) <= whole_after:
            write_states(out, **dict.fromkeys(methods, "timed"))
            return None
        row = {**all_peers.unmeasured_row("tiny", method), "error_hidden": 1e-3}
        write_states(out, **dict.fromkeys(methods, "measured"))
        all_peers.append_line(out, {**row, "state": "timing", "clock": clock})
        return EarlyEnd("no result within 300 s", killed_after=300)

    return run, runs


def test_a_limit_that_is_too_short_for_all_blames_nobody(tmp_path):
    """Whoever was timed when the time was over took no longer than the others."""
    out = tmp_path / "peers.jsonl"
    run, runs = time_out_in(out, "ours", clock=298, whole_after=2)
    all_peers.measure_shape_apart("tiny", arguments(out, ["ours", "torch"]), run)
    assert runs == [["bound", "ours", "torch"]]
    rows = all_peers.read_lines(out, 0)
    assert {row["failed"] for row in rows.values()} == {
        "not timed: all methods together took 300 s; raise --limit"
    }
    assert rows["tiny", "ours"]["error_hidden"] == 1e-3


def test_a_method_that_hangs_while_it_is_timed_costs_its_own_row(tmp_path):
    out = tmp_path / "peers.jsonl"
    run, runs = time_out_in(out, "ours", clock=120, whole_after=2)
    all_peers.measure_shape_apart("tiny", arguments(out, ["ours", "torch"]), run)
    assert runs == [["bound", "ours", "torch"], ["bound", "torch"]]
    rows = all_peers.read_lines(out, 0)
    assert rows["tiny", "ours"]["failed"] == "no result within 300 s"
    assert rows["tiny", "torch"]["state"] == "timed"


def test_methods_are_timed_as_often_as_the_limit_allows(tmp_path, monkeypatch):
    """At a limit that is near after the first of fifty repeats, and then a few of them."""
    out = tmp_path / "peers.jsonl"
    args = dataclasses.replace(arguments(out, ["ours"]), repeats=50, limit=2.0)
    began = []

    def slow_turns(problem, order, *arguments, measure_times=all_peers.measure_times):
        began.append(time.monotonic())
        time.sleep(0.6)
        measure_times(problem, order, *arguments)

    monkeypatch.setattr(all_peers, "measure_times", slow_turns)
    monkeypatch.setattr(all_peers, "SHARE_TO_BEGIN", 100)  # however slow this machine is
    assert all_peers.measure_shape("tiny", args) == 0
    rows = all_peers.read_lines(out, 0)
    for method in ("bound", "ours"):
        assert rows["tiny", method]["state"] == "timed"
        assert rows["tiny", method]["timings"] == len(began) // 2 < 50


def test_a_loss_that_learns_masked_labels_has_an_error(tmp_path, monkeypatch):
    """Which it has nowhere else: without masked labels it is right."""

    def wrong(hidden, weight, labels, label_smoothing=0.0, softcap=None):
        return dense(hidden, weight, labels.clamp(min=0), label_smoothing, softcap)

    wrong_contender = all_peers.Contender("wrong", wrong)
    monkeypatch.setitem(all_peers.CONTENDERS, "torch", wrong_contender)
    out = tmp_path / "peers.jsonl"
    assert all_peers.measure_shape("tiny", arguments(out, ["ours", "torch"])) == 0
    rows = all_peers.read_lines(out, 0)
    assert rows["tiny", "torch"]["error_hidden"] < EXACT
    assert rows["tiny", "torch"]["masked_error"] > 0.1
    assert rows["tiny", "ours"]["masked_error"] < EXACT
    assert f"{rows['tiny', 'torch']['masked_error']:.1e}" in all_peers.format_table(
        "tiny", [*rows.values()]
    )


def test_a_process_that_ends_without_a_culprit_is_not_started_again(tmp_path):
    out = tmp_path / "peers.jsonl"
    runs = []

    def run(shape, methods, args):
        runs.append(methods)
        write_states(out, bound="measured")
        return EarlyEnd("no result within 300 s", killed_after=300)

    all_peers.measure_shape_apart("tiny", arguments(out, ["ours"]), run)
    assert len(runs) == 1
    rows = all_peers.read_lines(out, 0)
    for method in ("bound", "ours"):
        assert rows["tiny", method]["failed"] == "no result within 300 s"


def test_no_method_is_begun_when_the_limit_is_near(tmp_path):
    out = tmp_path / "peers.jsonl"
    words = ["--tiny", "--out", str(out), "--methods", "ours", "--limit", "0"]
    assert all_peers.measure_shape("tiny", all_peers.parse(words)) == 0
    rows = all_peers.read_lines(out, 0)
    for method in ("bound", "ours"):
        assert rows["tiny", method]["failed"] == "not begun, since --limit 0 was near"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out nowhere/peers.jsonl --tiny", "no such folder"),
        ("--out peers.jsonl", "torch finds no CUDA GPU; --tiny needs none"),
        ("--out peers.jsonl --methods magic", "invalid choice: 'magic'"),
    ],
)
def test_bad_options_of_all_peers_are_named(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        all_peers.parse(options.split())
    assert message in capsys.readouterr().err

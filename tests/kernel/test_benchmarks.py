"""The benchmarks run, their losses are right, and no process of theirs outlives them."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import bench
import methods
import paper
import pytest
from loss_check import DEVICE

ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-2 if DEVICE == "cuda" else 1e-4  # errors of exact gradients in the inputs' dtype
TINY = ["--device", "cpu", "--models", "640x32", "--tokens", "16", "--repeats", "1"]
TINY += ["--seconds", "0.01"]


def run(script, *words, **environment):
    """Run a script of the benchmarks of training."""
    command = [sys.executable, ROOT / "benchmarks" / script, *words]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_the_loss_table_has_a_row_a_method_whose_gradient_is_right(tmp_path, capsys):
    """With a peer that is not installed, one that knows no softcap, and a checkout beside this."""
    file = tmp_path / "bench.json"
    names = ["ours", "torch", "torch-linear", "quack", "bound", "methods:dense"]
    words = [*TINY, "--json", str(file), "--softcap", "30", "--beside", str(ROOT)]
    bench.main([*words, "--methods", *names])
    printed = capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads(file.read_text())["results"]}
    for name in ("ours", "ours, beside", "torch", "methods:dense"):
        assert rows[name]["both_ms"] > 0 and rows[name]["same_bits"]
        assert rows[name]["error_weight"] < EXACT
        assert f"| {name} |" in printed
    failed = [row["failed"] for row in rows.values() if row["failed"]]
    assert failed == ["ValueError: knows no softcap"] * 2


def errors_of(losses, softcap):
    model = "96x32" if DEVICE == "cpu" else "8192x64"
    problem = bench.make_problem(DEVICE, model, 24, ("context", 1.0), 0.4, 0.1, softcap)
    _, rows = bench.measure(problem, losses, 1, repeats=0, seconds=0)
    return {row.method: row for row in rows}


def test_methods_are_right():
    losses = [methods.METHODS[name] for name in ("ours", "workspace=0", "torch")]
    losses.append(methods.Method("filtered", methods.ours(filter_eps=0.3, impl="triton")))
    rows = errors_of(losses, softcap=3.0)
    for name in ("ours", "ours, workspace=0", "torch"):
        assert rows[name].error_hidden < EXACT and rows[name].same_bits
    assert rows["filtered"].error_hidden < 0.2


@pytest.mark.parametrize("sort", [False, True])
def test_the_papers_algorithm_is_right_unfiltered(sort):
    unfiltered = functools.partial(paper.loss, filter_eps=None, sort=sort)
    row = errors_of([methods.Method("paper", unfiltered)], None)["paper"]
    # Its sums are in the inputs' dtype.
    assert max(row.error_hidden, row.error_weight) < 50 * EXACT


@pytest.mark.gpu
def test_every_loss_of_a_plain_loop_trains():
    pytest.importorskip("transformers")
    done = run("plain_loop.py", "--models", "tiny", "--steps", "2", "--length", "128")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^\| tiny \| (\S+) \| ([\d,]+) \| [\d.]+ \| ([\d.]+) \|", done.stdout, re.M)
    losses = {name: float(loss) for name, _, loss in rows}
    assert set(losses) == {"smoothed", "workspace=0", "transformers"}
    assert losses["smoothed"] == pytest.approx(losses["workspace=0"], abs=0.01)


@pytest.fixture
def training(monkeypatch):
    """The module of the benchmark of whole trainers."""
    file = ROOT / "benchmarks" / "training.py"
    spec = importlib.util.spec_from_file_location("training_benchmark", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def alpaca(tmp_path):
    """Conversations in Alpaca's form."""
    rows = []
    for number in range(64):
        answer = " ".join(f"word{number % 7}" for _ in range(1 + number % 9))
        rows.append({"instruction": f"Say it {number} times.", "input": "", "output": answer})
    file = tmp_path / "alpaca.json"
    file.write_text(json.dumps(rows))
    return file


def is_running(pid):
    """Whether the process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_trial_that_takes_too_long_leaves_no_process(training, alpaca, tmp_path, monkeypatch):
    """A trainer that starts another process, as the sweeps' does; torchrun gives it a session."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsetsid sleep 300 &\necho $! > {tmp_path}/pid\nwait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    words = ["training.py", "--alpaca", str(alpaca), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    arguments = training.parse()
    arguments.limit = 1
    assert training.run_trial("tiny", "sweeps", arguments) == {"failed": "not done after 1 s"}
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    still_runs = is_running(pid)
    if still_runs:
        os.kill(pid, 9)
    assert not still_runs


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["sweeps", "trl-theirs", "packed-ours"])
def test_a_trial_measures_and_a_second_call_measures_anew(trainer, alpaca, tmp_path):
    """Runs and tokens of the first one, which had other --steps, are not taken for its own."""
    pytest.importorskip("transformers")
    if trainer != "sweeps":
        pytest.importorskip("trl")
    words = ["--alpaca", alpaca, "--out", tmp_path / "out", "--models", "tiny"]
    words += ["--trainers", trainer, "--conversations", 4, "--steps"]
    for steps in (4, 5):
        done = run("training.py", *words, steps)
        assert done.returncode == 0, done.stderr[-2000:]
        row = json.loads((tmp_path / "out" / "training.jsonl").read_text().splitlines()[-1])
        assert "failed" not in row, row
        assert row["steps"] == steps and row["conversations"] == 4
        assert row["ms_per_update"] > 0 and row["loss"] > 0

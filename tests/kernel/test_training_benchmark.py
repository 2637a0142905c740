"""The benchmark of whole trainers: its processes, and what is left of an earlier call."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "training.py"


@pytest.fixture
def training():
    spec = importlib.util.spec_from_file_location("training_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


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


@pytest.mark.parametrize("session", ["", "setsid"])
def test_a_trial_that_takes_too_long_leaves_no_process(
    training, alpaca, tmp_path, monkeypatch, session
):
    """A trainer that starts another process, as the sweeps' does; torchrun gives it a session."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{session} sleep 300 &\necho $! > {tmp_path}/pid\nwait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(
        sys, "argv", ["training.py", "--alpaca", str(alpaca), "--out", str(tmp_path)]
    )
    arguments = training.parse()
    arguments.limit = 3
    assert training.run_trial("tiny", "sweeps", arguments) == {"failed": "not done after 3 s"}
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, 9)


def parsed(training, monkeypatch, alpaca, out, *words):
    command = ["training.py", "--alpaca", alpaca, "--out", out, "--models", "tiny", *words]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    return training.parse()


def test_the_pace_is_of_the_updates_after_the_warm_up(training):
    """Updates of 1 s and 100 tokens, after three that took 50 s each."""
    marks = [(50.0, 100), (100.0, 200), (150.0, 300), (151.0, 400), (152.0, 500), (153.0, 600)]
    assert training.median_pace(marks) == 100
    assert training.median_pace(marks[:4]) == 100


def test_a_token_that_is_no_target_needs_no_classifier(training):
    shape = training.MODELS["tiny"].shape
    classifier = 6 * shape.vocab_size * shape.hidden_size
    all_targets = shape.flops_per_token(100.0, target_share=1.0)
    assert all_targets - shape.flops_per_token(100.0, target_share=0.25) == 0.75 * classifier


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["sweeps", "trl-theirs", "packed-ours"])
def test_a_trial_measures_and_a_second_call_measures_anew(trainer, alpaca, tmp_path):
    """Runs and tokens of the first one, which had other --steps, are not taken for its own."""
    pytest.importorskip("transformers")
    if trainer != "sweeps":
        pytest.importorskip("trl")
    command = [sys.executable, SCRIPT, "--alpaca", alpaca, "--out", tmp_path / "out"]
    command += ["--models", "tiny", "--trainers", trainer, "--conversations", 4, "--steps"]
    for steps in (4, 5):
        done = subprocess.run(
            [str(word) for word in [*command, steps]], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        rows = (tmp_path / "out" / "training.jsonl").read_text().splitlines()
        row = json.loads(rows[-1])
        assert "failed" not in row, row
        assert row["seconds_to_first_update"] > 0
        assert row["ms_per_update"] > 0 and row["loss"] > 0
        assert row["steps"] == steps and row["conversations"] == 4
        assert row["versions"]["torch"] and row["card"] and row["date"]
        assert row["peak"] == 989e12 and "commit" in row
        assert 0 < row["learnt"] < 1 < row["mean_length"]

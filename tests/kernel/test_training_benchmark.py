"""The benchmark of whole trainers: its processes, and what is left of an earlier call."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
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
    assert training.run_trial("tiny", "ours", arguments) == {"failed": "not done after 3 s"}
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, 9)


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_benchmark(
    training, monkeypatch, capsys
):
    """Such as one that hangs in the GPU's driver: it stays, whatever signal it gets."""
    monkeypatch.setattr(psutil.Process, "kill", lambda process: None)
    process = subprocess.Popen(["sleep", "30"], env={"BENCHMARK_BEGAN": "12.5"})
    began = time.monotonic()
    try:
        training.kill_processes("12.5", patience=0.3)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert time.monotonic() - began < 10
    assert f"process {process.pid} is still there" in capsys.readouterr().err


def parsed(training, monkeypatch, alpaca, out, *words):
    command = ["training.py", "--alpaca", alpaca, "--out", out, "--models", "tiny", *words]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    return training.parse()


@pytest.mark.parametrize(
    ("words", "least"), [(["--steps", 3], 4), (["--steps", 4, "--profile"], 5)]
)
def test_too_few_updates_to_time_are_refused(
    words, least, training, alpaca, tmp_path, monkeypatch, capsys
):
    with pytest.raises(SystemExit):
        parsed(training, monkeypatch, alpaca, tmp_path, *words)
    assert f"--steps {words[1]}: {least} or more are needed" in capsys.readouterr().err
    enough = ["--steps", least, *words[2:]]
    assert parsed(training, monkeypatch, alpaca, tmp_path, *enough).steps == least


def failed_trial(training, arguments, tmp_path, monkeypatch, trainer, printed):
    """The row of a trial whose process prints this and fails."""
    (tmp_path / "printed").write_text(printed)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat {tmp_path}/printed\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return training.run_trial("tiny", trainer, arguments)


def test_a_failed_trial_of_ours_names_what_its_run_raised(
    training, alpaca, tmp_path, monkeypatch, capsys
):
    arguments = parsed(training, monkeypatch, alpaca, tmp_path, "--steps", 4)
    arguments.trial = "ours"
    error = "torch.OutOfMemoryError: CUDA out of memory"

    def launch(sweep, file):
        run = Path(sweep["output_root"]) / sweep["name"] / "run"
        run.mkdir(parents=True)
        (run / "train.log").write_text(f"data: 4 conversations\n{error}\n")
        return subprocess.CompletedProcess([], 1, stdout="1 run failed\n", stderr="")

    monkeypatch.setattr(training, "launch", launch)
    assert training.train_by_sweeps(arguments) == 1
    printed = capsys.readouterr().out
    assert "0 of 4 updates" in printed
    row = failed_trial(training, arguments, tmp_path, monkeypatch, "ours", printed)
    assert row == {"failed": error}


def test_a_failed_trial_of_several_ranks_names_what_a_rank_raised(
    training, alpaca, tmp_path, monkeypatch
):
    arguments = parsed(training, monkeypatch, alpaca, tmp_path, "--steps", 4)
    monkeypatch.setattr(training, "importable", lambda package: True)
    printed = (
        "ImportError: no kernels\n"
        "RuntimeError: Connection closed by peer\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    row = failed_trial(training, arguments, tmp_path, monkeypatch, "trl", printed)
    assert row == {"failed": "ImportError: no kernels"}


def test_a_profile_of_an_earlier_call_is_deleted(training, alpaca, tmp_path, monkeypatch):
    """It would lie beside the row of a call without --profile."""
    arguments = parsed(training, monkeypatch, alpaca, tmp_path, "--steps", 4)
    profile = training.profile_file("tiny", "ours", arguments)
    profile.write_text("padding: 40%")
    failed_trial(training, arguments, tmp_path, monkeypatch, "ours", "")
    assert not profile.exists()


def test_what_a_trial_needs_has_its_version_in_the_row(training):
    needed = {package for trainer in training.TRAINERS.values() for package in trainer.needs}
    assert needed <= set(training.VERSIONS)


def test_a_row_names_the_commit(training, monkeypatch, tmp_path):
    made = ["init", "-q"], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "-m", "c"]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(training, "PROJECT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert training.commit() is None
    for words in (made[0], ["add", "."], made[1]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert len(training.commit()) == 40
    (tmp_path / "file").write_text("changed")
    assert training.commit().endswith("-dirty")


def test_sharding_is_all_that_zero3_differs_in(training):
    assert training.TRAINERS["ours-zero3"].settings == training.TRAINERS["ours"].settings


@pytest.mark.parametrize(
    ("words", "multiple"), [(["--conversations", 40], 16), (["--gpus", 3], 48), (["--gpus", 65], 0)]
)
def test_updates_that_trainers_would_floor_are_refused(
    words, multiple, training, alpaca, tmp_path, monkeypatch, capsys
):
    with pytest.raises(SystemExit):
        parsed(training, monkeypatch, alpaca, tmp_path, *words)
    assert f"need a multiple of {multiple or 65} for tiny" in capsys.readouterr().err


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


def test_a_trainer_names_its_attention(training, alpaca, tmp_path, monkeypatch):
    """TRL takes the model as it was loaded, so padding-free needs it from there."""
    pytest.importorskip("transformers")
    assert training.TRAINERS["trl-padding-free"].attention == "flash_attention_2"
    arguments = parsed(training, monkeypatch, alpaca, tmp_path, "--steps", 4)
    training.prepare("tiny", arguments)
    eager = training.Contender("trl", (), {}, attention="eager")
    monkeypatch.setitem(training.TRAINERS, "trl-padding-free", eager)
    model, _ = training.load_for_trl("tiny", "trl-padding-free", arguments)
    assert model.config._attn_implementation == "eager"


def test_model_and_tokenizer_are_of_the_data_and_shape_of_their_call(
    training, alpaca, tmp_path, monkeypatch
):
    pytest.importorskip("transformers")

    def made(*words):
        arguments = parsed(training, monkeypatch, alpaca, tmp_path, *words)
        training.prepare("tiny", arguments)
        return (training.model_folder("tiny", arguments) / "tokenizer.json").stat().st_mtime_ns

    first = made("--steps", 4, "--conversations", 8)
    assert made("--steps", 4, "--conversations", 8) == first
    second = made("--steps", 5, "--conversations", 8)
    assert second != first
    alpaca.write_text(alpaca.read_text().replace("word1", "other"))
    third = made("--steps", 5, "--conversations", 8)
    assert third != second
    tiny = training.MODELS["tiny"]
    wider = dataclasses.replace(tiny, shape=dataclasses.replace(tiny.shape, intermediate_size=256))
    monkeypatch.setitem(training.MODELS, "tiny", wider)
    fourth = made("--steps", 5, "--conversations", 8)
    assert fourth != third
    template = tmp_path / "alpaca.jinja"
    template.write_text(training.TEMPLATE.read_text() + " ")
    monkeypatch.setattr(training, "TEMPLATE", template)
    assert made("--steps", 5, "--conversations", 8) != fourth


def test_a_file_that_is_too_short_is_repeated(training, alpaca, tmp_path, monkeypatch):
    """Otherwise its tokens would be counted once, and be trained on several times."""
    arguments = parsed(training, monkeypatch, alpaca, tmp_path, "--steps", 5)
    rows = json.loads(alpaca.read_text())
    assert training.training_data(arguments) == 5 * rows


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ours", "trl"])
def test_a_second_call_measures_anew(trainer, alpaca, tmp_path):
    """Runs and tokens of the first one, which had other --steps, are not taken for its own."""
    pytest.importorskip("transformers")
    if trainer == "trl":
        pytest.importorskip("trl")
    command = [sys.executable, SCRIPT, "--alpaca", alpaca, "--out", tmp_path / "out"]
    command += ["--models", "tiny", "--trainers", trainer, "--conversations", 4, "--steps"]
    for steps in (5, 6, 6):
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

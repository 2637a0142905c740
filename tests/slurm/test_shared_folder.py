"""A folder into which other users can write: what they put there is neither run nor followed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_tools import PROJECT, command, prepare

from calibeval.io import InputError, atomic_write, open_to_write
from sweeps.launch import worker
from sweeps.runs.events import EventKind, append_event
from sweeps.runs.files import locked, remove_folder, touch
from sweeps.runs.grid import plan_sweep, plan_to_look_at
from sweeps.runs.stages import TRAIN


def write_lock(path: Path) -> None:
    with locked(path, 0, "busy"):
        pass


def append_record(path: Path) -> None:
    with open_to_write(path, "a") as file:
        file.write("row")


@pytest.mark.parametrize(
    "write",
    [
        write_lock,
        append_record,
        touch,
        lambda path: append_event(path, EventKind.LAUNCHED, {}),
    ],
    ids=["lock", "records", "stop file", "events"],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_planted_link_is_not_written_through(tmp_path, write, is_there):
    mine = tmp_path / "mine"
    if is_there:
        mine.write_text("precious")
    planted = tmp_path / "planted"
    planted.symlink_to(mine)
    with pytest.raises((InputError, OSError), match=f"a link to {mine}, which would be written"):
        write(planted)
    if is_there:
        assert mine.read_text() == "precious"
    assert mine.exists() == is_there


def test_a_run_whose_log_is_a_link_is_not_started(toy_file, tmp_path):
    run = prepare(toy_file(grid={}))
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (run.path / f"{TRAIN}.log").symlink_to(mine)
    with pytest.raises(OSError, match="a link to"):
        worker.work(run, lambda: False)
    assert mine.read_text() == "precious"


def test_a_temporary_file_has_no_name_that_others_can_guess(tmp_path):
    """With a link for each process number, a launch overwrote a file of whoever typed it."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    written = tmp_path / "config.yaml"
    (tmp_path / f".{written.name}.{os.getpid()}.tmp").symlink_to(mine)
    with atomic_write(written) as file:
        file.write("new")
    assert mine.read_text() == "precious" and not written.is_symlink()


def test_a_folder_may_be_a_link_to_scratch(toy_file, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "out").symlink_to(scratch)
    run = prepare(toy_file(grid={}))
    append_event(run.attempts_file, EventKind.LAUNCHED, {})
    assert len(list(scratch.glob("toy/*/attempts.jsonl"))) == 1


def test_what_a_planted_folder_leads_to_is_not_deleted(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "part").symlink_to(mine)
    remove_folder(tmp_path / "part")
    assert mine.exists() and not os.path.lexists(tmp_path / "part")


@pytest.mark.parametrize(
    "name", ["attempts.jsonl", "metrics.jsonl", "config.yaml", ".lock", "../jobs/abc123/names"]
)
@pytest.mark.parametrize("word", ["status", "collect"])
def test_nobody_waits_for_a_planted_pipe(toy_file, word, name):
    """Both hung for ever."""
    path = toy_file(grid={})
    run = prepare(path)
    (run.path / "metrics.jsonl").touch()
    planted = run.path / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.unlink(missing_ok=True)
    os.mkfifo(planted)
    done = command(word, path, timeout=60)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def planted(toy_file, tmp_path) -> Path:
    """A folder that holds somebody's sweep, whose backend leaves a mark where it is imported.

    Modules that this package imports are planted beside it.
    """
    path = toy_file(grid={"seed": [1, 2]})
    run = prepare(path)
    for file in (run.path.parent / "launched.yaml", run.config_file):
        file.write_text(file.read_text().replace("toy.backend", "evil"))
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit('planted')\n"
    for module in ("evil", "yaml", "pydantic", "numpy"):
        (run.path.parent / f"{module}.py").write_text(text)
    return run.path.parent


@pytest.mark.parametrize("start", ["python -m", "sweeps.sh"])
@pytest.mark.parametrize("words", [["status"], ["collect"], ["cancel"], ["launch", "--dry-run"]])
def test_looking_at_a_folder_runs_nothing_that_it_names(planted, tmp_path, start, words):
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    typed = [sys.executable, "-m", "sweeps"]
    if start == "sweeps.sh":
        typed = ["bash", str(PROJECT / "slurm" / "sweeps.sh")]
        del environment["PYTHONPATH"]
    typed += [words[0], str(planted), *words[1:]]
    done = subprocess.run(
        typed, cwd=planted, env=environment, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr
    if "--dry-run" in words:
        assert done.returncode == 2 and "backend: 'evil' would be imported" in done.stderr


def test_a_dry_run_starts_no_interpreter(toy_file, profile, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    python.chmod(0o755)
    path = toy_file(cluster=profile(python=str(python)))
    done = command("launch", path, "--executor", "slurm", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_folder_tells_its_plan_without_its_backend(toy_file):
    path = toy_file(grid={"seed": [1, 2], "label_smoothing": [0.0, 0.1]}, score=None)
    plan = plan_sweep(path, [])
    plan.create()
    seen = plan_to_look_at(plan.folder, [])
    assert [run.name for run in seen.runs] == [run.name for run in plan.runs]
    assert [run.grid_values for run in seen.runs] == [run.grid_values for run in plan.runs]
    seen = plan_to_look_at(plan.folder, ["grid.seed=[2]"])
    assert [run.name for run in seen.runs] == [run.name for run in plan.runs[2:]]


ESCAPE = "\x1b[2J\x9b31m"


@pytest.mark.parametrize(
    "plant",
    [
        lambda run: append_event(run.attempts_file, EventKind.ENDED, {"error": f"no{ESCAPE}"}),
        lambda run: (
            append_event(run.attempts_file, EventKind.ENDED, {"stopped": True}),
            run.metrics.write_text(json.dumps({"step": f"1{ESCAPE}"})),
        ),
        lambda run: (run.path.parent / "launched.yaml").write_text(
            f'"{ESCAPE!a}": 1'.replace("'", "")
        ),
        lambda run: run.config_file.write_text(f'"{ESCAPE!a}": 1'.replace("'", "")),
    ],
    ids=["error", "metrics", "launched.yaml", "config.yaml"],
)
@pytest.mark.parametrize("word", ["status", "collect"])
def test_no_escape_sequence_of_a_file_reaches_the_terminal(toy_file, plant, word):
    run = prepare(toy_file(grid={}))
    run.metrics.touch()
    plant(run)
    done = command(word, run.path.parent)
    printed = done.stdout + done.stderr
    assert "\x1b" not in printed and "\x9b" not in printed
    assert "Traceback" not in printed, printed


def test_no_cell_of_a_sweeps_tables_is_a_formula(toy_file):
    run = prepare(toy_file(grid={}, train={"model_name_or_path": "=cmd"}))
    append_event(run.attempts_file, EventKind.BEGAN, {"stage": TRAIN})
    append_event(run.attempts_file, EventKind.ENDED, {"error": "=HYPERLINK(1)"})
    run.metrics.touch()
    command("collect", run.path.parent)
    table = (run.path.parent / "results" / "runs.csv").read_text()
    assert ",'=HYPERLINK(1)," in table

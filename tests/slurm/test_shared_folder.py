"""A folder into which other users can write: what they put there is neither run nor followed."""

import os
from pathlib import Path

import pytest
from sweep_tools import command, prepare

from calibeval.io import InputError, atomic_write, open_to_write
from sweeps.launch import worker
from sweeps.runs.events import EventKind, append_event
from sweeps.runs.files import locked, remove_folder, touch
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

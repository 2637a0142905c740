"""Files that several processes share: locks, rows and logs."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from sweep_tools import prepare

from sweeps import cli
from sweeps.runs import scoring
from sweeps.runs.events import EventKind, append_event, read_events
from sweeps.runs.files import is_locked, locked, replace_folder, tail


def test_a_lock_is_held_until_its_block_ends(tmp_path):
    """Also for other processes once this one has asked: closing the file would release it."""
    lock = tmp_path / ".lock"
    code = "from sweeps.runs.files import *; print(is_locked(Path(sys.argv[1])))"
    look = [sys.executable, "-c", f"import sys; from pathlib import Path; {code}", str(lock)]
    with locked(lock, 1, "busy"):
        assert is_locked(lock)
        assert subprocess.check_output(look, text=True) == "True\n"
    assert not is_locked(lock)


def test_where_the_file_system_knows_no_locks_a_warning_says_so(tmp_path, monkeypatch, capsys):
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with locked(tmp_path / ".lock", 1, "busy"):
        pass
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path}/.lock: No locks available: nothing keeps two")


def test_a_scoring_by_hand_on_any_node_holds_the_lock(toy_file, tiny, monkeypatch):
    """On all but a job's first node, `score` took itself for a part of a training that does."""
    score = {"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}], "base": False}
    run = prepare(toy_file(grid={}, score=score, world={"nodes": 2}))
    run.model.mkdir()
    monkeypatch.setenv("SLURM_NODEID", "1")
    held = []
    monkeypatch.setattr(scoring, "score_here", lambda run: held.append(is_locked(run.lock_file)))
    cli._score(Namespace(folder=run.path))
    assert held == [True]


def test_a_row_after_one_that_was_cut_off_is_read(tmp_path):
    """Both were lost: a failure after a full disk looked like a kill."""
    file = tmp_path / "attempts.jsonl"
    append_event(file, EventKind.LAUNCHED, {})
    with open(file, "a") as out:
        out.write('{"began": "2026-11-28T0')
    append_event(file, EventKind.ENDED, {"error": "the disk was full"})
    append_event(file, EventKind.LAUNCHED, {"tag": "a1b2c3"})
    kinds = [event.kind for event in read_events(file)]
    assert kinds == [EventKind.LAUNCHED, EventKind.ENDED, EventKind.LAUNCHED]
    assert file.read_text().count("\n") == 4  # no empty line


def test_a_block_that_fails_gives_its_lock_back(tmp_path):
    lock = tmp_path / ".lock"
    with pytest.raises(ValueError, match="inside"), locked(lock, 1, "busy"):
        raise ValueError("inside")
    assert not is_locked(lock)


def test_the_older_folder_is_deleted_only_once_the_new_one_is_in_its_place(tmp_path, monkeypatch):
    """A power cut between the deletion and the rename lost both."""
    source = tmp_path / "part"
    destination = tmp_path / "model"
    for folder, text in ((source, "new"), (destination, "old")):
        folder.mkdir()
        (folder / "state").write_text(text)
    seen = {}
    delete = shutil.rmtree

    def watched(folder: Path, **options) -> None:
        if folder.exists():
            seen[(folder / "state").read_text()] = (destination / "state").read_text()
        delete(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    replace_folder(source, destination)
    assert seen == {"old": "new"} and os.listdir(tmp_path) == ["model"]


def test_a_log_line_may_end_as_on_windows(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(b"10%\r20%\rerror: no room\r\n30%\r40%\n")
    assert tail(log, 9) == ["error: no room", "40%"]


def test_the_last_zero_bytes_of_a_log_hold_nothing(tmp_path):
    """The lines of an earlier program would be taken for those of one that printed nothing."""
    log = tmp_path / "train.log"
    log.write_text("error: of the attempt before\n")
    assert tail(log, 9, size=0) == []

"""Locks that keep two processes from one folder."""

import errno
import fcntl

import pytest

from sweeps.runs.files import is_locked, locked


def test_a_lock_is_held_until_its_block_ends(tmp_path):
    lock = tmp_path / ".lock"
    with locked(lock, 1, "busy"):
        assert is_locked(lock)
    assert not is_locked(lock)


def test_where_the_file_system_knows_no_locks_a_warning_says_so(tmp_path, monkeypatch, capsys):
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with locked(tmp_path / ".lock", 1, "busy"):
        pass
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path}/.lock: No locks available: nothing keeps two")


def test_a_block_that_fails_gives_its_lock_back(tmp_path):
    lock = tmp_path / ".lock"
    with pytest.raises(ValueError, match="inside"), locked(lock, 1, "busy"):
        raise ValueError("inside")
    assert not is_locked(lock)

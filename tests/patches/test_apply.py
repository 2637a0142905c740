"""What apply.sh says before it compares anything with upstream's file, on a folder that has one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

APPLY = Path(__file__).parents[2] / "patches" / "apply.sh"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "open_instruct").mkdir()
    (tmp_path / "open_instruct" / "finetune.py").write_text("pass\n")
    return tmp_path


def apply(folder, *options):
    return subprocess.run([APPLY, folder, *options], capture_output=True, text=True, check=False)


def test_line_ends_of_windows_are_named_with_what_mends_them(folder):
    """The licence's lines were shown as the user's own, and no word said why."""
    file = folder / "open_instruct" / "finetune.py"
    file.write_bytes(b"pass\r\n")
    done = apply(folder, "--check")
    assert done.returncode == 2 and "ends its lines as on Windows" in done.stderr
    command = done.stderr.strip().rpartition(": ")[2]
    subprocess.run(["bash", "-c", command], check=True)
    assert file.read_bytes() == b"pass\n"


@pytest.mark.parametrize("options", [("--reverse", "--check"), ("--check", "--reverse")])
def test_two_actions_are_refused(folder, options):
    """The last one was done."""
    done = apply(folder, *options)
    assert done.returncode == 2 and "one of --check and --reverse only" in done.stderr


def test_a_partial_clone_starts_no_program_of_its_own(folder):
    """git fetches what such a clone lacks by the program that the clone's configuration names."""
    git = ["git", "-C", folder]
    subprocess.run([*git, "init", "--quiet"], check=True)
    configuration = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": str(folder),
        "remote.origin.uploadpack": f"touch {folder}/ran; git-upload-pack",
    }
    for key, value in configuration.items():
        subprocess.run([*git, "config", key, value], check=True)
    done = apply(folder, "--check")
    assert done.returncode == 2 and "lacks that commit" in done.stderr
    assert not (folder / "ran").exists()


def test_a_large_file_is_no_finetune(folder):
    os.truncate(folder / "open_instruct" / "finetune.py", 1 << 40)
    done = apply(folder, "--check")
    assert done.returncode == 2 and "has more than 4 MB" in done.stderr


def test_nobody_waits_for_a_pipe_in_a_repository(folder):
    """It hung for ever; here git is given a second instead of a minute."""
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git" / "config")
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    for name in ("objects", "refs"):
        (folder / ".git" / name).mkdir()
    impatient = folder / "timeout"
    impatient.write_text('#!/bin/sh\nshift\nexec "$TIMEOUT" 1 "$@"\n')
    impatient.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TIMEOUT": shutil.which("timeout"),
    }
    done = subprocess.run(
        [APPLY, folder, "--check"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=30,
    )
    assert done.returncode == 2 and "lacks that commit" in done.stderr


def test_no_escape_sequence_reaches_the_terminal(folder):
    done = apply(f"{folder}/\x1b[2J\x9bü")
    assert done.returncode == 2 and f"error: {folder}/[2Jü is not a folder" in done.stderr

"""The code that jobs run, as a launch has copied it."""

import subprocess

import pytest

from sweeps.launch import snapshot


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("committed = 1\n", "committed = 1\nchanged = 2\n"),
        # The difference ends in lines that are empty but for the space which marks them unchanged.
        ("committed = 1\n\n\n\n", "changed = 2\n\n\n\n"),
    ],
)
def test_what_was_changed_can_be_applied_to_the_commit(tmp_path, monkeypatch, before, after):
    checkout = tmp_path / "checkout"
    package = checkout / "sweeps"
    package.mkdir(parents=True)
    module = package / "module.py"
    module.write_text(before)
    git = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    module.write_text(after)
    monkeypatch.setattr(snapshot, "_package_folders", lambda: {"sweeps": package})

    copied = snapshot.snapshot(tmp_path / "sweep")

    subprocess.run([*git, "checkout", "--quiet", "--", "."], check=True)
    subprocess.run([*git, "apply", str(copied / "DIFF")], check=True)
    assert module.read_text() == (copied / "sweeps" / "module.py").read_text()

"""The code that jobs run, as a launch has copied it."""

import os
import subprocess

import pytest

from sweeps.launch import snapshot


def commit(folder):
    """Put all files of a folder into a new repository."""
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *words], check=True)


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
    commit(checkout)
    module.write_text(after)
    monkeypatch.setattr(snapshot, "_package_folders", lambda: {"sweeps": package})

    copied = snapshot.snapshot(tmp_path / "sweep")

    git = ["git", "-C", str(checkout)]
    subprocess.run([*git, "checkout", "--quiet", "--", "."], check=True)
    subprocess.run([*git, "apply", str(copied / "DIFF")], check=True)
    assert module.read_text() == (copied / "sweeps" / "module.py").read_text()


@pytest.fixture
def environment_in_a_repository(tmp_path, monkeypatch):
    """Packages in an environment within somebody's repository, whose tracked .env was edited."""
    thesis = tmp_path / "thesis"
    package = thesis / ".venv" / "sweeps"
    package.mkdir(parents=True)
    (package / "module.py").write_text("copied = 1\n")
    (thesis / ".gitignore").write_text(".venv\n")
    (thesis / ".env").write_text("HF_TOKEN=\n")
    commit(thesis)
    (thesis / ".env").write_text("HF_TOKEN=hf_secret\n")
    monkeypatch.setattr(snapshot, "_package_folders", lambda: {"sweeps": package})
    return package


def test_nothing_of_the_repository_around_an_environment_is_copied(
    environment_in_a_repository, tmp_path
):
    """DIFF held the token of the thesis's .env, where everybody could read it."""
    copied = snapshot.snapshot(tmp_path / "sweep")
    assert (copied / "DIFF").read_text() == ""
    assert (copied / "COMMIT").read_text() == "not in git\n"
    assert (copied / "DIFF").stat().st_mode & 0o777 == 0o600


def test_changes_beside_the_packages_are_not_copied(environment_in_a_repository, tmp_path):
    package = environment_in_a_repository
    thesis = package.parents[1]
    (thesis / ".gitignore").write_text("")
    subprocess.run(["git", "-C", str(thesis), "add", "."], check=True)
    (package / "module.py").write_text("copied = 2\n")
    difference = (snapshot.snapshot(tmp_path / "sweep") / "DIFF").read_text()
    assert "+copied = 2" in difference and "hf_secret" not in difference


def plant_code(copied):
    (copied / "sweeps" / "module.py").write_text("planted = 1\n")


def plant_module_beside(copied):
    (copied / "yaml.py").write_text("planted = 1\n")


def plant_link(copied):
    (copied / "sweeps" / "linked").symlink_to(copied.parent)


def open_to_others(copied):
    (copied / "sweeps" / "module.py").chmod(0o666)


def give_away(copied):
    if os.getuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(copied / "sweeps" / "module.py", 12345, -1)


@pytest.mark.parametrize(
    "disturb", [plant_code, plant_module_beside, plant_link, open_to_others, give_away]
)
def test_a_copy_that_somebody_may_have_changed_is_not_run(
    environment_in_a_repository, tmp_path, capsys, disturb
):
    """The next launch ran it as it was."""
    first = snapshot.snapshot(tmp_path / "sweep")
    disturb(first)
    second = snapshot.snapshot(tmp_path / "sweep")
    assert second != first and (second / "sweeps" / "module.py").read_text() == "copied = 1\n"
    assert f"warning: {first}: is not yours alone" in capsys.readouterr().err
    assert snapshot.snapshot(tmp_path / "sweep") == second  # and not a third one


def test_a_planted_compiled_module_is_not_run(environment_in_a_repository, tmp_path):
    """Python takes one without a look at the source where its own header says so."""
    copied = snapshot.snapshot(tmp_path / "sweep")
    planted = copied / "sweeps" / "__pycache__" / "module.cpython-312.pyc"
    planted.parent.mkdir()
    planted.touch()
    assert snapshot.snapshot(tmp_path / "sweep") == copied and not planted.exists()

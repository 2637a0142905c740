"""apply.sh with a small series of its own, which needs no checkout of open-instruct."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

APPLY = Path(__file__).parents[2] / "patches" / "apply.sh"
FILE = "open_instruct/finetune.py"
BEFORE = "import torch\n\nmodel = make()\ntrain(model)\n"
FIRST_PATCHED = BEFORE.replace("\n\n", "\nimport smoothed_open_instruct as ours\n\n")
AFTER = FIRST_PATCHED.replace("train(model)\n", "ours.attach(model)\ntrain(model)\n")


def git(folder: Path, *arguments: object) -> str:
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass
class SmallSeries:
    """A folder with apply.sh and two patches, and a checkout that they are for."""

    folder: Path
    checkout: Path

    @property
    def script(self) -> Path:
        return self.checkout / FILE

    def apply(self, *options: str, **environment: str) -> subprocess.CompletedProcess:
        """Run apply.sh in the folder that holds the checkout."""
        return subprocess.run(
            [self.folder / "apply.sh", self.checkout, *options],
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            env=os.environ | environment,
        )


@pytest.fixture
def series(tmp_path: Path) -> SmallSeries:
    folder = tmp_path / "patches"
    checkout = tmp_path / "open-instruct"
    small = SmallSeries(folder, checkout)
    folder.mkdir()
    small.script.parent.mkdir(parents=True)
    git(checkout, "init", "--quiet")
    small.script.write_text(BEFORE)
    git(checkout, "add", FILE)
    blob = git(checkout, "hash-object", FILE).strip()
    for name, text in (("0001-import", FIRST_PATCHED), ("0002-attach", AFTER)):
        small.script.write_text(text)
        (folder / f"{name}.patch").write_text(git(checkout, "diff", "-U0", "--full-index"))
        git(checkout, "add", FILE)
    small.script.write_text(BEFORE)
    upstream = f"repository https://example.org/open-instruct\ncommit {'1' * 40}\n"
    (folder / "UPSTREAM").write_text(f"{upstream}blob {blob} {FILE}\n")
    shutil.copy(APPLY, folder)
    return small


@pytest.mark.parametrize("temporary", ["scratch/", "link"])
def test_temporary_files_may_lie_in_a_repository(series, tmp_path, temporary):
    """`git apply` skips all files of a patch, and exits with 0, in a folder of a repository."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    environment = {"TMPDIR": f"{tmp_path}/{temporary}"}
    assert series.apply("--check").returncode == 1
    done = series.apply(**environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert series.script.read_text() == AFTER
    assert series.apply("--check").returncode == 0
    done = series.apply("--reverse", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert series.script.read_text() == BEFORE
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("option", [(), ("--check",), ("--reverse",)])
@pytest.mark.parametrize("text", [BEFORE, AFTER])
@pytest.mark.parametrize("damage", ["another line", "no patch"])
def test_a_damaged_patch_is_named_whatever_the_checkout_holds(series, option, text, damage):
    """Exit status 1 would say that the checkout is not patched."""
    patch = series.folder / "0001-import.patch"
    if damage == "another line":
        patch.write_text(patch.read_text().replace("as ours", "as theirs"))
    else:
        patch.write_text("")
    series.script.write_text(text)
    done = series.apply(*option)
    assert done.returncode == 2
    assert "not as they were recorded" in done.stderr
    assert series.script.read_text() == text


@pytest.mark.parametrize("style", ["merge", "diff3", "zdiff3"])
def test_where_lines_clash_those_of_the_checkout_alone_are_shown(series, tmp_path, style):
    """git shows upstream's lines as well, in a repository where merge.conflictStyle asks for it."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "merge.conflictStyle", style)
    own = BEFORE.replace("model = make()\ntrain(model)", "model = mine()\nmy_train(model)")
    series.script.write_text(own)
    done = series.apply()
    assert done.returncode == 2
    _, _, shown = done.stderr.partition("Your lines there:\n")
    assert "model = mine()" in shown
    for line in shown.splitlines():
        assert line.strip() in [*own.splitlines(), "..."]
    assert series.script.read_text() == own

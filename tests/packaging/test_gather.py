"""The script that gathers pages for the site deletes nothing but what it gathered."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "gather.py"


@pytest.fixture
def checkout(tmp_path):
    """A small checkout with the script, a page, and a page whose name is not ASCII."""
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    shutil.copyfile(SCRIPT, root / "docs" / "gather.py")
    (root / "docs" / "extra.css").write_text("")
    (root / "README.md").write_text("[the picture](picture.png)")
    (root / "picture.png").write_text("")
    (root / "Größe.md").write_text("# Größe")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def gather(checkout, folder):
    command = [sys.executable, "docs/gather.py", str(folder)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_pages_and_what_they_link_to_are_gathered_again_and_again(checkout, tmp_path):
    site = tmp_path / "site"
    assert gather(checkout, site).returncode == 0
    assert (site / "picture.png").exists() and (site / "Größe.md").exists()
    (checkout / "README.md").unlink()  # which git still lists
    done = gather(checkout, site)
    assert done.returncode == 0, done.stderr
    assert not (site / "README.md").exists() and (site / "Größe.md").exists()


def test_a_folder_of_other_files_is_refused(checkout):
    done = gather(checkout, ".")
    assert done.returncode != 0
    assert "has files that gather.py did not put there" in done.stderr
    assert (checkout / "README.md").exists() and (checkout / ".git").is_dir()

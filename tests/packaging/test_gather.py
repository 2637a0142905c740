"""The script that gathers pages for the site deletes nothing but what it gathered."""

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "gather.py"


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copy(SCRIPT, tmp_path / "docs")
    (tmp_path / "README.md").touch()
    command = [sys.executable, "docs/gather.py", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "has files that gather.py did not put there" in done.stderr
    assert (tmp_path / "README.md").exists()

"""The copy of the package for the Hub: what is rewritten, and what is refused."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "kernel" / "build_hub.py"


def test_a_folder_that_exists_is_left_alone(tmp_path):
    folder = tmp_path / "hub"
    command = [sys.executable, SCRIPT, folder]
    subprocess.run(command, check=True, capture_output=True)
    metadata = folder / "build" / "torch-universal" / "metadata.json"
    metadata.write_text("mine")
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr == f"error: {folder} exists already: delete it, or name another folder\n"
    assert metadata.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]

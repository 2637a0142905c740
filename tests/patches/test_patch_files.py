"""Where the package finds its patch files: in a checkout, and where it was installed."""

import shutil
import subprocess
import sys
from pathlib import Path

from smoothed_open_instruct import patch_files, patches_folder

PATCHES = Path(__file__).parents[2] / "patches"


def test_in_a_checkout_they_lie_beside_the_package():
    assert patches_folder() == PATCHES
    assert (patches_folder() / "apply.sh").is_file()


def test_an_installed_package_carries_them(tmp_path):
    package = tmp_path / "smoothed_open_instruct"
    (package / "data").mkdir(parents=True)
    shutil.copy(patch_files.__file__, package / "patch_files.py")
    (package / "__init__.py").touch()
    code = "from smoothed_open_instruct.patch_files import patches_folder; print(patches_folder())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(package / "data")

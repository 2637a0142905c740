"""Makes the shared checks, the examples and the patches' tiny world importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent  # which itself would offer its folder `triton` where none is installed
FOLDERS = HERE / "shared", HERE.parents[1] / "kernel" / "examples", HERE.parent / "patches"
sys.path[:0] = map(str, FOLDERS)

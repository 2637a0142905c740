"""Makes the shared checks and the examples importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent  # which itself would offer its folder `triton` where none is installed
sys.path[:0] = [str(HERE / "shared"), str(HERE.parents[1] / "kernel" / "examples")]

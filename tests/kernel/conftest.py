"""Makes the shared checks and the examples importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "kernel" / "examples")]  # for loss_check, paper

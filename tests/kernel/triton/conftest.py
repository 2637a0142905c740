"""Makes the shared checks importable. Without a GPU, Triton's interpreter runs the kernels."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for loss_check

"""`python -m sweeps.trainer RUN_DIR`: train one run; `python -m sweeps train` wraps it."""

import sys
from pathlib import Path

from sweeps.errors import SweepError
from sweeps.rundir import RunDir


def main() -> int:
    run = RunDir(Path(sys.argv[1]))
    try:
        from sweeps.trainer.loop import train

        train(run)
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

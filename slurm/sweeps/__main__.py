"""`python -m sweeps`."""

import sys

if __name__ == "__main__":
    try:
        from sweeps.cli import main  # takes a moment, in which somebody may press Ctrl-C

        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(130)

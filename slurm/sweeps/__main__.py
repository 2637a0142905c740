"""`python -m sweeps COMMAND`."""

import sys

if __name__ == "__main__":
    # First is the folder where this was typed (or this file's own), which may be anybody's, and
    # would be searched for each module. A backend of the user's own may lie there: it comes last.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    from sweeps.cli import main

    sys.exit(main())

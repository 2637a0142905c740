"""One rank of a run, which torchrun starts and which ends with it.

    python -m sweeps.training.run_rank MODULE ARGUMENTS…

The module is run as `python -m MODULE ARGUMENTS…` would. `sweeps.training.starting_ranks` tells how
a rank comes about.
"""

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path

from sweeps.runs.processes import end_with_parent_and_ignore_warnings
from sweeps.training.starting_ranks import BLOCKED_SIGNALS, TORCHRUN


def run_rank(module: str, arguments: list[str]) -> None:
    """Run a module as one rank, which ends with torchrun; never returns.

    torchrun gives each rank a session of its own. A rank that outlived it would go on training in
    the folder that the next attempt resumes from.
    """
    end_with_parent_and_ignore_warnings()
    parent_command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    if TORCHRUN.encode() not in parent_command:
        sys.exit("torchrun was gone before this rank began")
    if module == "sweeps":  # Its trainers save on a signal; finetune.py would just end.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    sys.argv = [module, *arguments]
    exit_code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):  # a message, which the interpreter prints
            raise
        exit_code = leaving.code or 0
    # Torch's threads now and then abort a process that tears itself down, so it leaves at once,
    # after what the interpreter would have done before.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2:])

"""torchrun, the process above a run's ranks: it hands a stop on to them and ends as they do.

    python -m sweeps.training.torchrun_agent ARGUMENTS…

The arguments are torchrun's. By itself torchrun answers TERM and Ctrl-C by ending its ranks, which
it kills after 30 seconds, and exits with 1 whatever became of them. Here the ranks are told, and
save for as long as they need; where they have stopped, this process exits with 75, as a run of one
process does.
"""

import contextlib
import signal
import sys
import threading
import time

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from sweeps.runs.stages import Outcome
from sweeps.training.starting_ranks import BLOCKED_SIGNALS

POLL = 0.1  # seconds between looks for ranks that have not been started yet


def main(arguments: list[str]) -> None:
    """Be torchrun with these arguments. Raises SystemExit(75) where the ranks have stopped."""
    # Only `pass_on_stops` receives what is blocked, whatever handlers torchrun installs.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    asked_to_stop = threading.Event()
    threading.Thread(target=pass_on_stops, args=[asked_to_stop], daemon=True).start()
    try:
        torchrun.main(arguments)
    except ChildFailedError as error:
        _, first_failure = error.get_first_failure()
        exit_code = first_failure.exitcode
        if asked_to_stop.is_set() and exit_code == -signal.SIGTERM:
            # The rank died of TERM: one of backend trainer between `run_rank`, which unblocks it,
            # and `callbacks.StopSignal`, which handles it, so before any training.
            print("stopped: SIGTERM came to a rank that did not handle it yet", flush=True)
            exit_code = Outcome.STOPPED.value
        if exit_code == Outcome.STOPPED.value:
            sys.exit(exit_code)
        raise


def pass_on_stops(asked_to_stop: threading.Event) -> None:
    """Send TERM to all ranks for each TERM or Ctrl-C that this process gets; never returns."""
    while True:
        signal.sigwait(BLOCKED_SIGNALS)
        asked_to_stop.set()
        ranks = psutil.Process().children()
        while not ranks:
            time.sleep(POLL)
            ranks = psutil.Process().children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Locks that need no flock: a file made with O_EXCL and kept fresh by a heartbeat.

A holder on this machine counts as dead when its process is gone; one elsewhere after LEASE_SECONDS
without a heartbeat, measured on the contender's own clock.
"""

import time
from collections.abc import Callable
from pathlib import Path

from filelock import SoftFileLease

from sweeps.errors import SweepError

LEASE_SECONDS = 120.0  # every contender must use the same value


def lease(path: Path, *, timeout: float, lost: Callable[[], None] | None = None) -> SoftFileLease:
    """A lease on `path`; waits `timeout` seconds for it (-1: for ever), then filelock.Timeout.

    `lost` is called from the heartbeat's thread if another process took the lease over, which
    can only happen while this one was frozen or cut off from the file system.
    """
    return SoftFileLease(
        path,
        lease_duration=LEASE_SECONDS,
        heartbeat_interval=LEASE_SECONDS / 8,
        on_compromise=(lambda _: lost()) if lost else None,
        timeout=timeout,
        thread_local=False,
    )


def held(path: Path) -> bool:
    """Whether a process keeps the lease on `path`; one just killed seems to for LEASE_SECONDS."""
    try:
        return time.time() - path.stat().st_mtime < LEASE_SECONDS
    except OSError:
        return False


def unlockable(path: Path, error: OSError) -> SweepError:
    """The message for a lock file that cannot even be created."""
    return SweepError(
        f"{path}: cannot create this lock ({error.strerror}); make room or fix the folder's rights "
        "and type the same command again"
    )

"""Other programs: what they print, and which GPUs and which Slurm job are this process's."""

import contextlib
import ctypes
import os
import signal
import subprocess

from calibeval.io import InputError
from sweeps.runs.files import last_error

PATIENCE = 20  # seconds; twice what Slurm's tools wait for a controller that is busy
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # of prctl(2): which signal a process gets when its parent ends


def run_checked(tool: str, *words: str, patience: float = PATIENCE) -> str:
    """What one of Slurm's tools prints.

    Raises InputError if the tool is absent, fails, or says nothing within `patience` seconds.
    """
    try:
        done = subprocess.run([tool, *words], capture_output=True, timeout=patience, check=True)
        return os.fsdecode(done.stdout)
    except OSError:
        raise InputError(f"{tool} is not on the PATH: type this on a login node") from None
    except subprocess.TimeoutExpired:
        reason = f"nothing for {patience} s"
    except subprocess.CalledProcessError as error:
        reason = last_error(os.fsdecode(error.stderr).splitlines())
    raise InputError(f"{tool} does not answer: {reason}; try again in a minute")


def run_or_empty(*command: str) -> str:
    """What a program prints; nothing where it is absent, fails or does not answer."""
    with contextlib.suppress(InputError):
        return run_checked(*command).strip()
    return ""


def job_id() -> str | None:
    """The Slurm job that this process belongs to, as squeue prints it: 12_3, or 12; else None."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def visible_gpus() -> list[str]:
    """The GPUs that may be used here, as CUDA_VISIBLE_DEVICES names them; none on a CPU machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        listed = run_or_empty("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
        names = listed.split()
    else:
        names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name not in ("", "-1")]


def end_with_parent() -> None:
    """Let the kernel kill this process once the process that started it is gone.

    USR2 is ignored from here on: Slurm sends it to every process of a job, and only the parent is
    to act on it.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)

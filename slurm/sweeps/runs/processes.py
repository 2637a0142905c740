"""Other programs: what they print, which GPUs and which Slurm job are this process's."""

import contextlib
import ctypes
import os
import signal
import subprocess

from calibeval.io import InputError
from sweeps.runs.files import last_error

PATIENCE = 20  # seconds; twice what Slurm's tools wait for a controller that is busy
LIBC = ctypes.CDLL(None)


def run_checked(tool: str, *words: str) -> str:
    """What one of Slurm's tools prints; raises InputError if it fails, or waits for ever."""
    try:
        done = subprocess.run([tool, *words], capture_output=True, timeout=PATIENCE, check=True)
        return os.fsdecode(done.stdout)
    except OSError:
        raise InputError(f"{tool} is not on the PATH: type this on a login node") from None
    except subprocess.TimeoutExpired:
        why = f"nothing for {PATIENCE} s"
    except subprocess.CalledProcessError as error:
        why = last_error(os.fsdecode(error.stderr).splitlines())
    raise InputError(f"{tool} does not answer: {why}; try again in a minute")


def run_or_empty(*command: str) -> str:
    """What a program prints; nothing where it is absent, fails or does not answer."""
    with contextlib.suppress(InputError):
        return run_checked(*command).strip()
    return ""


def job_id() -> str | None:
    """This Slurm job as squeue prints it, or None."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def visible_gpus() -> list[str]:
    """The GPUs that may be used here, as CUDA_VISIBLE_DEVICES names them; none on a CPU machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        listed = run_or_empty("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
        visible = ",".join(listed.split())
    names = (name.strip() for name in visible.split(","))
    return [name for name in names if name not in ("", "-1")]


def end_with_parent() -> None:
    """Let the kernel kill this process once the one that started it is gone, which alone hears
    USR2: Slurm sends it to all of a job."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)

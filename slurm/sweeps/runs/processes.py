"""Processes: other programs and what they print, our own command as it is typed, and what belongs
to this process: its GPUs, its Slurm job, the processes that end with it."""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from calibeval.io import InputError
from sweeps.runs.files import last_error

# Seconds to wait for a program's answer: twice what Slurm's tools wait for a busy controller.
PATIENCE = 20
LIBC = ctypes.CDLL(None)
# The variable by which a worker tells the programs of a run on several nodes where they meet.
MEETING_PORT = "SWEEPS_MEETING_PORT"
# The ports at which they may, below those that Linux gives to outgoing connections.
MEETING_PORTS = range(10_000, 32_000)
PR_SET_PDEATHSIG = 1  # of prctl(2): which signal a process gets when its parent ends


# What Slurm's tools, and jobs, see of this shell. All else could change what the tools do, as
# SQUEUE_STATES and SBATCH_ACCOUNT would.
LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "SLURM_CONF")

# What Slurm's tools say when they fail because the controller does not answer them.
CONTROLLER_IS_AWAY = re.compile(
    "Unable to contact|timed out|[Cc]onnection|in standby mode|Zero Bytes were transmitted"
)


class ProgramError(Exception):
    """A program fails; the words are its own."""


class NoAnswer(ProgramError):
    """A program does not answer, or nobody answers it: another time it may."""


def shell_variables(names: Iterable[str] = LOGIN_VARIABLES) -> dict[str, str]:
    """Return this shell's variables of these names, as far as they are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def run_checked(
    tool: str, *words: str, cluster: str | None = None, patience: float = PATIENCE
) -> str:
    """What one of Slurm's tools prints, about the cluster of this name or the default one.

    Raises InputError if the tool is absent, fails, or says nothing within `patience` seconds. Only
    where Slurm does not answer does it say that the same may work later.
    """
    command = [tool, *words]
    if cluster is not None:
        command.insert(1, f"--clusters={cluster}")
    try:
        return _run(*command, patience=patience, variables=shell_variables())
    except OSError:
        raise InputError(f"{tool} is not on the PATH: type this on a login node") from None
    except NoAnswer as error:
        raise InputError(f"{tool} does not answer: {error}; try again in a minute") from None
    except ProgramError as error:
        raise InputError(f"{tool} fails: {error}") from None


def slurm_or_empty(tool: str, *words: str, cluster: str | None = None) -> str:
    """What one of Slurm's tools prints; nothing where it is absent, fails or does not answer."""
    with contextlib.suppress(InputError):
        return run_checked(tool, *words, cluster=cluster).strip("\n")
    return ""


def run_or_empty(*command: str) -> str:
    """What any other program prints, without the line breaks around it.

    Nothing where it is absent, fails or does not answer.
    """
    with contextlib.suppress(OSError, ProgramError):
        return _run(*command, patience=PATIENCE).strip("\n")
    return ""


def _run(*command: str, patience: float, variables: Mapping[str, str] | None = None) -> str:
    """What a program prints that sees these variables, or all of this process's.

    Raises ProgramError or NoAnswer with the reason, and OSError if the program cannot be run.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=patience, check=True, env=variables
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"nothing for {patience} s") from None
    except subprocess.CalledProcessError as error:
        words = last_error(os.fsdecode(error.stderr).splitlines())
        if CONTROLLER_IS_AWAY.search(words):
            raise NoAnswer(words) from None
        raise ProgramError(words) from None
    return os.fsdecode(done.stdout)


def cli_command(command: str, *words: str | Path) -> str:
    """A command of this package as it can be typed anywhere; paths are made absolute."""
    typed = [command]
    for word in words:
        typed.append(str(word.absolute()) if isinstance(word, Path) else word)
    start = os.environ.get("SWEEPS", "python -m sweeps")  # sweeps.sh sets it to its own call
    return f"{start} {shlex.join(typed)}"


def job_label() -> str | None:
    """The label of the Slurm job that this process belongs to, as squeue prints it; else None.

    Here and elsewhere, a label is 12_3 for an element of an array, and 12 for another job.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def node_number() -> int:
    """The number of this machine among those of its Slurm job or srun, from 0; 0 outside of one."""
    return int(os.environ.get("SLURM_NODEID", "0"))


def first_meeting_port(job: int) -> int:
    """The port at which the search for a job's meeting port begins.

    Jobs whose numbers are near each other begin at different ones."""
    return MEETING_PORTS[job % len(MEETING_PORTS)]


def free_meeting_port(job: int) -> int:
    """A port of this machine at which the nodes of a job can meet.

    The search begins at another port for each job, so that two jobs that start on one machine at
    the same time do not find the same one. Where all are taken, torchrun will say so.
    """
    first = MEETING_PORTS.index(first_meeting_port(job))
    for port in (*MEETING_PORTS[first:], *MEETING_PORTS[:first]):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    return MEETING_PORTS[first]


def visible_gpus() -> list[str]:
    """The GPUs that may be used here, as CUDA_VISIBLE_DEVICES names them; none on a CPU machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        listed = run_or_empty("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
        names = listed.split()
    else:
        names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name not in ("", "-1")]


def end_with_parent_and_ignore_warnings() -> None:
    """What a process does before it becomes a program that must not outlive this one.

    The kernel kills it once the thread that started it is gone. Whoever starts a program from a
    thread must therefore keep the thread until the program ends.

    USR2, by which Slurm warns of an end, is ignored, and what else people send by `scancel -s`: the
    parent handles it, and lets the program save. In a job on one node Slurm sends it to every
    process, and it kills those that neither handle nor ignore it. A trainer that wants it too
    installs a handler later.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

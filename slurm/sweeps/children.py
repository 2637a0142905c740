"""Starting programs so that they die with their parent, cold (a new interpreter) or warm (forked
from a server that has torch and transformers loaded, which saves seconds a program)."""

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from sweeps.backends.base import Program

PR_SET_PDEATHSIG = 1
# What a fork has loaded already; imports alone start no threads.
PRELOAD = ["accelerate", "torch", "transformers.optimization"]
PRELOAD += [f"transformers.models.auto.{name}_auto" for name in ("modeling", "tokenization")]
PRELOAD += ["transformers.models.llama.modeling_llama"]


class Child:
    """A started program, in a process group of its own."""

    def __init__(self, process: subprocess.Popen | multiprocessing.Process) -> None:
        self._process, self.pid = process, process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code (negative: the signal that killed it), or None if it still runs then."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return self._process.returncode
        self._process.join(seconds)
        return self._process.exitcode

    def signal(self, number: int) -> None:
        """Send a signal to the program and its own children."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # it has not made its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


# How to start a program, with its output appended to the file.
Start = Callable[[Program, Path], Child]


def environment(program: Program) -> dict[str, str]:
    """This environment plus the program's, with output that reaches the log at once."""
    return os.environ | {"PYTHONUNBUFFERED": "1"} | program.environment


def _detach() -> None:
    """An own process group, so that Ctrl-C reaches the supervisor only; killed if that dies."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm signals all of a step: not for launchers
    end_with_parent()


def end_with_parent() -> None:
    """Let the kernel kill this process once the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_cold(program: Program, log: Path) -> Child:
    """Start the program as a new process."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            program.words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(program),
            cwd=program.folder,
            preexec_fn=_detach,
        )
    return Child(process)


def start_warm(program: Program, log: Path) -> Child:
    """Run the program's module in a fork of a server that has the heavy imports done.

    A launcher, a script, or another Python starts cold.
    """
    if program.launcher or program.script or program.python != sys.executable:
        return start_cold(program, log)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_run_module, args=(program, str(log), environment(program)))
    process.start()
    return Child(process)


def _run_module(program: Program, log: str, variables: dict[str, str]) -> None:
    os.setpgid(0, 0)
    # The fork server is our parent and outlives the supervisor while we run, so the kernel's
    # parent-death signal would come too late: watch the supervisor itself.
    threading.Thread(target=_follow_supervisor, daemon=True).start()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 lives as long as we do
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


def _follow_supervisor() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def rank(words: list[str]) -> None:
    """Run `-m MODULE …` or `SCRIPT …` as a rank of torchrun, which gives it a session of its own:
    left behind by a killed one it would train on, in the folder that the next one resumes."""
    end_with_parent()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    rank(sys.argv[1:])

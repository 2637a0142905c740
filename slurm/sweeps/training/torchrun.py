"""The processes of a run that has several: torchrun, and ranks that end when it does.

`python -m sweeps.training.torchrun MODULE ARGUMENTS…` is one rank, which runs a module.
"""

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path

from sweeps.runs.processes import end_with_parent
from sweeps.runs.run import Run
from sweeps.runs.schema import DistributedConfig

TORCHRUN = "torch.distributed.run"


def block_sigterm() -> None:
    """Keep TERM from this process and from those that it starts.

    Slurm sends TERM to all processes of a job at once, and torchrun would kill its ranks while they
    save because of the stop file.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def exec_torchrun(run: Run) -> None:
    """Replace this process by torchrun, where the run has several ranks and this is not one."""
    distributed = run.config().world
    is_rank = "LOCAL_RANK" in os.environ
    if is_rank or distributed.single_process:
        return
    command = torchrun_command(distributed, "sweeps", "train", str(run.path.absolute()))
    block_sigterm()
    os.execv(command[0], command)


def torchrun_command(distributed: DistributedConfig, module: str, *arguments: str) -> list[str]:
    """The command that starts the ranks, each of which runs a module with these arguments."""
    return [
        sys.executable,
        "-m",
        TORCHRUN,
        "--standalone",
        f"--nproc-per-node={distributed.processes_per_node}",
        "-m",
        "sweeps.training.torchrun",
        module,
        *arguments,
    ]


def run_rank(module: str, arguments: list[str]) -> None:
    """Run a module as one rank, which ends with torchrun; never returns.

    torchrun gives each rank a session of its own. A rank that outlived it would go on training in
    the folder that the next attempt resumes from.
    """
    end_with_parent()
    parent_command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    if TORCHRUN.encode() not in parent_command:
        sys.exit("torchrun was gone before this rank began")
    if module == "sweeps":  # Its trainer saves on TERM; finetune.py would just end.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
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

"""The processes of a run of several: torchrun_command, and ranks that die with it.

`python -m sweeps.training.torchrun MODULE …` is one rank.
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


def block_sigterm() -> None:
    """Keep TERM from this process and what it starts. Slurm sends it to all of a job at once, and
    torchrun_command would kill its ranks while they save because the stop file appeared."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def exec_torchrun(run: Run) -> None:
    """Where the run has several processes and this is none of them, become what starts them."""
    world = run.config().world
    if "LOCAL_RANK" not in os.environ and not world.single_process:
        words = torchrun_command(world, "sweeps", "train", str(run.path.absolute()))
        block_sigterm()
        os.execv(words[0], words)


def torchrun_command(world: DistributedConfig, *rank: str) -> list[str]:
    """The command that starts the ranks, each a module with its arguments."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    each = f"--nproc-per-node={world.processes_per_node}"
    return [*launcher, each, "-m", "sweeps.training.torchrun", *rank]


def main(words: list[str]) -> None:
    """torchrun gives a rank a session of its own: left behind it would train on, in the folder
    that the next attempt resumes."""
    end_with_parent()
    if b"torch.distributed.run" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        sys.exit("its torchrun_command was gone before this rank began")
    if words[0] == "sweeps":  # whose trainer saves on TERM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code, sys.argv = 0, words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            raise
        code = leaving.code or 0
    # Torch's threads now and then abort a process that takes itself apart.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

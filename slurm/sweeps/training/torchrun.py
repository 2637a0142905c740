"""The processes of a run of several: torchrun, and ranks that die with it.

`python -m sweeps.training.torchrun MODULE …` is one rank.
"""

import atexit
import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from sweeps.runs.run import Run, output
from sweeps.runs.schema import World

LIBC = ctypes.CDLL(None)


def gpus() -> list[str]:
    """The GPUs that may be used here, as CUDA_VISIBLE_DEVICES names them; none on a CPU machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        listed = output("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
        visible = ",".join(listed.split())
    names = (name.strip() for name in visible.split(","))
    return [name for name in names if name not in ("", "-1")]


def end_with_parent() -> None:
    """Let the kernel kill this process once the one that started it is gone, which alone hears
    USR2: Slurm sends it to all of a job."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def shield() -> None:
    """Keep TERM from this process and what it starts. Slurm sends it to all of a job at once, and
    torchrun would kill its ranks while they save because the stop file appeared."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def spread(run: Run) -> None:
    """Where the run has several processes and this is none of them, become what starts them."""
    world = run.config().world
    if "LOCAL_RANK" not in os.environ and not world.alone:
        words = torchrun(world, "sweeps", "train", str(run.path.absolute()))
        shield()
        os.execv(words[0], words)


def torchrun(world: World, *rank: str) -> list[str]:
    """The command that starts the ranks, each a module with its arguments."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    each = f"--nproc-per-node={world.processes_per_node}"
    return [*launcher, each, "-m", "sweeps.training.torchrun", *rank]


def main(words: list[str]) -> None:
    """torchrun gives a rank a session of its own: left behind it would train on, in the folder
    that the next attempt resumes."""
    end_with_parent()
    if b"torch.distributed.run" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        sys.exit("its torchrun was gone before this rank began")
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

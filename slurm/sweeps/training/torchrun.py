"""The processes of a run that has several: torchrun, and ranks that end when it does.

`sweeps.training.torchrun_agent` is torchrun, as the process above the ranks. A run on several nodes
has one on each: `sweeps.launch.worker` starts them by one srun, and they meet on the first node.
`python -m sweeps.training.torchrun MODULE ARGUMENTS…` is one rank, which runs a module.

What each process does with the signals that ask a run to stop:

    process                       TERM and INT                      USR2
    element of a job              notes TERM                        notes it
    `sweeps train`, one process   saves (`callbacks.StopSignal`)    saves
    torchrun                      sends TERM to its ranks           ignores it
    rank of backend trainer       saves                             saves
    `sweeps train`, finetune.py   makes the stop file               ignores it
    finetune.py, its ranks        nothing: they are blocked         ignores it
"""

import atexit
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

from calibeval.io import InputError
from sweeps.runs.processes import follow_parent, node_number, run_checked
from sweeps.runs.run import Run
from sweeps.runs.schema import World

AGENT = "sweeps.training.torchrun_agent"  # the module that is torchrun
# The ports at which nodes meet, below those that Linux gives to outgoing connections.
MEETING_PORTS = range(10_000, 32_000)
MEETING_SECONDS = 600  # that a node waits for the others, whose file systems may be slow


def block_stop_signals() -> None:
    """Keep TERM and Ctrl-C from acting on this process and on those that it starts.

    Slurm sends TERM to all processes of a job at once, and a terminal sends INT to all that belong
    to a command. Each of them would end at once, and ranks may be saving.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def exec_torchrun(run: Run) -> None:
    """Replace this process by torchrun, where the run has several ranks and this is not one."""
    world = run.config().world
    is_rank = "LOCAL_RANK" in os.environ
    if is_rank or world.single_process:
        return
    command = torchrun_command(world, "sweeps", "train", str(run.path.absolute()))
    # An element of a job hears USR2, and tells the ranks by the stop file.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    block_stop_signals()
    os.execv(command[0], command)


def torchrun_command(world: World, module: str, *arguments: str) -> list[str]:
    """The command that starts the ranks, each of which runs a module with these arguments."""
    return [
        sys.executable,
        "-m",
        AGENT,
        *meeting_arguments(world),
        f"--nproc-per-node={world.processes_per_node}",
        "-m",
        "sweeps.training.torchrun",
        module,
        *arguments,
    ]


def meeting_arguments(world: World) -> list[str]:
    """torchrun's arguments that say where the nodes of the run meet.

    Raises InputError where a run of several nodes was not started by an srun on as many.
    """
    if world.nodes == 1:
        return ["--standalone"]  # at a port that the kernel chooses
    job = os.environ.get("SLURM_JOB_ID")
    nodes_of_step = int(os.environ.get("SLURM_STEP_NUM_NODES", "0"))
    if job is None or nodes_of_step != world.nodes:
        raise InputError(
            f"world.nodes: the run asks for {world.nodes} nodes and was started on "
            f"{nodes_of_step or 'none'} of Slurm's; `python -m sweeps launch` on Slurm starts it"
        )
    return [
        f"--nnodes={world.nodes}",
        f"--node-rank={node_number()}",
        f"--master-addr={first_node_address()}",
        f"--master-port={meeting_port(int(job))}",
        f"--rdzv-conf=timeout={MEETING_SECONDS}",
    ]


def first_node_address() -> str:
    """The name of the first node of this srun, or its address where the name stands in no DNS."""
    listed = run_checked("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"])
    name = listed.split()[0]
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        # The worker, which runs on the first node, has called srun.
        return os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    return name


def meeting_port(job: int) -> int:
    """The port of a job. Each element of an array is a job with a number of its own."""
    return MEETING_PORTS[job % len(MEETING_PORTS)]


def run_rank(module: str, arguments: list[str]) -> None:
    """Run a module as one rank, which ends with torchrun; never returns.

    torchrun gives each rank a session of its own. A rank that outlived it would go on training in
    the folder that the next attempt resumes from.
    """
    follow_parent()
    parent_command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    if AGENT.encode() not in parent_command:
        sys.exit("torchrun was gone before this rank began")
    if module == "sweeps":  # Its trainers save on a signal; finetune.py would just end.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
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

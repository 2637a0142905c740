"""How the ranks of a run are started: by torchrun, which `sweeps train` becomes or starts.

The processes of such a run, from the first to the last:

1. `python -m sweeps train`. Under backend trainer it becomes torchrun (`exec_torchrun`). Under
   open-instruct it stays, to turn signals into the stop file, and starts torchrun as a child; under
   command it stays too, to see how the command ends.
2. torchrun is `sweeps.training.torchrun_agent`, the process above the ranks. A run on several nodes
   has one on each: `sweeps.launch.worker` starts step 1 on every node by one srun, each becomes or
   starts torchrun, and these meet on the first node.
3. `python -m sweeps.training.run_rank MODULE ARGUMENTS…` is one rank, which runs a module.

A run of one process has neither torchrun nor ranks: `sweeps train` trains in its own process, or
starts finetune.py as a child. Where DeepSpeed or FSDP shards it, it goes the way above with one
rank (`World.single_process`).

What each process does with the signals that ask a run to stop:

    process                                TERM and INT                    USR2
    element of a job                       notes TERM                      notes it
    backend trainer without torchrun:
        `sweeps train`                     saves (`callbacks.StopSignal`)  saves
    backend trainer with torchrun:
        torchrun                           sends TERM to its ranks         ignores it
        a rank                             saves (`callbacks.StopSignal`)  saves
    backend open-instruct:
        `sweeps train`                     makes the stop file             ignores it
        torchrun, if any                   sends TERM to its ranks         ignores it
        finetune.py or its ranks           nothing: they are blocked       ignore it
    backend command:
        `sweeps train`                     sends TERM to the command,      ignores it
                                           also for the stop file
        torchrun, if any                   sends TERM to its ranks         ignores it
        the command, as a rank too         what the user has written       ignores it

Once an element has noted a signal, its worker makes the stop file, for which the ranks look after
each update. On one node Slurm sends USR2 to the ranks, too; what comes first counts.

TERM and INT are blocked before torchrun starts, and its ranks inherit that. A thread of torchrun
takes them by `sigwait`, which receives blocked signals. A rank of backend trainer unblocks them in
`run_rank`; in finetune.py's ranks they stay blocked.

A program begins with USR2 ignored where the worker starts it, whose `preexec_fn` is
`runs.processes.end_with_parent_and_ignore_warnings`. One that wants USR2 installs a handler, as
`StopSignal` does.
"""

import os
import signal
import socket
import sys

from calibeval.io import InputError
from sweeps.runs.processes import (
    MEETING_PORT,
    end_with_parent_and_ignore_warnings,
    first_meeting_port,
    node_number,
    run_checked,
)
from sweeps.runs.run import Run
from sweeps.runs.schema import World

TORCHRUN = "sweeps.training.torchrun_agent"  # the module that is torchrun
# Signals that torchrun alone receives, which tells its ranks.
BLOCKED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
MEETING_SECONDS = 600  # that a node waits for the others, whose file systems may be slow


def block_stop_signals() -> None:
    """Keep TERM and Ctrl-C from acting on this process and on those that it starts.

    Slurm sends TERM to all processes of a job at once, and a terminal sends INT to all that belong
    to a command. Each of them would end at once, and ranks may be saving.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)


def leave_signals_to_parent() -> None:
    """Let a new process end with this one, and leave to this one what signals ask for."""
    end_with_parent_and_ignore_warnings()
    block_stop_signals()


def exec_torchrun(run: Run) -> None:
    """Replace this process by torchrun, where the run needs it and this is not one of its ranks.

    A run needs it that has several processes or is sharded. Elsewhere this returns.
    """
    world = run.config().world
    is_rank = "LOCAL_RANK" in os.environ
    if is_rank or world.single_process:
        return
    command = torchrun_command(world, "sweeps", "train", str(run.path.absolute()))
    # The job's element gets USR2 too, and its worker makes the stop file, which the ranks look for.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    block_stop_signals()
    os.execv(command[0], command)


def torchrun_command(world: World, module: str, *arguments: str) -> list[str]:
    """The command that starts the ranks, each of which runs a module with these arguments."""
    return [
        sys.executable,
        "-m",
        TORCHRUN,
        *meeting_arguments(world),
        f"--nproc-per-node={world.processes_per_node}",
        "-m",
        "sweeps.training.run_rank",
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
    # An srun that was typed by hand has no worker that has looked for a free port.
    port = os.environ.get(MEETING_PORT, str(first_meeting_port(int(job))))
    return [
        f"--nnodes={world.nodes}",
        f"--node-rank={node_number()}",
        f"--master-addr={first_node_address()}",
        f"--master-port={port}",
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

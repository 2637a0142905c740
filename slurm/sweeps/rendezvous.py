"""How the machines of one run find each other: free ports, a file, `accelerate launch`.

The machine with SLURM_PROCID 0 supervises; it writes address and port of each attempt to
rendezvous.json in the run folder, the others follow that file.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from calibeval.io import counted
from sweeps.children import Child
from sweeps.config import World
from sweeps.errors import SweepError
from sweeps.files import read_json, write_json
from sweeps.rundir import RunDir

POLL = 0.2  # seconds

PORTS = range(10000, 32000)  # below Linux's ephemeral range, so no outgoing connection takes one


_held: list[socket.socket] = []  # reservations of this process


def free_port() -> int:
    """A port that nothing on this machine listens on or has been promised.

    Tried by binding, in random order: a port derived from the job id clashes as soon as two
    elements share a node. The trainer binds it only seconds later, so until this process ends a
    socket in Linux's abstract namespace keeps other starts on this machine from taking it.
    """
    for port in random.SystemRandom().sample(PORTS, 200):
        promise = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            promise.bind(f"\0sweeps-port-{port}")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind(("", port))
        except OSError:
            promise.close()
            continue
        _held.append(promise)
        return port
    raise OSError(f"no free port among 200 tried in {PORTS.start}…{PORTS.stop}")


def check_allocation(world: World) -> None:
    """Raise SweepError unless Slurm gave what the run asks for.

    A wrong number of tasks does not fail by itself: it trains with another global batch.
    """
    if "SLURM_STEP_ID" not in os.environ and world.nodes == 1:
        return
    found = int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1")))
    machines = int(os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1")))
    if (found, machines) != (world.nodes, world.nodes):
        raise SweepError(
            f"world: {counted(world.nodes, 'node')} with one task each asked for, Slurm started "
            f"{counted(found, 'task')} on {counted(machines, 'node')}; "
            f"use srun --nodes={world.nodes} --ntasks={world.nodes}"
        )
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "-L"], text=True, capture_output=True, check=False
        ).stdout.count("GPU ")
        if 0 < listed < world.processes_per_node:
            raise SweepError(
                f"world.processes_per_node: {world.processes_per_node} asked for, this node "
                f"({socket.gethostname()}) shows {counted(listed, 'GPU')}; "
                "set gpus_per_process in the cluster profile"
            )


def machine() -> int:
    """This machine's number in the run."""
    return int(os.environ.get("SLURM_PROCID", "0"))


def _key() -> str:
    """Tells this start of this job from every other."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return ".".join(os.environ.get(name, "0") for name in names)


def publish(run: RunDir, attempt: int, port: int, *, ended: bool = False) -> None:
    """Tell the other machines where attempt number `attempt` meets, or that there is no other."""
    write_json(
        run.path / "rendezvous.json",
        {
            "key": _key(),
            "attempt": attempt,
            "address": socket.gethostname(),
            "port": port,
            "ended": ended,
        },
    )


def follow(run: RunDir, start: Callable[[str, int], Child]) -> int:
    """Take part in every attempt that is published; returns 0 once there will be no more.

    `start(address, port)` starts this machine's part.
    """
    last, child = 0, None
    while True:
        path = run.path / "rendezvous.json"
        meeting = read_json(path) if path.exists() else {}
        if meeting.get("key") == _key():
            if child is not None and (meeting["ended"] or meeting["attempt"] > last):
                if child.wait(10 if meeting["ended"] else 0) is None:
                    child.signal(signal.SIGKILL)
                    child.wait(10)
                child = None
            if meeting["ended"]:
                return 0
            if meeting["attempt"] > last:
                last = meeting["attempt"]
                child = start(meeting["address"], meeting["port"])
        time.sleep(POLL)


def launch_arguments(
    world: World, *, machine: int = 0, address: str = "127.0.0.1", port: int | None = None
) -> list[str]:
    """The launcher module and its flags for one machine of `world`."""
    port = port or free_port()
    if world.size > 1 and not world.deepspeed and not _has_gpu():
        # accelerate's launcher starts several CPU processes through MPI only; torch's own does not
        # need it, and Accelerator reads the same variables.
        return [
            "torch.distributed.run",
            f"--nnodes={world.nodes}",
            f"--nproc_per_node={world.processes_per_node}",
            f"--node_rank={machine}",
            f"--master_addr={address}",
            f"--master_port={port}",
        ]
    flags = [
        "accelerate.commands.launch",
        f"--num_processes={world.size}",
        f"--num_machines={world.nodes}",
        f"--machine_rank={machine}",
        f"--main_process_ip={address}",
        f"--main_process_port={port}",
        f"--mixed_precision={world.mixed_precision}",
        "--dynamo_backend=no",
    ]
    if world.size > 1 and not world.deepspeed:
        flags.append("--multi_gpu")
    if world.deepspeed:
        flags += ["--use_deepspeed", f"--deepspeed_config_file={os.path.abspath(world.deepspeed)}"]
        if world.nodes > 1:  # one launcher a node already runs under srun
            flags.append("--deepspeed_multinode_launcher=standard")
    return flags


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None

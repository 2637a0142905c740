"""How the processes of one run find each other: free ports and `accelerate launch`."""

import os
import random
import shutil
import socket

from sweeps.config import World

PORTS = range(10000, 32000)  # below Linux's ephemeral range, so no outgoing connection takes one


def free_port(host: str = "") -> int:
    """A port that nothing on this machine listens on; tried by binding, in random order.

    A port derived from the job id clashes as soon as two elements share a node.
    """
    for port in random.SystemRandom().sample(PORTS, 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among 200 tried in {PORTS.start}…{PORTS.stop}")


def launch_arguments(
    world: World, *, machine: int = 0, address: str = "127.0.0.1", port: int | None = None
) -> list[str]:
    """`accelerate.commands.launch` and its flags for one machine of `world`."""
    flags = [
        "accelerate.commands.launch",
        f"--num_processes={world.size}",
        f"--num_machines={world.nodes}",
        f"--machine_rank={machine}",
        f"--main_process_ip={address}",
        f"--main_process_port={port or free_port()}",
        f"--mixed_precision={world.mixed_precision}",
        "--dynamo_backend=no",
    ]
    if world.size > 1 and not world.deepspeed:
        flags.append("--multi_gpu" if _has_gpu() else "--cpu")
    if world.deepspeed:
        flags += ["--use_deepspeed", f"--deepspeed_config_file={os.path.abspath(world.deepspeed)}"]
        if world.nodes > 1:  # one launcher a node already runs under srun
            flags.append("--deepspeed_multinode_launcher=standard")
    return flags


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None

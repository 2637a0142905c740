"""A process that has imported what commands of sweeps import, and forks for each of them.

Imports are most of what a command takes, and the tests type hundreds. `sweep_tools.command` writes
a line of JSON for each: its words, environment and folder, and the files for what it prints. The
answer is its process id, and once it has ended its exit code.
"""

import importlib
import json
import os
import runpy
import signal
import sys

IMPORTED_BY_COMMANDS = [
    "sweeps.cli",
    "sweeps.launch.preflight",
    "sweeps.launch.slurm",
    "sweeps.results.collect",
    "sweeps.results.status",
    "sweeps.training.command_backend",
    "sweeps.training.hf_backend",
    "sweeps.training.open_instruct_backend",
]
for module in IMPORTED_BY_COMMANDS:
    importlib.import_module(module)
OUTSIDE_PYTHONPATH = [
    entry
    for entry in sys.path[1:]
    if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]


def become(request: dict) -> None:
    """Run a command as `python -m sweeps` does, in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    own_path = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [request["folder"], *filter(None, own_path), *OUTSIDE_PYTHONPATH]
    sys.argv[:] = ["sweeps", *request["words"]]
    runpy.run_module("sweeps", run_name="__main__", alter_sys=True)


def serve() -> None:
    """Answer requests until the tests have ended; returns in the process of a command."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            return
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()

"""The backends that come with this project, by the names that `backend:` of a sweep file takes.

`sweeps.runs.backend_modules` imports this module, and the one that a sweep names, when it is asked.
"""

from typing import TYPE_CHECKING

# Who adds one also names it in the description of `Sweep.backend` and in slurm/README.md, and lets
# mypy compare it with the protocol below.
BACKENDS = {
    "trainer": "sweeps.training.hf_backend",
    "open-instruct": "sweeps.training.open_instruct_backend",
    "command": "sweeps.training.command_backend",
}

if TYPE_CHECKING:
    from sweeps.runs.backend import Backend
    from sweeps.training import command_backend, hf_backend, open_instruct_backend

    _trainer: Backend[hf_backend.Train] = hf_backend
    _open_instruct: Backend[open_instruct_backend.Train] = open_instruct_backend
    _command: Backend[command_backend.Train] = command_backend

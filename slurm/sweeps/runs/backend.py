"""What trains: a module that `backend:` of a sweep file names."""

from importlib import import_module
from types import ModuleType

from calibeval.io import InputError

# What `backend:` names, apart from modules of the user's own. A backend is a module with
#   Train                    the pydantic model of its `train:` keys
#   packages(train, world)   modules that must be importable, beyond this project's own
#   missing(train, world)    what else would keep a run from starting, a sentence each
#   train(run)               trains in this process, or process group, to run.model;
#                            SystemExit(75) once it has saved because run.stop appeared
BACKENDS = {
    "trainer": "sweeps.training.hf_backend",
    "open-instruct": "sweeps.training.open_instruct_backend",
}


def load_backend(name: str) -> ModuleType:
    """The module that trains; raises InputError with those there are."""
    try:
        module, why = import_module(BACKENDS.get(name, name)), "it has no `Train`"
    except ImportError as error:
        module, why = None, error
    if not hasattr(module, "Train"):
        known = ", ".join(BACKENDS)
        raise InputError(f"backend: {name!r} is none of {known}, and no module that trains: {why}")
    return module

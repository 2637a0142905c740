"""Finding the module that `backend:` of a sweep file names.

`sweeps.runs.backend` says what such a module has. It is a file of its own because a run finds its
options here, and a backend is described there as what trains a run.
"""

from importlib import import_module
from types import ModuleType

from calibeval.io import InputError

# The module that lists the backends of this project. It is imported by its name, as all of them
# are: nothing in `sweeps.runs` knows a trainer.
BUILT_IN = "sweeps.training.backends"
MEMBERS = ("Train", "packages", "missing", "train")  # of every backend, as the protocol says


class NoBackend(InputError):
    """What `backend:` names cannot be imported, or does not train."""


def built_in_backends() -> dict[str, str]:
    """The modules of the backends that come with this project, by the names of the backends."""
    modules: dict[str, str] = import_module(BUILT_IN).BACKENDS
    return modules


def import_backend(name: str) -> ModuleType:
    """The module that trains; NoBackend, naming the built-in ones, if `name` is no backend."""
    built_in = built_in_backends()
    try:
        module = import_module(built_in.get(name, name))
    except ImportError as error:
        reason = str(error)
    else:
        absent = [member for member in MEMBERS if not hasattr(module, member)]
        if not absent:
            return module
        reason = f"it has no `{absent[0]}`"
    known = ", ".join(built_in)
    raise NoBackend(f"backend: {name!r} is none of {known}, and no module that trains: {reason}")

"""What trains a run: the module that `backend:` of a sweep file names, and what it must have."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel

from calibeval.io import InputError
from sweeps.runs.schema import DistributedConfig

if TYPE_CHECKING:
    from sweeps.runs.run import Run

Options = TypeVar("Options", bound=BaseModel)

# The names of the backends that come with this project, and the modules behind them.
BACKENDS = {
    "trainer": "sweeps.training.hf_backend",
    "open-instruct": "sweeps.training.open_instruct_backend",
}


class NoBackend(InputError):
    """What `backend:` names cannot be imported, or does not train."""


class Backend(Protocol[Options]):
    """A module that trains runs: one of `BACKENDS`, or a user's own, named by its import path.

    A backend has the four members below. It may have two more:

    `environment_variables: Sequence[str]` names variables of the submitting shell that its jobs
    need. Jobs see no others, apart from a login's own and the profile's `pass_environment`.

    `scoring_problem(train) -> str | None` says why the model that such a run leaves cannot be
    scored. A sweep that asks for scores is then refused with these words.
    """

    @property
    def Train(self) -> type[Options]:
        """The pydantic model of the `train:` keys. They need `model_name_or_path`,
        `learning_rate`, `label_smoothing` and `seed`, of which the names of runs are made. Mark an
        option that is added once runs were made as `added_later`: see `sweeps.runs.schema.option`;
        otherwise all runs get new names."""

    def packages(self, train: Options, distributed: DistributedConfig, /) -> list[str]:
        """The modules that must be importable for such a run, beyond this project's own."""

    def missing(self, train: Options, distributed: DistributedConfig, /) -> list[str]:
        """What else would keep such a run from starting, one sentence for each problem."""

    def train(self, run: "Run", /) -> None:
        """Train a run, resuming from its checkpoints, until `run.model` holds the final model.

        Called in a process of its own, or in each rank of a process group. While the file
        `run.stop` exists it saves, and leaves by `SystemExit(75)`. Progress is written to
        `run.metrics`, a JSON object a line, with `step`, `steps` and `loss`.
        """


if TYPE_CHECKING:  # mypy compares the built-in backends with the protocol here
    from sweeps.training import hf_backend, open_instruct_backend

    _trainer: Backend[hf_backend.Train] = hf_backend
    _open_instruct: Backend[open_instruct_backend.Train] = open_instruct_backend


def load_backend(name: str) -> Backend[Any]:
    """The module that trains; NoBackend, naming the built-in ones, if `name` is no backend."""
    return _import_backend(name)  # type: ignore[return-value]  # of a user's module


def _import_backend(name: str) -> ModuleType:
    try:
        module = import_module(BACKENDS.get(name, name))
    except ImportError as error:
        reason = str(error)
    else:
        if hasattr(module, "Train"):
            return module
        reason = "it has no `Train`"
    known = ", ".join(BACKENDS)
    raise NoBackend(f"backend: {name!r} is none of {known}, and no module that trains: {reason}")


def environment_variables(name: str) -> list[str]:
    """The variables of the submitting shell that jobs get for the sake of a backend.

    The built-in backends' variables are always among them, so that what a job sees does not depend
    on which of those trains.
    """
    variables: dict[str, None] = {}  # in order, each once
    for backend in (*BACKENDS, name):
        named = getattr(load_backend(backend), "environment_variables", ())
        variables.update(dict.fromkeys(named))
    return list(variables)


def scoring_problem(name: str, train: BaseModel) -> str | None:
    """Why a backend says that the model of such a run cannot be scored; None where it can."""
    explain = getattr(load_backend(name), "scoring_problem", None)
    if explain is None:
        return None
    problem: str | None = explain(train)
    return problem

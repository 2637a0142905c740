"""What trains a run: the module that `backend:` of a sweep file names, and what it must have."""

from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from sweeps.runs.backend_modules import built_in_backends, import_backend
from sweeps.runs.run import Run
from sweeps.runs.schema import World

Options = TypeVar("Options", bound=BaseModel)


class Backend(Protocol[Options]):
    """A module that trains runs: a built-in one, or a user's own, named by its import path.

    It has the four members below, and may have three more:

    `environment_variables: Sequence[str]` names variables of the submitting shell that its jobs
    need. Jobs see no others, apart from a login's own and the profile's `pass_environment`. Those
    of a built-in backend are in the scripts of all sweeps, whatever trains them.

    `scoring_problem(train_options) -> str | None` says why the model that such a run leaves cannot
    be scored. A sweep that asks for scores is then refused with these words.

    `trains_on_several_nodes = True` says that `train` may be called on each node of a run at the
    same time, as `training.starting_ranks.exec_torchrun` wants it. `world.nodes` above 1 is refused
    else.

    Whoever plans and launches imports the module too, and must not wait for torch: what only
    training needs is imported by `train`. Jobs run where the launch was typed, and must find the
    module there: install it, or name PYTHONPATH in the profile's `pass_environment`. It is no part
    of the snapshot that keeps our own packages as they were at the launch.
    """

    @property
    def Train(self) -> type[Options]:
        """The class of the options: a pydantic model of the keys of `train:` and `grid:`.

        Its `model_dump()` holds values of JSON only, and gives equal options when it is validated
        again: it is written to the run's config.yaml, and the name of the run's folder is made of
        its hash, after what it has of `model_name_or_path`, `learning_rate`, `label_smoothing` and
        `seed`. Tables of scores need the first and the third. Where an option is added, all runs
        get new names.

        These keys mean the same in every backend that has them; it need have none:

        `tokenizer_name`, `model_revision`   are fetched by `prefetch`, as the model is
        `train_file`                         conversations, which are read before a launch
        `num_train_epochs`, `train_file`     have columns in the tables
        `held_out`                           conversations not trained on; metrics have their loss

        Paths in `model_name_or_path`, `tokenizer_name`, `train_file` and `smoothing_target` name
        the same run however they are spelt, as `./x` or `x`: see `sweeps.runs.grid.PATH_KEYS`. A
        path in another key of yours is a text like any other.
        """

    def packages(self, train_options: Options, world: World, /) -> list[str]:
        """The modules that must be importable for such a run, beyond this project's own."""

    def missing(self, train_options: Options, world: World, /) -> list[str]:
        """What else would keep such a run from starting, one sentence for each problem.

        A launch asks this of each run that is to be trained, once its files are known to be there.
        So what takes time and is the same for many runs is best remembered.
        """

    def train(self, run: Run, /) -> None:
        """Train a run, resuming from its checkpoints, until `run.model` holds the final model.

        It is called by `python -m sweeps train RUN_DIR`, a process that holds the run's lock, in
        the folder where the launch was typed. A run of several processes is the backend's to start:
        the process may become torchrun by exec, which keeps the lock, and every rank then calls
        this function again through the same command. LOCAL_RANK tells a rank from the first one;
        `training.starting_ranks.exec_torchrun` does all this.

        `run.model`        appears by a rename, when it is whole: a run whose folder has it is
                           trained, unless `run.unfinished_file` is there too. A folder that
                           transformers can load, with its tokenizer, unless `scoring_problem` says
                           that nobody will score it.
        `run.checkpoints`  holds what a run resumes from. An entry is called by a word and its step,
                           `step-20` or `step_20`, and appears whole. The highest step tells whether
                           a run that is killed again and again gets on; one that saves nothing is
                           restarted `max_idle_restarts` times, and given up at the next kill.
                           Deleted once the run is done.
        `run.metrics`      gets a JSON object a line: `step`, `steps` (of the whole training),
                           `loss`; if known `tokens_per_second`, and `held_out_loss`, of which the
                           last counts for `select_on`.
        `run.stop_file`    asks for an end while it exists: save, and leave by `SystemExit(75)`.
                           TERM asks for the same: Slurm sends it when a job is to end, perhaps
                           before the file is there, and so does whoever ends the process by hand.
                           Of several ranks all get it. USR2, by which Slurm warns of an end, need
                           not be handled: here it is ignored unless `train` handles it.

        It may go on to score, by `scoring.score_here`, what it has trained, if it was not asked to
        stop.
        """


def load_backend(name: str) -> Backend[Any]:
    """The module that trains; raises NoBackend where there is none of this name."""
    return import_backend(name)  # type: ignore[return-value]  # of a user's module nobody can know


def environment_variables(name: str) -> list[str]:
    """The variables of the submitting shell that jobs get for the sake of a backend.

    The built-in backends' variables are always among them, so that what a job sees does not depend
    on which of those trains.
    """
    variables: dict[str, None] = {}  # in order, each once
    for backend in (*built_in_backends(), name):
        named = getattr(load_backend(backend), "environment_variables", ())
        variables.update(dict.fromkeys(named))
    return list(variables)


def trains_on_several_nodes(name: str) -> bool:
    """Whether a backend says that it can train one run on several machines."""
    return bool(getattr(load_backend(name), "trains_on_several_nodes", False))


def scoring_problem(name: str, train_options: BaseModel) -> str | None:
    """Why a backend says that the model of such a run cannot be scored; None where it can."""
    explain = getattr(load_backend(name), "scoring_problem", None)
    if explain is None:
        return None
    problem: str | None = explain(train_options)
    return problem

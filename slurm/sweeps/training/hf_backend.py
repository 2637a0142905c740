"""`backend: trainer`: what it needs before a run starts, and how a run is trained.

Planning and launching import this module and must not wait for torch. The training itself is in
`sweeps.training.fit`, which only `train` imports.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from calibeval.io import parse_json, read_text
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.training import starting_ranks
from sweeps.training.options import PACKAGES, TrainOptions, auxiliary_loss_problem

Train = TrainOptions  # what every backend calls its options
trains_on_several_nodes = True


def packages(train_options: TrainOptions, world: World) -> list[str]:
    """Modules that a run imports beyond those that every run does."""
    needed = [*PACKAGES, "trl"]
    if world.deepspeed is not None:
        needed.append("deepspeed")
    if train_options.lora is not None:
        needed.append("peft")
    if train_options.report_to is not None:
        needed.append(train_options.report_to)
    return needed


def missing(train_options: TrainOptions, world: World) -> list[str]:
    """What else would keep a run from starting, a sentence each."""
    problems = []
    if world.deepspeed is not None and world.fsdp is not None:
        problems.append("world.deepspeed, world.fsdp: one of them shards a run: set one to null")
    smoothing_target = train_options.smoothing_target
    if (
        smoothing_target is not None
        and smoothing_target != "unigram"
        and not Path(smoothing_target).is_file()
    ):
        problems.append(f"train.smoothing_target: {smoothing_target}: no such file")
    model = train_options.model_name_or_path
    problem = auxiliary_loss_problem(model, _config_on_disk(model))
    if problem is not None:
        problems.append(problem)
    installed = version("transformers")
    if int(installed.partition(".")[0]) < 5:
        problems.append(
            f"backend trainer: needs transformers 5, found {installed}: "
            "pip install 'transformers>=5'"
        )
    return problems


def _config_on_disk(model: str) -> dict[str, Any]:
    """The model's config.json, as far as it is here and can be read; empty otherwise.

    What is wrong with such a file, the run says when it loads the model.
    """
    file = Path(model) / "config.json"
    if not Path(model).exists():
        # The import reads the variables that say where the hub's cache is. A launch sets them as
        # the profile wants them, so that it may not come earlier.
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:  # It is no name on the hub.
            return {}
        if not isinstance(cached, str):
            return {}
        file = Path(cached)
    try:
        config = parse_json(read_text(file))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def scoring_problem(train_options: TrainOptions) -> str | None:
    """Why the model of such a run cannot be scored."""
    if train_options.lora is not None and train_options.lora.save == "adapter":
        return "train.lora.save: adapters alone are not scored: merged, or score=null"
    return None


def train(run: Run) -> None:
    """Train the run in this process, which is its only one or one of its ranks.

    Where the run has several ranks, or is sharded, and this process is not one of them, it becomes
    torchrun, which starts them. See `sweeps.training.fit.train`.
    """
    starting_ranks.exec_torchrun(run)
    from sweeps.training import fit

    fit.train(run)

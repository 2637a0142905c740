"""`backend: trainer`: what it needs before a run starts, and how a run is trained.

Planning and launching import this module and must not wait for torch. The training itself is in
`sweeps.training.fit`, which only `train` imports.
"""

from importlib.metadata import version
from pathlib import Path

from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.training import starting_ranks
from sweeps.training.options import TrainOptions

Train = TrainOptions  # what every backend calls its options
trains_on_several_nodes = True


def packages(train_options: TrainOptions, world: World) -> list[str]:
    """Modules that a run imports beyond those that every run does."""
    needed = []
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
    installed = version("transformers")
    if int(installed.partition(".")[0]) < 5:
        problems.append(
            f"backend trainer: needs transformers 5, found {installed}: "
            "pip install 'transformers>=5'"
        )
    return problems


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

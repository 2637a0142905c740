"""The trainer, and what it needs, told without torch: nobody who plans waits for it.

What trains is sweeps.training.hf_trainer, imported by `train` alone.
"""

from importlib.metadata import version
from pathlib import Path

from sweeps.runs.run import Run
from sweeps.runs.schema import DistributedConfig
from sweeps.training import torchrun
from sweeps.training.options import Train


def packages(train: Train, world: DistributedConfig) -> list[str]:
    """Modules that must be importable, beyond those of every run."""
    found = ["deepspeed"] * bool(world.deepspeed) + ["peft"] * bool(train.lora)
    return found + [train.report_to] * bool(train.report_to)


def missing(train: Train, world: DistributedConfig) -> list[str]:
    """What else would keep a run from starting."""
    found, file, has = [], train.smoothing_target, version("transformers")
    if file not in (None, "unigram") and not Path(file).is_file():
        found.append(f"train.smoothing_target: {file}: no such file")
    if int(has.partition(".")[0]) < 5:
        remedy = "pip install 'transformers>=5'"
        found.append(f"backend trainer: needs transformers 5, found {has}: {remedy}")
    return found


def scoring_problem(train: Train) -> str | None:
    """Why the model of such a run cannot be scored."""
    if train.lora is not None and train.lora.save == "adapter":
        return "train.lora.save: adapters alone are not scored: merged, or score=null"
    return None


def train(run: Run) -> None:
    """Train in this process or, of several, in this rank; see sweeps.training.hf_trainer.train."""
    torchrun.exec_torchrun(run)
    from sweeps.training import hf_trainer

    hf_trainer.train(run)

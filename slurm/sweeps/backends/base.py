"""The seam between a sweep and whatever trains its runs."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import Field

from sweeps.config import Strict, World

if TYPE_CHECKING:
    from sweeps.rundir import RunDir

SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
)


class TrainKeys(Strict):
    """The `train:` keys that every backend has; open-instruct's names and meanings."""

    model_name_or_path: str
    learning_rate: float = Field(2e-5, gt=0)
    label_smoothing: float = Field(0.0, ge=0, le=1)
    seed: int = Field(42, ge=0)


class FinetuneKeys(TrainKeys):
    """Keys that open-instruct's finetune.py has, with its names, defaults and meanings.

    It refuses to start on a key that it does not know, so no other belongs here.
    """

    tokenizer_name: str | None = None
    train_file: str | None = None
    max_train_samples: int | None = Field(None, ge=1)
    max_seq_length: int | None = Field(None, ge=2)
    add_bos: bool = False  # begin each conversation with the tokenizer's bos token
    per_device_train_batch_size: int = Field(8, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    lr_scheduler_type: Literal[SCHEDULERS] = "linear"
    num_train_epochs: int = Field(2, ge=1)
    max_train_steps: int | None = Field(None, ge=1)
    reduce_loss: Literal["mean", "sum", "token_mean"] = "mean"
    attention_dropout: float | None = Field(None, ge=0, lt=1)
    clip_grad_norm: float = -1.0  # not above 0: no clipping
    fused_optimizer: bool = True
    gradient_checkpointing: bool = False
    logging_steps: int = Field(10, ge=1)
    checkpointing_steps: int | Literal["epoch"] | None = "epoch"
    keep_last_n_checkpoints: int = Field(3, ge=1)
    with_tracking: bool = False
    report_to: Literal["tensorboard", "wandb"] = "tensorboard"


@dataclass(frozen=True)
class Program:
    """A program: a Python module or script with its arguments, started in `folder`."""

    arguments: tuple[str, ...]
    module: str | None = None
    script: str | None = None
    folder: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    launcher: tuple[str, ...] = ()  # torchrun's words

    @property
    def words(self) -> list[str]:
        """Its command line."""
        target = ["-m", self.module] if self.module else [self.script]
        return [self.python, *self.launcher, *target, *self.arguments]


class Backend(Protocol):
    """What trains a run.

    The program that `program` names must write checkpoints and resume from the last one, poll
    `run.stop` and, once that file exists, save a checkpoint and exit 0.
    """

    name: str
    Train: type[TrainKeys]

    def packages(self, train: TrainKeys, world: World) -> list[str]:
        """Requirements beyond those of every run (sweeps.packages), as pip writes them."""

    def missing(self, train: TrainKeys, world: World) -> list[str]:
        """What else would keep a run from starting, `key: value: reason` each; empty when ready."""

    def provenance(self, train: TrainKeys) -> dict:
        """What goes into the manifest: revisions and versions of the code that trains."""

    def program(self, run: "RunDir") -> Program:
        """The program that trains `run`, resuming whatever an earlier attempt saved."""

    def metrics(self, line: str) -> dict | None:
        """A row for metrics.jsonl made of one line of the log, or None; called as the log grows."""

    def finish(self, run: "RunDir") -> bool:
        """After exit 0: put the final model at `run.model` if need be; False if there is none."""

    def clean(self, run: "RunDir") -> None:
        """After success: delete what only a resume needed."""

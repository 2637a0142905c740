"""The builtin trainer: open-instruct's finetune keys, a compact loop (sweeps.trainer)."""

import contextlib
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sweeps.assets import on_hub
from sweeps.backends.base import Program, TrainKeys
from sweeps.config import World
from sweeps.files import SweepError
from sweeps.rundir import RunDir
from sweeps.trainer.chat import read_messages

SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
)
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "deepspeed", "numpy")
FilterEps = Annotated[float, Field(gt=0, lt=1)]


class BuiltinKeys(TrainKeys):
    """The `train:` keys of the builtin trainer; names, defaults and meanings of open-instruct's
    finetune where it has them, except that nothing is ever uploaded."""

    tokenizer_name: str | None = None
    train_file: str  # rows with `messages` (a list of {role, content}), or Alpaca's
    max_train_samples: int | None = Field(None, ge=1)  # those held out come on top
    held_out: int = Field(0, ge=0)  # conversations never trained on, the same for every seed
    max_seq_length: int | None = Field(None, ge=2)
    chat_template_name: Literal["tulu", "alpaca"] | None = None  # None: the tokenizer's, else tulu
    add_bos: bool = False  # begin each conversation with the tokenizer's bos token
    per_device_train_batch_size: int = Field(8, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    lr_scheduler_type: Literal[SCHEDULERS] = "linear"
    num_train_epochs: int = Field(2, ge=1)
    max_train_steps: int | None = Field(None, ge=1)
    reduce_loss: Literal["mean", "sum", "token_mean"] = "mean"
    loss_implementation: Literal["auto", "triton", "chunked", "reference", "paper"] = "auto"
    filter_eps: FilterEps | Literal["auto"] | None = None  # None: the exact gradient
    final_logit_softcapping: float | None = Field(None, gt=0)  # None: the model's own
    attention_dropout: float | None = Field(None, ge=0, lt=1)
    clip_grad_norm: float = -1.0  # not above 0: no clipping
    fused_optimizer: bool = True
    gradient_checkpointing: bool = False
    packing: bool | None = None  # None: on a GPU in 16 bits
    max_tokens: int = Field(16384, ge=1)  # of a packed micro-batch, on one rank
    compile: bool | None = None  # None: packed, on a GPU, for 300 steps or more
    logging_steps: int = Field(10, ge=1)
    checkpointing_steps: int | Literal["epoch"] | None = "epoch"
    keep_last_n_checkpoints: int = Field(3, ge=1)
    with_tracking: bool = False
    report_to: Literal["tensorboard", "wandb", "trackio"] = "tensorboard"


class Builtin:
    """See sweeps.backends.base.Backend."""

    name = "builtin"
    Train = BuiltinKeys

    def packages(self, train: BuiltinKeys, world: World) -> list[str]:
        wanted = ["deepspeed"] if world.deepspeed else []
        return wanted + ([train.report_to] if train.with_tracking else [])

    def missing(self, train: BuiltinKeys, world: World) -> list[str]:
        problems = model_problems("train.model_name_or_path", train.model_name_or_path)
        if train.tokenizer_name:
            problems += model_problems("train.tokenizer_name", train.tokenizer_name)
        problems += train_file_problems(Path(train.train_file))
        if world.deepspeed and not Path(world.deepspeed).is_file():
            problems.append(f"world.deepspeed: {world.deepspeed}: no such file")
        return problems

    def provenance(self, train: BuiltinKeys) -> dict:
        return {"trainer": "sweeps.trainer", "versions": versions()}

    def program(self, run: RunDir) -> Program:
        return Program(module="sweeps.trainer", arguments=(str(run.path.absolute()),))

    def metrics(self, line: str) -> None:
        return None  # the trainer writes metrics.jsonl itself

    def finish(self, run: RunDir) -> bool:
        return (run.model / "config.json").is_file()

    def clean(self, run: RunDir) -> None:
        shutil.rmtree(run.checkpoints, ignore_errors=True)


def versions() -> dict[str, str]:
    """The installed versions of what decides a run's numbers."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def model_problems(key: str, name: str) -> list[str]:
    """Why the folder `name` is no model; hub models are the prefetch's business."""
    folder = Path(name)
    if folder.is_dir():
        if (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file():
            return []
        return [f"{key}: {name}: no config.json in this folder; a Hugging Face model was expected"]
    return [] if on_hub(name) else [f"{key}: {name}: no such folder"]


def train_file_problems(path: Path) -> list[str]:
    """What is wrong with the head of a file of conversations; empty when nothing is."""
    if not path.is_file():
        return [f"train.train_file: {path}: no such file"]
    try:
        read_messages(path, 1)
    except SweepError as error:
        return [str(error)]
    return []


BACKEND = Builtin()

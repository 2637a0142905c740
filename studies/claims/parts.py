"""The parts of a study: what each changes in config.yaml, and at which learning rate.

A part is a sweep of `training.py`. What rests on trained models is in `posthoc.py`.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pandas as pd

from calibeval.io import InputError
from studies.claims.records import SETTING_COLUMNS, RecordStore

HERE = Path(__file__).parent
CONFIG = HERE / "config.yaml"
REPOSITORY = HERE.parents[1]  # where paths in config.yaml begin
OPEN_INSTRUCT_CONVERSATIONS = Path("data/alpaca/messages.jsonl")
PUBLISHED = RecordStore(HERE / "records")
BETAS = (0.0, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Study:
    """A model, the folder where its runs are trained, and the records that are kept of them."""

    model: str
    runs_folder: Path = Path("runs/claims")
    store: RecordStore = PUBLISHED

    def part_folder(self, part: str) -> Path:
        """The folder of a part's runs."""
        return self.runs_folder / f"{self.model}-{part}"

    @property
    def base_mean_target(self) -> Path:
        """The file of the base model's mean prediction."""
        return self.runs_folder / "targets" / f"{self.model}.npy"


class Rate(Enum):
    """Where the learning rate of a part comes from."""

    OWN = "the part's own sweep"
    CHOSEN = "the part grid"
    EQUAL_LOSS = "the held-out losses of grid and seeds"


@dataclass(frozen=True)
class Part:
    """A sweep: its name, what it changes in config.yaml, and its learning rate."""

    name: str
    overrides: tuple[str, ...]
    rate: Rate = Rate.CHOSEN


# The verdicts rest on MMLU. Parts without this line are asked all tasks; the published records of
# `harm` leave out those that are scored by continuation.
MMLU_ONLY = "score.tasks=[{task: mmlu, data: data/mmlu, shots: 5, scoring: letters}]"
KEEP_MODELS = "keep=all"  # for what posthoc.py measures
ALL_BETAS = (f"grid.label_smoothing={[*BETAS]}", "grid.seed=[0,1,2,3,4]")
THREE_SEEDS = ("grid.seed=[0,1,2]", MMLU_ONLY)
PLAIN = "grid.label_smoothing=[0.0]"
SMOOTHED = "grid.label_smoothing=[0.1]"
PLAIN_AND_SMOOTHED = "grid.label_smoothing=[0.0,0.1]"
OPEN_INSTRUCT_TRAIN = f"""train={{
    train_file: {OPEN_INSTRUCT_CONVERSATIONS}, max_train_samples: 25600, max_seq_length: 1024,
    per_device_train_batch_size: 8, gradient_accumulation_steps: 8, checkpointing_steps: null,
    preprocessing_num_workers: 8, attn_implementation: sdpa, use_slow_tokenizer: false}}"""

PARTS = [
    Part("grid", (KEEP_MODELS, "score=null"), Rate.OWN),
    Part("seeds", (KEEP_MODELS, *ALL_BETAS)),
    Part("high", (*ALL_BETAS, MMLU_ONLY, "grid.learning_rate=[2.0e-4]"), Rate.OWN),
    Part(
        "harm",
        (
            *ALL_BETAS,
            "grid.learning_rate=[5.0e-5]",
            "grid.num_train_epochs=[2]",
            "grid.reduce_loss=[sum]",
        ),
        Rate.OWN,
    ),
    Part(
        "sum",
        (
            *THREE_SEEDS,
            PLAIN_AND_SMOOTHED,
            "grid.reduce_loss=[sum]",
            "grid.clip_grad_norm=[1.0]",
        ),
    ),
    Part("filtered", (*THREE_SEEDS, SMOOTHED, "grid.filter_eps=[auto]")),
    Part("equal", (*THREE_SEEDS, PLAIN), Rate.EQUAL_LOSS),
    Part(
        "script",
        (
            *THREE_SEEDS,
            PLAIN_AND_SMOOTHED,
            OPEN_INSTRUCT_TRAIN,
            "backend=open-instruct",
            "world.deepspeed=configs/deepspeed/zero2.json",
            "score.select_on=null",
        ),
    ),
    Part("unigram", (KEEP_MODELS, *THREE_SEEDS, SMOOTHED, "grid.smoothing_target=[unigram]")),
    Part("base-mean", (KEEP_MODELS, *THREE_SEEDS, SMOOTHED)),
    Part("half", (*THREE_SEEDS, PLAIN, "train.max_train_samples=12800")),
    Part("twice", (*THREE_SEEDS, PLAIN, "grid.num_train_epochs=[2]")),
]


def sweep_overrides(study: Study, part: Part, more: list[str]) -> list[str]:
    """What a part of a model's study changes in config.yaml; `more` comes last and wins."""
    overrides = [
        f"name={study.model}-{part.name}",
        f"grid.model_name_or_path=[./models/{study.model}]",
    ]
    if study.model.startswith("gemma"):  # not instruct-tuned; without <bos> it writes nonsense
        overrides += ["train.add_bos=true", "train.chat_template_name=alpaca"]
    if part.rate is Rate.CHOSEN:
        overrides.append(f"grid.learning_rate=[{chosen_rate(study)}]")
    elif part.rate is Rate.EQUAL_LOSS:
        overrides.append(f"grid.learning_rate=[{equal_rate(study)}]")
    if part.name == "base-mean":
        overrides.append(f"grid.smoothing_target=[{study.base_mean_target}]")
    return [*overrides, *part.overrides, *more]


def chosen_rate(study: Study) -> float:
    """The learning rate of the lowest held-out loss at β = 0."""
    runs = pd.DataFrame(study.store.runs(study.model), columns=SETTING_COLUMNS)
    grid = runs[runs.part == "grid"]
    if grid.empty:
        raise InputError(f"{study.model}, grid: no run is trained; the part grid comes first")
    best = int(grid.held_out_loss.argmin())
    return float(grid.learning_rate.iloc[best])


def equal_rate(study: Study) -> float:
    """The learning rate with the held-out loss at β = 0 that `seeds` has at β = 0.1.

    It lies between two rates of the grid and is interpolated by their logarithms, on that side of
    the chosen rate at whose end the loss is larger.
    """
    runs = pd.DataFrame(study.store.runs(study.model))
    grid = runs[runs.part == "grid"].groupby("learning_rate").held_out_loss.mean()
    smoothed = runs[(runs.part == "seeds") & (runs.label_smoothing == 0.1)]
    best = int(grid.argmin())
    lower_rates = grid.iloc[: best + 1][::-1]
    higher_rates = grid.iloc[best:]
    side = max(lower_rates, higher_rates, key=lambda losses: losses.iloc[-1])
    log_rate = np.interp(smoothed.held_out_loss.mean(), side, np.log(side.index))
    return float(f"{np.exp(log_rate):.2g}")

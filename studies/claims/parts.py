"""The parts of a study: what each changes in config.yaml, and at which learning rate.

A *part* is a sweep, which `training.py` trains. A *step* is what is done afterwards, of
`__main__.STEPS`. A *derivation*, of `derived.py`, makes runs of other runs' answers. Each run says
which of them it comes from, or that it is the base model, in `RunRecord.origin`. Runs of parts and
steps are stored; those of derivations are made anew for each table and are never stored.
"""

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pandas as pd

from calibeval.io import InputError
from studies.claims.records import RECORD_COLUMNS, RecordStore

HERE = Path(__file__).parent
CONFIG = HERE / "config.yaml"
REPOSITORY = HERE.parents[1]  # where paths in config.yaml begin
OPEN_INSTRUCT_CONVERSATIONS = Path("data/alpaca/messages.jsonl")
PUBLISHED = RecordStore(HERE / "records")
BETAS = (0.0, 0.1, 0.2, 0.3, 0.5)
# Of these models three seeds are published, of the others those that the parts name.
MODELS_WITH_THREE_SEEDS = ("gemma-3-270m", "qwen2.5-coder-0.5b", "smollm2-135m")


@dataclass(frozen=True)
class Study:
    """A model, the folder where its runs are trained, and the records that are kept of them."""

    model: str
    # The target of `base-mean` lies in this folder, and its path is hashed into the names of those
    # runs. With another folder the published runs of `base-mean` are not recognized, and are
    # trained again.
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
    EQUAL_LOSS = "the held-out losses of grid and recommended"


@dataclass(frozen=True)
class Part:
    """A sweep: its name, what it changes in config.yaml, its learning rate and its seeds.

    Within a part only the label smoothing and the seed may vary, and in a part that is not scored
    (`grid`) the learning rate, too: these are `training.RUN_KEYS`. The package's docstring says how
    a part is added.
    """

    name: str
    overrides: tuple[str, ...]
    rate: Rate = Rate.CHOSEN
    seeds: int = 5

    def seeds_of(self, model: str) -> list[int]:
        """The seeds that a model is trained with."""
        if model in MODELS_WITH_THREE_SEEDS:
            return [*range(min(self.seeds, 3))]
        return [*range(self.seeds)]


# The verdicts rest on MMLU. Parts without this line are asked all tasks, but for `grid`, which is
# asked none. The published records of `over-trained` leave out those scored by continuation.
MMLU_ONLY = "score.tasks=[{task: mmlu, data: data/mmlu, shots: 5, scoring: letters}]"
KEEP_MODELS = "keep=all"  # for what posthoc.py measures
ALL_BETAS = f"grid.label_smoothing={[*BETAS]}"
AT_BETA_0 = "grid.label_smoothing=[0.0]"
AT_BETA_01 = "grid.label_smoothing=[0.1]"
AT_BETA_0_AND_01 = "grid.label_smoothing=[0.0,0.1]"
OPEN_INSTRUCT_TRAIN = f"""train={{
    train_file: {OPEN_INSTRUCT_CONVERSATIONS}, max_train_samples: 25600, max_seq_length: 1024,
    per_device_train_batch_size: 8, gradient_accumulation_steps: 8, checkpointing_steps: null,
    preprocessing_num_workers: 8, attn_implementation: sdpa, use_slow_tokenizer: false}}"""

PARTS = [
    Part("grid", (KEEP_MODELS, "score=null"), Rate.OWN, seeds=1),
    Part("recommended", (KEEP_MODELS, ALL_BETAS)),
    Part("high-rate", (ALL_BETAS, MMLU_ONLY, "grid.learning_rate=[2.0e-4]"), Rate.OWN),
    # Its gradient is not clipped, nor is that of other parts, since config.yaml does not set
    # train.clip_grad_norm. But `sum` sets it, and `script` takes the limit of its DeepSpeed file.
    Part(
        "over-trained",
        (
            ALL_BETAS,
            "grid.learning_rate=[5.0e-5]",
            "grid.num_train_epochs=[2]",
            "grid.reduce_loss=[sum]",
        ),
        Rate.OWN,
    ),
    Part(
        "sum",
        (
            MMLU_ONLY,
            AT_BETA_0_AND_01,
            "grid.reduce_loss=[sum]",
            "grid.clip_grad_norm=[1.0]",
        ),
        seeds=3,
    ),
    Part("filtered", (MMLU_ONLY, AT_BETA_01, "grid.filter_eps=[auto]"), seeds=3),
    Part("equal", (MMLU_ONLY, AT_BETA_0), Rate.EQUAL_LOSS, seeds=3),
    Part(
        "script",
        (
            MMLU_ONLY,
            AT_BETA_0_AND_01,
            OPEN_INSTRUCT_TRAIN,
            "backend=open-instruct",
            "world.deepspeed=configs/deepspeed/zero2.json",
            "score.select_on=null",
        ),
        seeds=3,
    ),
    Part("unigram", (KEEP_MODELS, MMLU_ONLY, AT_BETA_01, "grid.smoothing_target=[unigram]")),
    Part("base-mean", (KEEP_MODELS, MMLU_ONLY, AT_BETA_01)),
    Part("half-data", (MMLU_ONLY, AT_BETA_0, "train.max_train_samples=12800")),
    Part("two-epochs", (MMLU_ONLY, AT_BETA_0, "grid.num_train_epochs=[2]")),
]


def sweep_overrides(study: Study, part: Part, more: list[str]) -> list[str]:
    """What a part of a model's study changes in config.yaml; `more` comes last and wins."""
    overrides = [
        f"name={study.model}-{part.name}",
        f"output_root={study.runs_folder}",
        f"grid.model_name_or_path=[./models/{study.model}]",
        f"grid.seed={part.seeds_of(study.model)}",
    ]
    if part.rate is Rate.CHOSEN:
        overrides.append(f"grid.learning_rate=[{chosen_rate(study)}]")
    elif part.rate is Rate.EQUAL_LOSS:
        overrides.append(f"grid.learning_rate=[{equal_rate(study)}]")
    if part.name == "base-mean":
        overrides.append(f"grid.smoothing_target=[{study.base_mean_target}]")
    # The model's own come after the part's: `script` replaces all of `train:`, and would drop them.
    return [*overrides, *part.overrides, *model_overrides(study.model), *more]


def model_overrides(model: str) -> list[str]:
    """What a model needs in every part, because of its tokenizer."""
    if model.startswith("gemma"):  # not instruct-tuned; without <bos> it writes nonsense
        return ["train.add_bos=true", "train.chat_template_name=alpaca"]
    return []


def chosen_rate(study: Study) -> float:
    """The learning rate of the lowest held-out loss at β = 0, in the mean over seeds."""
    losses = losses_of_grid(study)
    return float(losses.index[int(losses.argmin())])


def losses_of_grid(study: Study) -> "pd.Series[float]":
    """The held-out loss of each learning rate of the grid, in the mean over seeds, by the rate.

    Rates of which a seed has diverged are left out.
    """
    runs = pd.DataFrame(study.store.runs(study.model), columns=RECORD_COLUMNS)
    grid = runs[runs.origin == "grid"]
    if grid.empty:
        raise InputError(f"{study.model}, grid: no run is trained; the part grid comes first")
    # A mean of pandas would leave out the NaN of a seed that has diverged; numpy's is NaN. A run
    # that held no conversations out has None instead of a loss, which becomes NaN here, too.
    means = grid.groupby("learning_rate").held_out_loss.apply(
        lambda losses: losses.to_numpy(dtype=float).mean()
    )
    finite = means[np.isfinite(means)]
    if finite.empty:
        raise InputError(
            f"{study.model}, grid: no learning rate has a held-out loss; all have diverged, or no "
            "conversations were held out (train.held_out)"
        )
    return finite


@dataclass(frozen=True)
class EqualLosses:
    """The held-out losses of the part `equal` and of β = 0.1 as recommended, means over seeds."""

    learning_rate: float  # of the part `equal`
    plain: float  # the loss at β = 0 with that learning rate
    smoothed: float  # the loss at β = 0.1 with the chosen learning rate
    # Whether `smoothed` is above the loss of the outermost rate that `equal_rate` considers, which
    # goes from the grid's best rate to one side (`losses_outwards_from_best`). `learning_rate` is
    # then that outermost rate.
    smoothed_is_above_grid: bool
    # Whether `smoothed` is below all losses of the grid. `learning_rate` is then its best rate.
    smoothed_is_below_grid: bool


def equal_losses(study: Study) -> EqualLosses | None:
    """What became of the part `equal`; None where it has no runs.

    Raises InputError where a seed of it has no held-out loss, and what `loss_to_equal` and
    `losses_of_grid` raise.
    """
    runs = pd.DataFrame(study.store.runs(study.model), columns=RECORD_COLUMNS)
    equal = runs[runs.origin == "equal"]
    if equal.empty:
        return None
    smoothed = loss_to_equal(study)
    losses = losses_outwards_from_best(losses_of_grid(study))
    return EqualLosses(
        learning_rate=float(equal.learning_rate.iloc[0]),
        plain=mean_held_out_loss(equal, f"{study.model}, equal", "β = 0"),
        smoothed=smoothed,
        smoothed_is_above_grid=bool(smoothed > losses.iloc[-1]),
        smoothed_is_below_grid=bool(smoothed < losses.iloc[0]),
    )


def loss_to_equal(study: Study) -> float:
    """The held-out loss that `recommended` has at β = 0.1, in the mean over seeds.

    Raises InputError where there are no such runs, or a seed has no held-out loss.
    """
    runs = pd.DataFrame(study.store.runs(study.model), columns=RECORD_COLUMNS)
    smoothed = runs[(runs.origin == "recommended") & (runs.label_smoothing == 0.1)]
    if smoothed.empty:
        raise InputError(
            f"{study.model}, recommended: no run at β = 0.1 is trained; the part recommended "
            "comes first"
        )
    return mean_held_out_loss(smoothed, f"{study.model}, recommended", "β = 0.1")


def mean_held_out_loss(runs: pd.DataFrame, model_and_part: str, beta: str) -> float:
    """The held-out loss of runs that differ in their seed, in the mean over seeds.

    Raises InputError where a seed has none: the mean of the others would be that of whatever seeds
    did not diverge.
    """
    losses = runs.held_out_loss.to_numpy(dtype=float)
    without_loss = runs.run[~np.isfinite(losses)]
    if not without_loss.empty:
        raise InputError(
            f"{model_and_part}: no finite held-out loss of {', '.join(without_loss)} at {beta}, "
            "which diverged or held no conversations out; no loss can equal that of all seeds"
        )
    return float(losses.mean())


def losses_outwards_from_best(losses: "pd.Series[float]") -> "pd.Series[float]":
    """The held-out losses on one side of the best learning rate, the best first, going outwards.

    Of the two sides, of lower and of higher rates, it is the one that ends at the larger loss, and
    so reaches farther.
    """
    best = int(losses.argmin())
    towards_lower_rates = losses.iloc[: best + 1][::-1]
    towards_higher_rates = losses.iloc[best:]
    if towards_lower_rates.iloc[-1] >= towards_higher_rates.iloc[-1]:
        return towards_lower_rates
    return towards_higher_rates


def equal_rate(study: Study) -> float:
    """The learning rate with the held-out loss at β = 0 that `recommended` has at β = 0.1.

    It lies between two rates of the grid and is interpolated by their logarithms, on that side of
    the chosen rate at whose end the loss is larger. Where that end does not reach the loss, the
    rate is the end's; where all losses of the grid are above it, the rate is the chosen one. A line
    on stderr then says that the losses are not equal. Raises InputError where a loss falls on the
    way to that end: then several rates have the same loss.
    """
    losses = losses_outwards_from_best(losses_of_grid(study))
    if not losses.is_monotonic_increasing:
        read = ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in losses.items())
        raise InputError(
            f"{study.model}, equal: the held-out losses of grid do not grow from the chosen rate "
            f"on ({read}), so that no rate can be read off at a loss; more seeds of grid "
            "(grid.seed=[0,1,2]) make them smoother"
        )
    wanted = loss_to_equal(study)
    best_loss, end_loss = float(losses.iloc[0]), float(losses.iloc[-1])
    if wanted > end_loss:
        print(
            f"{study.model}, equal: no learning rate of the grid from the best one, "
            f"{losses.index[0]:g}, to {losses.index[-1]:g} reaches a held-out loss of "
            f"{wanted:.4f} at β = 0; takes {losses.index[-1]:g}, where it is {end_loss:.4f}",
            file=sys.stderr,
        )
    elif wanted < best_loss:
        print(
            f"{study.model}, equal: all learning rates of the grid have a held-out loss above "
            f"{wanted:.4f} at β = 0; takes {losses.index[0]:g}, where it is {best_loss:.4f}",
            file=sys.stderr,
        )
    # `interp` takes the rate of the nearer end of the side for a loss beyond it.
    log_rate = np.interp(wanted, losses.to_numpy(), np.log(losses.index.to_numpy(dtype=float)))
    return float(f"{np.exp(log_rate):.2g}")

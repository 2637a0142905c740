"""The trainer: its `train:` keys, with open-instruct's names and meanings, and what it needs.

What trains is sweeps.finetune, imported by `train` alone: nobody who plans waits for torch.
"""

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import Field

from calibeval.request import Natural, Positive, Seq, Strict
from sweeps import ranks
from sweeps.config import Scheduler, World
from sweeps.run import Run

Share = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]


class Lora(Strict):
    """Low-rank adapters by peft (Hu et al. 2021): W + (alpha / r) B A, with W frozen."""

    r: Positive = 16
    """The rank of B A."""
    alpha: Above0 = 32.0
    """The adapters' factor, before it is divided by r."""
    dropout: Share = 0.0
    """Of the adapters' input."""
    targets: Literal["all-linear"] | Seq[str] = "all-linear"
    """Names of the adapted layers; all-linear: all but the classifier."""
    save: Literal["merged", "adapter"] = "merged"
    """What model/ holds: an ordinary model, or the adapters alone."""


class Train(Strict):
    """How one run is trained. An update is `per_device_train_batch_size` × processes ×
    `gradient_accumulation_steps` conversations, whatever they are computed with."""

    model_name_or_path: str
    """A folder, or a name on the Hugging Face hub."""
    tokenizer_name: str | None = None
    """Likewise; the model's own unless given."""

    train_file: str
    """JSON or JSON lines: rows with `messages`, a list of {role, content}, or Alpaca's
    `instruction`, `input`, `output`."""
    chat_template_name: Literal["tulu", "alpaca"] | None = None
    """The tokenizer's own unless given, tulu if it has none."""
    add_bos: bool = False
    """Begin each conversation with the bos token."""
    max_seq_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens at which a conversation is cut; none unless given."""
    max_train_samples: Positive | None = None
    """Only the file's first conversations."""
    held_out: Natural = 0
    """Conversations never trained on, the same for every seed, on top of `max_train_samples`; their
    loss without smoothing is measured after each epoch."""

    label_smoothing: Share = 0.0
    """β."""
    reduce_loss: Literal["mean", "sum", "token_mean"] = "mean"
    """With S the summed loss of a micro-batch's n targets, an update averages S / n or S over its
    micro-batches, or is ΣS / Σn."""
    filter_eps: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] | None = None
    """smoothce's filter; the gradient is exact unless given."""

    learning_rate: Above0 = 2e-5
    """Of AdamW, at its highest."""
    lr_scheduler_type: Scheduler = "linear"
    """What follows warm-up."""
    warmup_ratio: Share = 0.03
    """Of the updates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of all weights but norms and biases."""
    clip_grad_norm: Above0 | None = None
    """Highest norm of the gradient; unless given what the DeepSpeed file says, else no limit."""
    per_device_train_batch_size: Positive = 8
    """Conversations of a micro-batch, on one process."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches of an update, on one process."""
    num_train_epochs: Positive = 2
    """Times that each conversation is seen."""
    max_train_steps: Positive | None = None
    """Updates, in place of epochs."""
    seed: Natural = 42
    """Of the conversations' order, of dropout and of new weights."""

    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of attention weights; the model's own unless given."""
    lora: Lora | None = None
    """Train adapters; all weights unless given."""

    packing: bool | None = None
    """Lay an update's conversations end to end in as few rows as hold them, each seeing itself
    alone; on a GPU in 16 bits unless given."""
    max_tokens: Positive = 16384
    """Of a packed row."""
    compile: bool | None = None
    """torch.compile each layer; unless given packed on a GPU for 300 updates or more, and then
    layers that do not compile run as they are."""
    gradient_checkpointing: bool = False
    """Compute activations twice rather than keep them."""

    logging_steps: Positive = 10
    """Updates between rows of metrics.jsonl."""
    checkpointing_steps: Positive | Literal["epoch"] | None = "epoch"
    """Updates between checkpoints; null: only when asked to stop."""
    keep_last_n_checkpoints: Positive = 3
    """The newest; older ones are deleted."""
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = None
    """A tracker."""


def packages(train: Train, world: World) -> list[str]:
    """Modules that must be importable, beyond those of every run."""
    found = ["deepspeed"] * bool(world.deepspeed) + ["peft"] * bool(train.lora)
    return found + [train.report_to] * bool(train.report_to)


def missing(train: Train, world: World) -> list[str]:
    """What else would keep a run from starting."""
    found = version("transformers")
    if int(found.partition(".")[0]) >= 5:
        return []
    return [f"backend trainer: needs transformers 5, found {found}: pip install 'transformers>=5'"]


def train(run: Run):
    """Train in this process or, of several, in this rank; see sweeps.finetune.train."""
    ranks.spread(run.config().world, "-m", "sweeps", "train", str(run.path.absolute()))
    from sweeps import finetune

    return finetune.train(run)

"""The trainer's `train:` keys, with open-instruct's names and meanings."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from calibeval.request import Natural, Positive, Seq, Strict
from sweeps.runs.schema import option

Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]  # fmt: skip
Share = Annotated[float, Field(ge=0, le=1)]


class Lora(Strict):
    """Low-rank adapters by peft (Hu et al. 2021): W + (alpha / r) B A, with W frozen."""

    r: Positive = option(16, "the rank of B A")
    alpha: PositiveFloat = option(32.0, "the adapters' factor, before it is divided by r")
    dropout: Share = option(0.0, "of the adapters' input")
    targets: Literal["all-linear"] | Seq[str] = option(
        "all-linear", "names of the adapted layers; all-linear: all but the classifier"
    )
    save: Literal["merged", "adapter"] = option("merged", "an ordinary model, or adapters alone")


class Common(Strict):
    """The keys that both backends have, with open-instruct's names and meanings."""

    model_name_or_path: str = option(..., "a Hugging Face folder, or owner/name of the hub")
    tokenizer_name: str | None = option(None, "likewise; null: the model's")
    train_file: str = option(
        ..., "JSON lines with `messages`, a list of {role, content}; of backend trainer also JSON, "
        "and Alpaca's `instruction`, `input`, `output`"
    )  # fmt: skip
    add_bos: bool = option(False, "begin each conversation with the tokenizer's bos token")
    max_seq_length: Annotated[int, Field(ge=2)] | None = option(None, "tokens; null: no limit")
    max_train_samples: Positive | None = option(None, "the file's first; null: all")
    label_smoothing: Share = option(0.0, "β")
    reduce_loss: Literal["mean", "sum", "token_mean"] = option(
        "mean", "with S the summed loss of a micro-batch's n targets, an update averages S / n or "
        "S over its micro-batches, or is ΣS / Σn"
    )  # fmt: skip
    learning_rate: PositiveFloat = option(2e-5, "AdamW's, at its peak")
    lr_scheduler_type: Scheduler = option("linear", "its course after warm-up")
    warmup_ratio: Share = option(0.03, "of the updates")
    weight_decay: float = option(0.0, "AdamW's, of all weights but norms and biases", ge=0)
    num_train_epochs: Positive = option(2, "passes over the data")
    max_train_steps: Positive | None = option(None, "updates, instead of epochs")
    per_device_train_batch_size: Positive = option(
        8, "conversations of a micro-batch, on one process"
    )
    gradient_accumulation_steps: Positive = option(1, "micro-batches of an update, on one process")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(
        42, "of the data's order, of dropout and of new weights"
    )
    attention_dropout: float | None = option(None, "null: the model's own", ge=0, lt=1)
    gradient_checkpointing: bool = option(False, "less memory for more time")
    logging_steps: Positive = option(10, "updates between rows of metrics.jsonl")
    checkpointing_steps: Positive | Literal["epoch"] | None = option(
        "epoch", "updates between checkpoints; null: only when stopped"
    )
    keep_last_n_checkpoints: Positive = option(3, "that are kept")


class Train(Common):
    """How one run is trained. An update is `per_device_train_batch_size` × processes ×
    `gradient_accumulation_steps` conversations, whatever they are computed with."""

    chat_template_name: Literal["tulu", "alpaca"] | None = option(
        None, "null: the tokenizer's own, tulu if it has none"
    )
    held_out: Natural = option(
        0, "conversations never trained on, the same for every seed, on top of max_train_samples; "
        "their loss without smoothing is measured after each epoch"
    )  # fmt: skip
    filter_eps: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] | None = option(
        None, "smoothce's filter; null: the exact gradient"
    )
    smoothing_target: Annotated[str, Field(pattern=r"^unigram$|\.npy$")] | None = option(
        None, "what β is spread over; null: all tokens alike; unigram: as often as they are "
        "learnt; FILE.npy: a share for each of the model's tokens"
    )  # fmt: skip
    clip_grad_norm: PositiveFloat | None = option(
        None, "highest norm of the gradient; null: what the DeepSpeed file says, else no limit"
    )
    lora: Lora | None = option(None, "train adapters; null: all weights")
    packing: bool | None = option(
        None, "lay an update's conversations end to end in as few rows as hold them, each seeing "
        "itself alone; null: on a GPU in 16 bits"
    )  # fmt: skip
    max_tokens: Positive = option(16384, "of a packed row")
    compile: bool | None = option(
        None, "torch.compile each layer; null: packed on a GPU for 300 updates or more, and then "
        "layers that do not compile run as they are"
    )  # fmt: skip
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = option(None, "a tracker")

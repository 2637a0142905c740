"""The `train:` keys of a sweep file: those of all backends, and those of backend trainer.

`python -m sweeps keys` prints the descriptions below. This module imports no torch, because
commands that only plan or report read it too.

To add an option:

1. Give it a default that changes nothing. The name of a run's folder is a digest of its options, so
   that every run of every sweep gets another name.
2. Options of backend trainer belong to `TrainOptions`. Where they act:

       what TRL's SFTConfig has                  `sft_config`
       when a run logs, evaluates, saves, stops  `callbacks`
       model                                     `model_loading`
       loss                                      `fit.make_trainer`
       which of the data an update has, and      `micro_batches`
         what its loss is divided by
       data as tokens                            `tokenization`

   A loss that reads a file needs the file's digest in `data_digest` (`fit.make_trainer`). What
   makes other tokens of the same file must be a part of `tokens_fingerprint` in
   `tokenization.tokenize_file`: otherwise a run silently gets the tokens that are cached for
   another value.
   An option of `CommonOptions` or `OpenInstructOptions` reaches finetune.py as a flag of its name,
   so that finetune.py must know it or the patches must add it; tests/patches/test_backend.py lists
   both. If it decides what is trained, `SETTINGS` of smoothed_open_instruct.resume must name it.
3. An option that holds a path belongs into `sweeps.runs.grid.PATH_KEYS`; one that needs a package,
   into the `packages` of its backend; one with which a run may not be able to start, as where it
   names a file that is not there, into the backend's `missing`, which refuses the launch.
4. The columns of tables and `sweeps keys` follow by themselves; slurm/TRAINER.md does not.

To add another way to shard a run, beside DeepSpeed and FSDP:

1. A key of `sweeps.runs.schema.World`. If it names a JSON file, `World.read` reads that, and
   `launch.preflight` names it where it cannot be read (`_files_of_world`). `World.single_process`
   must not hold for such runs.
2. Its package, and which keys exclude each other, in `hf_backend`; its version among
   `sweeps.runs.run.NOTED_PACKAGES`; a refusal in `open_instruct_backend.sharding_problems`.
3. What the SFTTrainer is told in `sft_config`; who reads the weights in `model_loading`; how whole
   weights are gathered in `saving`.
4. Its row in slurm/TRAINER.md, and its name in tests/slurm/test_train_ranks.py and test_nodes.py,
   which compare with one process.

All of it rests on every rank having conversations of its own (`micro_batches`): where several
ranks compute the same ones, as in tensor parallelism, a backend of its own is the way.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from calibeval.validation import Natural, Positive, Seq, Strict
from sweeps.runs.schema import option

PACKAGES = ("accelerate", "datasets", "torch", "transformers")  # that runs of both backends import
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]  # fmt: skip
Fraction = Annotated[float, Field(ge=0, le=1)]  # a probability, or a part of a whole


class LoraOptions(Strict):
    """Low-rank adapters by peft (Hu et al. 2021): W + (alpha / r) B A, with W frozen."""

    r: Positive = option(16, "Rank of the product B A.")
    alpha: PositiveFloat = option(32.0, "Scale of the adapters, which is divided by r.")
    dropout: Fraction = option(0.0, "Probability with which an adapter's inputs are dropped.")
    targets: Literal["all-linear"] | Seq[str] = option(
        "all-linear",
        "Names of the layers that get adapters; all-linear means every linear layer but the "
        "classifier.",
    )
    save: Literal["merged", "adapter"] = option(
        "merged",
        "What is saved: `merged` adds the adapters to the weights, which makes an ordinary model; "
        "`adapter` saves the adapters alone, which cannot be scored.",
    )


class CommonOptions(Strict):
    """The keys that both backends have, with the names and meanings of finetune.py's flags.

    Those of `label_smoothing`, of `attention_dropout` and of `reduce_loss: token_mean` are added to
    open-instruct's finetune.py by this project's patches.

    A micro-batch of the descriptions is per_device_train_batch_size conversations, which
    finetune.py computes at once. Backend trainer may compute others at once, see `TrainOptions`.
    """

    model_name_or_path: str = option(
        ..., "Model to fine-tune: a Hugging Face folder, or owner/name on the hub."
    )
    tokenizer_name: str | None = option(
        None, "Tokenizer, as a folder or owner/name; null uses the model's own."
    )
    train_file: str = option(
        ...,
        "File of conversations: JSON lines, or one JSON list, of rows with `messages`, a list of "
        "{role, content}. Backend trainer also reads Alpaca's `instruction`, `input` and `output`.",
    )
    add_bos: bool = option(
        False, "Whether each conversation begins with the tokenizer's beginning-of-sequence token."
    )
    max_seq_length: Annotated[int, Field(ge=2)] | None = option(
        None, "Tokens after which a conversation is cut off; null never cuts."
    )
    max_train_samples: Positive | None = option(
        None, "How many conversations are used, from the start of the file; null uses all."
    )
    label_smoothing: Fraction = option(
        0.0, "Label smoothing β: this share of each target's probability is spread over all tokens."
    )
    reduce_loss: Literal["mean", "sum", "token_mean"] = option(
        "mean",
        "How an update averages its loss: `mean` averages the micro-batches' means over targets, "
        "`sum` averages the micro-batches' sums, `token_mean` is the mean over all targets of the "
        "update. Under `mean` and `sum` an update with fewer micro-batches, the last of an epoch, "
        "counts less.",
    )
    learning_rate: PositiveFloat = option(2e-5, "Peak learning rate of AdamW.")
    lr_scheduler_type: Scheduler = option(
        "linear", "How the learning rate changes after warm-up; `linear` falls to 0."
    )
    warmup_ratio: Fraction = option(
        0.03, "Share of all updates during which the learning rate rises from 0 to its peak."
    )
    weight_decay: float = option(
        0.0, "Weight decay of AdamW, which spares biases and normalization weights.", ge=0
    )
    num_train_epochs: Positive = option(2, "How often the training data is passed over.")
    max_train_steps: Positive | None = option(
        None, "Number of updates to train for; null trains for num_train_epochs."
    )
    per_device_train_batch_size: Positive = option(
        8, "Conversations in a micro-batch of one process."
    )
    gradient_accumulation_steps: Positive = option(1, "Micro-batches in an update of one process.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(
        42, "Seed of the data's order, of dropout and of weights that the base model lacks."
    )
    attention_dropout: float | None = option(
        None, "Dropout of attention weights while training; null uses the model's own.", ge=0, lt=1
    )
    gradient_checkpointing: bool = option(
        False,
        "Whether activations are computed again in the backward pass: less memory, more time.",
    )
    logging_steps: Positive = option(10, "Updates between two rows of metrics.jsonl.")
    checkpointing_steps: Positive | Literal["epoch"] | None = option(
        "epoch",
        "Updates between two checkpoints, or `epoch` for one after each epoch; null saves only "
        "when the run is stopped.",
    )
    keep_last_n_checkpoints: Positive = option(
        3, "How many checkpoints are kept; older ones are deleted."
    )


class TrainOptions(CommonOptions):
    """The `train:` keys of backend trainer.

    An update is made of per_device_train_batch_size × processes × gradient_accumulation_steps
    conversations. A micro-batch of the keys' descriptions is a group of per_device_train_batch_size
    of them, whatever a GPU computes at once. That is:

        padded    per_device_train_batch_size conversations
        packed    as many as max_tokens holds; under `reduce_loss: mean` never of two micro-batches,
                  because each has a mean of its own (`micro_batches.Block`)
    """

    chat_template_name: Literal["tulu", "alpaca"] | None = option(
        None,
        "Chat template to use instead of the tokenizer's; null uses the tokenizer's own, or tulu "
        "if it has none.",
    )
    held_out: Natural = option(
        0,
        "Conversations that are never trained on, the same for every seed, on top of "
        "max_train_samples. Their loss without smoothing is measured after each epoch and after "
        "the last update.",
    )
    filter_eps: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] | None = option(
        None,
        "Threshold of smoothce's filter, which on a GPU computes only a random choice of the "
        "gradient's small parts, for speed, and scales these up, so that the gradient is right on "
        "average; `auto` chooses it by the vocabulary's size, null keeps the gradient exact.",
    )
    smoothing_target: Annotated[str, Field(pattern=r"^unigram$|\.npy$")] | None = option(
        None,
        "Distribution that β is spread over: `unigram` gives each token its frequency among the "
        "training targets, FILE.npy holds one share for each token of the model's vocabulary; "
        "null spreads β evenly.",
    )
    clip_grad_norm: PositiveFloat | None = option(
        None,
        "Norm to which larger gradients are scaled down; null takes the DeepSpeed file's limit, "
        "else sets none.",
    )
    lora: LoraOptions | None = option(
        None, "Low-rank adapters to train instead of all weights; null trains all weights."
    )
    packing: bool | None = option(
        None,
        "Whether an update's conversations lie end to end in few rows, each attending to itself "
        "alone; null packs on a GPU in 16 bits. Under `reduce_loss: mean` a row of an "
        "update has at most per_device_train_batch_size of them.",
    )
    max_tokens: Positive = option(
        16384,
        "Tokens of conversations that a packed row may have; a longer conversation has a row of "
        "its own. The rows of an update have about equally many.",
    )
    compile: bool | None = option(
        None,
        "Whether torch.compile compiles each layer; null compiles packed runs of 300 updates or "
        "more on a GPU, where layers that do not compile run as they are.",
    )
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = option(
        None, "Experiment tracker that also gets the metrics; null uses none."
    )


def auxiliary_loss_problem(model: str, config: Mapping[str, Any]) -> str | None:
    """Why a model with this configuration is refused, if that asks for an auxiliary loss.

    A mixture of experts adds it to its loss for the balance between experts. It is a mean over a
    micro-batch, where `SweepTrainer` divides sums, and how an update is split may not change it.
    """
    place = "config.json"
    text_config = config.get("text_config")  # of a model that also reads images, for example
    if isinstance(text_config, dict):
        place = "config.json, under text_config"
        config = text_config
    if not config.get("output_router_logits"):
        return None
    instead = 'type "output_router_logits": false there'
    if not Path(model).is_dir():
        instead += ", in a copy of the model, and name that copy as train.model_name_or_path"
    return (
        f"train.model_name_or_path: {model}: {place}: output_router_logits: true asks for a "
        "mixture of experts' auxiliary loss, which backend trainer does not add to its own; to "
        f"train without it, {instead}"
    )

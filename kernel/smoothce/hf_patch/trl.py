"""What is known of TRL: which of its trainers and forwards there are, and what it reads.

TRL's SFTTrainer replaces its model's forward by a `_fused_forward`, which keeps the one before in a
variable `original_forward` and computes a loss of its own from hidden states. It asks for that loss
by the argument `fused_lm_head=True`, and reads a `FusedCausalLMOutput`."""

import dataclasses
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from smoothce.hf_patch.head_forward import LossAndStatistics

TRAINER = "TRL's SFTTrainer"
OUTPUT_MODULE = "trl.trainer.utils"
OUTPUT_CLASS = "FusedCausalLMOutput"
OUTPUT_FIELDS = {"loss", "log_probs", "entropy", "is_top1", "label_mask", "aux_loss"}
ADVICE = "install trl 1.16, or train with Hugging Face's Trainer"
LOSS_REQUEST = "fused_lm_head"  # the argument by which TRL's trainers ask a forward for their loss


def is_trls_forward(forward: Callable[..., Any]) -> bool:
    """Whether it is a forward, or the function of a method, that TRL has given a model.

    TRL copies name and module of the forward that it replaces. So only the function's globals tell
    the two apart: they are those of the module that defines it. Other versions of TRL have other
    functions for this."""
    function = getattr(forward, "__func__", forward)
    defined_in = getattr(function, "__globals__", {}).get("__name__", "")
    return defined_in.startswith("trl.")


def forward_before_trls(trls_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that TRL's has replaced. Raises ValueError where TRL keeps it elsewhere."""
    function = getattr(trls_forward, "__func__", trls_forward)
    variables = inspect.getclosurevars(function).nonlocals
    if "original_forward" not in variables:
        raise ValueError(
            f"TRL {importlib.metadata.version('trl')} replaces the model's forward by one without "
            "a variable original_forward, in which patch_trainer looks for the model's own: "
            f"{ADVICE}"
        )
    return variables["original_forward"]


def _trl_classes_of(trainer: Any) -> list[str]:
    """The names of TRL's classes that a trainer's class is or derives from, the nearest first."""
    return [base.__name__ for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]


def is_trls_trainer(trainer: Any) -> bool:
    """Whether the trainer's class is one of TRL's, or derives from one."""
    return len(_trl_classes_of(trainer)) > 0


def refuse_other_trainers(trainer: Any) -> None:
    """Raises ValueError for TRL's trainers of losses of their own, such as its DPOTrainer, and for
    the SFTTrainer of a version that asks its model for the loss in another way."""
    if not is_trls_trainer(trainer):
        return
    trl_classes = _trl_classes_of(trainer)
    if "SFTTrainer" not in trl_classes:
        raise ValueError(
            f"TRL's {trl_classes[0]} computes a loss of its own, which would ignore "
            "label_smoothing; only its SFTTrainer trains with this one"
        )
    output_class = getattr(sys.modules.get(OUTPUT_MODULE), OUTPUT_CLASS, None)
    if output_class is None or not _field_names(output_class) >= OUTPUT_FIELDS:
        raise ValueError(
            f"the SFTTrainer of TRL {importlib.metadata.version('trl')} does not ask its model for "
            f"a {OUTPUT_CLASS} of {', '.join(sorted(OUTPUT_FIELDS))}, as patch_trainer returns it: "
            f"{ADVICE}"
        )


def refuse_sum(reduction: str) -> None:
    """Raises ValueError for another reduction than "mean", which would have no effect: TRL's loss
    is a mean whatever the settings say."""
    if reduction != "mean":
        raise ValueError(
            f"reduction must be 'mean', as {TRAINER} reduces its loss, not {reduction!r}: call "
            "smoothce.patch_trainer(trainer, …) with reduction='mean'"
        )


def _field_names(output_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(output_class)}  # type: ignore[arg-type]


def trl_output(
    result: LossAndStatistics,
    valid: Tensor,  # (B, T) bool, the tokens whose labels count
    mean_loss: Tensor,  # (), with a mixture's auxiliary loss
    auxiliary: Tensor | None,  # ()
) -> Any:
    """What TRL's trainers read: their loss is the sum of −log_probs over the number of tokens, or
    under DeepSpeed's sequence parallelism `loss`.

    Of log_probs TRL reads the sum alone, which must be minus the summed loss. So what is returned
    under that name are not log probabilities: to each of them an equal share of what their sum
    lacks is added.

    That is done for speed. True log probabilities would be one loss for each token, whose gradient
    `linear_cross_entropy` would in general make in its backward, by one more matrix product. The
    gradient of one summed loss it makes in its forward by default.
    """
    log_probability = result.statistics.log_probability
    assert log_probability is not None  # there are labels
    # A token that does not count has log_probability 0, so this is the sum over those that do. The
    # statistics have no gradient: that of log_probs comes from `result.loss` alone.
    lacking = -result.loss - log_probability.sum()
    # `clamp`: a batch without labels has no token that counts, and so none to share it.
    correction_per_token = lacking / valid.sum().clamp(min=1)
    # TRL, which has asked for this, has imported it; an import here would break a compiled graph.
    output_class = getattr(sys.modules[OUTPUT_MODULE], OUTPUT_CLASS)
    return output_class(
        loss=mean_loss,
        log_probs=(log_probability + correction_per_token) * valid,
        entropy=result.statistics.entropy,
        is_top1=(result.statistics.argmax == result.labels) & valid,
        label_mask=valid,
        aux_loss=auxiliary,
    )

"""What is known of TRL: which of its trainers and forwards there are, and what it reads.

TRL's SFTTrainer replaces its model's forward by a `_fused_forward`, which keeps the one before in a
variable `original_forward` and computes a loss of its own from hidden states. It asks for that loss
by the argument `fused_lm_head=True`, and reads a `FusedCausalLMOutput`."""

import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from smoothce.hf_patch.head_forward import LossAndStatistics

TRAINER = "TRL's SFTTrainer"
LOSS_REQUEST = "fused_lm_head"  # the argument by which TRL's trainers ask a forward for their loss


def is_fused_forward(forward: Callable[..., Any]) -> bool:
    """Whether it is the forward, or the function of the method, that TRL gives a model."""
    function = getattr(forward, "__func__", forward)
    return getattr(getattr(function, "__code__", None), "co_name", "") == "_fused_forward"


def forward_before(fused_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that TRL's has replaced. Raises ValueError where TRL keeps it elsewhere."""
    function = getattr(fused_forward, "__func__", fused_forward)
    variables = inspect.getclosurevars(function).nonlocals
    if "original_forward" not in variables:
        raise ValueError(
            f"TRL {importlib.metadata.version('trl')} replaces the model's forward by a "
            "_fused_forward without a variable original_forward, in which patch_trainer looks for "
            "the model's own: install trl 1.16, or train with Hugging Face's Trainer"
        )
    return variables["original_forward"]


def refuse_other_trainers(trainer: Any) -> None:
    """Raises ValueError for TRL's trainers of losses of their own, such as its DPOTrainer."""
    trls = [base.__name__ for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
    if trls and "SFTTrainer" not in trls:
        raise ValueError(
            f"TRL's {trls[0]} computes a loss of its own, which would ignore label_smoothing; "
            "only its SFTTrainer trains with this one"
        )


def trl_output(result: LossAndStatistics, ignore_index: int, auxiliary: Tensor | None) -> Any:
    """What TRL's trainers read: their loss is the sum of −log_probs over the number of tokens.

    All tokens count alike in it, so that each can carry an equal part of the summed loss, whose
    gradient is made in the forward; a loss per token would take one more matrix product.
    """
    mask = result.labels != ignore_index
    log_probability = result.statistics.log_probability
    assert log_probability is not None  # there are labels
    rest = (-result.loss - log_probability.sum()) / mask.sum().clamp(min=1)
    # TRL, which has asked for this, has imported it; an import here would break a compiled graph.
    return sys.modules["trl.trainer.utils"].FusedCausalLMOutput(
        log_probs=(log_probability + rest) * mask,
        entropy=result.statistics.entropy,
        is_top1=(result.statistics.argmax == result.labels) & mask,
        label_mask=mask,
        aux_loss=auxiliary,
    )

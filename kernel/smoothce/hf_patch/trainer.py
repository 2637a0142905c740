"""`patch_trainer`: the loss in Hugging Face's Trainer and TRL's SFTTrainer."""

import dataclasses
import importlib.metadata
import sys
from typing import Any, TypeVar

from typing_extensions import Unpack

from smoothce.hf_patch.head import (
    UPSTREAMS_IGNORE_INDEX,
    LossSettings,
    PatchSettings,
    SmoothedHead,
    patched_heads,
)
from smoothce.hf_patch.patching import install, refuse_sum_under_trl

AnyTrainer = TypeVar("AnyTrainer")

# What a model returns to TRL's trainers that ask for their loss with `fused_lm_head=True`.
TRLS_OUTPUT = "FusedCausalLMOutput"
TRLS_FIELDS = {"loss", "log_probs", "entropy", "is_top1", "label_mask", "aux_loss"}
TRLS_VERSIONS = "trl 1.15 or 1.16"


def patch_trainer(trainer: AnyTrainer, **keywords: Unpack[PatchSettings]) -> AnyTrainer:
    """`patch_model` for the model of a Hugging Face `Trainer` or TRL `SFTTrainer`, made already.

        trainer = SFTTrainer(model, args=SFTConfig(…), …)
        patch_trainer(trainer, label_smoothing=0.1)

    The settings are `patch_model`'s. One that is left out is as an earlier `patch_model` has it.
    Where this call gives no `label_smoothing`, and an earlier one none above 0, the β is
    `TrainingArguments.label_smoothing_factor`. (Without this call that factor makes the Trainer
    take the labels away from the model and smooth dense logits.) Evaluation reports the loss
    without smoothing. TRL's entropy and accuracy come from the same pass as the loss; in training
    with a `loss` of yours they come from a second pass, without gradients.

    Returns the trainer. `unpatch_model` undoes what this does to the model. A call that is refused
    leaves model and trainer as they were.

    Raises ValueError for a loss of the trainer's that this one cannot be, for `reduction="sum"`
    under TRL, whose loss is a mean, for a factor that is neither 0 nor the β, for a trainer with a
    `model_init`, which makes another model when it trains, and what `patch_model` raises. When it
    trains, the trainer raises ValueError for another model than the patched one, and after a step
    that did not ask the model for its loss, where the settings change that loss.
    """
    # Imported here, since it imports transformers, which `patch_model` does without.
    from smoothce.hf_patch.callback import LossWatch, SmoothingCallback

    trainer_: Any = trainer
    callbacks = trainer_.callback_handler.callbacks
    if any(isinstance(callback, SmoothingCallback) for callback in callbacks):
        raise ValueError(
            "the trainer has a SmoothingCallback, which gives the model its own settings when "
            "training begins: use the callback or patch_trainer, not both"
        )
    settings = _combined(trainer_.model, trainer_.args.label_smoothing_factor, keywords)
    for_trl = is_trls(trainer_)
    if for_trl:
        _refuse_other_trl(trainer_)
        refuse_sum_under_trl(settings)
    refuse_arguments(trainer_.args)
    _refuse_trainer(trainer_, settings)
    install(trainer_.model, settings, for_trl=for_trl)
    trainer_.label_smoother = None
    if not any(isinstance(callback, LossWatch) for callback in callbacks):
        trainer_.add_callback(LossWatch())
    return trainer


def _combined(model: Any, factor: float, keywords: PatchSettings) -> LossSettings:
    """The keywords of this call, and for those that it does not give an earlier `patch_model`'s.

    β is this call's `label_smoothing`, else the earlier one if that is not 0, else the trainer's
    factor. Raises ValueError where the factor is neither 0 nor the β that comes out."""
    earlier: SmoothedHead | None = next(patched_heads(model), None)
    settings = LossSettings() if earlier is None else earlier.settings
    if settings.label_smoothing == 0:
        settings = dataclasses.replace(settings, label_smoothing=factor)
    settings = settings.with_keywords(keywords)
    if factor not in (0, settings.label_smoothing):
        raise ValueError(
            f"label_smoothing={settings.label_smoothing} and the trainer's "
            f"label_smoothing_factor={factor} differ: give one"
        )
    return settings


def is_trls(trainer_or_args: Any) -> bool:
    """Whether its class is one of TRL's, or derives from one."""
    return any(base.__module__.startswith("trl.") for base in type(trainer_or_args).__mro__)


def _refuse_other_trl(trainer: Any) -> None:
    """Raises ValueError for TRL's trainers of losses of their own, such as its DPOTrainer, and for
    the SFTTrainer of a version that asks its model for the loss in another way."""
    names = [base.__name__ for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
    if names[0] != "SFTTrainer":  # some of TRL's others derive from it
        raise ValueError(
            f"TRL's {names[0]} computes a loss of its own, which would ignore label_smoothing; "
            "only its SFTTrainer trains with this one"
        )
    output_class = getattr(sys.modules.get("trl.trainer.utils"), TRLS_OUTPUT, None)
    found = {field.name for field in dataclasses.fields(output_class)} if output_class else set()
    if not found >= TRLS_FIELDS:
        raise ValueError(
            f"the SFTTrainer of TRL {importlib.metadata.version('trl')} asks its model for the "
            f"loss in another way than patch_trainer answers: install {TRLS_VERSIONS}, or train "
            "with Hugging Face's Trainer"
        )


def _refuse_trainer(trainer: Any, settings: LossSettings) -> None:
    if getattr(trainer, "model_init", None) is not None:
        raise ValueError(
            "the trainer's model_init makes a new model when it trains, which would not be the "
            "patched one: give the Trainer model=, or callbacks=[smoothce.SmoothingCallback("
            "label_smoothing=…)] instead of patch_trainer"
        )
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise ValueError(
            "the trainer's compute_loss_func would train another loss than the settings': drop it"
        )
    if not settings.eval_logits and not is_trls(trainer):
        for name in ("compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(trainer, name, None) is not None:
                raise ValueError(
                    f"the trainer's {name} needs logits, which eval_logits=False spares: drop one"
                )
    refuse_ignore_index(settings.ignore_index)


def refuse_ignore_index(index: int) -> None:
    """Raises ValueError for another index than the one by which a Trainer counts labels."""
    if index != UPSTREAMS_IGNORE_INDEX:
        raise ValueError(
            f"ignore_index must be {UPSTREAMS_IGNORE_INDEX}, the trainer's, not {index}: give "
            f"{UPSTREAMS_IGNORE_INDEX} to the labels that shall not count, and pass "
            f"ignore_index={UPSTREAMS_IGNORE_INDEX}"
        )


def refuse_arguments(args: Any) -> None:
    """Raises ValueError for `TrainingArguments` that would train the model without its patch."""
    if args.n_gpu > 1:
        raise ValueError(
            f"the trainer has {args.n_gpu} GPUs in one process, by DataParallel, whose "
            "copies of a patched model all run the first: start a process a GPU (torchrun, "
            "accelerate launch) or set CUDA_VISIBLE_DEVICES"
        )
    loss_type = getattr(args, "loss_type", "nll")
    if loss_type != "nll":
        raise ValueError(
            f"loss_type must be 'nll', not {loss_type!r}, which would ignore label_smoothing"
        )
    liger_options = getattr(args, "liger_kernel_config", None) or {}
    replaces_loss = liger_options.get("fused_linear_cross_entropy", True)
    if getattr(args, "use_liger_kernel", False) and replaces_loss:
        raise ValueError(
            "use_liger_kernel would put Liger's loss, which ignores label_smoothing, in the place "
            "of this one: add liger_kernel_config={'fused_linear_cross_entropy': False}"
        )

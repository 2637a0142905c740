"""`patch_trainer`: the loss in Hugging Face's Trainer and TRL's SFTTrainer."""

from typing import Any, TypeVar

from typing_extensions import Unpack

from smoothce.hf_patch import trl
from smoothce.hf_patch.anatomy import CausalModel, unwrapped
from smoothce.hf_patch.model_forward import ModelForward
from smoothce.hf_patch.patching import patch_model
from smoothce.hf_patch.settings import UPSTREAMS_IGNORE_INDEX, PatchSettings, shows_settings

AnyTrainer = TypeVar("AnyTrainer")


@shows_settings()
def patch_trainer(trainer: AnyTrainer, **keywords: Unpack[PatchSettings]) -> AnyTrainer:
    """`patch_model` for the model of a Hugging Face `Trainer` or TRL `SFTTrainer`, made already.

        trainer = SFTTrainer(model, args=SFTConfig(…), …)
        patch_trainer(trainer, label_smoothing=0.1)

    The settings are `patch_model`'s. One that is left out is as an earlier `patch_model` has it,
    whatever default `help()` shows. Where this call gives no `label_smoothing`, and an earlier one
    none above 0, the β is `TrainingArguments.label_smoothing_factor`. (Without this call that
    factor makes the Trainer take the labels away from the model and smooth dense logits. TRL will
    remove the factor.) Evaluation reports the loss without smoothing. TRL's own fused head gives
    way, and its entropy and accuracy come from the same pass as the loss; in training with a `loss`
    of yours they come from a second pass, without gradients.

    Returns the trainer. `unpatch_model` undoes what this does to the model, but does not bring
    TRL's fused head back: make the trainer anew for that. A call that is refused leaves model and
    trainer as they were.

    Raises ValueError for a loss of the trainer's that this one cannot be, for `reduction="sum"`
    under TRL, whose loss is a mean, for a factor that is neither 0 nor the β, for a trainer with a
    `model_init`, which makes another model when it trains, and what `patch_model` raises. When it
    trains, the trainer raises ValueError for another model than the patched one, for an
    `ignore_index`, or under TRL a sum, that a later `patch_model` has brought, and after a step
    that did not ask the model for its loss, where the settings change that loss.
    """
    trainer_: Any = trainer
    causal = unwrapped(trainer_.model)
    keywords = _combined(causal, trainer_.args.label_smoothing_factor, keywords)
    _refuse_other_losses(trainer_, keywords)
    trls_forward = None
    outermost = vars(causal).get("forward")
    if outermost is not None and trl.is_trls_forward(outermost):
        trls_forward = outermost
        # TRL's forward gives way to what it has replaced: the class's, an earlier patch, or
        # accelerate's wrapper of one of them.
        causal.forward = trl.forward_before_trls(trls_forward)
    try:
        patch_model(trainer_.model, **keywords)
    except BaseException:  # TRL's forward comes back where the call is refused
        if trls_forward is not None:
            causal.forward = trls_forward
        raise
    trainer_.label_smoother = None
    _watch(trainer_)
    return trainer


def _watch(trainer: Any) -> None:
    """Have the trainer check, when it trains, that it trains the patched model by its loss."""
    # It is imported here since it imports transformers, which `patch_model` does without, and since
    # it imports this module.
    from smoothce.hf_patch.callback import LossWatch

    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, LossWatch) for callback in callbacks):
        trainer.add_callback(LossWatch())


def _combined(causal: CausalModel, factor: float, keywords: PatchSettings) -> PatchSettings:
    """The keywords of this call, and for those that it does not give an earlier `patch_model`'s.

    β is this call's `label_smoothing`, else the earlier one if that is not 0, else the trainer's
    factor. Raises ValueError where the factor is neither 0 nor the β that comes out."""
    combined = PatchSettings(label_smoothing=0.0)
    model_forward = ModelForward.of(causal)
    if model_forward is not None:
        combined = model_forward.fused.head_forward.settings.keywords()
    if combined["label_smoothing"] == 0:
        combined["label_smoothing"] = factor
    combined.update(keywords)
    beta = combined["label_smoothing"]
    if factor not in (0, beta):
        raise ValueError(
            f"label_smoothing={beta} and the trainer's label_smoothing_factor={factor} differ: "
            "give one"
        )
    return combined


def _refuse_other_losses(trainer: Any, keywords: PatchSettings) -> None:
    """Raises ValueError for what would train another loss than the settings'."""
    # TRL's version is looked at first: whoever has a version that cannot be served would change
    # the arguments as the other messages say, and be refused all the same.
    trl.refuse_other_trainers(trainer)
    if trl.is_trls_trainer(trainer):
        trl.refuse_sum(keywords.get("reduction", "mean"))
    refuse_arguments(trainer.args)
    if getattr(trainer, "model_init", None) is not None:
        raise ValueError(
            "the trainer's model_init makes a new model when it trains, which would not be the "
            "patched one: give the Trainer model=, or callbacks=[smoothce.SmoothingCallback("
            "label_smoothing=…)] instead of patch_trainer"
        )
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise ValueError("the trainer's compute_loss_func needs logits, which never exist: drop it")
    refuse_ignore_index(keywords)


def refuse_ignore_index(keywords: PatchSettings) -> None:
    """Raises ValueError for another index than the one by which a Trainer counts labels."""
    index = keywords.get("ignore_index", UPSTREAMS_IGNORE_INDEX)
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

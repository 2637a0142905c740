"""`patch_trainer`: the loss in Hugging Face's Trainer and TRL's SFTTrainer."""

from typing import Any, TypeVar

from typing_extensions import Unpack

from smoothce.hf_patch.anatomy import CausalModel, unwrapped
from smoothce.hf_patch.forwards import is_trls_forward
from smoothce.hf_patch.patching import patch_model
from smoothce.hf_patch.settings import PatchSettings, shows_settings

AnyTrainer = TypeVar("AnyTrainer")


@shows_settings
def patch_trainer(trainer: AnyTrainer, **settings: Unpack[PatchSettings]) -> AnyTrainer:
    """`patch_model` for the model of a Hugging Face `Trainer` or TRL `SFTTrainer`, made already.

    `TrainingArguments(label_smoothing_factor=β)` becomes the fused loss's β, where the trainer
    would take the labels away and smooth dense logits; `settings` are `patch_model`'s others, and
    those of an earlier `patch_model` stay. Evaluation reports the loss without smoothing. TRL's own
    fused head gives way, and its entropy and accuracy come from the same pass as the loss.

        trainer = Trainer(model, TrainingArguments(…, label_smoothing_factor=0.1), …)
        patch_trainer(trainer)

    Returns the trainer. Raises ValueError for a loss of the trainer's that this one cannot be, and
    what `patch_model` raises.
    """
    trainer_: Any = trainer
    causal = unwrapped(trainer_.model)
    settings = _combined(causal, trainer_.args.label_smoothing_factor, settings)
    _refuse_other_losses(trainer_, settings)
    forward = vars(causal).get("forward")
    if is_trls_forward(forward):
        if settings.get("reduction", "mean") != "mean":
            raise ValueError(f"reduction must be 'mean', TRL's, not {settings['reduction']!r}")
        del causal.forward  # which computes a loss of its own
        if "_smoothce" in vars(causal):
            causal.forward = causal._smoothce
    patch_model(trainer_.model, **settings)
    trainer_.label_smoother = None
    return trainer


def _combined(causal: CausalModel, factor: float, settings: PatchSettings) -> PatchSettings:
    """The settings, then those of an earlier `patch_model`, then the trainer's factor."""
    earlier = PatchSettings(label_smoothing=0.0)
    if "_smoothce" in vars(causal):
        earlier = causal._smoothce.head_forward.loss.keywords()
    if not earlier["label_smoothing"]:
        earlier["label_smoothing"] = factor
    combined: PatchSettings = {**earlier, **settings}
    if factor not in (0, combined["label_smoothing"]):
        raise ValueError(
            f"label_smoothing={combined['label_smoothing']} and the trainer's "
            f"label_smoothing_factor={factor} differ: give one"
        )
    return combined


def _refuse_other_losses(trainer: Any, settings: PatchSettings) -> None:
    """Raises ValueError for what would train another loss than the settings'."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"the trainer has {trainer.args.n_gpu} GPUs in one process, by DataParallel, whose "
            "copies of a patched model all run the first: start a process a GPU (torchrun, "
            "accelerate launch) or set CUDA_VISIBLE_DEVICES"
        )
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise ValueError("the trainer's compute_loss_func needs logits, which never exist: drop it")
    if getattr(trainer.args, "loss_type", "nll") != "nll":
        raise ValueError(f"loss_type must be 'nll', not {trainer.args.loss_type!r}")
    index = settings.get("ignore_index", -100)
    if index != -100:
        raise ValueError(f"ignore_index must be -100, the trainer's, not {index}")

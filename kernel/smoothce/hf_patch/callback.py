"""`SmoothingCallback`: the loss in any Hugging Face Trainer that takes callbacks."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import Unpack

from smoothce.hf_patch.head import LossSettings, PatchSettings, patched_heads
from smoothce.hf_patch.patching import PatchedForward, install
from smoothce.hf_patch.trainer import is_trls, refuse_arguments, refuse_ignore_index


class LossWatch(TrainerCallback):
    """Raises ValueError where a Trainer trains a model that is not patched, or around its loss.

    `patch_trainer` adds one to the trainer, whose model may be another by the time it trains."""

    def __init__(self) -> None:
        self.forward: PatchedForward | None = None  # the patched model's, while it trains

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        self.forward = _patched_forward_in(model)
        if self.forward is None:
            raise ValueError(
                "the trainer's model is another one than when patch_trainer was called, or is no "
                "longer patched, and would train without its settings: call patch_trainer once the "
                "trainer has its model, or give callbacks=[SmoothingCallback(label_smoothing=…)]"
            )
        refuse_ignore_index(_settings_of(self.forward).ignore_index)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.forward is None:
            return
        # A model that its owner has unpatched since is not watched any more.
        self.forward = PatchedForward.of(self.forward.causal)
        if self.forward is None:
            return
        self.forward.gave_loss_in_training = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        forward = self.forward
        if forward is None or forward.gave_loss_in_training:
            return
        if PatchedForward.of(forward.causal) is not forward:  # unpatched within the step
            return
        left_out = _settings_of(forward).changes_in_training()
        if left_out:
            raise ValueError(
                "the trainer's step did not ask the model for its loss (a compute_loss_func, or a "
                f"compute_loss of its own?), so that {left_out} had no effect"
            )


class SmoothingCallback(LossWatch):
    """`patch_model` for the model of a Hugging Face `Trainer`, as one of its callbacks.

        Trainer(model, TrainingArguments(…), callbacks=[SmoothingCallback(label_smoothing=0.1)], …)

    `TrainingArguments.label_smoothing_factor` stays 0. The other keywords are `patch_model`'s, and
    replace what an earlier `patch_model` has set.
    Serves every trainer that leaves the loss to its model, LLaMA-Factory's and ms-swift's too; for
    TRL's `SFTTrainer`, which does not, there is `patch_trainer`. Evaluation reports the loss
    without smoothing.

    Raises ValueError for a trainer that would train another loss: when it is made, when it begins
    to train, or after a step that did not ask the model for its loss. Raises TypeError without
    `label_smoothing`, and what `patch_model` raises.
    """

    def __init__(self, **keywords: Unpack[PatchSettings]) -> None:
        if "label_smoothing" not in keywords:
            raise TypeError("SmoothingCallback needs label_smoothing=")
        self.settings = LossSettings().with_keywords(keywords)
        refuse_ignore_index(self.settings.ignore_index)
        super().__init__()

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        self._check(args)
        install(model, self.settings)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Patch once more: `model_init` may have made the model anew, and another trainer may have
        patched it with other settings."""
        self._check(args)
        forward = _patched_forward_in(model)
        if forward is None:
            install(model, self.settings)
        elif _settings_of(forward) is not self.settings:
            install(forward.causal, self.settings)
        super().on_train_begin(args, state, control, model, **kwargs)

    def _check(self, args: TrainingArguments) -> None:
        shown = self.settings.changes_in_training() or "label_smoothing=0"
        if args.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor:g} would smooth dense logits "
                f"beside SmoothingCallback's {shown}: leave the factor at 0"
            )
        if is_trls(args):
            raise ValueError(
                f"TRL's trainers compute losses of their own, without SmoothingCallback's {shown}: "
                f"for SFTTrainer, call smoothce.patch_trainer(trainer, {shown}) once it is made"
            )
        refuse_arguments(args)


def _settings_of(forward: PatchedForward) -> LossSettings:
    head = next(patched_heads(forward.causal), None)
    return LossSettings() if head is None else head.settings


def _patched_forward_in(model: nn.Module) -> PatchedForward | None:
    """The patched forward in a model, whatever wraps it."""
    for module in model.modules():
        forward = PatchedForward.of(module)
        if forward is not None:
            return forward
    return None

"""`SmoothingCallback`: the loss in any Hugging Face Trainer that takes callbacks."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import Unpack

from smoothce.hf_patch.anatomy import CausalModel, unwrapped
from smoothce.hf_patch.head_forward import HeadForward
from smoothce.hf_patch.model_forward import ModelForward, other_loss_of
from smoothce.hf_patch.patching import patch_model
from smoothce.hf_patch.settings import (
    UPSTREAMS_IGNORE_INDEX,
    PatchSettings,
    differences_from_upstream,
    shows_settings,
)
from smoothce.hf_patch.trainer import refuse_arguments, refuse_ignore_index


class LossWatch(TrainerCallback):
    """Raises ValueError where a Trainer trains another model than the patched one, or around it.

    It also raises where a later `patch_model` has made the model leave out labels that the Trainer
    counts.

    `patch_trainer` adds one to the trainer, whose model may be another by the time it trains."""

    def __init__(self) -> None:
        self.model_forward: ModelForward | None = None  # the patched model's, while it trains

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        self.model_forward = _model_forward_of(model)
        if self.model_forward is None:
            raise ValueError(
                "the trainer's model is another one than when patch_trainer was called, or is no "
                "longer patched, and would train without its settings: call patch_trainer once the "
                "trainer has its model, or give callbacks=[SmoothingCallback(label_smoothing=…)]"
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.model_forward is None:
            return
        # It is looked up at each step. A model that its owner has unpatched since is not watched
        # any more, until training begins anew.
        self.model_forward = ModelForward.of(self.model_forward.causal)
        if self.model_forward is None:
            return
        # A `patch_model` since the last step may have brought another index.
        _refuse_ignore_index_of_later_patch(self.model_forward)
        self.model_forward.gave_loss_in_training = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model_forward = self.model_forward
        if model_forward is None or model_forward.gave_loss_in_training:
            return
        if ModelForward.of(model_forward.causal) is not model_forward:  # unpatched within the step
            return
        settings = model_forward.fused.head_forward.settings
        if settings.differs_from_upstream():
            raise ValueError(
                "the trainer's step did not ask the model for its loss (a compute_loss_func, or a "
                f"compute_loss of its own?), so that {settings.differences()} had no effect"
            )


class SmoothingCallback(LossWatch):
    """`patch_model` for the model of a Hugging Face `Trainer`, as one of its callbacks.

        Trainer(model, TrainingArguments(…), callbacks=[SmoothingCallback(label_smoothing=0.1)], …)

    `TrainingArguments.label_smoothing_factor` stays 0. The other keywords are `patch_model`'s.
    Serves every trainer that leaves the loss to its model, LLaMA-Factory's and ms-swift's too; for
    TRL's `SFTTrainer`, which does not, there is `patch_trainer`. Evaluation reports the loss
    without smoothing.

    Raises ValueError for a trainer that would train another loss: when it is made, when it begins
    to train, before a step where a later `patch_model` has given the model another `ignore_index`,
    or after a step that did not ask the model for its loss. Raises TypeError without
    `label_smoothing`, and what `patch_model` raises.
    """

    @shows_settings(required=("label_smoothing",))
    def __init__(self, **keywords: Unpack[PatchSettings]) -> None:
        if "label_smoothing" not in keywords:
            raise TypeError("SmoothingCallback needs label_smoothing=")
        refuse_ignore_index(keywords)
        super().__init__()
        self.keywords = keywords

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        self._check(args)
        patch_model(model, **self.keywords)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Look at the model once more, which `model_init` has made anew, and others may change."""
        self._check(args)
        if _model_forward_of(model) is None:
            _patch_prepared(model, self.keywords)
        self.model_forward = _model_forward_of(model)
        assert self.model_forward is not None  # patch_model has made it
        other = other_loss_of(self.model_forward.causal)
        if other is not None:
            differences = self.model_forward.fused.head_forward.settings.differences()
            raise ValueError(
                f"{other} has given the model a loss of its own, without SmoothingCallback's "
                f"{differences or 'settings'}"
            )

    def _check(self, args: TrainingArguments) -> None:
        shown_settings = differences_from_upstream(self.keywords) or "label_smoothing=0"
        if args.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor:g} would smooth dense logits "
                f"beside SmoothingCallback's {shown_settings}: leave the factor at 0"
            )
        if any(base.__module__.startswith("trl.") for base in type(args).__mro__):
            raise ValueError(
                "TRL's trainers compute losses of their own, without SmoothingCallback's "
                f"{shown_settings}: for SFTTrainer, call smoothce.patch_trainer(trainer, "
                f"{shown_settings}) once it is made"
            )
        refuse_arguments(args)


def _refuse_ignore_index_of_later_patch(model_forward: ModelForward) -> None:
    """Raises ValueError for an `ignore_index` by which no Trainer counts labels.

    `patch_trainer` and `SmoothingCallback` refuse one themselves. A `patch_model` that is called
    after them does not know of the trainer."""
    head_forward = HeadForward.of(model_forward.fused.head)
    if head_forward is None:  # the head was replaced since, which the model's forward refuses
        return
    index = head_forward.settings.options.ignore_index
    if index != UPSTREAMS_IGNORE_INDEX:
        raise ValueError(
            f"the trainer's model was patched again by patch_model with ignore_index={index}, and "
            f"the trainer divides the loss by the number of labels that are not "
            f"{UPSTREAMS_IGNORE_INDEX}: give {UPSTREAMS_IGNORE_INDEX} to the labels that shall not "
            "count, and call smoothce.patch_trainer(trainer, "
            f"ignore_index={UPSTREAMS_IGNORE_INDEX}), which keeps the other settings"
        )


def _model_forward_of(model: nn.Module) -> ModelForward | None:
    """The patched forward in a model, whatever wraps it."""
    for module in model.modules():
        model_forward = ModelForward.of(module)
        if model_forward is not None:
            return model_forward
    return None


def _patch_prepared(model: nn.Module, keywords: PatchSettings) -> None:
    """Patch a model that accelerate may have prepared for training in mixed precision already."""
    with _autocast_outermost(unwrapped(model)):
        patch_model(model, **keywords)


@contextlib.contextmanager
def _autocast_outermost(causal: CausalModel) -> Iterator[None]:
    """Take accelerate's autocast off a model's forward, if there is one, and put it on again around
    the forward that the model then has: accelerate has it around all."""
    # In mixed precision accelerate's `prepare_model` puts autocast around the forward, and keeps
    # the forward without it under this name. (`_old_forward`, which `anatomy` knows, is another
    # thing: what a module ran before accelerate gave it a hook.)
    forward_without_autocast = causal.__dict__.pop("_original_forward", None)
    if forward_without_autocast is None:
        yield
        return
    # Only a model that accelerate has prepared gets here, so that it is installed.
    from accelerate.utils import convert_outputs_to_fp32
    from accelerate.utils.modeling import get_mixed_precision_context_manager

    forward_with_autocast = causal.forward
    causal.forward = forward_without_autocast
    try:
        yield
    except BaseException:
        causal.forward = forward_with_autocast
        causal._original_forward = forward_without_autocast
        raise
    causal._original_forward = causal.forward
    # A Trainer gives its accelerator no AutocastKwargs, so that native_amp says all there is.
    autocast = get_mixed_precision_context_manager(native_amp=True)
    causal.forward = convert_outputs_to_fp32(autocast(causal.forward))

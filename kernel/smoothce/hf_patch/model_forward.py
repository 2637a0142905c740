"""What a patched model runs in the place of upstream's forward, and what its decoder's hook sees.

They are objects and not closures so that a patched model can be copied and pickled as a whole, and
comes back patched.
"""

import inspect
from typing import Any, Optional

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smoothce.hf_patch import trl
from smoothce.hf_patch.anatomy import CausalModel, class_forward, class_of, forward_layers
from smoothce.hf_patch.fused_forward import FusedForward
from smoothce.hf_patch.head_forward import HeadForward
from smoothce.hf_patch.head_hooks import HeadHooks
from smoothce.hf_patch.outputs import wants_auxiliary_loss
from smoothce.hf_patch.settings import UPSTREAMS_IGNORE_INDEX
from smoothce.hf_patch.user_warnings import warn_user_once
from smoothce.hf_patch.verification import CannotRun, VerifiedLoss, verify


class ModelForward:
    """A patched model's forward, which runs `FusedForward` or upstream's.

    Upstream's is the one that the model's class has in transformers. A call without labels is
    upstream's. A call with labels is fused in training; in evaluation it is upstream's, unless
    `eval_logits` is False or TRL asks for its loss (`fused_lm_head=True`): then it is fused too.
    The signature is upstream's, by which Trainers pick columns.

    Two attributes say what happens around it: `is_running`, while it runs, for `DecoderHook`; and
    `gave_loss_in_training`, which `callback.LossWatch` takes back when an update begins, to see
    whether the update has asked for the loss."""

    ATTRIBUTE = "_smoothce_model_forward"  # under which a patched model keeps it

    def __init__(self, causal: CausalModel, head_name: str) -> None:
        self.causal = causal
        self.head_name = head_name
        self.fused = FusedForward(causal, head_name)
        self.verified: VerifiedLoss | None = None  # None: the model could not run until now
        self.is_running = False
        self.gave_loss_in_training = False
        self.head_hooks = HeadHooks()
        # `patch_model` fills these two when it puts the forwards in place.
        self.installed_head: nn.Module | None = None
        self.decoder_hook: RemovableHandle | None = None
        self.warnings_given: set[str] = set()
        # The signature is set on the object, not on the class, since each model has its own.
        self.__signature__ = inspect.signature(class_forward(causal))

    @classmethod
    def of(cls, causal: nn.Module) -> Optional["ModelForward"]:
        """The one that `patch_model` has put on this model, if any."""
        return vars(causal).get(cls.ATTRIBUTE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # DecoderHook reads this. It is set in compiled code as well: where the graph breaks, the
        # decoder is called from Python, and its hook is not compiled away.
        # A forward may call the model again inside itself, and still runs once that call is over.
        was_running = self.is_running
        self.is_running = True
        try:
            return self._fused_or_upstream(*args, **kwargs)
        finally:
            self.is_running = was_running

    def _fused_or_upstream(self, *args: Any, **kwargs: Any) -> Any:
        causal = self.causal
        for_trl = kwargs.pop(trl.LOSS_REQUEST, False)
        inputs = self.fused.inputs_by_name(args, kwargs)
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            if causal.training and torch.is_grad_enabled():
                self.warn(
                    "a patched model in training got no labels, so it computes dense logits and no "
                    "loss. Hugging Face's Trainer takes labels away where TrainingArguments has a "
                    "label_smoothing_factor: call smoothce.patch_trainer(trainer)"
                )
            return type(causal).forward(causal, *args, **kwargs)
        if not causal.training and not for_trl:
            self._warn_where_evaluation_trains()
            head_forward = HeadForward.of(self.fused.head)
            if head_forward is None:  # somebody has put in another head since
                return type(causal).forward(causal, *args, **kwargs)
            if head_forward.settings.eval_logits:
                ignore_index = head_forward.settings.options.ignore_index
                return self._evaluate_upstream(inputs, ignore_index)
        verified = self._verified_for(inputs)
        self.head_hooks.admit(self.fused.head, self.head_name)
        if causal.training:
            self.gave_loss_in_training = True
        return self.fused(
            inputs, verified.output_class, as_in_training=causal.training, for_trl=for_trl
        )

    def _evaluate_upstream(self, inputs: dict[str, Any], ignore_index: int) -> Any:
        """Upstream's forward, with logits, of the labels that count in training.

        Upstream leaves out labels of -100 too, whatever `ignore_index` the settings have. A call
        that says by itself which label to ignore is upstream's as it stands."""
        inputs_of_upstream = dict(inputs)
        if ignore_index != UPSTREAMS_IGNORE_INDEX and inputs.get("ignore_index") is None:
            for name in ("labels", "shift_labels"):
                labels = inputs.get(name)
                if labels is not None:
                    ignored = labels == ignore_index
                    inputs_of_upstream[name] = labels.masked_fill(ignored, UPSTREAMS_IGNORE_INDEX)
        return type(self.causal).forward(self.causal, **inputs_of_upstream)

    def _verified_for(self, inputs: dict[str, Any]) -> VerifiedLoss:
        """What was verified, if it covers this call; else the model is verified for this call.

        Raises ValueError where the model's loss is not, or is no longer, the fused one."""
        verified = self.verified
        with_auxiliary_loss = wants_auxiliary_loss(self.causal, inputs)
        if verified is None:
            return self._verify(with_auxiliary_loss)
        # A scale's or another attribute's new value is somebody's mistake: it raises.
        verified.raise_where_changed()
        # A frozen tensor's new value is a checkpoint's: the model is looked at again.
        if verified.needs_verifying_again():
            return self._verify(with_auxiliary_loss)
        if with_auxiliary_loss and not verified.has_auxiliary_loss:
            return self._verify(with_auxiliary_loss)
        return verified

    def _verify(self, with_auxiliary_loss: bool) -> VerifiedLoss:
        name = class_of(self.causal).__name__
        if torch.compiler.is_compiling():
            router = ", and output_router_logits=True" if with_auxiliary_loss else ""
            raise ValueError(
                f"{name} could not be verified when it was patched, and is compiled now: call it "
                f"once, in training mode with labels{router}, before torch.compile"
            )
        head_forward = self.fused.head_forward
        try:
            verified = verify(
                self.fused,
                head_forward.settings.given_logit_map,
                with_auxiliary_loss=with_auxiliary_loss,
                in_forward=True,
            )
        except CannotRun as reason:
            raise ValueError(
                f"patch_model cannot tell whether {name}'s loss is the fused one: {reason}"
            ) from reason
        head_forward.logit_map = verified.logit_map
        self.verified = verified
        return verified

    def _warn_where_evaluation_trains(self) -> None:
        """`from_pretrained` returns models in evaluation mode, which would train without what the
        settings ask for."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        head_forward = HeadForward.of(self.fused.head)
        if head_forward is None:
            return
        left_out = head_forward.settings.left_out_in_evaluation()
        if left_out == "":
            return
        if any(parameter.requires_grad for parameter in self.causal.parameters()):
            self.warn(
                "a patched model in evaluation mode, as from_pretrained returns it, has its "
                f"loss without {left_out}: call model.train(), or evaluate under torch.no_grad()"
            )

    def warn(self, message: str) -> None:
        """Warn once for this model."""
        warn_user_once(self.warnings_given, message)


class DecoderHook:
    """The decoder's forward pre-hook: notices where a patched model trains, but not for its loss.

    It raises ValueError where TRL or Liger trains with a loss that lacks what the settings add, and
    warns once of anybody else.

    A decoder that runs while its model's patched forward does was called by that. Any other call of
    a decoder in training comes from somebody who computes another loss of its hidden states."""

    def __init__(self, model_forward: ModelForward) -> None:
        self.model_forward = model_forward

    def __call__(self, decoder: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if not decoder.training or not torch.is_grad_enabled():
            return
        if _a_patched_forward_runs(decoder) or _in_backward():
            return
        settings = self.model_forward.fused.head_forward.settings
        other = other_loss_of(self.model_forward.causal)
        if other is not None and settings.differs_from_upstream():
            raise ValueError(
                f"{other} trains the model with a loss of its own, without patch_model's "
                f"{settings.differences()}: call smoothce.patch_trainer(trainer), which keeps "
                "that, once the trainer is made, without use_liger_kernel"
            )
        self.model_forward.warn(
            "something trains a patched model around its loss, so that patch_model's settings have "
            "no effect: for TRL's SFTTrainer call smoothce.patch_trainer(trainer)"
        )


def _a_patched_forward_runs(decoder: nn.Module) -> bool:
    """Whether a patched model of which this is the decoder runs; several may share a decoder."""
    for hook in decoder._forward_pre_hooks.values():
        if isinstance(hook, DecoderHook) and hook.model_forward.is_running:
            return True
    return False


def _in_backward() -> bool:
    """Whether a backward runs, which a checkpointed decoder is recomputed in."""
    return torch._C._current_graph_task_id() != -1


def other_loss_of(causal: CausalModel) -> str | None:
    """Who has put a forward with another loss around the model's, where that is known."""
    for forward in forward_layers(causal):
        if trl.is_trls_forward(forward):
            return trl.TRAINER
        if (getattr(forward, "__module__", None) or "").startswith("liger_kernel."):
            return "Liger"
    return None

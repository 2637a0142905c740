"""What a patched model runs in the place of upstream's forward, and what its decoder's hook sees.

They are objects and not closures so that a patched model can be copied and pickled as a whole, and
comes back patched.
"""

import inspect
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smoothce.hf_patch.anatomy import (
    CausalModel,
    check_head,
    class_forward,
    config_of,
    decoder_of,
    forward_in_slot,
    forward_layers,
    is_wrapped,
    warn_once,
)
from smoothce.hf_patch.head_forward import HeadForward, SummedLoss
from smoothce.hf_patch.hooks import HeadHooks
from smoothce.hf_patch.outputs import (
    auxiliary_loss,
    causal_output,
    refuse_summed_router,
    trl_output,
)
from smoothce.hf_patch.proof import CannotRun, Proof, prove

# Arguments of a causal model's forward that its decoder does not take.
HEAD_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "ignore_index")


class ModelForward:
    """A patched model's forward. It keeps upstream's signature, by which Trainers pick columns.

    Upstream is transformers, whose forward of the model's class still runs where there is nothing
    to fuse: without labels, and in evaluation."""

    ATTRIBUTE = "_smoothce_model_forward"  # under which a patched model keeps it

    def __init__(self, causal: CausalModel, head_name: str, eval_logits: bool) -> None:
        self.causal = causal
        self.head_name = head_name
        self.eval_logits = eval_logits
        parameters = inspect.signature(class_forward(causal)).parameters
        self.parameter_names = tuple(parameters)
        self.takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.proof: Proof | None = None  # None: the model could not run when it was patched
        self.has_trained = False  # since SmoothingCallback set it, when the step began
        self.is_running = False
        self.head_hooks = HeadHooks()
        self.decoder_hook: RemovableHandle | None = None  # of the decoder's DecoderHook
        self.warnings_given: set[str] = set()

    @classmethod
    def of(cls, causal: nn.Module) -> Optional["ModelForward"]:
        """The one that `patch_model` has put on this model, if any."""
        return vars(causal).get(cls.ATTRIBUTE)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(class_forward(self.causal))

    @property
    def head_forward(self) -> HeadForward:
        """The head's. Raises TypeError where the head is another since."""
        head = getattr(self.causal, self.head_name)
        head_forward = HeadForward.of(head)
        if head_forward is None:
            check_head(self.head_name, head)
            raise TypeError(
                f"{self.head_name} was replaced after patch_model; call patch_model again"
            )
        if torch.compiler.is_compiling():
            return head_forward
        if forward_in_slot(head) is not head_forward or is_wrapped(head):
            raise TypeError(
                f"{self.head_name}.forward was wrapped after patch_model; remove the wrapper, "
                "which would get the loss in the place of logits"
            )
        return head_forward

    def takes(self, name: str) -> bool:
        """Whether upstream's forward has such an argument."""
        return self.takes_any or name in self.parameter_names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the decoder's hook, for which this is, is silent then
            return self._run(*args, **kwargs)
        self.is_running = True
        try:
            return self._run(*args, **kwargs)
        finally:
            self.is_running = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        causal = self.causal
        per_token = kwargs.pop("fused_lm_head", False)  # as TRL's trainers ask
        names = self.parameter_names[: len(args)]
        inputs = {**dict(zip(names, args, strict=True)), **kwargs}
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            if causal.training and torch.is_grad_enabled():
                self._warn(
                    "a patched model in training got no labels, so it computes dense logits and no "
                    "loss. Hugging Face's Trainer takes labels away where TrainingArguments has a "
                    "label_smoothing_factor: call smoothce.patch_trainer(trainer)"
                )
            return type(causal).forward(causal, *args, **kwargs)
        if not causal.training and not per_token:
            self._warn_where_evaluation_trains()
            if self.eval_logits:
                return type(causal).forward(causal, *args, **kwargs)
        self._check_proof()
        if causal.training:
            self.has_trained = True
        return self.fused(inputs, smoothed=causal.training, per_token=per_token)

    def _check_proof(self) -> None:
        """Raises ValueError where the model does not, or no longer, compute the fused loss."""
        name = type(self.causal).__name__
        if self.proof is None:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"{name} could not be tried when it was patched, and is compiled now: call it "
                    "once, in training mode with labels, before torch.compile"
                )
            head_forward = self.head_forward
            try:
                self.proof = prove(self, head_forward.settings, in_forward=True)
            except CannotRun as reason:
                raise ValueError(
                    f"patch_model cannot tell whether {name}'s loss is the fused one: {reason}"
                ) from reason
            head_forward.settings = head_forward.settings.with_logit_map(self.proof.logit_map)
        self.proof.check_still_true()
        self.head_hooks.check(getattr(self.causal, self.head_name), self.head_name)

    def fused(self, inputs: dict[str, Any], *, smoothed: bool, per_token: bool = False) -> Any:
        """The outputs of a forward with labels, from the decoder and the head's loss.

        They are upstream's, or `per_token` those that TRL asks for."""
        causal = self.causal
        decoder_inputs = dict(inputs)
        head_inputs = {name: decoder_inputs.pop(name, None) for name in HEAD_ARGUMENTS}
        options = self.head_forward.settings.options
        self._check_head_inputs(head_inputs, options.ignore_index)
        wants_dict = decoder_inputs.pop("return_dict", None)

        outputs = decoder_of(causal)(**decoder_inputs, return_dict=True)
        labels = head_inputs["shift_labels"]
        if labels is None:
            labels = F.pad(head_inputs["labels"][..., 1:], (0, 1), value=options.ignore_index)
        head = getattr(causal, self.head_name)
        hidden = outputs.last_hidden_state
        if per_token:
            summed: SummedLoss = head(hidden, labels=labels, smoothed=smoothed, per_token=True)
            auxiliary = auxiliary_loss(causal, outputs, decoder_inputs)
            return trl_output(summed, options.ignore_index, auxiliary)
        divisor = head_inputs["num_items_in_batch"]
        loss: Tensor = head(hidden, labels=labels, divisor=divisor, smoothed=smoothed)
        result = causal_output(causal, loss, outputs, decoder_inputs)
        if getattr(result, "aux_loss", None) is not None:
            refuse_summed_router(options.reduction)
        if wants_dict is None:
            wants_dict = getattr(config_of(causal), "return_dict", True)
        return result if wants_dict else result.to_tuple()

    def _check_head_inputs(self, head_inputs: dict[str, Any], ignore_index: int) -> None:
        kept = head_inputs["logits_to_keep"]
        if isinstance(kept, Tensor) or kept:
            raise ValueError("logits_to_keep cannot be combined with labels in a patched model")
        if head_inputs["ignore_index"] not in (None, ignore_index):
            raise ValueError(
                f"ignore_index={head_inputs['ignore_index']} is given to a model that was patched "
                f"with ignore_index={ignore_index}"
            )

    def _warn_where_evaluation_trains(self) -> None:
        """`from_pretrained` returns models in evaluation mode, which would train unsmoothed."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        head_forward = HeadForward.of(getattr(self.causal, self.head_name))
        if head_forward is None or not head_forward.settings.smooths():
            return
        if any(parameter.requires_grad for parameter in self.causal.parameters()):
            self._warn(
                "a patched model in evaluation mode, as from_pretrained returns it, has its "
                "loss without smoothing: call model.train(), or evaluate under torch.no_grad()"
            )

    def _warn(self, message: str) -> None:
        warn_once(self.warnings_given, message)


class DecoderHook:
    """The decoder's forward pre-hook: warns where a patched model trains, but not for its loss.

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
        settings = self.model_forward.head_forward.settings
        other = other_loss_of(self.model_forward.causal)
        if other is not None and settings.smooths():
            beta = f"label_smoothing={settings.options.label_smoothing:g}"
            raise ValueError(
                f"{other} trains the model with a loss of its own, without patch_model's {beta}: "
                f"call smoothce.patch_trainer(trainer, {beta}) once the trainer is made, without "
                "use_liger_kernel"
            )
        self.model_forward._warn(
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


TRL = "TRL's SFTTrainer"


def other_loss_of(causal: CausalModel) -> str | None:
    """Who has put a forward with another loss around the model's, where that is known."""
    for forward in forward_layers(causal):
        if is_trls(forward):
            return TRL
        if (getattr(forward, "__module__", None) or "").startswith("liger_kernel."):
            return "Liger"
    return None


def is_trls(forward: Any) -> bool:
    """Whether it is the forward that TRL's `add_fused_lm_head` makes."""
    return getattr(getattr(forward, "__code__", None), "co_name", "") == "_fused_forward"

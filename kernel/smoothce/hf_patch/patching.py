"""`patch_model` and `unpatch_model`, and what a patched model runs."""

import inspect
import logging
import os
import types
import warnings
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from smoothce.checks import check_target
from smoothce.hf_patch.deferred_logits import Deferral, DeferredLogits
from smoothce.hf_patch.head import (
    UPSTREAMS_IGNORE_INDEX,
    LossSettings,
    PatchSettings,
    SmoothedHead,
    patch_head,
    patched_heads,
    unpatch_head,
)
from smoothce.linear_cross_entropy import explain

logger = logging.getLogger("smoothce")


def patch_model(model: nn.Module, **keywords: Unpack[PatchSettings]) -> nn.Module:
    """Make a language model compute `linear_cross_entropy` where it computed its loss.

        patch_model(model, label_smoothing=0.1)
        model.train()  # from_pretrained returns it in evaluation mode
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss

    The model's own forward runs. Its head defers the logits, and the one cross-entropy that the
    forward makes of them is computed without them, smoothed. So shift, masks, divisor, auxiliary
    loss and output are the model's own. What a forward returns:

    | mode                            | with labels                         | without labels     |
    |---------------------------------|-------------------------------------|--------------------|
    | training                        | the smoothed loss, deferred logits  | as upstream        |
    | evaluation                      | upstream's loss and logits          | as upstream        |
    | evaluation, `eval_logits=False` | upstream's loss, deferred logits    | as upstream        |

    Deferred logits are computed by `outputs.logits.dense()`, without a gradient; whatever else
    is done to them raises. Upstream's loss is without smoothing, z-loss or a `loss` of yours, and a
    mean whatever `reduction` is. Training in evaluation mode, where it would leave something out,
    warns.

    A forward takes `token_weights` (B, T) beside `labels`: the weight of each label, as
    `linear_cross_entropy` has them.

    The settings:

    - `label_smoothing`, `smoothing_target`, `z_loss`, `filter_eps`, `workspace` and `impl` are
      `linear_cross_entropy`'s;
    - `ignore_index`: labels of this value do not count, and those of -100 do not either;
    - `reduction` is "mean" or "sum", of the loss in training; a sum is not divided by
      `num_items_in_batch`;
    - `logit_scale` and `softcap` are the model's own; one that is given, a number or None, has to
      be what the model does;
    - `loss` puts another function in the place of `linear_cross_entropy`:
      `loss(hidden (N, D), weight (V, D), labels (N,))`, with the model's `bias=`, `softcap=` and
      `logit_scale=` where it has them, whose result is the mean over labels that are not -100. Its
      logits are cap(logit_scale · hidden Wᵀ + bias): the bias that it is given is scaled already.
      It smooths as it likes: `label_smoothing` and `z_loss` are not used beside it;
    - `eval_logits=False` spares evaluation the logits as well.

    Call it before `torch.compile`, `accelerator.prepare` or `deepspeed.initialize`, and before or
    after `fully_shard`. A `PeftModel` is patched inside. Returns the model, changed in place; a
    second call replaces the settings, and one that is refused leaves them.

    Raises ValueError for a setting out of range, and TypeError for an unknown setting and for a
    model that is wrapped or whose head is no `nn.Linear`. A forward with labels raises ValueError
    where the model does to its logits what a loss without logits cannot follow (TypeError where
    that is one of Python's operators, such as −logits), and where its loss is not made by one
    cross-entropy of them.
    """
    return install(model, LossSettings().with_keywords(keywords))


def install(model: nn.Module, settings: LossSettings, *, for_trl: bool = False) -> nn.Module:
    """Patch the model with these settings; `for_trl` answers TRL's request for its loss too."""
    causal = unwrapped(model)
    if hasattr(causal, "module") or hasattr(causal, "_orig_mod"):
        raise TypeError(
            f"{type(causal).__name__} is a wrapped model: call patch_model before "
            "DistributedDataParallel, deepspeed.initialize or torch.compile"
        )
    head = head_of(causal)
    if settings.smoothing_target is not None:
        check_target(settings.smoothing_target, head.out_features)  # type: ignore[arg-type]
    earlier = PatchedForward.of(causal)
    if earlier is not None:
        for_trl = for_trl or earlier.for_trl
        unpatch_model(causal)
    patch_head(head, settings)
    forward = PatchedForward(causal, for_trl)
    setattr(causal, PatchedForward.ATTRIBUTE, forward)
    setattr(causal, forward.slot, forward)
    _say_once_a_job(f"{type(causal).__name__}: {settings.describe()}")
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo `patch_model`: the model computes its own loss from then on. Returns it.

    What `patch_trainer` has done to a trainer stays: make the trainer anew. Raises TypeError where
    the model is not patched."""
    causal = unwrapped(model)
    forward = PatchedForward.of(causal)
    if forward is None:
        raise TypeError(f"{type(causal).__name__} is not patched")
    delattr(causal, PatchedForward.ATTRIBUTE)
    forward.remove()
    for head in patched_heads(causal):
        unpatch_head(head)
    return model


def unwrapped(model: nn.Module) -> Any:
    """The causal language model; of a `PeftModel` the one inside."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    return model


def head_of(causal: Any) -> nn.Module:
    """The module that turns hidden states into logits; where PEFT trains a copy, the copy.

    Raises TypeError where there is none, or where it does something else than an `nn.Linear`."""
    name = type(causal).__name__
    head = None
    with_embeddings = getattr(causal, "get_output_embeddings", None)
    if with_embeddings is not None:
        try:
            head = with_embeddings()
        except NotImplementedError:  # models of which transformers cannot tell the embeddings
            head = None
    if head is None:
        head = getattr(causal, "lm_head", None)
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"{name} has no head that turns hidden states into logits: neither "
            "get_output_embeddings() nor lm_head is one"
        )
    copies = getattr(head, "modules_to_save", None)
    if copies is not None:  # PEFT's wrapper of a module that is trained as a whole
        head = copies[head.active_adapter]
    if isinstance(head, SmoothedHead):
        return head
    head_class = f"{type(head).__module__}.{type(head).__name__}"
    if hasattr(head, "base_layer"):
        raise TypeError(
            f"{name}'s head carries an adapter ({head_class}), whose gradient would be lost: leave "
            "it out of target_modules, or train it as a whole by modules_to_save"
        )
    if type(head).forward is not nn.Linear.forward:
        raise TypeError(f"{name}'s head must be a torch.nn.Linear, not {head_class}")
    return head


class PatchedForward:
    """What a patched model runs in the place of its forward: the forward itself, with labels while
    its head defers the logits. Its signature is upstream's and `token_weights`, by which Trainers
    pick columns.

    It is an object and no closure, so that a patched model can be copied and pickled. One that is
    no longer the model's, because the model was patched anew or unpatched inside another wrapper,
    passes its calls on."""

    ATTRIBUTE = "_smoothce_forward"  # under which a patched model keeps it

    def __init__(self, causal: Any, for_trl: bool) -> None:
        self.causal = causal
        self.for_trl = for_trl
        self.slot = _forward_slot(causal)
        # What was in the place of the class's forward, such as TRL's; None: nothing.
        self.replaced = vars(causal).get(self.slot)
        signature = inspect.signature(types.MethodType(type(causal).forward, causal))
        self.positional_names = tuple(
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        # Whether the forward takes that count of tokens; before transformers 4.46 none did.
        self.takes_items = (
            inspect.Parameter.VAR_KEYWORD in kinds or "num_items_in_batch" in signature.parameters
        )
        self.__signature__ = _with_token_weights(signature)
        self.is_running = False
        self.gave_loss_in_training = False  # `callback.LossWatch` takes it back at each update
        self.warned: set[str] = set()
        self.decoder_hook = None
        decoder = _decoder_of(causal)
        if decoder is not None:
            self.decoder_hook = decoder.register_forward_pre_hook(DecoderHook(self))

    @classmethod
    def of(cls, causal: nn.Module) -> Optional["PatchedForward"]:
        """The one that the model has, if it is patched."""
        return vars(causal).get(cls.ATTRIBUTE)

    def upstream(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that was there before."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.causal).forward(self.causal, *args, **kwargs)

    def explain(self) -> str:
        """Say with what settings the model trains, and how its loss is computed for 8,192 tokens
        where its head is now."""
        head: Any = head_of(self.causal)
        settings = head.settings
        said = f"{type(self.causal).__name__} trains with {settings.describe()}"
        weight = head.weight
        is_sharded = type(weight).__name__ == "DTensor" or hasattr(weight, "ds_status")
        if settings.loss is not None or weight.is_meta or is_sharded:
            return said
        plan = explain(
            weight.new_empty(8192, weight.shape[1]).requires_grad_(),
            weight,
            bias=head.bias,
            filter_eps=settings.filter_eps,
            workspace=settings.workspace,
            impl=settings.impl,
        )
        return f"{said}; {plan}"

    def is_outermost(self) -> bool:
        """Whether nobody has put another forward in its place, or around it, since."""
        current = vars(self.causal).get(self.slot)
        while current is not None:
            if getattr(current, "__func__", current) is self:
                return True
            current = getattr(current, "__wrapped__", None)
        return False

    def remove(self) -> None:
        """Put back what was there. Inside a wrapper of somebody else's it stays, and passes on."""
        if self.decoder_hook is not None:
            self.decoder_hook.remove()
        current = vars(self.causal).get(self.slot)
        if getattr(current, "__func__", current) is not self:
            return
        if self.replaced is None:
            delattr(self.causal, self.slot)
        else:
            setattr(self.causal, self.slot, self.replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            # accelerate's `unwrap_model` binds what it finds to the model, or a copy of it, as if
            # it were a function.
            current = PatchedForward.of(args[0]) or self
            return current(*args[1:], **kwargs)
        named = dict(zip(self.positional_names, args, strict=False))
        if PatchedForward.of(self.causal) is not self or named.keys() & kwargs.keys():
            return self.upstream(*args, **kwargs)
        if len(args) > len(self.positional_names):
            return self.upstream(*args, **kwargs)
        was_running = self.is_running
        self.is_running = True
        try:
            return self._deferred_or_upstream({**named, **kwargs})
        finally:
            self.is_running = was_running

    def _deferred_or_upstream(self, inputs: dict[str, Any]) -> Any:
        causal = self.causal
        asked_by_trl = self.for_trl and inputs.pop("fused_lm_head", False)
        token_weights = inputs.pop("token_weights", None)
        head: Any = head_of(causal)
        if not isinstance(head, SmoothedHead):
            raise TypeError(
                f"{type(causal).__name__}'s head was replaced after patch_model; call it again"
            )
        settings = head.settings
        labels = inputs.get("labels")
        shift_labels = inputs.get("shift_labels")
        if labels is None and shift_labels is None:
            return self._without_labels(inputs, settings)
        for name in ("labels", "shift_labels"):
            given = inputs.get(name)
            if given is not None and settings.ignore_index != UPSTREAMS_IGNORE_INDEX:
                ignored = given == settings.ignore_index
                inputs[name] = given.masked_fill(ignored, UPSTREAMS_IGNORE_INDEX)
        if not causal.training and not asked_by_trl:
            self._warn_where_evaluation_trains(settings)
            if settings.eval_logits and token_weights is None:
                return self.upstream(**inputs)
        deferral = Deferral(with_smoothing=causal.training, with_statistics=asked_by_trl)
        if asked_by_trl and causal.training:
            refuse_sum_under_trl(settings)
        if token_weights is not None:
            deferral.token_weights, deferral.aligned_labels = _aligned(
                token_weights, labels, shift_labels
            )
        outputs = self._deferred(head, deferral, inputs)
        if causal.training and torch.is_grad_enabled():
            self.gave_loss_in_training = True
        if asked_by_trl:
            return trl_output(deferral, outputs)
        if not causal.training and settings.eval_logits:
            return _with_dense_logits(outputs)
        return outputs

    def _without_labels(self, inputs: dict[str, Any], settings: LossSettings) -> Any:
        left_out = settings.changes_in_training()
        if self.causal.training and torch.is_grad_enabled() and left_out:
            self.warn(
                f"a patched model in training got no labels, so it computes logits without "
                f"{left_out}. Hugging Face's Trainer takes labels away where TrainingArguments has "
                "a label_smoothing_factor: call smoothce.patch_trainer(trainer). For training by "
                "another loss, call smoothce.unpatch_model(model)"
            )
        return self.upstream(**inputs)

    def _deferred(self, head: Any, deferral: Deferral, inputs: dict[str, Any]) -> Any:
        """Upstream's outputs, their loss computed without logits. Raises ValueError where the
        forward makes its loss of them in another way than by one cross-entropy."""
        settings = head.settings
        items = inputs.get("num_items_in_batch")
        if items is not None:
            # It may be a fraction. A mean of nothing is 0, and not NaN.
            items = torch.where(items == 0, 1, items) if isinstance(items, Tensor) else items or 1
            inputs["num_items_in_batch"] = items
        if deferral.with_smoothing and settings.reduction == "sum":
            inputs.pop("num_items_in_batch", None)
        elif not self.takes_items:
            deferral.divisor = inputs.pop("num_items_in_batch", None)
        outer_deferral = head.deferral
        head.deferral = deferral
        try:
            outputs = self.upstream(**inputs)
        finally:
            head.deferral = outer_deferral
        name = type(self.causal).__name__
        if deferral.losses != 1:
            raise ValueError(
                f"the forward of {name} makes its loss by {deferral.losses} cross-entropies of its "
                "head's logits, and not by one, so that patch_model cannot change it (where TRL's "
                "SFTTrainer is the cause, call smoothce.patch_trainer(trainer))"
            )
        has_auxiliary = getattr(outputs, "aux_loss", None) is not None
        if isinstance(outputs, tuple):  # return_dict=False
            asked = inputs.get("output_router_logits")
            config = getattr(self.causal, "config", None)
            of_config = getattr(config, "output_router_logits", False)
            has_auxiliary = of_config if asked is None else asked
        if deferral.with_smoothing and settings.reduction == "sum" and has_auxiliary:
            raise ValueError(
                f"{name} adds an auxiliary loss, which is a mean, and reduction='sum' makes a sum "
                "of its loss: use reduction='mean', or turn output_router_logits off"
            )
        return outputs

    def _warn_where_evaluation_trains(self, settings: LossSettings) -> None:
        """`from_pretrained` returns models in evaluation mode, which would train without what the
        settings ask for."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        left_out = settings.changes_in_training()
        trains = any(parameter.requires_grad for parameter in self.causal.parameters())
        if left_out and trains:
            self.warn(
                "a patched model in evaluation mode, as from_pretrained returns it, has its "
                f"loss without {left_out}: call model.train(), or evaluate under torch.no_grad()"
            )

    def warn(self, message: str) -> None:
        """Warn once for this model; compiled code does not."""
        if message not in self.warned and not torch.compiler.is_compiling():
            self.warned.add(message)
            warnings.warn(message, stacklevel=4)


def _forward_slot(module: nn.Module) -> str:
    """The attribute that holds a module's own forward.

    It is `forward`, but for a module with a hook of accelerate's, which `device_map` puts on. There
    accelerate has put a wrapper into `forward`, which moves inputs to the module's device and then
    calls what the module ran before: accelerate keeps that in `_old_forward`."""
    if "_hf_hook" not in vars(module):
        return "forward"
    forward = vars(module).get("forward")
    function = getattr(forward, "func", forward)  # accelerate's is a functools.partial
    code = getattr(function, "__code__", None)
    is_accelerates = getattr(code, "co_name", "") == "new_forward"
    return "_old_forward" if is_accelerates else "forward"


def _with_token_weights(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    if "token_weights" in signature.parameters:
        return signature
    added = inspect.Parameter("token_weights", inspect.Parameter.KEYWORD_ONLY, default=None)
    place = len(parameters)
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        place -= 1
    return signature.replace(parameters=[*parameters[:place], added, *parameters[place:]])


def _aligned(
    token_weights: Tensor,  # (B, T), of labels or shift_labels
    labels: Tensor | None,  # (B, T)
    shift_labels: Tensor | None,  # (B, T)
) -> tuple[Tensor, Tensor]:
    """The weights and their labels at the places of the logits that predict them."""
    of_labels = labels if shift_labels is None else shift_labels
    assert of_labels is not None  # there is a loss
    if token_weights.shape != of_labels.shape:
        raise ValueError(
            f"token_weights must have the labels' shape {tuple(of_labels.shape)}, not "
            f"{tuple(token_weights.shape)}"
        )
    if shift_labels is not None:
        return token_weights, shift_labels
    next_weights = F.pad(token_weights[..., 1:], (0, 1))
    return next_weights, F.pad(of_labels[..., 1:], (0, 1), value=UPSTREAMS_IGNORE_INDEX)


def _with_dense_logits(outputs: Any) -> Any:
    """A forward's outputs, with its deferred logits computed."""
    if isinstance(outputs, tuple):
        return tuple(
            output.dense() if isinstance(output, DeferredLogits) else output for output in outputs
        )
    if isinstance(outputs.logits, DeferredLogits):
        outputs.logits = outputs.logits.dense()
    return outputs


def refuse_sum_under_trl(settings: LossSettings) -> None:
    """Raises ValueError for a sum, which would have no effect: TRL's loss is a mean."""
    if settings.reduction != "mean":
        raise ValueError(
            f"reduction must be 'mean', as TRL's SFTTrainer reduces its loss, not "
            f"{settings.reduction!r}: call smoothce.patch_trainer(trainer, reduction='mean')"
        )


def trl_output(deferral: Deferral, outputs: Any) -> Any:
    """What TRL's SFTTrainer reads: its loss is the sum of −log_probs over the number of tokens, or
    under DeepSpeed's sequence parallelism `loss`.

    Of log_probs it reads the sum alone, so that each token gets an equal share of the summed loss.
    True log probabilities would be one loss a token, whose gradient takes one matrix product more.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    loss_sum = deferral.loss_sum
    statistics = deferral.statistics
    labels = deferral.labels
    assert loss_sum is not None and statistics is not None and labels is not None
    valid = labels != UPSTREAMS_IGNORE_INDEX
    share = -loss_sum / valid.sum().clamp(min=1)
    return FusedCausalLMOutput(
        loss=outputs.loss,
        log_probs=share * valid,
        entropy=statistics.entropy,
        is_top1=(statistics.argmax == labels) & valid,
        label_mask=valid,
        aux_loss=getattr(outputs, "aux_loss", None),
    )


def _decoder_of(causal: Any) -> nn.Module | None:
    """The part of the model that makes hidden states, if it has a name that we know."""
    for name in ("base_model", "model"):
        decoder = getattr(causal, name, None)
        if isinstance(decoder, nn.Module) and decoder is not causal:
            return decoder
    return None


class DecoderHook:
    """The decoder's forward pre-hook: notices who trains a patched model, but not by its loss.

    It raises where somebody has put a forward in the place of the patched one, as TRL's trainers
    and Liger do, which would train without the settings in silence. Somebody who calls the decoder
    by himself is warned once. Compiled code has no hook."""

    def __init__(self, forward: PatchedForward) -> None:
        self.forward = forward

    def __call__(self, decoder: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        in_backward = torch._C._current_graph_task_id() != -1  # of a checkpointed decoder
        if not decoder.training or not torch.is_grad_enabled() or in_backward:
            return
        for hook in decoder._forward_pre_hooks.values():  # several models may share a decoder
            if isinstance(hook, DecoderHook) and hook.forward.is_running:
                return
        forward = self.forward
        causal = forward.causal
        head: Any = next(patched_heads(causal), None)
        left_out = "" if head is None else head.settings.changes_in_training()
        if left_out and not forward.is_outermost():
            other = vars(causal).get(forward.slot, type(causal).forward)
            other = getattr(other, "__func__", other)
            raise ValueError(
                f"{getattr(other, '__globals__', {}).get('__name__', other)} has replaced the "
                f"forward of {type(causal).__name__} and trains it without {left_out}: for TRL's "
                "SFTTrainer call smoothce.patch_trainer(trainer) once the trainer is made; for "
                "another trainer or loss call smoothce.unpatch_model(model) before it is made"
            )
        forward.warn(
            "something trains a patched model around its loss, so that patch_model's settings have "
            "no effect: for TRL's SFTTrainer call smoothce.patch_trainer(trainer)"
        )


def _say_once_a_job(message: str) -> None:
    """Log a line, on the first process of a job alone."""
    if os.environ.get("RANK", "0") == "0":
        logger.info(message)

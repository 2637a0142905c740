"""The loss inside Hugging Face causal language models: `patch_model`, `unpatch_model`.

A patched model in training mode, given labels, runs its own decoder and then calls its `lm_head`
with hidden states and labels; the head's forward returns the loss. Going through
`lm_head.__call__`, once for each forward, is what lets DeepSpeed's ZeRO-3 gather the classifier
for the head's forward and backward and free it in between. Reading `lm_head.weight` from outside
the head would not.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from smoothce.linear_cross_entropy import linear_cross_entropy
from smoothce.options import Options


def _plain(config: object) -> dict[str, float]:
    return {}


def _softcap(config: object) -> dict[str, float]:
    return {"softcap": config.final_logit_softcapping}


# What stands between lm_head's output and the logits, read from the model's configuration.
ARCHITECTURES = {
    "LlamaForCausalLM": _plain,
    "MistralForCausalLM": _plain,
    "MixtralForCausalLM": _plain,
    "GemmaForCausalLM": _plain,
    "Gemma2ForCausalLM": _softcap,
    "Gemma3ForCausalLM": _softcap,
    "Qwen2ForCausalLM": _plain,
    "Qwen3ForCausalLM": _plain,
    "OlmoForCausalLM": _plain,
    "Olmo2ForCausalLM": _plain,
    "Phi3ForCausalLM": _plain,
    "CohereForCausalLM": lambda config: {"logit_scale": config.logit_scale},
    "GraniteForCausalLM": lambda config: {"logit_scale": 1 / config.logits_scaling},
}
# Arguments of a causal model's forward that its decoder does not take.
HEAD_ONLY = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")


def patch_model(
    model: nn.Module,
    *,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    filter_eps: float | str | None = None,
    workspace: int = 0,
    impl: str = "auto",
) -> nn.Module:
    """Make a causal language model compute `linear_cross_entropy` where it computed its loss.

    In training mode with `labels` (B, T), which the model shifts as ever, `outputs.loss` is the
    smoothed loss ("mean" over the valid tokens, or "sum") and `outputs.logits` is None, for they
    never exist. `num_items_in_batch`, which the Hugging Face Trainer passes, replaces the number of
    valid tokens as the mean's divisor. Without labels, or in evaluation mode, nothing changes.

    The gradient is exact unless `filter_eps` asks for the Triton kernels' filter, which is right in
    the mean but not in every step. `workspace` bytes make the exact one faster, as
    `linear_cross_entropy` says.

    Softcap, logit scale, bias and tied embeddings are those of the model. A mixture of experts adds
    its auxiliary loss as upstream does, where `output_router_logits` is on. Patch after resizing
    embeddings and before `accelerator.prepare` or `deepspeed.initialize`; a `PeftModel` is patched
    inside. Returns the model, changed in place; a second call replaces the settings, and one that
    is refused leaves them.

    Raises TypeError for an architecture or a head that is not known to come out exact, and
    ValueError for a setting out of range.
    """
    causal = _unwrapped(model)
    name = type(causal).__name__
    if name not in ARCHITECTURES or not type(causal).__module__.startswith("transformers."):
        raise TypeError(
            f"patch_model does not know {type(causal).__module__}.{name}; "
            f"it knows transformers' {', '.join(ARCHITECTURES)}"
        )
    if getattr(causal.config, "pretraining_tp", 1) > 1:
        raise TypeError(
            f"{name} with pretraining_tp={causal.config.pretraining_tp} is not supported"
        )
    _check_head(causal.lm_head)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum for a model, not {reduction!r}")
    options = Options(
        label_smoothing=label_smoothing,
        reduction=reduction,
        ignore_index=ignore_index,
        filter_eps=filter_eps,
        workspace=workspace,
        **ARCHITECTURES[name](causal.config),
    )
    if getattr(causal.config, "output_router_logits", False):
        _refuse_summed_router(reduction)
    if hasattr(causal, "_smoothce"):  # only now: a refused second call leaves the first in place
        unpatch_model(causal)
    if "forward" in vars(causal):
        raise TypeError(f"{name}.forward is already wrapped; call patch_model before the wrapper")
    causal.lm_head._smoothce = {**vars(options), "impl": impl}
    causal.lm_head.forward = types.MethodType(_head_forward, causal.lm_head)
    causal.forward = types.MethodType(_training_forward(type(causal).forward), causal)
    causal._smoothce = causal.forward
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo `patch_model`. Raises TypeError where the model is not patched or was wrapped since."""
    causal = _unwrapped(model)
    name = type(causal).__name__
    if "_smoothce" not in vars(causal):
        raise TypeError(f"{name} is not patched")
    if vars(causal).get("forward") is not causal._smoothce:
        raise TypeError(f"{name}.forward was wrapped after patch_model; remove the wrapper first")
    for module in (causal, causal.lm_head):
        vars(module).pop("forward", None)
        vars(module).pop("_smoothce", None)
    return model


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_head(head: nn.Module) -> None:
    found = f"{type(head).__module__}.{type(head).__name__}"
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise TypeError(
            f"lm_head carries an adapter ({found}), whose gradient would be lost: "
            "leave lm_head out of target_modules and modules_to_save"
        )
    if type(head) is not nn.Linear:
        raise TypeError(f"lm_head must be a torch.nn.Linear, not {found}")


def _refuse_summed_router(reduction: str) -> None:
    if reduction == "sum":
        raise ValueError(
            "output_router_logits cannot be combined with reduction='sum': the auxiliary loss is a "
            "mean, whose coefficient would lose its meaning beside a sum; use reduction='mean'"
        )


def _head_forward(
    self: nn.Linear,
    hidden: Tensor,  # (B, T, D)
    labels: Tensor | None = None,  # (B, T), shifted
    divisor: Tensor | int | None = None,  # of a mean, instead of the number of valid labels
) -> Tensor:  # (), or without labels the logits (B, T, V)
    if labels is None:
        return type(self).forward(self, hidden)
    divided = divisor is not None and self._smoothce["reduction"] == "mean"
    options = {**self._smoothce, "reduction": "sum"} if divided else self._smoothce
    labels = labels.to(hidden.device)
    bias, scale = self.bias, options["logit_scale"]
    if bias is not None and scale is not None:
        bias = bias * scale  # these models scale the head's whole output
    loss = linear_cross_entropy(hidden, self.weight, labels, bias=bias, **options)
    return loss / divisor if divided else loss


def _training_forward(upstream: Callable) -> Callable:
    """A patched model's forward. It keeps upstream's signature, by which Trainers pick columns."""
    names = list(inspect.signature(upstream).parameters)[1:]  # without self

    @functools.wraps(upstream)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not self.training or given.get("labels") is None:
            return upstream(self, *args, **kwargs)
        head_only = {key: given.pop(key, None) for key in HEAD_ONLY}
        if isinstance(head_only["logits_to_keep"], Tensor) or head_only["logits_to_keep"]:
            raise ValueError("logits_to_keep cannot be combined with labels in a patched model")
        if "_smoothce" not in vars(self.lm_head):
            _check_head(self.lm_head)
            raise TypeError("lm_head was replaced after patch_model; call patch_model again")

        wants_dict = given.pop("return_dict", None)
        outputs = self.model(**given, return_dict=True)
        labels = head_only["shift_labels"]
        if labels is None:
            options = self.lm_head._smoothce
            labels = F.pad(head_only["labels"][..., 1:], (0, 1), value=options["ignore_index"])
        loss = self.lm_head(outputs.last_hidden_state, labels, head_only["num_items_in_batch"])
        result = _result(self, loss, outputs, given)
        wants_dict = self.config.return_dict if wants_dict is None else wants_dict
        return result if wants_dict else result.to_tuple()

    return forward


def _result(model: nn.Module, loss: Tensor, outputs: object, given: dict) -> object:
    """What upstream returns, without logits; a mixture's auxiliary loss added as it adds it."""
    from transformers import modeling_outputs

    shared = {
        "loss": loss,
        "past_key_values": outputs.past_key_values,
        "hidden_states": outputs.hidden_states,
        "attentions": outputs.attentions,
    }
    if not hasattr(outputs, "router_logits"):
        return modeling_outputs.CausalLMOutputWithPast(**shared)
    balanced = given.get("output_router_logits")
    if balanced is None:
        balanced = model.config.output_router_logits
    auxiliary = None
    if balanced:
        _refuse_summed_router(model.lm_head._smoothce["reduction"])
        upstream = sys.modules[type(model).__module__]
        auxiliary = upstream.load_balancing_loss_func(
            outputs.router_logits,
            model.num_experts,
            model.num_experts_per_tok,
            given.get("attention_mask"),
        )
        shared["loss"] = loss + model.router_aux_loss_coef * auxiliary.to(loss.device)
    return modeling_outputs.MoeCausalLMOutputWithPast(
        **shared, aux_loss=auxiliary, router_logits=outputs.router_logits
    )

"""The loss inside Hugging Face causal language models: `patch_model`, and `patch_trainer`.

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
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothce.dispatch import check_impl, check_target, check_tensors
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
    "Qwen2MoeForCausalLM": _plain,
    "Qwen3ForCausalLM": _plain,
    "Qwen3MoeForCausalLM": _plain,
    "OlmoForCausalLM": _plain,
    "Olmo2ForCausalLM": _plain,
    "Olmo3ForCausalLM": _plain,
    "OlmoeForCausalLM": _plain,
    "SmolLM3ForCausalLM": _plain,
    "Phi3ForCausalLM": _plain,
    "CohereForCausalLM": lambda config: {"logit_scale": config.logit_scale},
    "GraniteForCausalLM": lambda config: {"logit_scale": 1 / config.logits_scaling},
}
# Arguments of a causal model's forward that its decoder does not take.
HEAD_ONLY = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "ignore_index")


def patch_model(
    model: nn.Module,
    *,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    smoothing_target: Tensor | None = None,  # (V,)
    z_loss: float = 0.0,
    filter_eps: float | str | None = None,
    workspace: int | str = "auto",
    impl: str = "auto",
    loss: Callable[..., Tensor] | None = None,
    eval_logits: bool = True,
    **head: float | None,
) -> nn.Module:
    """Make a causal language model compute `linear_cross_entropy` where it computed its loss.

    In training mode (`model.train()`; from `from_pretrained` a model comes in evaluation mode,
    where training warns once) with `labels` (B, T), which the model shifts as ever, `outputs.loss`
    is the smoothed loss ("mean" over the valid tokens, or "sum") and `outputs.logits` is None, for
    they never exist. `num_items_in_batch`, which the Hugging Face Trainer passes, replaces the
    number of valid tokens as the mean's divisor. Without labels, or in evaluation mode, nothing
    changes; with `eval_logits=False` an evaluation with labels has the loss without smoothing,
    reduced as in training, and no logits either. Training without labels warns once.

    `smoothing_target`, `z_loss`, `filter_eps`, `workspace` and `impl` are `linear_cross_entropy`'s.
    `loss` puts another function in its place: `loss(hidden (N, D), weight (V, D), labels (N,))`,
    with the model's `bias=`, `softcap=` and `logit_scale=` where it has them, whose result is the
    mean over labels that are not `ignore_index`; it smooths as it likes.

    Softcap, logit scale, bias and tied embeddings are those of the model. For an architecture that
    is not known, give both `softcap=` and `logit_scale=` (a number, or None for none) for what its
    forward does to the output of `lm_head`, which nothing checks. A mixture of experts adds
    its auxiliary loss as upstream does, where `output_router_logits` is on. Patch after resizing
    embeddings and before `accelerator.prepare` or `deepspeed.initialize`; a `PeftModel` is patched
    inside. Returns the model, changed in place; a second call replaces the settings, and one that
    is refused leaves them.

    Raises TypeError for an architecture or a head that is not known to come out exact, and
    ValueError for a setting out of range.
    """
    causal = _unwrapped(model)
    name = type(causal).__name__
    if not head.keys() <= {"softcap", "logit_scale"}:
        raise TypeError(f"patch_model has no setting {', '.join(sorted(head))}")
    if name.startswith("FSDP") or hasattr(causal, "module") or hasattr(causal, "_orig_mod"):
        raise TypeError(
            f"{name} is a wrapped model: call patch_model before fully_shard, "
            "DistributedDataParallel, deepspeed.initialize or torch.compile"
        )
    known = name in ARCHITECTURES and type(causal).__module__.startswith("transformers.")
    if known:
        head = {**ARCHITECTURES[name](causal.config), **head}
    elif len(head) < 2 or not isinstance(getattr(causal, "lm_head", None), nn.Module):
        raise TypeError(
            f"patch_model does not know {type(causal).__module__}.{name}; it knows transformers' "
            f"{', '.join(ARCHITECTURES)}, and a model with an lm_head whose softcap= and "
            "logit_scale= are both given"
        )
    if getattr(causal.config, "pretraining_tp", 1) > 1:
        raise TypeError(
            f"{name} with pretraining_tp={causal.config.pretraining_tp} is not supported"
        )
    _check_head(causal.lm_head)
    check_impl(impl)
    if smoothing_target is not None:
        check_tensors(smoothing_target=smoothing_target)
        check_target(smoothing_target.cpu(), causal.lm_head.out_features)  # raises here, not later
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum for a model, not {reduction!r}")
    options = Options(
        label_smoothing=label_smoothing,
        reduction=reduction,
        ignore_index=ignore_index,
        z_loss=z_loss,
        filter_eps=filter_eps,
        workspace=workspace,
        **head,
    )
    if getattr(causal.config, "output_router_logits", False):
        _refuse_summed_router(reduction)
    if hasattr(causal, "_smoothce"):  # only now: a refused second call leaves the first in place
        unpatch_model(causal)
    if vars(causal).get(_slot(causal), _plain_forward(causal)) != _plain_forward(causal):
        raise TypeError(f"{name}.forward is already wrapped; call patch_model before the wrapper")
    head = causal.lm_head
    own = {"impl": impl, "smoothing_target": smoothing_target, "loss": loss}
    head._smoothce = {**vars(options), **own}
    setattr(head, _slot(head), types.MethodType(_head_forward, head))
    forward = types.MethodType(_training_forward(type(causal).forward, eval_logits), causal)
    setattr(causal, _slot(causal), forward)
    causal._smoothce = forward
    decoder = _decoder(causal)
    decoder._smoothce = decoder.register_forward_pre_hook(_expect)
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo `patch_model`. Raises TypeError where the model is not patched or was wrapped since."""
    causal = _unwrapped(model)
    name = type(causal).__name__
    if "_smoothce" not in vars(causal):
        raise TypeError(f"{name} is not patched")
    if vars(causal).get(_slot(causal)) is not causal._smoothce:
        raise TypeError(f"{name}.forward was wrapped after patch_model; remove the wrapper first")
    if handle := vars(_decoder(causal)).pop("_smoothce", None):  # none in a decoder set since
        handle.remove()
    for module in (causal, causal.lm_head):
        vars(module).pop("_smoothce", None)
        if _slot(module) == "forward":
            vars(module).pop("forward", None)
        else:
            module._old_forward = _plain_forward(module)
    return model


def patch_trainer(trainer: object, **settings: object) -> object:
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
    causal, factor = _unwrapped(trainer.model), trainer.args.label_smoothing_factor
    earlier = {"label_smoothing": 0}
    if (own := vars(causal).get("_smoothce")) and hasattr(own, "eval_logits"):  # patched before
        earlier = {**causal.lm_head._smoothce, "eval_logits": own.eval_logits}
        del earlier["return_lse"], earlier["return_statistics"]  # no settings of a model's
    earlier["label_smoothing"] = earlier["label_smoothing"] or factor
    settings = {**earlier, **settings}
    if factor not in (0, settings["label_smoothing"]):
        raise ValueError(
            f"label_smoothing={settings['label_smoothing']} and the trainer's "
            f"label_smoothing_factor={factor} differ: give one"
        )
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
    if (index := settings.get("ignore_index", -100)) != -100:
        raise ValueError(f"ignore_index must be -100, the trainer's, not {index}")
    code = getattr(getattr(vars(causal).get("forward"), "__func__", None), "__code__", None)
    if getattr(code, "co_name", "") == "_fused_forward":  # by TRL's add_fused_lm_head
        if settings.get("reduction", "mean") != "mean":
            raise ValueError(f"reduction must be 'mean', TRL's, not {settings['reduction']!r}")
        del causal.forward  # which computes a loss of its own
        if "_smoothce" in vars(causal):
            causal.forward = causal._smoothce
    patch_model(trainer.model, **settings)
    trainer.label_smoother = None
    return trainer


def _slot(module: nn.Module) -> str:
    """The attribute that holds a module's own forward: accelerate's `device_map` hooks wrap it."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _plain_forward(module: nn.Module) -> Callable:
    return types.MethodType(type(module).forward, module)


def _decoder(causal: nn.Module) -> nn.Module:
    return causal.model if hasattr(causal, "model") else causal.base_model


def _expect(decoder: nn.Module, inputs: tuple) -> None:
    """Warn where a patched model's decoder trains, but not for its loss."""
    if torch.compiler.is_compiling():
        return
    expected = vars(decoder).pop("_smoothce_expected", False)
    if not expected and decoder.training and torch.is_grad_enabled():
        _warn(
            decoder,
            "something trains a patched model around its loss, so that patch_model's settings have "
            "no effect: for TRL's SFTTrainer call smoothce.patch_trainer(trainer)",
        )


def _warn(module: nn.Module, message: str) -> None:
    said = vars(module).setdefault("_smoothce_warned", set())
    if message not in said:
        said.add(message)
        warnings.warn(message, stacklevel=3)


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
    smoothed: bool = True,
    each: bool = False,  # the summed loss, and every token's statistics
) -> Tensor | tuple:  # (), or without labels the logits (B, T, V)
    if labels is None:
        return type(self).forward(self, hidden)
    options = dict(self._smoothce)
    other, u = options.pop("loss"), options["smoothing_target"]
    labels = labels.to(hidden.device)
    bias, scale = self.bias, options["logit_scale"]
    if bias is not None and scale is not None:
        bias = bias * scale  # these models scale the head's whole output
    if other is not None and smoothed:
        given = {"bias": bias, **{key: options[key] for key in ("softcap", "logit_scale")}}
        given = {key: value for key, value in given.items() if value is not None}
        loss = other(hidden.flatten(0, -2), self.weight, labels.flatten(), **given)
        divided = divisor is not None and options["reduction"] == "mean"
        if divided or options["reduction"] == "sum":
            loss = loss * (labels != options["ignore_index"]).sum()
        return loss / (divisor + (divisor == 0)) if divided else loss
    divided = divisor is not None and options["reduction"] == "mean" and not each
    if each or divided:
        options["reduction"] = "sum"
    if not smoothed:
        options["label_smoothing"] = options["z_loss"] = 0.0
    options["smoothing_target"] = u if u is None else u.to(hidden.device)
    options["return_statistics"] = each
    loss = linear_cross_entropy(hidden, self.weight, labels, bias=bias, **options)
    if each:
        return *loss, labels
    return loss / (divisor + (divisor == 0)) if divided else loss  # a mean of nothing is 0


# A method is pickled by its name: a model that is saved whole comes back with its own forwards.
_head_forward.__name__ = "forward"


def _training_forward(upstream: Callable, eval_logits: bool) -> Callable:
    """A patched model's forward. It keeps upstream's signature, by which Trainers pick columns."""
    names = list(inspect.signature(upstream).parameters)[1:]  # without self

    @functools.wraps(upstream)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        decoder = _decoder(self)
        if not torch.compiler.is_compiling():
            decoder._smoothce_expected = True
        each = kwargs.pop("fused_lm_head", False)  # as TRL's trainers ask
        given = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        smoothed = self.training
        if given.get("labels") is None and given.get("shift_labels") is None:
            if self.training and torch.is_grad_enabled():
                _warn(
                    self,
                    "a patched model in training got no labels, so it computes dense logits and no "
                    "loss. Hugging Face's Trainer takes labels away where TrainingArguments has a "
                    "label_smoothing_factor: call smoothce.patch_trainer(trainer)",
                )
            return upstream(self, *args, **kwargs)
        if not (self.training or each):
            smooths = self.lm_head.__dict__.get("_smoothce", {}).get("label_smoothing")
            tracked = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if smooths and tracked and any(p.requires_grad for p in self.parameters()):
                _warn(
                    self,
                    "a patched model in evaluation mode, as from_pretrained returns it, has its "
                    "loss without smoothing: call model.train(), or evaluate under torch.no_grad()",
                )
            if eval_logits:
                return upstream(self, *args, **kwargs)
        head_only = {key: given.pop(key, None) for key in HEAD_ONLY}
        if isinstance(head_only["logits_to_keep"], Tensor) or head_only["logits_to_keep"]:
            raise ValueError("logits_to_keep cannot be combined with labels in a patched model")
        if "_smoothce" not in self.lm_head.__dict__:
            _check_head(self.lm_head)
            raise TypeError("lm_head was replaced after patch_model; call patch_model again")

        ignored = self.lm_head._smoothce["ignore_index"]
        if head_only["ignore_index"] not in (None, ignored):
            raise ValueError(
                f"ignore_index={head_only['ignore_index']} is given to a model that was patched "
                f"with ignore_index={ignored}"
            )
        wants_dict = given.pop("return_dict", None)
        outputs = decoder(**given, return_dict=True)
        labels = head_only["shift_labels"]
        if labels is None:
            labels = F.pad(head_only["labels"][..., 1:], (0, 1), value=ignored)
        divisor = head_only["num_items_in_batch"]
        loss = self.lm_head(outputs.last_hidden_state, labels, divisor, smoothed, each)
        if each:
            return _trls(self, *loss, outputs, given)
        result = _result(self, loss, outputs, given)
        wants_dict = self.config.return_dict if wants_dict is None else wants_dict
        return result if wants_dict else result.to_tuple()

    forward.eval_logits = eval_logits
    return forward


def _trls(
    model: nn.Module, loss: Tensor, statistics: tuple, labels: Tensor, outputs: object, given: dict
) -> object:
    """What TRL's trainers read: their loss is the sum of −log_probs over the number of tokens.

    All tokens count alike in it, so that each can carry an equal part of the summed loss, whose
    gradient is made in the forward; a loss per token would take a product more."""
    mask = labels != model.lm_head._smoothce["ignore_index"]
    log_p = statistics.log_probability
    rest = (-loss - log_p.sum()) / mask.sum().clamp(min=1)
    return sys.modules["trl.trainer.utils"].FusedCausalLMOutput(
        log_probs=(log_p + rest) * mask,
        entropy=statistics.entropy,
        is_top1=(statistics.argmax == labels) & mask,
        label_mask=mask,
        aux_loss=_auxiliary(model, outputs, given),
    )


def _result(model: nn.Module, loss: Tensor, outputs: object, given: dict) -> object:
    """What upstream returns, without logits; a mixture's auxiliary loss added as it adds it."""
    # the model's own module has imported it; an import here would break torch.compile's graph
    modeling_outputs = sys.modules["transformers.modeling_outputs"]
    names = ("past_key_values", "hidden_states", "attentions")  # Mamba has the second alone
    shared = {"loss": loss, **{name: getattr(outputs, name, None) for name in names}}
    if not hasattr(outputs, "router_logits"):
        return modeling_outputs.CausalLMOutputWithPast(**shared)
    auxiliary = _auxiliary(model, outputs, given)
    if auxiliary is not None:
        _refuse_summed_router(model.lm_head._smoothce["reduction"])
        shared["loss"] = loss + model.router_aux_loss_coef * auxiliary.to(loss.device)
    return modeling_outputs.MoeCausalLMOutputWithPast(
        **shared, aux_loss=auxiliary, router_logits=outputs.router_logits
    )


def _auxiliary(model: nn.Module, outputs: object, given: dict) -> Tensor | None:
    balanced = given.get("output_router_logits")
    if balanced is None:
        balanced = getattr(model.config, "output_router_logits", False)
    if not balanced or not hasattr(outputs, "router_logits"):
        return None
    return sys.modules[type(model).__module__].load_balancing_loss_func(
        outputs.router_logits,
        model.num_experts,
        model.num_experts_per_tok,
        given.get("attention_mask"),
    )

"""`patch_model` and `unpatch_model`."""

from torch import nn
from typing_extensions import Unpack

from smoothce.hf_patch.anatomy import (
    CausalModel,
    check_head,
    class_forward,
    decoder_of,
    forward_in_slot,
    forward_slot,
    head_name_of,
    restore_class_forward,
    unwrapped,
)
from smoothce.hf_patch.forwards import DecoderHook, HeadForward, ModelForward
from smoothce.hf_patch.logit_map import logit_map_of
from smoothce.hf_patch.outputs import refuse_summed_router
from smoothce.hf_patch.settings import (
    LOGIT_MAP_KEYWORDS,
    ModelLoss,
    PatchSettings,
    model_loss,
    shows_settings,
)


@shows_settings
def patch_model(model: nn.Module, **settings: Unpack[PatchSettings]) -> nn.Module:
    """Make a causal language model compute `linear_cross_entropy` where it computed its loss.

    In training mode (`model.train()`; from `from_pretrained` a model comes in evaluation mode,
    where training warns once) with `labels` (B, T), which the model shifts as ever, `outputs.loss`
    is the smoothed loss ("mean" over the valid tokens, or "sum") and `outputs.logits` is None, for
    they never exist. `num_items_in_batch`, which the Hugging Face Trainer passes, replaces the
    number of valid tokens as the mean's divisor. Without labels, or in evaluation mode, nothing
    changes; with `eval_logits=False` an evaluation with labels has the loss without smoothing,
    reduced as in training, and no logits either. Training without labels warns once.

    `label_smoothing`, `smoothing_target`, `z_loss`, `filter_eps`, `workspace`, `ignore_index` and
    `impl` are `linear_cross_entropy`'s. `loss` puts another function in its place:
    `loss(hidden (N, D), weight (V, D), labels (N,))`, with the model's `bias=`, `softcap=` and
    `logit_scale=` where it has them, whose result is the mean over labels that are not
    `ignore_index`; it smooths as it likes.

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
    causal = unwrapped(model)
    _refuse_wrapped(causal)
    name = type(causal).__name__
    given = set(settings).intersection(LOGIT_MAP_KEYWORDS)
    logit_map = logit_map_of(causal, given)
    if getattr(causal.config, "pretraining_tp", 1) > 1:
        raise TypeError(
            f"{name} with pretraining_tp={causal.config.pretraining_tp} is not supported"
        )
    head_name = head_name_of(causal)
    head = getattr(causal, head_name)
    check_head(head_name, head)
    loss = model_loss({**logit_map, **settings}, head.out_features)
    if getattr(causal.config, "output_router_logits", False):
        refuse_summed_router(loss.options.reduction)
    if hasattr(causal, "_smoothce"):  # only now: a refused second call leaves the first in place
        unpatch_model(causal)
    if forward_in_slot(causal) != class_forward(causal):
        raise TypeError(f"{name}.forward is already wrapped; call patch_model before the wrapper")
    _install(causal, head_name, loss)
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo `patch_model`. Raises TypeError where the model is not patched or was wrapped since."""
    causal = unwrapped(model)
    name = type(causal).__name__
    forward = vars(causal).get("_smoothce")
    if forward is None:
        raise TypeError(f"{name} is not patched")
    if forward_in_slot(causal) is not forward:
        raise TypeError(f"{name}.forward was wrapped after patch_model; remove the wrapper first")
    hook = decoder_of(causal).__dict__.pop("_smoothce", None)  # none in a decoder that was set since
    if hook is not None:
        hook.remove()
    for module in (causal, getattr(causal, forward.head_name)):
        vars(module).pop("_smoothce", None)
        restore_class_forward(module)
    return model


def _refuse_wrapped(causal: CausalModel) -> None:
    name = type(causal).__name__
    if name.startswith("FSDP") or hasattr(causal, "module") or hasattr(causal, "_orig_mod"):
        raise TypeError(
            f"{name} is a wrapped model: call patch_model before fully_shard, "
            "DistributedDataParallel, deepspeed.initialize or torch.compile"
        )


def _install(causal: CausalModel, head_name: str, loss: ModelLoss) -> None:
    """Put the forwards in place; each module keeps its own as `_smoothce`, too."""
    head = getattr(causal, head_name)
    head._smoothce = HeadForward(head, loss)
    setattr(head, forward_slot(head), head._smoothce)
    causal._smoothce = ModelForward(causal, head_name, loss.eval_logits)
    setattr(causal, forward_slot(causal), causal._smoothce)
    decoder = decoder_of(causal)
    decoder._smoothce = decoder.register_forward_pre_hook(DecoderHook(causal._smoothce))

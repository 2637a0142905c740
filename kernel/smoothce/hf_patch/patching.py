"""`patch_model` and `unpatch_model`."""

from torch import nn
from typing_extensions import Unpack

from smoothce.hf_patch import trl
from smoothce.hf_patch.anatomy import (
    CausalModel,
    check_head,
    class_forward,
    class_of,
    config_of,
    decoder_of,
    forward_layers,
    forward_slot,
    head_name_of,
    restore_class_forward,
    runs_another_forward,
    unwrapped,
)
from smoothce.hf_patch.head_forward import HeadForward
from smoothce.hf_patch.model_forward import DecoderHook, ModelForward
from smoothce.hf_patch.outputs import refuse_sum_beside_auxiliary_loss
from smoothce.hf_patch.settings import PatchSettings, loss_settings, shows_settings
from smoothce.hf_patch.user_warnings import warn_user
from smoothce.hf_patch.verification import CannotRun, verify


@shows_settings()
def patch_model(model: nn.Module, **keywords: Unpack[PatchSettings]) -> nn.Module:
    """Make a causal language model compute `linear_cross_entropy` where it computed its loss.

        patch_model(model, label_smoothing=0.1)
        model.train()  # from_pretrained returns it in evaluation mode
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss

    What a forward of the patched model returns:

    | mode                            | with labels                         | without labels     |
    |---------------------------------|-------------------------------------|--------------------|
    | training                        | the smoothed loss, `logits` is None | as upstream; warns |
    | evaluation                      | upstream's loss and logits          | as upstream        |
    | evaluation, `eval_logits=False` | upstream's loss, `logits` is None   | as upstream        |

    Upstream's loss is the mean over valid tokens without smoothing, z-loss or a `loss` of yours,
    whatever `reduction` is. Labels of your `ignore_index` do not count in it either. Where TRL's
    SFTTrainer evaluates, after `patch_trainer`, there are no logits whatever `eval_logits` is.

    `labels` (B, T) are shifted by the model as ever, `shift_labels` are shifted already and count
    as labels. (In evaluation with logits upstream's forward gets both, with -100 for labels of
    another `ignore_index`, and that of transformers returns no loss for `shift_labels` without
    `labels`.)

    The loss is in nats per valid token; `num_items_in_batch`, which the Hugging Face Trainer
    passes, replaces the number of valid tokens as the mean's divisor, and 1 makes the mean of
    evaluation a sum. Training in evaluation mode, where it would leave something out, warns once.

    The settings:

    - `label_smoothing`, `smoothing_target`, `z_loss`, `filter_eps`, `workspace`, `ignore_index` and
      `impl` are `linear_cross_entropy`'s;
    - `reduction` is "mean" or "sum", of the loss in training;
    - `logit_scale` and `softcap` are read from the model's configuration unless they are given.
      Give them where they have an unknown name there, as the error then says: a number, or None for
      a model that has none;
    - `loss` puts another function in the place of `linear_cross_entropy`:
      `loss(hidden (N, D), weight (V, D), labels (N,))`, with the model's `bias=`, `softcap=` and
      `logit_scale=` where it has them, whose result is the mean over labels that are not
      `ignore_index`. Its logits are cap(logit_scale · hidden Wᵀ + bias): the bias that it is given
      is scaled already. It smooths as it likes: `label_smoothing` and `z_loss` are not used beside
      it;
    - `eval_logits=False` spares evaluation the logits as well.

    Call it once the checkpoint is loaded, the configuration is as it shall be and embeddings are
    resized, and before `accelerator.prepare` or `deepspeed.initialize`; before or after
    `fully_shard`. A `PeftModel` is patched inside. Returns the model, changed in place; a second
    call replaces the settings, and one that is refused leaves them.

    Any architecture is accepted whose loss comes out exact, which is verified on sixteen tokens
    (`smoothce.hf_patch.verification` says how): its decoder's last hidden states go through a
    linear head to the mean cross-entropy of the next tokens, with at most a scale and a cap
    between. A mixture of experts adds its auxiliary loss as upstream does, where
    `output_router_logits` is on.

    A model that cannot run when it is patched is verified on every rank when its first training
    batch comes, or before that an evaluation batch whose loss is computed without logits; a warning
    says so.
    Such a model is, for example, on the meta device, or sharded by ZeRO-3 or FSDP2 already, or is
    to get its weights from the first rank when accelerate shards it by FSDP2.

    What was verified is the model as it was then. In training, and in evaluation without logits,

    - these later changes raise ValueError: of a scale or cap under a known name or the one that
      held the given number; of the model's loss function; of `config.output_router_logits`; a
      parameter outside decoder and head that is trained now and was not; and a forward hook on the
      head that changes logits;
    - these make the next forward verify the model once more: another value in a frozen parameter or
      a buffer outside decoder and head (of at most four million numbers), and an argument
      `output_router_logits=True`;
    - a forward that is changed in another way is not seen.

    A hook that only looks at logits gets a ramp once, and then the loss in training.

    Once torch.compile has compiled the model, two of these changes go unnoticed: another value of a
    frozen parameter or buffer, and a hook that is put on the head, which is not run either, since
    torch.compile does not look for hooks again. (One that is there when it compiles anew is
    refused, unless it is known from before.)

    Raises ValueError for a model whose loss is another one and for a setting out of range, and
    TypeError for an unknown setting, for a smoothing target that is no tensor, and for a model that
    is wrapped, has no decoder or no linear head, has an adapter on its head, or has a
    `pretraining_tp` above 1 in its configuration.
    """
    causal = unwrapped(model)
    _refuse_wrapped(causal)
    name = class_of(causal).__name__
    head_name = head_name_of(causal)
    head = getattr(causal, head_name)
    check_head(head_name, head)
    decoder_of(causal)
    _refuse_wrapped_forward(causal, name, ModelForward.of(causal))
    _refuse_wrapped_forward(head, head_name, HeadForward.of(head))
    pretraining_tp = getattr(config_of(causal), "pretraining_tp", None)
    if pretraining_tp is not None and pretraining_tp > 1:
        raise TypeError(f"{name} with pretraining_tp={pretraining_tp} is not supported")
    settings = loss_settings(keywords, head.out_features)
    if getattr(config_of(causal), "output_router_logits", False):
        refuse_sum_beside_auxiliary_loss(settings.options.reduction)

    model_forward = ModelForward(causal, head_name)
    logit_map = None
    try:
        model_forward.verified = verify(model_forward.fused, settings.given_logit_map)
    except CannotRun as reason:
        warn_user(
            f"patch_model verifies {name} when its first training batch comes, not now: {reason}"
        )
    else:
        logit_map = model_forward.verified.logit_map
        model_forward.head_hooks.admit(head, head_name)
    # Only now, so that a refused call leaves the patch before it.
    if ModelForward.of(causal) is not None:
        unpatch_model(causal)
    _install(model_forward, HeadForward(head, settings, logit_map))
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo `patch_model`: the model computes its own loss from then on. Returns it.

    What `patch_trainer` has done to a trainer stays: make the trainer anew. One that trains goes on
    with the model's own loss.

    Raises TypeError, and changes nothing, where the model is not patched, or its forward or its
    head's was wrapped since."""
    causal = unwrapped(model)
    name = class_of(causal).__name__
    model_forward = ModelForward.of(causal)
    if model_forward is None:
        raise TypeError(f"{name} is not patched")
    # Ours alone may be there. The class's own, which `_refuse_wrapped_forward` lets pass, would
    # mean here that somebody has taken ours out.
    if runs_another_forward(causal, than=(model_forward,)):
        raise TypeError(f"{name}.forward was wrapped after patch_model; remove the wrapper first")
    # A patched head's forward may be on several modules. What is the head now may be an adapter of
    # PEFT's, which holds the patched head or a copy of it, or both.
    modules = set(model_forward.fused.head.modules())
    # The head that was patched may also be there no more, with another in its place.
    if model_forward.installed_head is not None:
        modules.add(model_forward.installed_head)
    patched_heads = []
    for module in modules:
        head_forward = HeadForward.of(module)
        if head_forward is None:
            continue
        if runs_another_forward(module, than=(head_forward,)):
            raise TypeError(
                f"{model_forward.head_name}.forward was wrapped after patch_model; remove the "
                "wrapper first"
            )
        patched_heads.append(module)
    if model_forward.decoder_hook is not None:
        model_forward.decoder_hook.remove()
    delattr(causal, ModelForward.ATTRIBUTE)
    restore_class_forward(causal)
    for module in patched_heads:
        delattr(module, HeadForward.ATTRIBUTE)
        restore_class_forward(module)
    return model


def _refuse_wrapped(causal: CausalModel) -> None:
    if hasattr(causal, "module") or hasattr(causal, "_orig_mod"):
        raise TypeError(
            f"{class_of(causal).__name__} is a wrapped model: call patch_model before "
            "DistributedDataParallel, deepspeed.initialize or torch.compile"
        )


def _refuse_wrapped_forward(
    module: nn.Module, name: str, patch: ModelForward | HeadForward | None
) -> None:
    own_forwards = [class_forward(module)]
    if patch is not None:
        own_forwards.append(patch)
    if runs_another_forward(module, than=tuple(own_forwards)):
        when = "before" if patch is None else "after"
        if any(trl.is_trls_forward(forward) for forward in forward_layers(module)):
            raise TypeError(
                f"{name}.forward was wrapped {when} patch_model by TRL, whose trainer has its own "
                "loss there: call smoothce.patch_trainer(trainer, …) with the SFTTrainer that has "
                "the model, instead of patch_model"
            )
        raise TypeError(
            f"{name}.forward was wrapped {when} patch_model: call patch_model before the wrapper"
        )


def _install(model_forward: ModelForward, head_forward: HeadForward) -> None:
    """Put the forwards in place. Each module also keeps its own under a name of ours, by which it
    is found inside whatever wraps it later."""
    causal = model_forward.causal
    setattr(causal, forward_slot(causal), model_forward)
    setattr(causal, ModelForward.ATTRIBUTE, model_forward)
    head = head_forward.head
    setattr(head, forward_slot(head), head_forward)
    setattr(head, HeadForward.ATTRIBUTE, head_forward)
    model_forward.installed_head = head
    decoder = decoder_of(causal)
    hook = DecoderHook(model_forward)
    model_forward.decoder_hook = decoder.register_forward_pre_hook(hook)

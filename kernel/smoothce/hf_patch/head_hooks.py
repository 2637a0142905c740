"""Forward hooks around a patched head: which may stay.

A patched head in training returns the loss, so that a hook which changes logits would change the
loss instead. A hook that only looks at them stays, and gets the loss there. Which kind a hook is
shows when it is called once with a ramp in the place of logits, in training mode."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from smoothce.hf_patch.logit_map import ramp_like

Hook = Callable[..., Any]

# Hooks of these libraries gather and free parameters, and leave logits alone.
SHARDING_LIBRARIES = ("accelerate", "deepspeed", "torch.distributed")


class HeadHooks:
    """The hooks of a head that are known to leave logits alone.

    Compiled code does not call hooks with a ramp, and raises for one that is not known yet."""

    def __init__(self) -> None:
        self.harmless: list[Hook] = []

    def admit(self, head: nn.Linear, head_name: str) -> None:
        """Try the hooks that are new, and remember those that leave logits alone.

        Raises ValueError where a hook changes logits, or where that cannot be told now."""
        for hook, takes_keywords in _forward_hooks(head):
            if any(hook is known for known in self.harmless) or _shards(hook):
                continue
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"the forward hook {name} was put on {head_name} after patch_model, and "
                    "compiled code cannot tell whether it changes logits: put it on before "
                    "patch_model, or call patch_model again"
                )
            try:
                changes_logits = _changes_logits(head, hook, takes_keywords)
            except Exception as error:
                raise ValueError(
                    f"the forward hook {name} on {head_name} raises {type(error).__name__}: "
                    f"{error}, when it is tried with a ramp of (1, 2, {head.out_features}) in the "
                    "place of logits, so that it cannot be told whether it changes them: let it "
                    "take that, or remove it"
                ) from error
            if changes_logits:
                raise ValueError(
                    f"the forward hook {name} on {head_name} changes the logits, which a "
                    "patched model never has: remove the hook, or unpatch_model the model"
                )
            self.harmless.append(hook)


def _forward_hooks(head: nn.Linear) -> Iterator[tuple[Hook, bool]]:
    """The hooks that a call of the head runs, and whether each takes the call's keywords."""
    for hook_id, hook in torch_module._global_forward_hooks.items():
        yield hook, hook_id in torch_module._global_forward_hooks_with_kwargs
    for hook_id, hook in head._forward_hooks.items():
        yield hook, hook_id in head._forward_hooks_with_kwargs


def _shards(hook: Hook) -> bool:
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or ""
    return any(module == name or module.startswith(f"{name}.") for name in SHARDING_LIBRARIES)


@torch.no_grad()
def _changes_logits(head: nn.Linear, hook: Hook, takes_keywords: bool) -> bool:
    """Whether a forward hook gives or makes other logits than a ramp that it gets."""
    # Not `head.weight`: under ZeRO-3, reading it outside the head's forward would gather it.
    parameter = next(head.parameters())
    hidden = torch.zeros(1, 2, head.in_features, dtype=parameter.dtype, device=parameter.device)
    ramp = ramp_like(torch.empty(1, 2, head.out_features, device=parameter.device))
    logits = ramp.clone()
    mode = head.training
    head.training = True
    try:
        if takes_keywords:
            returned = hook(head, (hidden,), {}, logits)
        else:
            returned = hook(head, (hidden,), logits)
    finally:
        head.training = mode
    if returned is not None:
        logits = returned
    return not (isinstance(logits, Tensor) and torch.equal(logits, ramp))

"""A causal language model's parts: the decoder, the head, and where each keeps its forward."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

# A transformers model: a Module with attributes (config, lm_head, …) that Module does not declare.
CausalModel: TypeAlias = Any

ACCELERATES_WRAPPER = "new_forward"  # the name of the function that accelerate's hook puts in place


def unwrapped(model: nn.Module) -> CausalModel:
    """The causal language model; of a `PeftModel` the one inside."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    return model


def class_of(module: nn.Module) -> type:
    """The module's class, without the one that torch's `fully_shard` puts in front of it."""
    if not _is_sharded_by_fsdp2(module):
        return type(module)
    for base in type(module).__mro__:
        if not base.__module__.startswith("torch.distributed."):
            return base
    return type(module)


def _is_sharded_by_fsdp2(module: nn.Module) -> bool:
    """Whether `fully_shard` has changed its class. The name is looked for, since the class is in
    another module of torch in each of its versions."""
    for base in type(module).__mro__:
        if base.__name__ == "FSDPModule" and base.__module__.startswith("torch.distributed."):
            return True
    return False


def decoder_of(causal: CausalModel) -> CausalModel:
    """What turns tokens into the head's hidden states: `model`, or what transformers names by
    `base_model`. Raises TypeError where there is neither."""
    for name in ("model", "base_model"):
        decoder = getattr(causal, name, None)
        if isinstance(decoder, nn.Module):
            return decoder
    raise TypeError(
        f"{class_of(causal).__name__} has no decoder: neither a module named model nor a base_model"
    )


def config_of(causal: CausalModel) -> Any:
    """The model's configuration; None where a model of somebody's own has none."""
    return getattr(causal, "config", None)


def head_name_of(causal: CausalModel) -> str:
    """The attribute that holds the head. Raises TypeError where the model has none."""
    if isinstance(getattr(causal, "lm_head", None), nn.Module):
        return "lm_head"
    find = getattr(causal, "get_output_embeddings", None)
    head = find() if find is not None else None
    for name, module in causal.named_children():
        if module is head:
            return name
    raise TypeError(
        f"{class_of(causal).__name__} has no head that turns hidden states into logits: neither an "
        "lm_head nor a child that get_output_embeddings() returns"
    )


def forward_slot(module: nn.Module) -> str:
    """The attribute that holds a module's own forward, into which a patch puts another.

    It is `forward`, but for a module with a hook of accelerate's, which `device_map` puts on. There
    accelerate has put a wrapper into `forward`, which moves inputs to the module's device and then
    calls what the module ran before: accelerate keeps that in `_old_forward`. A patch goes there,
    inside the wrapper, so that inputs are still moved."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def class_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that the module's class defines, bound to the module."""
    return types.MethodType(type(module).forward, module)


def forward_in_slot(module: nn.Module) -> Callable[..., Any]:
    """The module's own forward: the class's, or what was put in its place."""
    return vars(module).get(forward_slot(module), class_forward(module))


def runs_another_forward(module: nn.Module, *, than: tuple[Callable[..., Any], ...]) -> bool:
    """Whether the module runs something else than one of these forwards, accelerate's hook apart.

    Somebody has then wrapped or replaced its forward."""
    if forward_in_slot(module) not in than:
        return True
    if forward_slot(module) == "forward":
        return False
    # With a hook of accelerate's the slot is inside accelerate's wrapper. So it does not show
    # whether somebody has put another wrapper around accelerate's, into `forward`.
    return not _is_accelerates_wrapper(vars(module).get("forward"))


def _is_accelerates_wrapper(forward: Callable[..., Any] | None) -> bool:
    """Whether it is what accelerate's hook puts into `forward`, and not a wrapper around that."""
    function = getattr(forward, "func", forward)  # accelerate's is a functools.partial
    return getattr(getattr(function, "__code__", None), "co_name", "") == ACCELERATES_WRAPPER


def forward_layers(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The functions that were put around the class's forward, the outermost first.

    There are none around the forward of a plain module. Inner ones are found where a wrapper says
    what it wraps, as `functools.wraps` has it."""
    forward = vars(module).get("forward")
    while forward is not None:
        yield getattr(forward, "__func__", forward)
        forward = getattr(forward, "__wrapped__", None)


def restore_class_forward(module: nn.Module) -> None:
    slot = forward_slot(module)
    if slot == "forward":
        vars(module).pop(slot, None)
    else:
        setattr(module, slot, class_forward(module))


def check_head(name: str, head: nn.Module) -> None:
    """Raises TypeError for a head that is no plain nn.Linear, or carries an adapter."""
    head_class = class_of(head)
    class_name = f"{head_class.__module__}.{head_class.__name__}"
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise TypeError(
            f"{name} carries an adapter ({class_name}), whose gradient would be lost: "
            f"leave {name} out of target_modules and modules_to_save"
        )
    if head_class is not nn.Linear:
        raise TypeError(f"{name} must be a torch.nn.Linear, not {class_name}")


def waits_for_weights() -> bool:
    """Whether accelerate is to send models' weights to the ranks, when FSDP2 shards them.

    With `cpu_ram_efficient_loading` the first rank alone has them until then, on its CPU."""
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is None or not accelerate_state.AcceleratorState._shared_state:
        return False
    plugin = getattr(accelerate_state.AcceleratorState(), "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 2:
        return False
    return bool(plugin.cpu_ram_efficient_loading)


class OutsideTensor(NamedTuple):
    """A parameter or buffer that a module outside decoder and head has.

    Logits and the loss may depend on it beside what the head makes of the decoder's result: it is
    a bias of the logits, for example, or belongs to a second tower."""

    name: str  # in the model
    module: nn.Module  # that has it
    attribute: str  # under which

    def tensor(self) -> Tensor:
        """What is there now."""
        return getattr(self.module, self.attribute)


def tensors_outside(causal: CausalModel, head: nn.Module) -> list[OutsideTensor]:
    """The parameters and buffers of all modules that are neither in the decoder nor the head.

    One that is tied to a parameter of the decoder is among them, since what is computed with it
    outside counts there."""
    inside = {*decoder_of(causal).modules(), *head.modules()}
    tensors = []
    for module_name, module in causal.named_modules():
        if module in inside:
            continue
        named_tensors = [
            *module.named_parameters(module_name, recurse=False),
            *module.named_buffers(module_name, recurse=False),
        ]
        for name, _ in named_tensors:
            tensors.append(OutsideTensor(name, module, attribute=name.rpartition(".")[2]))
    return tensors


def partitioned_by(model: nn.Module) -> str | None:
    """Which library holds a part of each parameter on each rank, if any does at this moment."""
    if any(_is_sharded_by_fsdp2(module) for module in model.modules()):
        return "FSDP2"
    for parameter in model.parameters():
        status = getattr(parameter, "ds_status", None)
        if status is not None and status.name != "AVAILABLE":
            return "ZeRO-3"
    return None

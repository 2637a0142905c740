"""What a patched model's forward returns: an object of upstream's own class, without logits.

The auxiliary loss of a mixture of experts is computed and weighted here, as upstream does;
`fused_forward` adds it."""

import dataclasses
import sys
from typing import Any

from torch import Tensor

from smoothce.hf_patch.anatomy import CausalModel, class_of, config_of


@dataclasses.dataclass(frozen=True)
class OutputClass:
    """The class of what upstream's forward returns, which each architecture chooses."""

    output_type: type
    field_names: tuple[str, ...]

    @classmethod
    def of(cls, outputs: Any) -> "OutputClass":
        """The class of these outputs. transformers' plainest where theirs is no dataclass of
        transformers' kind, as a model of somebody's own may return."""
        from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

        output_type = type(outputs)
        if not (dataclasses.is_dataclass(output_type) and issubclass(output_type, ModelOutput)):
            output_type = CausalLMOutputWithPast
        return cls(output_type, tuple(field.name for field in dataclasses.fields(output_type)))

    def make(self, loss: Tensor, auxiliary: Tensor | None, decoder_outputs: Any) -> Any:
        """An object with this loss; what else it has, such as a cache, is the decoder's."""
        values: dict[str, Any] = {}
        for name in self.field_names:
            if name == "loss":
                values[name] = loss
            elif name == "aux_loss":
                values[name] = auxiliary
            elif name != "logits":
                values[name] = getattr(decoder_outputs, name, None)
        return self.output_type(**values)


def wants_auxiliary_loss(causal: CausalModel, inputs: dict[str, Any]) -> bool:
    """Whether this call's arguments, or the configuration, ask for a mixture's auxiliary loss."""
    wanted = inputs.get("output_router_logits")
    if wanted is None:
        wanted = getattr(config_of(causal), "output_router_logits", False)
    return bool(wanted)


def auxiliary_loss(causal: CausalModel, outputs: Any, inputs: dict[str, Any]) -> Tensor | None:
    """The auxiliary loss of a mixture of experts, (), where it is asked for.

    Raises ValueError for a mixture whose function for it is not known."""
    if not wants_auxiliary_loss(causal, inputs) or not hasattr(outputs, "router_logits"):
        return None
    # transformers' function is beside its class. A subclass of a user's own is in another module.
    for base in class_of(causal).__mro__:
        modeling = sys.modules[base.__module__]
        if hasattr(modeling, "load_balancing_loss_func"):
            return modeling.load_balancing_loss_func(
                outputs.router_logits,
                causal.num_experts,
                causal.num_experts_per_tok,
                inputs.get("attention_mask"),
            )
    raise ValueError(
        f"output_router_logits is on, and {class_of(causal).__name__} has no load-balancing "
        "loss that patch_model knows: turn it off"
    )


def weighted_auxiliary_loss(causal: CausalModel, auxiliary: Tensor) -> Tensor:
    """What upstream adds to the loss."""
    return causal.router_aux_loss_coef * auxiliary


def refuse_sum_beside_auxiliary_loss(reduction: str) -> None:
    """Raises ValueError for a sum of tokens' losses beside an auxiliary loss."""
    if reduction == "sum":
        raise ValueError(
            "output_router_logits cannot be combined with reduction='sum': the auxiliary loss is a "
            "mean, whose coefficient would lose its meaning beside a sum; use reduction='mean'"
        )

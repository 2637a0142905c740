"""What a patched model's forward returns, in upstream's classes and in TRL's."""

import sys
from typing import Any

from torch import Tensor

from smoothce.hf_patch.anatomy import CausalModel, class_of, config_of
from smoothce.hf_patch.head_forward import SummedLoss


def causal_output(model: CausalModel, loss: Tensor, outputs: Any, inputs: dict[str, Any]) -> Any:
    """What upstream returns, without logits; a mixture's auxiliary loss added as it adds it."""
    # The model's own module has imported it; an import here would break torch.compile's graph.
    modeling_outputs = sys.modules["transformers.modeling_outputs"]
    shared: dict[str, Any] = {"loss": loss}
    for name in ("past_key_values", "hidden_states", "attentions"):  # Mamba has the second alone
        shared[name] = getattr(outputs, name, None)
    if not hasattr(outputs, "router_logits"):
        return modeling_outputs.CausalLMOutputWithPast(**shared)
    auxiliary = auxiliary_loss(model, outputs, inputs)
    if auxiliary is not None:
        shared["loss"] = loss + weighted_auxiliary_loss(model, auxiliary).to(loss.device)
    return modeling_outputs.MoeCausalLMOutputWithPast(
        **shared, aux_loss=auxiliary, router_logits=outputs.router_logits
    )


def auxiliary_loss(model: CausalModel, outputs: Any, inputs: dict[str, Any]) -> Tensor | None:
    """The load-balancing loss of a mixture of experts, where it is asked for."""
    wanted = inputs.get("output_router_logits")
    if wanted is None:
        wanted = getattr(config_of(model), "output_router_logits", False)
    if not wanted or not hasattr(outputs, "router_logits"):
        return None
    modeling = sys.modules[class_of(model).__module__]
    if not hasattr(modeling, "load_balancing_loss_func"):
        raise ValueError(
            f"output_router_logits is on, and {class_of(model).__name__} has no load-balancing "
            "loss that patch_model knows: turn it off"
        )
    return modeling.load_balancing_loss_func(
        outputs.router_logits,
        model.num_experts,
        model.num_experts_per_tok,
        inputs.get("attention_mask"),
    )


def weighted_auxiliary_loss(model: CausalModel, auxiliary: Tensor) -> Tensor:
    """What upstream adds to the loss."""
    return model.router_aux_loss_coef * auxiliary


def refuse_summed_router(reduction: str) -> None:
    """Raises ValueError for a sum of tokens' losses beside an auxiliary loss."""
    if reduction == "sum":
        raise ValueError(
            "output_router_logits cannot be combined with reduction='sum': the auxiliary loss is a "
            "mean, whose coefficient would lose its meaning beside a sum; use reduction='mean'"
        )


def trl_output(summed: SummedLoss, ignore_index: int, auxiliary: Tensor | None) -> Any:
    """What TRL's trainers read: their loss is the sum of −log_probs over the number of tokens.

    All tokens count alike in it, so that each can carry an equal part of the summed loss, whose
    gradient is made in the forward; a loss per token would take one more matrix product.
    """
    mask = summed.labels != ignore_index
    log_probability = summed.statistics.log_probability
    assert log_probability is not None  # there are labels
    rest = (-summed.loss - log_probability.sum()) / mask.sum().clamp(min=1)
    return sys.modules["trl.trainer.utils"].FusedCausalLMOutput(
        log_probs=(log_probability + rest) * mask,
        entropy=summed.statistics.entropy,
        is_top1=(summed.statistics.argmax == summed.labels) & mask,
        label_mask=mask,
        aux_loss=auxiliary,
    )

"""A loss for torchtitan. In a config of `config_registry.py`:

    from smoothce.integrations.torchtitan import SmoothedLoss

    loss=SmoothedLoss.Config(label_smoothing=0.1)

It takes the place of `ChunkedLossWrapper`, whose `set_lm_head` the trainer calls: the model leaves
its head out, and the loss runs it with the labels. Where tensor parallelism splits the head, its
weight is a DTensor, for which `smoothce.checks` raises TypeError. A loop of your own can serve such
a head, by `linear_cross_entropy(process_group=…)`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config import CompileConfig

from smoothce.hf_patch.deferred_logits import Deferral, DeferredLogits
from smoothce.hf_patch.head import LossSettings, patch_head


class SmoothedLoss(ChunkedLossWrapper):
    """The summed loss by the number of an update's tokens, from hidden states.

    Validation, which is without gradients, has the loss without smoothing and z-loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        label_smoothing: float = 0.0
        softcap: float | None = None
        logit_scale: float | None = None
        z_loss: float = 0.0
        filter_eps: float | str | None = None
        workspace: int | str = "auto"

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.settings = LossSettings().with_keywords(
            {
                "label_smoothing": config.label_smoothing,
                "softcap": config.softcap,
                "logit_scale": config.logit_scale,
                "z_loss": config.z_loss,
                "filter_eps": config.filter_eps,
                "workspace": config.workspace,
            }
        )

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """The head, whose own forward computes the loss, so that FSDP2 gathers its weight."""
        super().set_lm_head(lm_head)
        patch_head(lm_head, self.settings)

    def __call__(
        self,
        pred: Tensor,  # (B, T, D), hidden states
        labels: Tensor,  # (B, T), shifted
        global_valid_tokens: Tensor | None = None,  # of the whole update, on all ranks
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.lm_head is not None, "set_lm_head has not been called"
        # Not `pred.requires_grad`: hidden states of a frozen decoder need no gradient.
        deferral = Deferral(with_smoothing=torch.is_grad_enabled())
        logits = DeferredLogits(self.lm_head, pred.flatten(0, -2), deferral)
        if self.settings.logit_scale is not None:
            logits = logits * self.settings.logit_scale
        if self.settings.softcap is not None:
            logits = (logits / self.settings.softcap).tanh() * self.settings.softcap
        loss = logits.cross_entropy(labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        if global_valid_tokens is not None:
            loss = loss / global_valid_tokens.clamp(min=1)
        return loss, {}

"""An Axolotl plugin. In the YAML:

    plugins:
      - smoothce.integrations.axolotl.SmoothCEPlugin
    smoothce_label_smoothing: 0.1

Evaluation reports the loss without smoothing. Axolotl's own fused losses (its cut_cross_entropy
plugin, liger_fused_linear_cross_entropy) cannot be combined with this one: `patch_trainer`, which
verifies the model and looks at the trainer's arguments, refuses a trainer that has one.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from smoothce.hf_patch import patch_trainer


class SmoothCEArgs(BaseModel):
    """The plugin's keys."""

    smoothce_label_smoothing: float = Field(
        ge=0, le=1, description="β, the share of each label that is spread over the vocabulary."
    )
    smoothce_z_loss: float = Field(
        default=0.0, description="Weight of the squared log-sum-exp of each token."
    )
    smoothce_filter_eps: float | str | None = Field(
        default=None,
        description="'auto' or a number: a faster gradient, whose small parts are drawn at random. "
        "It is right on average, and noisy in a step.",
    )


class SmoothCEPlugin(BasePlugin):
    """Puts the loss into the trainer's model once the trainer is made."""

    def get_input_args(self) -> str:
        return "smoothce.integrations.axolotl.SmoothCEArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raises ValueError for a trainer that would train another loss."""
        # `hf_patch.trainer` does not look for it: only Axolotl's trainers have this argument.
        if getattr(trainer.args, "orpo_alpha", None):
            raise ValueError("orpo_alpha is a loss of its own, without smoothce_label_smoothing")
        patch_trainer(
            trainer,
            label_smoothing=cfg.smoothce_label_smoothing,
            z_loss=cfg.smoothce_z_loss,
            filter_eps=cfg.smoothce_filter_eps,
        )

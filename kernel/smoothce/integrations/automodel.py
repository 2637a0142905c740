"""A loss for NVIDIA NeMo Automodel. In the recipe's YAML:

    loss_fn:
      _target_: smoothce.integrations.automodel.SmoothedLinearCrossEntropy
      label_smoothing: 0.1

Automodel hands the loss its hidden states and its head's weight. What a model does between its head
and its logits has to be given: Gemma 2's `softcap: 30.0`, for example. A bias is not handed over.
"""

import torch
import torch.distributed as dist
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from torch import Tensor

from smoothce.linear_cross_entropy import linear_cross_entropy


class SmoothedLinearCrossEntropy(LinearCrossEntropy):
    """`linear_cross_entropy` as Automodel's recipes call their losses.

    The options have the names that they have in `linear_cross_entropy`, of whose options these are
    a part: there is no `smoothing_target` and no `impl`, for example. The reduction is
    Automodel's: the sum over labels, divided by the number of the update's labels. Evaluation,
    which is without gradients, has the loss without smoothing and z-loss.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        softcap: float | None = None,
        logit_scale: float | None = None,
        z_loss: float = 0.0,
        filter_eps: float | str | None = None,
        workspace: int | str = "auto",
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index  # which Automodel reads
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss = z_loss
        self.filter_eps = filter_eps
        self.workspace = workspace

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        labels: Tensor,  # (B, T), shifted
        lm_weight: Tensor,  # (V, D), or FSDP2's shards of it
        num_label_tokens: int | None = None,  # of the whole update, on all ranks
        grad_reduce_group: dist.ProcessGroup | None = None,
        loss_weights: Tensor | None = None,  # (B, T)
    ) -> Tensor:  # ()
        """The sum over this rank's labels by the number of the update's, or without it the sum."""
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        # Not `hidden_states.requires_grad`: those of a frozen decoder need no gradient.
        trains = torch.is_grad_enabled()
        summed = linear_cross_entropy(
            hidden_states.to(weight.dtype),
            weight,
            labels,
            label_smoothing=self.label_smoothing if trains else 0.0,
            token_weights=loss_weights,
            ignore_index=self.ignore_index,
            reduction="sum",
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            z_loss=self.z_loss if trains else 0.0,
            filter_eps=self.filter_eps,
            workspace=self.workspace,
        )
        assert isinstance(summed, Tensor)  # one number, for nothing else is asked for
        if num_label_tokens is None:
            return summed
        return summed / max(num_label_tokens, 1)  # a sum over no tokens is 0

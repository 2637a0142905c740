"""Makes `outputs.loss` of the trained model the loss that the flags ask for."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smoothce.hf_patch import patch_model
from smoothce.token_mean import token_mean_factor
from smoothed_open_instruct.arguments import replaces_loss

BOUNDARY = "set_gradient_accumulation_boundary"  # of DeepSpeed's engine


def training_loss(args: Namespace, accelerator: Any) -> "TrainingLoss | None":
    """The loss that the flags ask for, or None where upstream's own loss stays."""
    return TrainingLoss(args, accelerator) if replaces_loss(args) else None


@dataclass
class TrainingLoss:
    """Label-smoothed loss of a causal language model, with upstream's meaning of mean and sum.

    "mean" averages over the tokens of a micro-batch and "sum" adds them up; upstream then averages
    over ranks and accumulation steps. "token_mean" is the mean over all tokens of one optimizer
    step, so that the update does not depend on how the batch was split.
    """

    args: Namespace
    accelerator: Any

    def attach(self, model: Any) -> None:
        """Replaces the model's loss; call it once, before LoRA and before `accelerator.prepare`.

        Raises TypeError for a model that the fused loss does not know.
        """
        args = self.args
        patch_model(
            model,
            label_smoothing=args.label_smoothing,
            reduction="sum" if args.reduce_loss == "sum" else "mean",
            filter_eps=args.filter_eps,
        )
        self.accelerator.print(f"loss: fused, beta {args.label_smoothing:g}, {args.reduce_loss}")

    def batches(self, loader: Iterable[Any], model: Any) -> Iterable[Any]:
        """The micro-batches; for token_mean each carries its step's share of tokens as divisor."""
        counted = self.args.reduce_loss == "token_mean"
        return self._steps(loader, model) if counted or hasattr(model, BOUNDARY) else loader

    def _steps(self, loader: Iterable[Any], model: Any) -> Iterator[dict[str, Tensor]]:
        accumulation = self.args.gradient_accumulation_steps
        state = self.accelerator.gradient_state
        batches = iter(loader)
        while True:
            group = []
            for batch in batches:
                group.append(batch)
                if len(group) == accumulation or state.end_of_dataloader:
                    break
            if not group:
                return
            share = {}
            if self.args.reduce_loss == "token_mean":
                labels = [batch["labels"] for batch in group]
                share["num_items_in_batch"] = 1 / token_mean_factor(labels, steps=accumulation)
            # Reading ahead moved accelerate's sign of the last batch forward: it belongs to the
            # last micro-batch of the group, where accelerate then synchronises and steps.
            ended = state.end_of_dataloader
            for position, batch in enumerate(group, 1):
                last = position == len(group)
                state.active_dataloader.end_of_dataloader = ended and last
                # DeepSpeed counts micro-batches over the end of an epoch; accelerate does not.
                if hasattr(model, BOUNDARY):
                    getattr(model, BOUNDARY)(last)
                yield {**batch, **share}

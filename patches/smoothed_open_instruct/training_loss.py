"""Makes `outputs.loss` of the trained model the loss that the flags ask for."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smoothce import patch_model, token_mean_factor
from smoothed_open_instruct.arguments import replaces_loss


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
        """Replace the model's loss; call it once, before `accelerator.prepare`.

        Raises TypeError for a model that the fused loss does not know.
        """
        patch_model(
            model,
            label_smoothing=self.args.label_smoothing,
            reduction="sum" if self.args.reduce_loss == "sum" else "mean",
            filter_eps=self.args.filter_eps,
        )
        beta = f"{self.args.label_smoothing:g}"
        self.accelerator.print(f"loss: fused, beta {beta}, {self.args.reduce_loss}")

    def batches(self, loader: Iterable[Any], model: Any) -> Iterable[Any]:
        """The micro-batches, read a step ahead where something about the whole step must be known.

        token_mean needs the tokens of all of a step's micro-batches, by which each one's loss is
        divided; DeepSpeed must be told which micro-batch ends a step.
        """
        if self.args.reduce_loss == "token_mean" or is_deepspeed(model):
            return self._batches_by_step(loader, model)
        return loader

    def _batches_by_step(self, loader: Iterable[Any], model: Any) -> Iterator[dict[str, Tensor]]:
        """Read the micro-batches of an optimizer step ahead, then hand them out one by one."""
        accumulation = self.args.gradient_accumulation_steps
        state = self.accelerator.gradient_state
        loader_iterator = iter(loader)
        while True:
            micro_batches: list[dict[str, Tensor]] = []
            for batch in loader_iterator:
                micro_batches.append(batch)
                if len(micro_batches) == accumulation or state.end_of_dataloader:
                    break
            if not micro_batches:
                return
            extra_inputs: dict[str, Tensor] = {}
            if self.args.reduce_loss == "token_mean":
                labels = [batch["labels"] for batch in micro_batches]
                factor = token_mean_factor(labels, steps=accumulation)
                # The patched model divides its summed loss by this input.
                extra_inputs["num_items_in_batch"] = 1 / factor
            # accelerate makes an update at each micro-batch for which this flag of the loader is
            # set. Reading ahead has set it too early: without this the epoch's last step would be
            # made once for each of its micro-batches.
            loader_ended = state.end_of_dataloader
            for position, batch in enumerate(micro_batches, 1):
                is_last = position == len(micro_batches)
                state.active_dataloader.end_of_dataloader = loader_ended and is_last
                if is_deepspeed(model):
                    # DeepSpeed would count on across the end of an epoch; accelerate does not.
                    model.set_gradient_accumulation_boundary(is_last)
                yield {**batch, **extra_inputs}


def is_deepspeed(model: Any) -> bool:
    """Whether DeepSpeed's engine wraps the model."""
    return hasattr(model, "set_gradient_accumulation_boundary")

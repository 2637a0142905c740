"""Makes `outputs.loss` of the trained model the loss that the flags ask for."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from smoothce import patch_model, token_mean_factor
from smoothed_open_instruct.arguments import replaces_loss


def training_loss(args: Namespace, accelerator: Any) -> "TrainingLoss | None":
    """The loss that the flags ask for, or None where upstream's own loss stays."""
    return TrainingLoss(args, accelerator) if replaces_loss(args) else None


class Step(NamedTuple):
    """One optimizer step of this process, as its loader gives it.

    `monitor` and `smoothce` call that an update. The argument `steps` of `token_mean_factor` is
    another thing: the number by which accelerate or DeepSpeed divides each loss. It is
    `gradient_accumulation_steps` for an epoch's last step too, which may have fewer
    micro-batches."""

    micro_batches: list[dict[str, Tensor]]
    ends_epoch: bool


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

        Raises ValueError for a model whose own loss is not the fused one, and TypeError for one
        that is wrapped or has no decoder or no linear head, as `patch_model` does.
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
        """Read each optimizer step as a whole, then hand out its micro-batches one by one."""
        for step in self._read_steps(loader):
            extra_inputs = self._inputs_of_step(step)
            for position, batch in enumerate(step.micro_batches, 1):
                is_last = position == len(step.micro_batches)
                self._tell_accelerate(ends_epoch=is_last and step.ends_epoch)
                if is_deepspeed(model):
                    # DeepSpeed's own count of micro-batches would run on across an epoch's end.
                    model.set_gradient_accumulation_boundary(is_last)
                yield {**batch, **extra_inputs}

    def _read_steps(self, loader: Iterable[Any]) -> Iterator[Step]:
        """An epoch's optimizer steps, of which the last one may have fewer micro-batches."""
        state = self.accelerator.gradient_state
        micro_batches: list[dict[str, Tensor]] = []
        for batch in loader:
            micro_batches.append(batch)
            ends_epoch = state.end_of_dataloader  # set by accelerate's loader with its last batch
            if len(micro_batches) == self.args.gradient_accumulation_steps or ends_epoch:
                yield Step(micro_batches, ends_epoch)
                micro_batches = []
        # This fails for a loader that is not accelerate's, which marks no end.
        assert not micro_batches

    def _inputs_of_step(self, step: Step) -> dict[str, Tensor]:
        """What the model is given beside each micro-batch of a step."""
        if self.args.reduce_loss != "token_mean":
            return {}
        labels = [batch["labels"] for batch in step.micro_batches]
        # factor = ranks · steps / tokens, where steps = gradient_accumulation_steps
        factor = token_mean_factor(labels, steps=self.args.gradient_accumulation_steps)
        # The model divides its summed loss by this, which is tokens / (ranks · steps): accelerate
        # and DeepSpeed divide by the accumulation steps, and average over ranks, once more.
        return {"num_items_in_batch": 1 / factor}

    def _tell_accelerate(self, *, ends_epoch: bool) -> None:
        """Tell accelerate whether the coming micro-batch is its epoch's last.

        Reading ahead has told it so already at the first micro-batch of an epoch's last step, and
        accelerate makes an update at every micro-batch while it believes it.
        """
        # `gradient_state.end_of_dataloader` is read from the active loader. Accelerate forgets that
        # when the iteration over it ends, and there would be None here. It has not ended, even
        # where the last batch is read: `_read_steps` waits at its yield, inside its loop over the
        # loader.
        self.accelerator.gradient_state.active_dataloader.end_of_dataloader = ends_epoch


def is_deepspeed(model: Any) -> bool:
    """Whether DeepSpeed's engine wraps the model."""
    return hasattr(model, "set_gradient_accumulation_boundary")

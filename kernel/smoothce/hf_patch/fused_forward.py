"""A forward with labels in which a model's head computes the loss, so that logits never exist."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothce.hf_patch.anatomy import (
    CausalModel,
    check_head,
    class_forward,
    class_of,
    config_of,
    decoder_of,
    runs_another_forward,
)
from smoothce.hf_patch.head_forward import HeadForward, LossAndStatistics, divided
from smoothce.hf_patch.outputs import (
    OutputClass,
    auxiliary_loss,
    refuse_sum_beside_auxiliary_loss,
    weighted_auxiliary_loss,
)
from smoothce.hf_patch.trl import refuse_sum, trl_output

# Arguments of a causal model's forward that concern its logits and its loss, not its decoder.
LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "ignore_index")


class FusedForward:
    """Runs a model's decoder and then, with the labels, its patched head."""

    def __init__(self, causal: CausalModel, head_name: str) -> None:
        self.causal = causal
        self.head_name = head_name
        parameters = inspect.signature(class_forward(causal)).parameters
        self.argument_names = tuple(parameters)
        kinds = [parameter.kind for parameter in parameters.values()]
        self.takes_any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
        self.positional_names = tuple(
            name
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )

    @property
    def head(self) -> nn.Linear:
        """The model's head at this moment: the patched one, unless it was replaced since."""
        return getattr(self.causal, self.head_name)

    @property
    def head_forward(self) -> HeadForward:
        """What the head runs. Raises TypeError where the head was replaced or wrapped since."""
        head = self.head
        head_forward = HeadForward.of(head)
        if head_forward is None:
            check_head(self.head_name, head)
            raise TypeError(
                f"{self.head_name} was replaced after patch_model; call patch_model again"
            )
        if torch.compiler.is_compiling():
            return head_forward
        if runs_another_forward(head, than=(head_forward,)):
            raise TypeError(
                f"{self.head_name}.forward was wrapped after patch_model; remove the wrapper, "
                "which would get the loss in the place of logits"
            )
        return head_forward

    def takes(self, name: str) -> bool:
        """Whether upstream's forward has such an argument."""
        return self.takes_any_keyword or name in self.argument_names

    def inputs_by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments by their names in upstream's forward.

        Raises TypeError, as Python does, for too many of them and for one that is given twice."""
        call = f"{class_of(self.causal).__name__}.forward()"
        if len(args) > len(self.positional_names):
            raise TypeError(
                f"{call} takes {len(self.positional_names)} positional arguments, not {len(args)}"
            )
        inputs = dict(kwargs)
        for name, value in zip(self.positional_names, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{call} got multiple values for argument {name!r}")
            inputs[name] = value
        return inputs

    def __call__(
        self,
        inputs: dict[str, Any],
        output_class: OutputClass,
        *,
        as_in_training: bool,
        for_trl: bool = False,
    ) -> Any:
        """The outputs for upstream's arguments by name, labels among them; logits are None.

        `as_in_training` is False for the loss that evaluation reports (`HeadForward`).
        The outputs are of upstream's class, or `for_trl` what TRL asks for. Raises ValueError for
        arguments that a loss without logits cannot serve."""
        causal = self.causal
        decoder_inputs = dict(inputs)
        loss_inputs = {name: decoder_inputs.pop(name, None) for name in LOSS_ARGUMENTS}
        options = self.head_forward.settings.options
        _check_loss_inputs(loss_inputs, options.ignore_index)
        if for_trl and as_in_training:
            # patch_trainer has refused a sum already. A patch_model that is called after it does
            # not know of the trainer.
            refuse_sum(options.reduction)
        wants_dict = decoder_inputs.pop("return_dict", None)

        decoder_outputs = decoder_of(causal)(**decoder_inputs, return_dict=True)
        hidden = decoder_outputs.last_hidden_state  # (B, T, D)
        auxiliary = auxiliary_loss(causal, decoder_outputs, decoder_inputs)
        labels = loss_inputs["shift_labels"]  # (B, T)
        if labels is None:
            labels = F.pad(loss_inputs["labels"][..., 1:], (0, 1), value=options.ignore_index)
        divisor = loss_inputs["num_items_in_batch"]
        if for_trl:
            return self._outputs_for_trl(
                hidden, labels, divisor, auxiliary, as_in_training=as_in_training
            )
        if auxiliary is not None:
            refuse_sum_beside_auxiliary_loss(options.reduction)
        loss: Tensor = self.head(
            hidden, labels=labels, divisor=divisor, as_in_training=as_in_training
        )
        loss = _with_auxiliary(causal, loss, auxiliary)
        outputs = output_class.make(loss, auxiliary, decoder_outputs)
        if wants_dict is None:
            wants_dict = getattr(config_of(causal), "return_dict", True)
        return outputs if wants_dict else outputs.to_tuple()

    def _outputs_for_trl(
        self,
        hidden: Tensor,  # (B, T, D)
        labels: Tensor,  # (B, T), shifted
        divisor: Tensor | int | None,
        auxiliary: Tensor | None,  # ()
        *,
        as_in_training: bool,
    ) -> Any:
        result: LossAndStatistics = self.head(
            hidden, labels=labels, as_in_training=as_in_training, with_statistics=True
        )
        valid = result.labels != self.head_forward.settings.options.ignore_index
        if divisor is None:
            divisor = valid.sum()
        mean_loss = _with_auxiliary(self.causal, divided(result.loss, divisor), auxiliary)
        return trl_output(result, valid, mean_loss, auxiliary)


def _with_auxiliary(causal: CausalModel, loss: Tensor, auxiliary: Tensor | None) -> Tensor:
    """The loss, and a mixture's auxiliary loss where there is one, as upstream adds it."""
    if auxiliary is None:
        return loss
    return loss + weighted_auxiliary_loss(causal, auxiliary).to(loss.device)


def _check_loss_inputs(loss_inputs: dict[str, Any], ignore_index: int) -> None:
    kept = loss_inputs["logits_to_keep"]
    if isinstance(kept, Tensor) or kept:
        raise ValueError("logits_to_keep cannot be combined with labels in a patched model")
    if loss_inputs["ignore_index"] not in (None, ignore_index):
        raise ValueError(
            f"ignore_index={loss_inputs['ignore_index']} is given to a model that was patched "
            f"with ignore_index={ignore_index}"
        )

"""What a patched head runs in the place of its forward: the loss is computed there."""

from typing import Any

from torch import Tensor, nn

from smoothce.hf_patch.settings import LOGIT_MAP_KEYWORDS, OPTION_NAMES, LossFunction, ModelLoss
from smoothce.linear_cross_entropy import linear_cross_entropy


class HeadForward:
    """A patched head's forward: logits without labels, as ever, and the loss with them."""

    def __init__(self, head: nn.Linear, loss: ModelLoss) -> None:
        self.head = head
        self.loss = loss

    def __call__(
        self,
        hidden: Tensor,  # (B, T, D)
        labels: Tensor | None = None,  # (B, T), shifted
        divisor: Tensor | int | None = None,  # of a mean, instead of the number of valid labels
        smoothed: bool = True,
        per_token: bool = False,  # the summed loss, and every token's statistics
    ) -> Any:  # logits (B, T, V); the loss (); or the loss, the statistics and the labels
        if labels is None:
            return type(self.head).forward(self.head, hidden)
        labels = labels.to(hidden.device)
        if smoothed and self.loss.loss is not None:
            return self._given_loss(self.loss.loss, hidden, labels, divisor)

        options = self.loss.options
        keywords = {name: getattr(options, name) for name in OPTION_NAMES}
        if options.reduction != "mean" or per_token:
            divisor = None
        if divisor is not None or per_token:
            keywords["reduction"] = "sum"
        if not smoothed:
            keywords["label_smoothing"] = 0.0
            keywords["z_loss"] = 0.0
        smoothing_target = self.loss.smoothing_target
        if smoothing_target is not None:
            smoothing_target = smoothing_target.to(hidden.device)
        loss: Any = linear_cross_entropy(
            hidden,
            self.head.weight,
            labels,
            bias=self._scaled_bias(),
            smoothing_target=smoothing_target,
            return_statistics=per_token,
            impl=self.loss.impl,
            **keywords,
        )
        if per_token:
            return *loss, labels
        return loss if divisor is None else divided(loss, divisor)

    def _scaled_bias(self) -> Tensor | None:
        """The bias inside the logit scale: these models scale the head's whole output."""
        bias, scale = self.head.bias, self.loss.options.logit_scale
        if bias is None or scale is None:
            return bias
        return bias * scale

    def _given_loss(
        self, loss: LossFunction, hidden: Tensor, labels: Tensor, divisor: Tensor | int | None
    ) -> Tensor:  # ()
        """The loss of `patch_model(loss=…)`, which is a mean, reduced as the settings say."""
        options = self.loss.options
        model_options: dict[str, Any] = {}
        bias = self._scaled_bias()
        if bias is not None:
            model_options["bias"] = bias
        for name in LOGIT_MAP_KEYWORDS:
            if getattr(options, name) is not None:
                model_options[name] = getattr(options, name)
        mean = loss(hidden.flatten(0, -2), self.head.weight, labels.flatten(), **model_options)
        if options.reduction == "mean" and divisor is None:
            return mean
        summed = mean * (labels != options.ignore_index).sum()
        if options.reduction == "sum" or divisor is None:
            return summed
        return divided(summed, divisor)


def divided(summed: Tensor, divisor: Tensor | int) -> Tensor:
    """A mean, which of nothing is 0 and not NaN."""
    return summed / (divisor + (divisor == 0))

"""What a patched head runs in the place of its forward: the loss is computed there."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from smoothce.hf_patch.logit_map import LogitMap
from smoothce.hf_patch.settings import SETTING_OPTIONS, LossFunction, LossSettings
from smoothce.linear_cross_entropy import linear_cross_entropy
from smoothce.options import TokenStatistics


class LossAndStatistics(NamedTuple):
    """A batch's summed loss and what the model says of each of its tokens."""

    loss: Tensor  # (), the sum over the valid tokens
    statistics: TokenStatistics  # (B, T) each, without a gradient
    labels: Tensor  # (B, T), on the device of the hidden states


class HeadForward:
    """A patched head's forward: logits without labels, as ever, and the loss with them.

    FSDP2 and ZeRO-3 gather the head's weight around a call of the head. That is why `logits`,
    `loss` and `loss_and_statistics` are all reached by calling it.

    The caller says by `as_in_training` which loss it wants: that of the settings, or, where it is
    False, the one that evaluation reports. That is upstream's: the mean cross-entropy, without
    smoothing, z-loss or a loss of the caller's own, whatever the settings' reduction. Labels that
    the settings ignore are ignored there too. A patched model goes by its mode, `model.training`,
    so that it follows `model.train()` and `model.eval()`. Losses of `smoothce.integrations` that
    know of no model go by whether gradients are on.
    """

    ATTRIBUTE = "_smoothce_head_forward"  # under which a patched head keeps it

    def __init__(self, head: nn.Linear, settings: LossSettings, logit_map: LogitMap | None) -> None:
        self.head = head
        self.settings = settings
        # None until the model is verified, before which no loss is asked for.
        self.logit_map = logit_map
        self.smoothing_target = settings.smoothing_target  # (V,), where it was used last

    @classmethod
    def of(cls, head: nn.Module) -> Optional["HeadForward"]:
        """The one that `patch_model` has put on this head, if any."""
        return vars(head).get(cls.ATTRIBUTE)

    def __call__(
        self,
        hidden: Tensor,  # (B, T, D)
        *,
        labels: Tensor | None = None,  # (B, T), shifted
        # What a mean is divided by instead of the number of valid labels: upstream's
        # `num_items_in_batch`.
        divisor: Tensor | int | None = None,
        as_in_training: bool = True,
        with_statistics: bool = False,
    ) -> Tensor | LossAndStatistics:
        """Logits (B, T, V) without labels; with labels the loss, (), or `with_statistics` a
        LossAndStatistics, which TRL asks for."""
        if labels is None:
            return self.logits(hidden)
        labels = labels.to(hidden.device)
        if with_statistics:
            return self.loss_and_statistics(hidden, labels, as_in_training=as_in_training)
        return self.loss(hidden, labels, divisor, as_in_training=as_in_training)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head computes unpatched, (B, T, V)."""
        return type(self.head).forward(self.head, hidden)

    def loss(
        self, hidden: Tensor, labels: Tensor, divisor: Tensor | int | None, *, as_in_training: bool
    ) -> Tensor:
        """The loss, (), in training reduced as the settings say; `divisor` is a mean's alone."""
        reduction = self.settings.options.reduction if as_in_training else "mean"
        if reduction == "mean" and divisor is not None:
            summed = self._reduced(hidden, labels, "sum", as_in_training=as_in_training)
            return divided(summed, divisor)
        return self._reduced(hidden, labels, reduction, as_in_training=as_in_training)

    def loss_and_statistics(
        self, hidden: Tensor, labels: Tensor, *, as_in_training: bool
    ) -> LossAndStatistics:
        """The summed loss beside each token's statistics.

        A loss of the caller's own gives none. Then a pass without gradients gives them."""
        if as_in_training and self.settings.given_loss is not None:
            summed = self._reduced(hidden, labels, "sum", as_in_training=True)
            with torch.no_grad():
                # The loss of this pass is dropped. Smoothing, which changes no statistic, is left
                # out of it.
                _, statistics = self._linear_cross_entropy(
                    hidden, labels, "sum", as_in_training=False, return_statistics=True
                )
        else:
            summed, statistics = self._linear_cross_entropy(
                hidden, labels, "sum", as_in_training=as_in_training, return_statistics=True
            )
        return LossAndStatistics(summed, statistics, labels)

    def _reduced(
        self, hidden: Tensor, labels: Tensor, reduction: str, *, as_in_training: bool
    ) -> Tensor:
        given_loss = self.settings.given_loss
        if not as_in_training or given_loss is None:
            return self._linear_cross_entropy(
                hidden, labels, reduction, as_in_training=as_in_training
            )
        valid = labels != self.settings.options.ignore_index
        # A mean over nothing would be NaN, which a product with 0 does not take away. So where no
        # label counts the function gets label 0 everywhere, and its mean is multiplied by 0.
        some_labels = torch.where(valid.any(), labels, torch.zeros_like(labels))
        mean = self._given_mean(given_loss, hidden, some_labels)
        if reduction == "mean":
            return mean * valid.any()
        return mean * valid.sum()

    def _linear_cross_entropy(
        self,
        hidden: Tensor,
        labels: Tensor,
        reduction: str,
        *,
        as_in_training: bool,
        return_statistics: bool = False,
    ) -> Any:
        """`linear_cross_entropy` with the settings: a loss, or with statistics the two."""
        options = {name: getattr(self.settings.options, name) for name in SETTING_OPTIONS}
        options["reduction"] = reduction
        logit_map = self._verified_map()
        if not as_in_training:
            options["label_smoothing"] = 0.0
            options["z_loss"] = 0.0
        return linear_cross_entropy(
            hidden,
            self.head.weight,
            labels,
            bias=self._scaled_bias(),
            logit_scale=logit_map.logit_scale,
            softcap=logit_map.softcap,
            smoothing_target=self._smoothing_target_on(hidden.device),
            return_statistics=return_statistics,
            impl=self.settings.impl,
            **options,
        )

    def _verified_map(self) -> LogitMap:
        assert self.logit_map is not None  # no loss is asked for before the model is verified
        return self.logit_map

    def _smoothing_target_on(self, device: torch.device) -> Tensor | None:
        """The target, (V,). It is copied to the device once: it is no buffer, so that what moves
        the model leaves it where it is."""
        target = self.smoothing_target
        if target is None or target.device == device:
            return target
        target = target.to(device)
        # What compiled code makes may be overwritten by its next run.
        if not torch.compiler.is_compiling():
            self.smoothing_target = target
        return target

    def _scaled_bias(self) -> Tensor | None:
        """The bias, (V,), as `linear_cross_entropy` takes it, which adds it to scaled logits.

        These models scale the head's whole output, its bias too, so that it is scaled here."""
        bias = self.head.bias
        scale = self._verified_map().logit_scale
        if bias is None or scale is None:
            return bias
        return bias * scale

    def _given_mean(self, given_loss: LossFunction, hidden: Tensor, labels: Tensor) -> Tensor:
        """What the function of `patch_model(loss=…)` returns, which is a mean, ()."""
        model_options: dict[str, Any] = {}
        bias = self._scaled_bias()
        if bias is not None:
            model_options["bias"] = bias
        logit_map = self._verified_map()
        if logit_map.softcap is not None:
            model_options["softcap"] = logit_map.softcap
        if logit_map.logit_scale is not None:
            model_options["logit_scale"] = logit_map.logit_scale
        return given_loss(
            hidden.flatten(0, -2), self.head.weight, labels.flatten(), **model_options
        )


def divided(summed: Tensor, divisor: Tensor | int) -> Tensor:
    """A mean, (), which of nothing is 0 and not NaN."""
    if isinstance(divisor, Tensor):
        # It may be on another GPU than the head, where a model is split over several.
        divisor = divisor.to(summed.device)
        return summed / torch.where(divisor == 0, 1, divisor)
    return summed / (1 if divisor == 0 else divisor)

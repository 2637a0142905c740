"""The loss as a module, for code that configures its criterion once."""

from torch import Tensor, nn

from smoothce.dispatch import check_impl
from smoothce.linear_cross_entropy import LossResult, linear_cross_entropy
from smoothce.options import Options


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options fixed. It has no parameters of its own.

    It takes those keywords of `linear_cross_entropy` that are the same for every call: all but
    tensors and `process_group`. For a loss with a `smoothing_target`, `token_weights` or a split
    vocabulary call the function. Raises ValueError and TypeError as that does.
    """

    def __init__(
        self,
        *,
        impl: str = "auto",
        return_lse: bool = False,
        return_statistics: bool = False,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        softcap: float | None = None,
        logit_scale: float | None = None,
        z_loss: float = 0.0,
        filter_eps: float | str | None = None,
        workspace: int | str = "auto",
    ) -> None:
        super().__init__()
        check_impl(impl)
        self.impl = impl
        self.options = Options(
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            reduction=reduction,
            softcap=softcap,
            logit_scale=logit_scale,
            z_loss=z_loss,
            filter_eps=filter_eps,
            workspace=workspace,
            return_lse=return_lse,
            return_statistics=return_statistics,
        )

    def forward(
        self,
        hidden: Tensor,  # (..., D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (...)
        bias: Tensor | None = None,  # (V,)
    ) -> LossResult:
        """The loss, and what `return_lse` and `return_statistics` add to it."""
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, impl=self.impl, **vars(self.options)
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self.options).items())

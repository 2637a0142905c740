"""The loss as a module, for code that configures its criterion once."""

from torch import Tensor, nn

from smoothce.dispatch import check_impl
from smoothce.linear_cross_entropy import linear_cross_entropy
from smoothce.options import Options


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its keyword options fixed; it has no parameters of its own.

    Takes the options of `linear_cross_entropy` that are no tensors. Raises ValueError.
    """

    def __init__(self, *, impl: str = "auto", **options: object) -> None:
        super().__init__()
        check_impl(impl)
        self.impl = impl
        self.options = Options(**options)

    def forward(
        self,
        hidden: Tensor,  # (..., D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (...)
        bias: Tensor | None = None,  # (V,)
    ) -> Tensor:  # (), or the labels' shape where reduction is "none"
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, impl=self.impl, **vars(self.options)
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in vars(self.options).items())

"""The losses that are compared, each a mean over tokens: (hidden, weight, labels, β) → loss."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def torch_dense(hidden: Tensor, weight: Tensor, labels: Tensor, beta: float) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, label_smoothing=beta)


def ours(impl: str, hidden: Tensor, weight: Tensor, labels: Tensor, beta: float) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, label_smoothing=beta, impl=impl)


METHODS: dict[str, Loss] = {
    "torch": torch_dense,
    "chunked": partial(ours, "chunked"),
}

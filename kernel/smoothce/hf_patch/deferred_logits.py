"""Logits that a model handles as ever and that nobody computes.

A patched head answers with `DeferredLogits`. They hold the hidden states and note what the model
does to its logits on the way to its loss: which tokens it takes, by what it scales them, how it
caps them. The cross-entropy that takes them calls the head once more, with the labels and these
notes, and the head computes the loss from the hidden states. Anything else that is done to them
raises CannotDefer, or Python's own TypeError for an operator that they lack, so that no model
trains on another loss than it says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoothce.options import TokenStatistics


class CannotDefer(ValueError, AttributeError):
    """The model does to its logits what no loss without logits can follow.

    It is an AttributeError too, so that `hasattr` works on deferred logits as on anything else.
    """


@dataclass
class Deferral:
    """One forward of a patched model, in which its head defers the logits."""

    with_smoothing: bool  # False: the loss that evaluation reports
    # (B, T) each, aligned with the logits: each token's weight, and its label.
    token_weights: Tensor | None = None
    aligned_labels: Tensor | None = None
    # `num_items_in_batch`, where the model's forward does not take it: a mean is divided by it.
    divisor: Any = None
    # TRL asks for the sum of losses and for statistics of each token; they are left here.
    with_statistics: bool = False
    loss_sum: Tensor | None = None  # ()
    statistics: TokenStatistics | None = None  # (N,) each
    labels: Tensor | None = None  # (N,), -100 where none counts
    losses: int = 0  # how many cross-entropies have taken the logits


@dataclass(eq=False, repr=False)
class DeferredLogits:
    """The logits z = outer · tanh(inner · (E Cᵀ + b) + bias), or without the outer tanh where there
    is no cap, of hidden states E, with the head's classifier C and bias b."""

    head: Any  # a patched one
    hidden: Tensor  # (…, D)
    deferral: Deferral
    inner: float = 1.0
    bias: Tensor | None = None  # (V,)
    outer: float | None = None
    token_weights: Tensor | None = None  # (…)
    labels: Tensor | None = None  # (…), those that the token weights belong to
    # Whether others share its memory: what is done to one in place would be done to all.
    is_shared: bool = False

    requires_grad = True

    # What the model asks of its logits' shape and place.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def vocabulary(self) -> int:
        return self.head.out_features

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def dim(self) -> int:
        return self.ndim

    def size(self, dimension: int | None = None) -> Any:
        return self.shape if dimension is None else self.shape[dimension]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}; .dense() computes them)"

    # What leaves the logits' values alone.

    def _copied(self, *args: Any, **kwargs: Any) -> "DeferredLogits":
        copied = replace(self)
        self.is_shared = True
        return copied

    to = contiguous = clone = type_as = cpu = cuda = float = _copied

    # Which tokens the model takes.

    def _of_tokens(self, choose: Callable[[Tensor, bool], Tensor]) -> "DeferredLogits":
        """The logits of the tokens that `choose` takes of a tensor; it is told whether that one has
        features as its last dimension."""
        token_weights = self.token_weights
        labels = self.labels
        if token_weights is not None:
            token_weights = choose(token_weights, False)
        if labels is not None:
            labels = choose(labels, False)
        hidden = choose(self.hidden, True)
        self.is_shared = True
        return replace(self, hidden=hidden, token_weights=token_weights, labels=labels)

    def __getitem__(self, index: Any) -> "DeferredLogits":
        token_index = self._token_index(index)
        return self._of_tokens(lambda tensor, _: tensor[token_index])

    def _token_index(self, index: Any) -> tuple[Any, ...]:
        """The index without the vocabulary's part, which has to take all of it."""
        parts = list(index) if isinstance(index, tuple) else [index]
        dimensions = 0
        for part in parts:
            if part is None:
                raise CannotDefer("a new dimension is put into the logits")
            if isinstance(part, Tensor) and part.dtype == torch.bool:
                dimensions += part.ndim
            elif part is not Ellipsis:
                dimensions += 1
        for place, part in enumerate(parts):
            if part is Ellipsis:
                parts[place : place + 1] = [slice(None)] * (self.ndim - dimensions)
                dimensions = self.ndim
                break
        if dimensions < self.ndim:
            return tuple(parts)
        of_vocabulary = parts.pop()
        everything = (0, self.vocabulary, 1)
        if (
            not isinstance(of_vocabulary, slice)
            or of_vocabulary.indices(self.vocabulary) != everything
        ):
            raise CannotDefer("a part of the vocabulary is taken of the logits")
        return tuple(parts)

    def view(self, *shape: Any) -> "DeferredLogits":
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        if len(shape) < 2 or shape[-1] not in (self.vocabulary, -1):
            raise CannotDefer(f"the logits are viewed as {shape}, of {tuple(self.shape)}")
        tokens = shape[:-1]

        def viewed(tensor: Tensor, has_features: bool) -> Tensor:
            return (
                tensor.reshape(*tokens, tensor.shape[-1])
                if has_features
                else tensor.reshape(tokens)
            )

        return self._of_tokens(viewed)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "DeferredLogits":
        end = end_dim % self.ndim
        if end == self.ndim - 1:
            raise CannotDefer("the vocabulary is flattened with the tokens")
        return self._of_tokens(lambda tensor, _: tensor.flatten(start_dim, end))

    def transpose(self, dim0: int, dim1: int) -> "DeferredLogits":
        first = dim0 % self.ndim
        second = dim1 % self.ndim
        if self.ndim - 1 in (first, second):
            raise CannotDefer("the vocabulary is not the logits' last dimension")
        return self._of_tokens(lambda tensor, _: tensor.transpose(first, second))

    # What the model makes of the logits' values.

    def __mul__(self, factor: Any) -> "DeferredLogits":
        number = _fixed_number(factor)
        if self.outer is not None:
            return replace(self, outer=self.outer * number)
        bias = self.bias
        if bias is not None:
            bias = bias * number
        return replace(self, inner=self.inner * number, bias=bias)

    def __truediv__(self, divisor: Any) -> "DeferredLogits":
        return self * (1 / _fixed_number(divisor))

    def __add__(self, bias: Any) -> "DeferredLogits":
        is_bias = isinstance(bias, Tensor) and bias.numel() == self.vocabulary == bias.shape[-1]
        if not is_bias or self.outer is not None:
            raise CannotDefer("something that is no bias (V,) is added to the logits")
        bias = bias.flatten()
        if self.bias is not None:
            bias = self.bias + bias
        return replace(self, bias=bias)

    def tanh(self) -> "DeferredLogits":
        if self.outer is not None:
            raise CannotDefer("the logits are capped twice")
        return replace(self, outer=1.0)

    __rmul__ = mul = __mul__
    div = __truediv__
    __radd__ = add = __add__

    def _become(self, other: "DeferredLogits") -> "DeferredLogits":
        if self.is_shared:
            raise CannotDefer("the logits are changed in place after a part of them was taken")
        self.inner = other.inner
        self.bias = other.bias
        self.outer = other.outer
        return self

    def __imul__(self, factor: Any) -> "DeferredLogits":
        return self._become(self * factor)

    def __itruediv__(self, divisor: Any) -> "DeferredLogits":
        return self._become(self / divisor)

    def __iadd__(self, bias: Any) -> "DeferredLogits":
        return self._become(self + bias)

    def tanh_(self) -> "DeferredLogits":
        return self._become(self.tanh())

    mul_ = __imul__
    div_ = __itruediv__
    add_ = __iadd__

    def __setitem__(self, index: Any, value: Any) -> None:  # as Chameleon masks image tokens
        raise CannotDefer("a part of the logits is changed in place")

    # What becomes of them.

    def cross_entropy(
        self,
        target: Tensor,  # (N,)
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Tensor:
        """The loss that `F.cross_entropy` would have of these logits (N, V), smoothed as the head's
        settings say. The head computes it, in a call of its own, around which FSDP2 and ZeRO-3
        gather the classifier."""
        if weight is not None or size_average is not None or reduce is not None:
            raise CannotDefer("the cross-entropy of the logits weighs its classes")
        if label_smoothing != 0:
            raise CannotDefer(f"the model smooths its labels itself, by {label_smoothing}")
        if self.ndim != 2 or target.ndim != 1:
            raise CannotDefer("the cross-entropy is not one of logits (N, V) and labels (N,)")
        self.deferral.losses += 1
        request = LossRequest(self, target, ignore_index, reduction)
        return self.head(self.hidden, request=request)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Compute the logits, (…, V), without a gradient."""
        deferral = self.head.deferral
        self.head.deferral = None
        try:
            logits = self.head(self.hidden) * self.inner
        finally:
            self.head.deferral = deferral
        if self.bias is not None:
            logits = logits + self.bias
        if self.outer is not None:
            logits = self.outer * logits.tanh()
        return logits

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotDefer(
            f".{name} is read of the logits, which a patched model does not compute where it "
            "computes a loss; .dense() computes them"
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # `torch.tanh(logits)` and `tensor * logits` come here, and so does `F.cross_entropy`.
        name = function.__name__
        if name in OPERATIONS:
            if isinstance(args[0], cls):
                return getattr(args[0], OPERATIONS[name])(*args[1:], **kwargs)
            if name in COMMUTATIVE:
                return getattr(args[1], OPERATIONS[name])(args[0], **kwargs)
        raise CannotDefer(f"{name} is called on the logits, which a patched model does not compute")


# Functions of torch, by name, and the method that stands for each.
COMMUTATIVE = {"mul": "__mul__", "__mul__": "__mul__", "__rmul__": "__mul__"}
COMMUTATIVE |= {"add": "__add__", "__add__": "__add__", "__radd__": "__add__"}
OPERATIONS = {
    **COMMUTATIVE,
    "cross_entropy": "cross_entropy",
    "tanh": "tanh",
    "div": "__truediv__",
    "__truediv__": "__truediv__",
    "true_divide": "__truediv__",
}


class LossRequest:
    """What a head is called with for the loss, beside its hidden states (N, D).

    No dataclass: FSDP2 would hand a copy to the head, with a deferral of its own."""

    def __init__(
        self,
        logits: DeferredLogits,
        labels: Tensor,  # (N,)
        ignore_index: int,
        reduction: str,
    ) -> None:
        self.logits = logits
        self.labels = labels
        self.ignore_index = ignore_index
        self.reduction = reduction

    @property
    def softcap(self) -> float | None:
        """The cap c of c · tanh(z / c); it is even in c, so that a negative one is positive."""
        outer = self.logits.outer
        return None if outer is None else abs(outer)

    @property
    def logit_scale(self) -> float:
        """What the products E Cᵀ are multiplied by before the cap."""
        return self.logits.inner * self._before_the_cap

    @property
    def added_bias(self) -> Tensor | None:
        """What the model adds to scaled logits before the cap, (V,), beside its head's own bias."""
        bias = self.logits.bias
        return None if bias is None else bias * self._before_the_cap

    @property
    def _before_the_cap(self) -> float:
        """A model writes its cap as outer · tanh(x), we as c · tanh(z / c): so z = outer · x."""
        outer = self.logits.outer
        return 1.0 if outer is None else outer


def _fixed_number(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise CannotDefer(f"the logits are scaled by a tensor of {tuple(value.shape)}")
    if value.requires_grad:
        raise CannotDefer("the logits are scaled by a number that is trained")
    return value.item()

"""What crosses the package: the loss's options, the inputs of one call, and what comes out of it.

`linear_cross_entropy` makes an `Inputs` of what it is given. Every implementation takes that and
returns a `LossOutput`.
"""

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict, TypeGuard, TypeVar

import torch
from torch import Tensor

from smoothce.vocab_parallel import Shard

REDUCTIONS = ("none", "sum", "mean")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """The options of the loss under the names of `linear_cross_entropy`'s keywords, which its
    docstring explains. They are checked here: raises ValueError, naming the option and its value.

    Where a new option goes:

    - Its name: a field and a check here, and a key in `LossKeywords`. The signatures that users
      see, `LinearCrossEntropy` and the operator that `torch.compile` sees follow from these.
    - What it means: the docstring of `linear_cross_entropy`, and `reference`, the definition that
      tests compare with.
    - How it is computed, where it changes the loss of given logits, as `z_loss` does:

          reference                 `loss`
          chunked                   `_write_output` (the loss), `_gradient_rows`
          triton.forward            `losses_kernel` (the loss), and its launch in `write_losses`
          triton.tokens             `Coefficients`, `coefficients_kernel`, and its launch in
                                    `coefficients`
          triton.filtered           `upstream_gradient`, which divides one by the other: their
                                    quotient 1 + 2ζ lse_i is called the lift
          triton.filter_kernels     `tile_gradients` (of listed pairs), `block_sums_kernel` and
                                    `filtered_hidden_kernel` (of dropped ones)

      The gradient's equations at the head of `tokens.Coefficients`, `grad_in_forward` and
      `filtered` have two coefficients a token; an option that needs a third changes all of these,
      and `dproduct`. One that gives each token a factor of its own ends the shortcut of
      `filtered.upstream_gradient`, which takes one g for all tokens of a reduced loss without token
      weights. What a gradient takes of the forward, such as each token's loss, becomes a field of
      `tokens.PackedTokens`.
    - Where it changes the smoothing term, as `smoothing_target` does:

          reference                 `_smoothing_logit`
          chunked                   `_smoothing_logit`, `_LinearSmoothing` and where `_Walk` makes
                                    one, `_gradient_rows`, `_add_products`
          triton.forward            `block_smoothing_logit`, `run_forward`
          triton.tokens             `smoothing_factor`
          triton.dproduct           `store_dproduct`, `finish_hidden_kernel`
          triton.grad_in_forward    `SmoothingRows`, `weigh_kernel`
          triton.filter_kernels     `tile_gradients`, `share_item`, `filtered_hidden_kernel`

    - Where it changes the logits, as `softcap` and `logit_scale` do. A new number is handed to
      `base2_logits` and `slope` through every kernel that has `softcap` among its parameters, and
      through its launch. Some of the functions below ask whether there is a softcap, because logits
      are then no longer linear in the hidden states:

          reference                 `logits`
          chunked                   `_logits`, `_chunk`, `_add_products`, `_Walk`
          token_statistics          `token_statistics`, which makes a temperature of them
          triton.tiles              `base2_logits`, `slope`
          triton.tokens             `gather_kernel` (the label's logit)
          triton.forward            `walk_vocabulary` (whether logits are scaled products)
          triton.plan               `reason_to_recompute`, `describe_filter`
          triton                    `unsupported`, if the kernels do not have it
          triton.dproduct           `store_dproduct`, `finish_hidden_kernel`
          triton.grad_in_forward    `products_take_probabilities`, `add_from_dproduct`,
                                    `weigh_kernel`, `write_factors`
          triton.recompute_backward `add_super_block` (the bias's gradient)
          triton.filtered           `_block_sums`, `_allocate_queue_memory`, `_write_hidden`
          triton.filter_kernels     `tile_gradients`, `tile_item`, `share_item`

    - Whether it changes which gradients the forward can make: `plan_for` and `threshold` of
      `triton.plan`, `makes_gradients_in_forward` of `chunked`, `OperatorCall.step` of
      `compile_operator`.
    - How patched models take it: its line in `PatchSettings` of `hf_patch.settings` makes it a
      keyword, and nothing else has to name it, unless it changes the logits: then `GivenLogitMap`
      and `LogitMap` of `hf_patch.logit_map` and `HeadForward` have it. If it changes what a model
      is trained on, it counts in `_changes_in_training_alone` of `hf_patch.settings`, and
      `hf_patch.head_forward` and `integrations.automodel` leave it out of the loss that evaluation
      reports. Each module of `integrations` names the options it takes. A tensor of one number a
      token, as `token_weights`, is no option but an argument of each call: it would go through
      `LOSS_ARGUMENTS` of `hf_patch.fused_forward` and all of `HeadForward`, and TRL, which counts
      all tokens alike (`trl_output`), has no place for it.
    - Its tests: `ANY_SHAPE_AND_OPTION` and `torch_loss` of `tests/helpers/loss_check.py`;
      tests/kernel/test_reference.py, which holds the definition against PyTorch; and, since
      `ANY_SHAPE_AND_OPTION` has no `filter_eps` that drops a block,
      `test_unbiased_filter_is_right_in_the_mean` of tests/kernel/triton/test_filter.py.
    """

    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float | None = None
    z_loss: float = 0.0
    filter_eps: float | str | None = None
    workspace: int | str = "auto"
    return_lse: bool = False
    return_statistics: bool = False

    def __post_init__(self) -> None:
        self._check()
        self._store_python_numbers()

    def _check(self) -> None:
        smoothing = self.label_smoothing
        if not (is_number(smoothing) and 0 <= smoothing <= 1):
            raise ValueError(f"label_smoothing must be a number in [0, 1], not {smoothing!r}")
        if not is_integer(self.ignore_index):
            raise ValueError(f"ignore_index must be an integer, not {self.ignore_index!r}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}"
            )
        if self.softcap is not None and not (is_number(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be None or a positive number, not {self.softcap!r}")
        if self.logit_scale is not None and not is_number(self.logit_scale):
            raise ValueError(f"logit_scale must be None or a number, not {self.logit_scale!r}")
        if not is_number(self.z_loss):
            raise ValueError(f"z_loss must be a number, not {self.z_loss!r}")
        eps = self.filter_eps
        if not (eps is None or eps == "auto" or (is_number(eps) and 0 < eps < 1)):
            raise ValueError(
                f"filter_eps must be 'auto', None (exact) or a number in (0, 1), not {eps!r}"
            )
        size = self.workspace
        if size != "auto" and not (is_integer(size) and size >= 0):
            raise ValueError(
                f"workspace must be 'auto' or an integer of bytes, 0 or more, not {size!r}"
            )
        for name, types in option_types().items():
            value = getattr(self, name)
            if bool in types and not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")

    def _store_python_numbers(self) -> None:
        """Turn NumPy's numbers, and others, into Python's, which are all that kernels take."""
        for name, types in option_types().items():
            value: Any = getattr(self, name)
            if value is None or isinstance(value, (str, bool)):
                continue
            if float in types:
                object.__setattr__(self, name, float(value))
            elif int in types:
                object.__setattr__(self, name, int(value))


class LossKeywords(TypedDict, total=False):
    """The options as keywords of a signature, `**options: Unpack[LossKeywords]`.

    They are the fields of `Options`, which has the defaults. Two fields are missing here,
    `return_lse` and `return_statistics`: what is returned depends on these, so that every overload
    of a signature names them itself.
    """

    label_smoothing: float
    ignore_index: int
    reduction: str
    softcap: float | None
    logit_scale: float | None
    z_loss: float
    filter_eps: float | str | None
    workspace: int | str


OPTION_NAMES = tuple(LossKeywords.__annotations__)


def check_names(function: str, options: LossKeywords) -> None:
    """Raises TypeError for a keyword that is no option, in the name of the function that the user
    has called."""
    for name in options:
        if name not in OPTION_NAMES:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; "
                f"options are {', '.join(OPTION_NAMES)}"
            )


def spell_out_options(function: Function) -> Function:
    """Make `help()` and notebooks show the keywords of `**options` one by one, with their defaults.

    Editors read them from `LossKeywords`.
    """
    signature = inspect.signature(function)
    shown = []
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            shown.append(parameter)
    for field in dataclasses.fields(Options):
        if field.name not in signature.parameters:
            keyword = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.type,
            )
            shown.append(keyword)
    vars(function)["__signature__"] = signature.replace(parameters=shown)
    return function


@functools.cache  # every call of the loss makes an `Options`, which asks for them
def option_types() -> dict[str, tuple[Any, ...]]:
    """The types that each option's annotation allows: (float, NoneType) of `float | None`."""
    types = {}
    for field in dataclasses.fields(Options):
        types[field.name] = typing.get_args(field.type) or (field.type,)
    return types


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """The gradients of a call's inputs; None where one is not wanted."""

    hidden: Tensor | None = None  # (N, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)


class InputTensors(NamedTuple):
    """The tensors of one call, flat and in the dtypes that implementations take."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D); of a sharded vocabulary this rank's rows
    labels: Tensor  # (N,) int64, in the whole vocabulary
    bias: Tensor | None  # (V,)
    smoothing_target: Tensor | None  # (V,) fp32; None: 1/V everywhere
    token_weights: Tensor | None  # (N,) fp32; None: 1 everywhere

    def needs(self) -> Needs:
        """Which of them want a gradient from the call that is being made."""
        if not torch.is_grad_enabled():
            return Needs(hidden=False, weight=False, bias=False)
        return Needs(
            hidden=self.hidden.requires_grad,
            weight=self.weight.requires_grad,
            bias=self.bias is not None and self.bias.requires_grad,
        )

    def with_options(self, options: Options, shard: Shard | None = None) -> "Inputs":
        return Inputs(self, options, shard)


class Inputs(NamedTuple):
    """One call: what every implementation's `loss` takes, checked by `checks.check_call` and
    `checks.check_values`.

    The tensors are attributes of it as well: `inputs.hidden` is `inputs.tensors.hidden`.
    """

    tensors: InputTensors
    options: Options
    shard: Shard | None = None

    @property
    def hidden(self) -> Tensor:  # (N, D)
        return self.tensors.hidden

    @property
    def weight(self) -> Tensor:  # (V, D)
        return self.tensors.weight

    @property
    def labels(self) -> Tensor:  # (N,)
        return self.tensors.labels

    @property
    def bias(self) -> Tensor | None:  # (V,)
        return self.tensors.bias

    @property
    def smoothing_target(self) -> Tensor | None:  # (V,)
        return self.tensors.smoothing_target

    @property
    def token_weights(self) -> Tensor | None:  # (N,)
        return self.tensors.token_weights

    @property
    def logit_scale(self) -> float:
        """What products of hidden states and classifier rows are multiplied by; 1 where the
        option is None."""
        return 1.0 if self.options.logit_scale is None else self.options.logit_scale

    @property
    def vocabulary(self) -> int:
        """Entries of the whole vocabulary."""
        return len(self.weight) if self.shard is None else self.shard.entries

    @property
    def most_rows(self) -> int:
        """Rows of the classifier on the rank that has most.

        A choice that decides which collectives a rank takes part in, or how large they are, must
        follow this and never `len(weight)`, which may differ from rank to rank."""
        return len(self.weight) if self.shard is None else self.shard.most_rows

    @property
    def least_rows(self) -> int:
        """Rows of the classifier on the rank that has least; see `most_rows`."""
        return len(self.weight) if self.shard is None else self.shard.least_rows

    def valid(self) -> Tensor:  # (N,) bool
        """Which tokens count."""
        return self.labels != self.options.ignore_index

    def loss_scale(self, dtype: torch.dtype = torch.float32) -> Tensor:  # ()
        """What the reduction multiplies the sum of the tokens' losses by.

        That is 1, or for a mean 1 / (sum of the valid tokens' weights). Where no token is valid it
        is 1 without token weights and 0 with them, which makes no difference: the losses that it
        multiplies are all 0. It stays on the device, so that nothing waits for the host."""
        if self.options.reduction != "mean":
            return torch.ones((), dtype=dtype, device=self.labels.device)
        valid = self.valid()
        if self.token_weights is None:
            return valid.sum().clamp(min=1).to(dtype).reciprocal()
        weight_sum = torch.where(valid, self.token_weights, 0).sum().to(dtype)
        return torch.where(weight_sum > 0, 1 / weight_sum, 0)


class TokenStatistics(NamedTuple):
    """What a model says of each token, in nats.

    A token labeled `ignore_index` has 0 everywhere, and -1 as its argmax. Floats are fp32, or fp64
    for fp64 inputs.

    Where a new token statistic goes:

    - What users see: a field here, with what it is for a masked token; `format_result` of
      `linear_cross_entropy`; what it means, in the docstring of `token_statistics`.
    - What implementations return: a field of `LossOutput`.
    - How it is found. One that is a sum over the vocabulary, or a largest number of it, has to be
      joined over blocks, chunks and ranks:

          reference                 `_with_statistics`, the definition
          vocab_parallel            `TokenLogitSums`, `merge_shards`
          chunked                   `_empty_output`, `_softmax`, `_write_output`, and what
                                    `forward` marks as without gradient
          compile_operator          `OperatorOutputs`, `operator_shapes`
          triton.forward            `BlockSums`, `forward_kernel`, `finish_kernel`, `empty_sums`,
                                    `losses_kernel`, `Results`, and the launches in
                                    `walk_vocabulary`, `join_blocks` and `write_losses`
          triton                    `TritonLoss`, whose forward returns it

    - Its tests: tests/kernel/test_token_statistics.py.
    """

    log_probability: Tensor | None  # of the label; None where there are no labels
    entropy: Tensor
    lse: Tensor
    argmax: Tensor  # int64


class LossOutput(NamedTuple):
    """What an implementation's `loss` returns. The last three are there where `return_statistics`
    asks for them, and have no gradient."""

    loss: Tensor  # (), or (N,) where reduction is "none"
    lse: Tensor  # (N,), 0 where a token is masked; differentiable where `return_lse` asks for it
    log_probability: Tensor | None = None  # (N,) of the label, 0 where masked
    entropy: Tensor | None = None  # (N,), 0 where masked
    argmax: Tensor | None = None  # (N,) int64, -1 where masked


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits, losses and sums of inputs of this dtype are in: fp32, or fp64 for fp64.

    Where a new dtype of inputs goes:

    - Whether it is taken: `DTYPES` of `checks`, and `unsupported` of `triton`, where what the
      kernels do not serve goes to `chunked`.
    - Its exponents: `lacks_gradient_range` here; `SAVED_POWERS` of `triton.plan` and
      `LEAST_PROBABILITY` of `triton.dproduct`, which hold for fp32 and bf16.
    - Its size: `tile_set` of `triton.tiles`, which has fp32 and 16 bits. `can_sum_in_fp32` of
      `triton.plan`, `matmul_fp32` and `add_matmul_fp32` of `triton.dproduct`, `SmoothingRows` of
      `triton.grad_in_forward` (two numbers make one of fp32), `ALIGNED_NUMBERS` of
      `triton.recompute_backward` and `ALIGNED` of `triton.filter_kernels` know no other.
    - Its tests: `FLOOR`, `HALF` and `wider` of `tests/helpers/loss_check.py`, and the lists of
      dtypes in tests/kernel: test_chunked, test_dtypes, triton/test_gradients, triton/test_gpu and
      triton/test_shared_memory.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def lacks_gradient_range(dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype underflow before a gradient scaler has multiplied the loss,
    so that they must not be made before the backward."""
    return dtype == torch.float16


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite real number, NumPy's too, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, NumPy's too, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)

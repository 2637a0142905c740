"""What `bench.py` measures: this package's loss, PyTorch's, other libraries', and a bound.

`METHODS` has them by name, and says of each what it lacks. A library is imported when its loss is
first called, since some change torch when imported: `METHODS` has these last.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy

Feature = Literal["smoothing", "chunked smoothing", "softcap", "bias"]

TRL_CHUNK = 32768  # entries of the vocabulary at a time, as the trainers of TRL 1.16 take
QUACK_CHUNK = 4096  # tokens at a time, QuACK's own default
IGNORE_INDEX = -100  # the label of a masked token


class Loss(Protocol):
    """The mean loss of the tokens that are not masked, a tensor of shape ().

    A loss that knows no softcap may lack that parameter: it is given where there is one."""

    def __call__(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (N,)
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> Tensor: ...


def dense(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The loss as one writes it in PyTorch: all logits, then cross-entropy in fp32."""
    logits = (hidden @ weight.T).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def ours(
    function: Callable[..., Tensor] = linear_cross_entropy, **options: float | str | None
) -> Loss:
    """This package's loss, or that of another checkout, with these options."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> Tensor:
        return function(
            hidden, weight, labels, label_smoothing=label_smoothing, softcap=softcap, **options
        )

    return loss


class MatrixProducts(torch.autograd.Function):
    """The least work of an exact gradient: three matrix products, or two where the classifier is
    frozen. Masked tokens are left out.

    The forward computes the logits E Cᵀ and returns a zero, since it is no loss. The backward uses
    the logits in the place of their gradient, which has the same shape, so that its products for
    dE and dC take as long as any exact ones."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        valid = (labels != IGNORE_INDEX).nonzero()[:, 0]
        rows = hidden[valid]
        logits = rows @ weight.T
        ctx.shape = hidden.shape
        ctx.save_for_backward(rows, weight, valid, logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, valid, logits = ctx.saved_tensors
        d_hidden = rows.new_zeros(ctx.shape).index_copy_(0, valid, logits @ weight)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = logits.T @ rows
        return d_hidden, d_weight, None


def matrix_products(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Not a loss: the products that every exact gradient takes. Smoothing and cap cost nothing."""
    return MatrixProducts.apply(hidden, weight, labels)


def torch_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """PyTorch's own, from 2.13 on: in chunks, or with smoothing, where it makes all logits."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy; 2.13 has")
    if label_smoothing:
        return F.linear_cross_entropy(hidden, weight, labels, label_smoothing=label_smoothing)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def liger(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Liger's fused linear cross-entropy, in its default implementation."""
    return apply_liger(hidden, weight, labels, label_smoothing, softcap)


def liger_cute(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Liger's, from 0.8.5 on, with the inner cross-entropy in NVIDIA's CuTe DSL."""
    accumulator_dtype = None
    return_z_loss = use_token_scaling = return_token_accuracy = return_predicted_tokens = False
    return apply_liger(
        hidden,
        weight,
        labels,
        label_smoothing,
        softcap,
        return_z_loss,
        accumulator_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
        "nvidia-cutedsl",
    )


def apply_liger(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float,
    softcap: float | None,
    *later_arguments: bool | str | None,
) -> Tensor:
    """The loss of Liger's autograd function, which takes its arguments by their places alone."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    bias = class_weight = None
    lse_square_scale = 0.0
    output = LigerFusedLinearCrossEntropyFunction.apply(
        hidden,
        weight,
        labels,
        bias,
        class_weight,
        IGNORE_INDEX,
        lse_square_scale,
        label_smoothing,
        "mean",
        softcap,
        *later_arguments,
    )
    return output[0] if isinstance(output, tuple) else output


def liger_cute_sm90(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Liger's for Hopper alone, all of it in the CuTe DSL."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90(hidden, weight, labels, IGNORE_INDEX, "mean")


def quack(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """QuACK's scaled-exp pipeline, for Hopper, with its default chunk or half of it."""
    chunk = QUACK_CHUNK
    if chunk == hidden.shape[1]:
        # QuACK tells a product's rows from its columns by their numbers: these may not be equal.
        chunk //= 2
    return quack_in_chunks(hidden, weight, labels, chunk)


def quack_large_chunk(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The same with twice the default chunk, which takes more memory and may be faster."""
    return quack_in_chunks(hidden, weight, labels, 2 * QUACK_CHUNK)


def quack_in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    let_quack_name_any_value()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(
        hidden,
        weight,
        labels,
        chunk_size=chunk,
        ignore_index=IGNORE_INDEX,
        use_scaled_exp=True,
    )


def let_quack_name_any_value() -> None:
    """Let QuACK 0.6.5 be imported beside a CUTLASS DSL whose functions log.

    QuACK names what an epilogue's closure refers to, for its cache of compiled kernels, and raises
    TypeError at a value that it does not know, such as a logger. In this process such a value gets
    its type's name instead. Kernels do not depend on it.
    """
    from quack.gemm_runtime import identity

    if hasattr(identity.semantic_value_key, "names_any_value"):
        return
    strict_key = identity.semantic_value_key

    def key(value: Any, seen: set[Any]) -> Any:
        try:
            return strict_key(value, seen)
        except TypeError:
            return ("unknown", type(value).__module__, type(value).__qualname__)

    key.names_any_value = True  # type: ignore[attr-defined]
    identity.semantic_value_key = key
    frontend = sys.modules.get("quack.operand_transform.frontend")
    if frontend is not None:  # has the function under a name of its own
        frontend._semantic_value_key = key  # type: ignore[attr-defined]


def unsloth(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Unsloth's fused loss."""
    let_unsloth_zoo_be_imported_alone()
    from unsloth_zoo.fused_losses import unsloth_fused_ce_loss

    return unsloth_fused_ce_loss(
        trainer=None,
        hidden_states=hidden[None],
        lm_head_weight=weight,
        lm_head_bias=None,
        labels=labels[None],
        shift_labels=False,
        logit_softcapping=softcap,
        label_smoothing=label_smoothing,
    )


def let_unsloth_zoo_be_imported_alone() -> None:
    """Let unsloth_zoo, which has the loss, be imported without unsloth.

    It wants unsloth to be installed and imported before it. The loss needs nothing of that, and
    unsloth patches much more."""
    os.environ["UNSLOTH_IS_PRESENT"] = "1"
    # Else it leaves a folder where the benchmark is run.
    compiled = Path(tempfile.gettempdir()) / "unsloth_compiled_cache"
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(compiled))
    if find_spec("unsloth") is None:
        placeholder = ModuleType("unsloth")
        placeholder.__spec__ = ModuleSpec("unsloth", loader=None)
        sys.modules["unsloth"] = placeholder


def trl(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """TRL's chunked log-probabilities, which its trainers' losses are made of."""
    from trl.kernels import ChunkedLogProbFunction

    is_valid = labels != IGNORE_INDEX
    bias = None
    temperature = 1.0
    logit_scale = 1.0
    optional_outputs = ()
    log_probabilities, *_ = ChunkedLogProbFunction.apply(
        hidden[is_valid],
        weight,
        bias,
        labels[is_valid],
        temperature,
        TRL_CHUNK,
        softcap,
        logit_scale,
        optional_outputs,
    )
    return -log_probabilities.mean()


def cut(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Apple's cut-cross-entropy, with the filter that it has by default."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, softcap=softcap)


def paper_rewrite(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The paper's algorithm as `paper.py` has it."""
    import paper

    return paper.loss(hidden, weight, labels, label_smoothing=label_smoothing)


class Method(NamedTuple):
    """A row of the table."""

    name: str
    loss: Loss
    package: str | None = None  # whose version is printed, by the name that pip knows
    # What lacks "chunked smoothing" smooths, but only with all logits in memory.
    lacks: tuple[Feature, ...] = ()
    is_bound: bool = False  # whether it is no loss, but the matrix products alone


CUTE: tuple[Feature, ...] = ("smoothing", "softcap", "bias")
METHODS = {
    "ours": Method("ours", ours()),
    "workspace=0": Method("ours, workspace=0", ours(workspace=0)),
    "filtered": Method("ours, filtered", ours(filter_eps="auto")),
    "torch": Method("torch", dense),
    "torch-compile": Method("torch.compile", torch.compile(dense, dynamic=False)),
    "torch-linear": Method(
        "torch, F.linear_cross_entropy",
        torch_linear_cross_entropy,
        lacks=("chunked smoothing", "softcap"),
    ),
    "bound": Method("the products alone (bound)", matrix_products, is_bound=True),
    "quack": Method("QuACK, scaled-exp", quack, "quack-kernels", CUTE),
    "quack-large": Method("QuACK, chunks of 8192", quack_large_chunk, "quack-kernels", CUTE),
    "liger": Method("Liger", liger, "liger_kernel"),
    "liger-cute": Method("Liger, CuTe cross-entropy", liger_cute, "liger_kernel"),
    "liger-cute-sm90": Method("Liger, CuTe for SM90", liger_cute_sm90, "liger_kernel", CUTE),
    "trl": Method("TRL, chunked", trl, "trl", ("smoothing",)),
    "cut": Method("cut-cross-entropy, filtered", cut, "cut-cross-entropy", ("smoothing", "bias")),
    "paper": Method(
        "paper's algorithm, our untuned rewrite", paper_rewrite, lacks=("softcap", "bias")
    ),
    "unsloth": Method("Unsloth", unsloth, "unsloth_zoo"),  # which changes torch when imported
}

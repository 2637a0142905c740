"""Start here: the loss, and `explain`, which says how a call would be computed.

A call's tensors are checked and flattened, `dispatch` chooses an implementation and runs it, and
its output takes the caller's shape. Under `torch.compile` an operator stands in the graph for the
middle part, except with `impl="reference"` or a process group. It is no implementation of the loss:
when the graph runs, it asks `dispatch` for one.
"""

from typing import Any, Literal, TypeAlias, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack  # not yet in Python 3.10's typing; PyTorch depends on it

from smoothce import checks, compile_operator, dispatch
from smoothce.options import LossCall, Options, TokenStatistics

LossResult: TypeAlias = (
    Tensor
    | tuple[Tensor, Tensor]
    | tuple[Tensor, TokenStatistics]
    | tuple[Tensor, Tensor, TokenStatistics]
)


class LossKeywords(TypedDict, total=False):
    """Every keyword of `linear_cross_entropy` that leaves the type of what it returns alone, for
    editors to complete."""

    bias: Tensor | None
    smoothing_target: Tensor | None
    token_weights: Tensor | None
    process_group: dist.ProcessGroup | None
    label_smoothing: float
    ignore_index: int
    reduction: str
    softcap: float | None
    logit_scale: float | None
    z_loss: float
    filter_eps: float | str | None
    workspace: int | str


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    impl: str = ...,
    return_lse: Literal[False] = False,
    return_statistics: Literal[False] = False,
    **keywords: Unpack[LossKeywords],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    impl: str = ...,
    return_lse: Literal[True],
    return_statistics: Literal[False] = False,
    **keywords: Unpack[LossKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    impl: str = ...,
    return_lse: Literal[False] = False,
    return_statistics: Literal[True],
    **keywords: Unpack[LossKeywords],
) -> tuple[Tensor, TokenStatistics]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    impl: str = ...,
    return_lse: Literal[True],
    return_statistics: Literal[True],
    **keywords: Unpack[LossKeywords],
) -> tuple[Tensor, Tensor, TokenStatistics]: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    impl: str = ...,
    return_lse: bool = ...,
    return_statistics: bool = ...,
    **keywords: Unpack[LossKeywords],
) -> LossResult: ...
def linear_cross_entropy(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    smoothing_target: Tensor | None = None,  # (V,)
    token_weights: Tensor | None = None,  # (...)
    process_group: dist.ProcessGroup | None = None,
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
) -> LossResult:
    """Cross-entropy of a linear classifier with label smoothing, without its N × V logits.

        loss = linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], label_smoothing=0.1)

    for hidden states (B, T, D) and labels (B, T): the caller shifts labels. The loss is

        z_iv   = cap(logit_scale · C_v · E_i + b_v),    cap(z) = softcap · tanh(z / softcap)
        lse_i  = logsumexp_v z_iv
        loss_i = ω_i (lse_i − (1−β) z_i,y − β Σ_v u_v z_iv + ζ lse_i²)

    E_i is a token's hidden state and y its label; C_v and b_v are an entry's row of `weight` and
    its bias. The loss is in nats per token, and a scalar unless `reduction` is "none". With the
    defaults it equals `F.cross_entropy(E @ C.T, y, label_smoothing=β)` computed in fp32.

    The loss is defined by

    - `label_smoothing`, which is β, in [0, 1];
    - `smoothing_target`, which is u, a fixed distribution over the vocabulary that smoothing moves
      labels towards (None: 1/V everywhere);
    - `token_weights`, which is ω, 0 or more for each token (None: 1), in the labels' shape or flat;
    - `z_loss`, which is ζ;
    - `softcap` and `logit_scale`, which are the model's (None: it has none);
    - `ignore_index`, the label of tokens whose loss is 0;
    - `reduction`: "mean" divides the sum of losses by the sum of ω over the tokens that are not
      ignored. Where that sum is 0 the loss is 0 and its gradient zero, not NaN. "sum" and "none" do
      not divide.

    An ignored token counts for nothing, whatever its hidden state holds, NaN included.

    Hidden states are fp16, bf16, fp32 or fp64. The loss is fp32 (fp64 for fp64 hidden states), and
    each gradient has its input's dtype. `smoothing_target` and `token_weights` are rounded to fp32
    in any case. Under autocast the inputs are cast as for `F.linear`. Only `impl="reference"` has
    second derivatives; elsewhere they raise RuntimeError. In a graph that `torch.compile` makes
    there are none, and they may lack the loss's part in silence. Meta tensors give the shapes.

    With `return_lse` or `return_statistics` a tuple is returned: the loss; then lse_i, which is
    differentiable and 0 for ignored tokens; then each token's `TokenStatistics`, which come from
    the same pass and have no gradient.

    How it is computed is up to

    - `impl`: "auto", "reference", "chunked" or "triton". `explain` tells what a call takes.
    - `workspace`: how many bytes the Triton kernels may take for the exact gradient. In them they
      hold the probabilities of some tokens at a time, from which they make the gradients during the
      forward. That takes three matrix products of this shape, or two where only one gradient is
      wanted. `explain` says how many tokens and bytes a call takes. The other implementations and
      the filter ignore `workspace`.

      "auto" holds the probabilities of at most max(D, 2048) tokens at a time, which take the bytes
      of the classifier's gradient or more; or of a quarter of all tokens, where that is up to three
      times as many; or of 2048 tokens, where the classifier is frozen. Tokens are cut into as few
      parts as keep to that, all of one size but the last, so a part may have fewer: of 8,192 tokens
      with D = 2304 it has 2,048. "auto" does not look at how much memory is free: where the GPU has
      too little, PyTorch raises OutOfMemoryError.

      0 takes little memory, and one product more, since the backward computes all logits a second
      time. These calls do so whatever `workspace` is: in fp16, with `return_lse`, with a softcap
      over 43.3, and a loss per token where the classifier or the bias wants a gradient.

      Any other number is an upper bound for the probabilities. (A call of fewer tokens than a tile,
      128 or in fp32 64, may exceed it: their probabilities take a whole tile.) If it cuts the
      tokens into more than 8 parts, the classifier's gradient is summed in fp32 (for 16-bit
      inputs), and these sums must fit in as well. A number that is too small for min(N, 512) tokens
      counts as 0, without a warning: `explain` says so, and which number is enough.

    - `filter_eps`: None for the exact gradient. A number lets the Triton kernels leave out small
      parts of it, which is faster. The classifier's rows are cut into blocks of 256 entries, or 128
      in fp32. Where a bound of the 2-norm of a token's probabilities in a block is below
      `filter_eps`, this token's part of the block is computed with probability p = bound /
      filter_eps. Where the part is left out, a model stands in for it; where it is computed, it
      counts 1/p times, and the model is taken off 1/p − 1 times, so that the gradient is right in
      the mean. (A block whose bounds, each counted up to `filter_eps`, sum to less than 64 ·
      filter_eps has a lower threshold of its own, which is that sum / 64. It is then computed for
      about 64 tokens if their bounds are alike, and for fewer if a few bounds make up most of the
      sum.)
      "auto" is

          2^-8.3 (256000 / V)^¼, or None where no rank has 8192 of the V entries or more.

      A step's gradient is then off by 1.4e-2 (hidden) and 1.5e-2 (weight) on inputs like a language
      model's (kernel/RESULTS.md), and sums are taken in an order that depends on timing. Under a
      softcap the filtered gradient is biased, so that its error does not average out over steps:
      with a cap of 30 and β = 0.1 a step's is off by 2.5e-2 (hidden). Whatever `filter_eps` is, the
      gradient is exact under `torch.use_deterministic_algorithms(True)`, in fp16, with
      `return_lse`, and where the bias wants a gradient.
    - `process_group`: its ranks share the vocabulary. Each has a part of the classifier's rows, in
      the order of ranks: as a plain tensor, of equally many rows on each rank, or as a DTensor of
      `Shard(0)`, whose last rank may have fewer rows, but one at least. `bias` and
      `smoothing_target` are the rank's part or the whole vector. Hidden states, labels and
      `token_weights` are the same on every rank. The loss and the gradient of `hidden` are those of
      the whole vocabulary.

    Under `torch.compile` a reduced loss makes its gradients in the forward, whatever `workspace`
    and `filter_eps` are, and the graph holds them until the backward. Three kinds of loss make them
    in the backward instead: one that is not reduced, one in fp16, and one with `return_lse`. There
    the logits are computed again, also where the classifier is frozen. With a `process_group` the
    graph breaks, and the call does what it does outside `torch.compile`; `impl="reference"` is
    traced.

    Raises ValueError or TypeError, naming what was given and what was expected. A label outside
    [0, V) raises IndexError on a CPU and is a device-side assertion on CUDA.

    Source: "Calibrated Language Models and How to Find Them with Label Smoothing", equation 15.
    """
    options: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "z_loss": z_loss,
        "filter_eps": filter_eps,
        "workspace": workspace,
        "return_lse": return_lse,
        "return_statistics": return_statistics,
    }
    tensors, shard = checks.prepare(
        hidden, weight, labels, bias, smoothing_target, token_weights, process_group
    )
    if torch.compiler.is_compiling() and impl != "reference" and process_group is None:
        # The reference is traced as it is, which leaves it its second derivatives. With a process
        # group the graph breaks: the operator's schema has no place for a group, whose collectives
        # have to run on every rank in the same order. `Options` are not made here, since a graph
        # may hold their numbers as symbols.
        output = compile_operator.call_operator(tensors, options, impl)
    else:
        output = dispatch.run(LossCall.of(tensors, Options(**options), shard), impl)

    loss = output.loss
    if loss.dim() > 0:  # one for each token
        loss = loss.view(labels.shape)
    result: list[Any] = [loss]
    if return_lse:
        result.append(output.lse.view(labels.shape))
    if return_statistics:
        assert output.log_probability is not None
        assert output.entropy is not None
        assert output.argmax is not None
        statistics = TokenStatistics(
            log_probability=output.log_probability.detach().view(labels.shape),
            entropy=output.entropy.detach().view(labels.shape),
            lse=output.lse.detach().view(labels.shape),
            argmax=output.argmax.detach().view(labels.shape),
        )
        result.append(statistics)
    return tuple(result) if len(result) > 1 else loss


def make_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing_target: Tensor | None = None,
    token_weights: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> LossCall:
    """Check what a user gives, but for the numbers in tensors, and make a call of it."""
    tensors, shard = checks.prepare(
        hidden, weight, labels, bias, smoothing_target, token_weights, process_group
    )
    return LossCall.of(tensors, Options(**options), shard)


def explain(
    hidden: Tensor | nn.Module,  # (..., D)
    weight: Tensor | None = None,  # (V, D)
    *,
    impl: str = "auto",
    return_lse: bool = False,
    return_statistics: bool = False,
    **keywords: Unpack[LossKeywords],
) -> str:
    """Say in a sentence which implementation `linear_cross_entropy` takes for these inputs and
    options, why it does, and how that one makes the gradient. It takes the keywords of
    `linear_cross_entropy`. For 8,192 tokens and a classifier of
    256,000 by 2,304 in bf16, both of which want a gradient, it is on a GPU:

        triton: the Triton kernels; 3 products: gradients are made in the forward, 2,048 of 8,192
        tokens at a time, in a workspace of 1,048,576,000 bytes

    A product is one matrix product of this shape, E Cᵀ, which says about how long it takes.

    `explain(model)` says so of a patched model, for 8,192 tokens, and with which settings it
    trains. Raises TypeError for a model that is not patched.

    The answer is that for a call outside `torch.compile`. Inside it the same implementation is
    taken, but gradients are made in the forward exactly where the loss is reduced, hidden states
    are not fp16 and `return_lse` is False; otherwise in the backward. (With a `process_group` the
    graph breaks, and the call does what it does outside; `impl="reference"` is traced.)

    No logits are computed. Tensors that the call would copy first are copied: hidden states and
    classifier under autocast, and what is not contiguous. Raises what `linear_cross_entropy` raises
    for options, and for types, shapes, dtypes and devices of tensors. What the numbers in the
    tensors are is not looked at.
    """
    if isinstance(hidden, nn.Module):
        return _explain_model(hidden)
    checks.check_tensors(hidden=hidden)  # the labels' shape is made from its shape
    if weight is None:
        raise TypeError("weight must be a tensor, not NoneType")
    labels = hidden.new_empty(hidden.shape[:-1], dtype=torch.int64)
    call = make_call(
        hidden,
        weight,
        labels,
        return_lse=return_lse,
        return_statistics=return_statistics,
        **keywords,
    )
    return dispatch.explain(impl, call)


def _explain_model(model: nn.Module) -> str:
    for module in model.modules():
        patched_forward = vars(module).get("_smoothce_forward")  # a hf_patch.PatchedForward
        if patched_forward is not None:
            return patched_forward.explain()
    raise TypeError(f"{type(model).__name__} is not patched: call smoothce.patch_model")

"""Which way a call makes its gradients, and how much memory that takes.

The choice follows from the call's shapes, dtype, options and wanted gradients, from the GPU's tile
shapes and from `torch.use_deterministic_algorithms`. Neither the tensors' values nor the free
memory matter, so equal calls choose alike. Where ranks share a vocabulary, it follows from the rank
that has most of it, so that all ranks choose the same and take part in the same collectives.

`plan_for` chooses the way, `describe` puts it into words for `smoothce.explain`. Whether gradients
are filtered is in the call already (`filter.threshold`).
"""

import math
from typing import Literal, NamedTuple

from triton import cdiv

from smoothce.options import lacks_gradient_range
from smoothce.triton.tokens import KernelCall

BUSY_TOKENS = 2048  # tokens whose products keep a GPU busy
# Where there is room for fewer, computing logits twice costs less. (Parts may be smaller: with room
# for 512 of 600 tokens, they have 384 and 216.)
LEAST_TOKENS = 512
MOST_ROUNDINGS = 8  # most parts after each of which dC is rounded; more are summed in fp32

# Under a softcap the forward's gradients take each logit from its saved probability, which can be
# as small as exp(-2 · softcap). Normal fp32 and bf16 numbers end at 2^-126, of which one power of
# two is left for rounding. Below that a logit, and so the slope of the cap there, would be lost.
SAVED_POWERS = 125
MOST_SOFTCAP = SAVED_POWERS * math.log(2) / 2  # nats, 43.3


# The module that makes the gradients; "none" where no gradient is wanted.
Mode = Literal["none", "filtered", "grad_in_forward", "recompute_backward"]


class GradientPlan(NamedTuple):
    """How a call makes its gradients."""

    mode: Mode
    reason: str = ""  # why the forward makes none: of "none" and "recompute_backward" alone
    # Of "grad_in_forward" alone:
    part_tokens: int = 0  # tokens whose probabilities the workspace holds at a time: whole tiles
    sum_in_fp32: bool = False  # whether dC is summed in fp32 over the parts


def plan_for(call: KernelCall) -> GradientPlan:
    """Choose how this call makes its gradients."""
    if not any(call.needs):
        return GradientPlan("none", "no input needs a gradient")
    if call.eps is not None:
        return GradientPlan("filtered")
    reason = reason_to_recompute(call)
    if reason is not None:
        return GradientPlan("recompute_backward", reason)
    capacity = workspace_capacity(call)
    n = len(call.labels)
    if capacity.tokens < min(n, LEAST_TOKENS):
        return GradientPlan("recompute_backward", reason_of_small_workspace(call))
    return GradientPlan(
        "grad_in_forward",
        part_tokens=tokens_of_equal_parts(n, capacity.tokens, call.tiles.rows),
        sum_in_fp32=capacity.sum_in_fp32,
    )


def reason_to_recompute(call: KernelCall) -> str | None:
    """Say why exact gradients cannot be made in the forward, whatever the workspace; None if they
    can."""
    options = call.options
    if options.workspace == 0:
        return "workspace is 0"
    if lacks_gradient_range(call.hidden.dtype):
        return "fp16 has no range for gradients before a gradient scaler's factor"
    if options.return_lse:
        return "the log-sum-exps have an upstream gradient of their own"
    if options.reduction == "none" and (call.needs.weight or call.needs.bias):
        return "without reduction each token has an upstream gradient of its own"
    if options.softcap is not None and options.softcap > MOST_SOFTCAP:
        return (
            f"a softcap over {MOST_SOFTCAP:.1f} lets logits lie further apart than saved "
            "probabilities can tell"
        )
    return None


class Capacity(NamedTuple):
    """What the workspace has room for."""

    tokens: int  # whose probabilities it holds at a time, at most
    sum_in_fp32: bool  # whether dC is summed in fp32 beside them


def workspace_capacity(call: KernelCall) -> Capacity:
    """Find for how many tokens at a time the option `workspace` leaves room, and whether the parts'
    dC is summed in fp32.

    In 16 bits dC is rounded after each part of the tokens. Where that would be more than
    MOST_ROUNDINGS times, it is summed in fp32 instead, and the sums take some of the bytes that
    were asked for. Small things are not counted: the rows of û, one offset for each token and
    block, and a part's hidden states and products.

    "auto" is as follows. `few` are max(D, BUSY_TOKENS) tokens, since the probabilities of D tokens
    take as many bytes as dC. A quarter of the N tokens is rounded up to whole tiles, since with
    less a fifth part would be left.

        where                        tokens at a time    dC is summed
        the classifier is frozen     BUSY_TOKENS         not at all
        N / 4 ≤ few                  few                 in the inputs' dtype, in ≤ 4 parts
        few < N / 4 ≤ 3 · few        N / 4               in the inputs' dtype, in 4 parts
        3 · few < N / 4              few                 in fp32

    In the last row the fp32 sums of dC take as many bytes as the 16-bit probabilities of 2 · D
    tokens. With those of the `few` tokens beside them, this is at most what the probabilities of
    3 · few tokens would take, and so less than those of a quarter of all tokens. (fp32 inputs need
    no such sums: their dC is summed in the inputs' dtype there too.)
    """
    n = len(call.labels)
    d = call.weight.shape[1]
    workspace = call.options.workspace

    if isinstance(workspace, str):  # "auto"
        if not call.needs.weight:
            return Capacity(BUSY_TOKENS, sum_in_fp32=False)
        few = max(d, BUSY_TOKENS)
        quarter = cdiv(n, 4)
        if quarter > 3 * few:
            return Capacity(few, can_sum_in_fp32(call))
        quarter = cdiv(quarter, call.tiles.rows) * call.tiles.rows
        return Capacity(max(quarter, few), sum_in_fp32=False)

    most = workspace // bytes_of_token(call)
    if most and cdiv(n, most) > MOST_ROUNDINGS and can_sum_in_fp32(call):
        beside_sums = max(workspace - bytes_of_fp32_sums(call), 0)
        return Capacity(beside_sums // bytes_of_token(call), sum_in_fp32=True)
    return Capacity(most, sum_in_fp32=False)


def can_sum_in_fp32(call: KernelCall) -> bool:
    """Tell whether sums of dC in fp32 would be better than those in its own dtype: where it is
    wanted, and has 16 bits."""
    return call.needs.weight and call.weight.element_size() < 4


def bytes_of_token(call: KernelCall) -> int:
    """Return the bytes of one token's probabilities in the workspace, on the rank that has most."""
    return call.most_blocks * call.tiles.width * call.weight.element_size()


def bytes_of_fp32_sums(call: KernelCall) -> int:
    """Return the bytes of dC in fp32, on the rank that has most."""
    return 4 * call.most_rows * call.weight.shape[1]


def reason_of_small_workspace(call: KernelCall) -> str:
    """Say what a workspace of too few bytes lacks, and how many would be enough."""
    workspace = call.options.workspace
    assert isinstance(workspace, int)  # "auto" is always enough
    n = len(call.labels)
    least = min(n, LEAST_TOKENS)
    most = workspace // bytes_of_token(call)
    fewest_tokens = least * bytes_of_token(call)
    if can_sum_in_fp32(call):
        # There are two ways to have enough: so many tokens at a time that there are at most
        # MOST_ROUNDINGS parts, or the fewest tokens at a time with fp32 sums beside them.
        few_parts = max(cdiv(n, MOST_ROUNDINGS), least) * bytes_of_token(call)
        enough = min(few_parts, fewest_tokens + bytes_of_fp32_sums(call))
    else:
        enough = fewest_tokens
    remedy = f"workspace={enough} or more is enough"
    if most < least:
        return (
            f"a workspace of {workspace} bytes holds the probabilities of {most} tokens, and it "
            f"must have room for {least}; {remedy}"
        )
    return (
        f"a workspace of {workspace} bytes has no room for fp32 sums beside the probabilities: "
        f"{n} tokens would take {cdiv(n, most)} parts, and more than {MOST_ROUNDINGS} parts take "
        f"dC's sums in fp32, of {bytes_of_fp32_sums(call)} bytes; {remedy}"
    )


def tokens_of_equal_parts(n: int, most: int, tile_rows: int) -> int:
    """Return the size of a part, in tokens, where n tokens are cut into the fewest equal parts of
    whole tiles with at most `most` tokens each. A part has one tile at least."""
    most = max(most, tile_rows)
    parts = 1
    while True:
        size = cdiv(cdiv(max(n, 1), parts), tile_rows) * tile_rows
        if size <= most:
            return size
        parts += 1


def describe(call: KernelCall) -> str:
    """Put the plan into words."""
    plan = plan_for(call)
    if plan.mode == "none":
        return f"one product, for {plan.reason}"
    if plan.mode == "filtered":
        words = "some of the gradient's blocks are computed, small ones drawn at random"
        if call.options.softcap is not None:
            words += "; under a softcap the gradient is biased; filter_eps=None is exact"
        return words
    # The forward's product, and one for each matrix whose gradient is wanted. The bias's gradient
    # is a product with a vector, which costs next to nothing.
    products = 1 + call.needs.hidden + call.needs.weight
    if plan.mode == "recompute_backward":
        return f"{products + 1} products, for {plan.reason}"
    # This rank's. The plan itself goes by the rank that has most (`bytes_of_token`).
    bytes_per_token = call.blocks * call.tiles.width * call.weight.element_size()
    counted = "1 product" if products == 1 else f"{products} products"
    n = len(call.labels)
    words = (
        f"{counted}: gradients are made in the forward, {min(plan.part_tokens, n):,} of "
        f"{n:,} tokens at a time, in a workspace of "
        f"{plan.part_tokens * bytes_per_token:,} bytes"
    )
    if plan.sum_in_fp32:
        words += " and dC's sums in fp32"
    return words

"""Which way a call makes its gradients, and how much memory that takes.

The choice follows from shapes and options alone, so that equal calls give equal bits. Where ranks
share a vocabulary, it follows from the rank that has most of it, so that all ranks choose the same
and take part in the same collectives. `threshold` says whether gradients are filtered, `plan_for`
chooses the way, `describe` puts it into words for `smoothce.explain`. Two choices are made
elsewhere: how a filtered call makes its gradients (`filtered.makes_gradients_in_forward`), and what
a bias and fp16 need (`smoothce.triton.call_for`).
"""

import math
from typing import Literal, NamedTuple

import torch
from triton import cdiv

from smoothce.options import Options
from smoothce.triton.tokens import LossCall

# filter_eps="auto" is AUTO_EPS · V^(-1/4): 2^-8.3 at 256,000 entries and 2^-7.6 at 32,768, which
# gives about the same error for all. It was still faster than the exact gradient at 8,192 entries.
AUTO_EPS = 2.0**-8.3 * 256000**0.25
LEAST_FILTERED_ENTRIES = 8192  # with fewer there is too little to skip: "auto" is exact

BUSY_TOKENS = 2048  # tokens whose products keep a GPU busy, or D where that is more
LEAST_TOKENS = 512  # fewer at a time cost more than computing logits twice
MOST_ROUNDINGS = 8  # most parts after each of which dC is rounded; more are summed in fp32

# Under a softcap the forward's gradients take each logit from its saved probability, which is
# 2^(logit - offset): as much as 2 · softcap nats below 1. Normal fp32 and bf16 numbers end at
# 2^-126, of which one power of two is left for rounding. Below that a logit, and so the slope of
# the cap there, would be lost.
SAVED_POWERS = 125
MOST_SOFTCAP = SAVED_POWERS * math.log(2) / 2  # nats, 43.3


# The module that makes the gradients; "none" where no gradient is wanted.
Mode = Literal["none", "filtered", "grad_in_forward", "recompute_backward"]


class GradientPlan(NamedTuple):
    """How a call makes its gradients."""

    mode: Mode
    reason: str
    # Of "grad_in_forward" alone:
    part_tokens: int = 0  # tokens whose logits the workspace holds at a time
    sum_in_fp32: bool = False  # whether dC is summed in fp32 over the parts


def threshold(options: Options, vocabulary: int, most_rows: int) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact.

    "auto" follows from the entries of the whole vocabulary and of the rank that has most of them.
    The filter adds with atomics, in an order that depends on timing, and knows no upstream gradient
    of the log-sum-exps."""
    if options.return_lse or torch.are_deterministic_algorithms_enabled():
        return None
    eps = options.filter_eps
    if isinstance(eps, str):  # "auto"
        return AUTO_EPS * vocabulary**-0.25 if most_rows >= LEAST_FILTERED_ENTRIES else None
    return eps


def plan_for(call: LossCall) -> GradientPlan:
    """How this call makes its gradients."""
    if not any(call.needs):
        return GradientPlan("none", "no input needs a gradient")
    if call.eps is not None:
        return GradientPlan("filtered", "filter_eps asks for it")
    reason = reason_to_recompute(call)
    if reason is not None:
        return GradientPlan("recompute_backward", reason)
    most_tokens, sum_in_fp32 = tokens_of_workspace(call)
    n = len(call.inputs.labels)
    if most_tokens < min(n, LEAST_TOKENS):
        workspace = call.inputs.options.workspace
        return GradientPlan(
            "recompute_backward", f"a workspace of {workspace} bytes holds too few logits"
        )
    return GradientPlan(
        "grad_in_forward",
        "a workspace holds logits of some tokens",
        part_tokens=tokens_of_equal_parts(n, most_tokens, call.tiles.rows),
        sum_in_fp32=sum_in_fp32,
    )


def reason_to_recompute(call: LossCall) -> str | None:
    """Why exact gradients cannot be made in the forward, whatever the workspace; None if they
    can."""
    options = call.inputs.options
    if options.workspace == 0:
        return "workspace is 0"
    if call.inputs.hidden.dtype == torch.float16:
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


def tokens_of_workspace(call: LossCall) -> tuple[int, bool]:
    """How many tokens' logits the workspace holds, and whether dC is to be summed in fp32."""
    n = len(call.inputs.labels)
    d = call.inputs.weight.shape[1]
    size = call.inputs.weight.element_size()
    workspace = call.inputs.options.workspace
    fp32_sums_help = size < 4 and call.needs.weight

    if isinstance(workspace, str):  # "auto"
        if not call.needs.weight:
            return BUSY_TOKENS, False
        few = max(d, BUSY_TOKENS)
        quarter = max(cdiv(n, 4), few)
        if quarter > 3 * few:  # then fp32 sums and few tokens at a time take less
            return few, fp32_sums_help
        return quarter, False

    bytes_per_token = call.most_blocks * call.tiles.width * size
    most = workspace // bytes_per_token
    if most and cdiv(n, most) > MOST_ROUNDINGS and fp32_sums_help:
        fp32_weight_bytes = 4 * call.inputs.most_rows * d
        return max(workspace - fp32_weight_bytes, 0) // bytes_per_token, True
    return most, False


def tokens_of_equal_parts(n: int, most: int, tile_rows: int) -> int:
    """The size of the fewest equal parts of n tokens, in whole tiles, that have at most so many."""
    n = max(n, 1)
    most = max(most, 1)
    parts = 1
    while True:
        size = min(cdiv(cdiv(n, parts), tile_rows) * tile_rows, n)
        if size <= most:
            return size
        parts += 1


def describe(call: LossCall) -> str:
    """The plan in words."""
    plan = plan_for(call)
    if plan.mode == "none":
        return f"one product, for {plan.reason}"
    if plan.mode == "filtered":
        return "some of the gradient's blocks are computed, small ones drawn at random"
    # The forward's product, and one for each matrix whose gradient is wanted. The bias's gradient
    # is a sum over tokens.
    products = 1
    if call.needs.hidden:
        products += 1
    if call.needs.weight:
        products += 1
    if plan.mode == "recompute_backward":
        return f"{products + 1} products or a little less, for {plan.reason}"
    bytes_per_token = call.blocks * call.tiles.width * call.inputs.weight.element_size()
    counted = "1 product" if products == 1 else f"{products} products"
    words = (
        f"{counted}: gradients are made in the forward, {plan.part_tokens:,} of "
        f"{len(call.inputs.labels):,} tokens at a time, in a workspace of "
        f"{plan.part_tokens * bytes_per_token:,} bytes"
    )
    if plan.sum_in_fp32:
        words += " and dC's sums in fp32"
    return words

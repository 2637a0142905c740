"""Which way a call makes its gradients, and how much memory that takes.

The choice follows from shapes and options alone, so that equal calls give equal bits. Where ranks
share a vocabulary, it follows from the rank that has most of it, so that all ranks choose the same
and take part in the same collectives. `threshold` says whether gradients are filtered, `plan_for`
chooses the way, `describe` puts it into words for `smoothce.explain`. One choice is made elsewhere:
whether a filtered call makes its gradients in the forward (`filtered.makes_gradients_in_forward`).
"""

import math
from typing import Literal, NamedTuple

import torch
from triton import cdiv
from typing_extensions import assert_never  # not yet in Python 3.10's typing

from smoothce.options import Inputs, Needs
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
    part_tokens: int = 0  # tokens whose probabilities the workspace holds at a time: whole tiles
    sum_in_fp32: bool = False  # whether dC is summed in fp32 over the parts


def threshold(inputs: Inputs, needs: Needs) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact.

    "auto" follows from the entries of the whole vocabulary and of the rank that has most of them.
    The filter adds with atomics, in an order that depends on timing. It makes no gradient of a
    bias, knows no upstream gradient of the log-sum-exps, and its factors need more range than fp16
    has."""
    if torch.are_deterministic_algorithms_enabled():
        return None
    if inputs.options.return_lse or needs.bias or inputs.hidden.dtype == torch.float16:
        return None
    eps = inputs.options.filter_eps
    if not isinstance(eps, str):
        return eps
    # "auto"
    if inputs.most_rows < LEAST_FILTERED_ENTRIES:
        return None
    return AUTO_EPS * inputs.vocabulary**-0.25


def plan_for(call: LossCall) -> GradientPlan:
    """How this call makes its gradients."""
    if not any(call.needs):
        return GradientPlan("none", "no input needs a gradient")
    if call.eps is not None:
        return GradientPlan("filtered", "filter_eps asks for it")
    reason = reason_to_recompute(call)
    if reason is not None:
        return GradientPlan("recompute_backward", reason)
    capacity = workspace_capacity(call)
    n = len(call.inputs.labels)
    if capacity.tokens < min(n, LEAST_TOKENS):
        workspace = call.inputs.options.workspace
        return GradientPlan(
            "recompute_backward", f"a workspace of {workspace} bytes holds too few probabilities"
        )
    return GradientPlan(
        "grad_in_forward",
        "a workspace holds probabilities of some tokens",
        part_tokens=tokens_of_equal_parts(n, capacity.tokens, call.tiles.rows),
        sum_in_fp32=capacity.sum_in_fp32,
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


class Capacity(NamedTuple):
    """What the workspace has room for."""

    tokens: int  # whose probabilities it holds, at most
    sum_in_fp32: bool  # whether dC is summed in fp32 beside them


def workspace_capacity(call: LossCall) -> Capacity:
    """What `workspace` asks for, in tokens."""
    n = len(call.inputs.labels)
    d = call.inputs.weight.shape[1]
    size = call.inputs.weight.element_size()
    workspace = call.inputs.options.workspace
    fp32_sums_help = size < 4 and call.needs.weight

    if isinstance(workspace, str):  # "auto"
        if not call.needs.weight:
            return Capacity(BUSY_TOKENS, sum_in_fp32=False)
        few = max(d, BUSY_TOKENS)
        quarter = max(cdiv(n, 4), few)
        if quarter > 3 * few:  # then fp32 sums and few tokens at a time take less
            return Capacity(few, fp32_sums_help)
        return Capacity(quarter, sum_in_fp32=False)

    bytes_per_token = call.most_blocks * call.tiles.width * size
    most = workspace // bytes_per_token
    if most and cdiv(n, most) > MOST_ROUNDINGS and fp32_sums_help:
        fp32_weight_bytes = 4 * call.inputs.most_rows * d
        most_beside_sums = max(workspace - fp32_weight_bytes, 0) // bytes_per_token
        return Capacity(most_beside_sums, sum_in_fp32=True)
    return Capacity(most, sum_in_fp32=False)


def tokens_of_equal_parts(n: int, most: int, tile_rows: int) -> int:
    """The size of the fewest equal parts of n tokens, in whole tiles, that have at most so many: of
    one tile where that is more already."""
    most = max(most, tile_rows)
    parts = 1
    while True:
        size = cdiv(cdiv(max(n, 1), parts), tile_rows) * tile_rows
        if size <= most:
            return size
        parts += 1


def describe(call: LossCall) -> str:
    """The plan in words."""
    plan = plan_for(call)
    # The forward's product, and one for each matrix whose gradient is wanted. The bias's gradient
    # is a sum over tokens.
    products = 1
    if call.needs.hidden:
        products += 1
    if call.needs.weight:
        products += 1
    match plan.mode:
        case "none":
            return f"one product, for {plan.reason}"
        case "filtered":
            return "some of the gradient's blocks are computed, small ones drawn at random"
        case "recompute_backward":
            return f"{products + 1} products or a little less, for {plan.reason}"
        case "grad_in_forward":
            return describe_workspace(call, plan, products)
        case _:
            assert_never(plan.mode)


def describe_workspace(call: LossCall, plan: GradientPlan, products: int) -> str:
    """How gradients are made in the forward, in words."""
    bytes_per_token = call.blocks * call.tiles.width * call.inputs.weight.element_size()
    counted = "1 product" if products == 1 else f"{products} products"
    n = len(call.inputs.labels)
    words = (
        f"{counted}: gradients are made in the forward, {min(plan.part_tokens, n):,} of "
        f"{n:,} tokens at a time, in a workspace of "
        f"{plan.part_tokens * bytes_per_token:,} bytes"
    )
    if plan.sum_in_fp32:
        words += " and dC's sums in fp32"
    return words

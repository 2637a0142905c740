"""Which way a call makes its gradients, and how much memory that takes."""

import itertools
import math
from typing import NamedTuple

import torch
from triton import cdiv

from smoothce.triton.tokens import LossCall

FEW = 2048  # tokens whose products keep a GPU busy, or D where that is more
LEAST = 512  # fewer at a time cost more than computing logits twice
PARTS = 8  # most parts after each of which dC is rounded; more are summed in fp32
# Under a softcap the forward's gradients take each logit from its saved probability, which is
# 2^(logit - offset): as much as 2 · softcap nats below 1. Normal fp32 and bf16 numbers end at
# 2^-126, of which one power of two is left for rounding. Below that a logit, and so the slope of
# the cap there, would be lost.
SAVED_POWERS = 125
MOST_SOFTCAP = SAVED_POWERS * math.log(2) / 2  # nats, 43.3


class Plan(NamedTuple):
    """How a call makes its gradients.

    `how` names the module that makes them: "grad_in_forward", "recompute_backward" or "filtered";
    it is "none" where no gradient is wanted.
    """

    how: str
    why: str
    tokens: int = 0  # of a part, where early
    wide: bool = False  # whether dC is summed in fp32 there


def plan_for(call: LossCall) -> Plan:
    """The way, from shapes and options alone: equal calls give equal bits."""
    inputs, needs = call.inputs, call.needs
    options, d_weight = inputs.options, needs[1] or needs[2]
    if not any(needs):
        return Plan("none", "no input needs a gradient")
    if call.eps is not None:
        return Plan("filtered", "filter_eps asks for it")
    if options.workspace == 0:
        return Plan("recompute_backward", "workspace is 0")
    if inputs.hidden.dtype == torch.float16:
        return Plan(
            "recompute_backward",
            "fp16 has no range for gradients before a gradient scaler's factor",
        )
    if options.return_lse:
        return Plan("recompute_backward", "the log-sum-exps have an upstream gradient of their own")
    if options.reduction == "none" and d_weight:
        return Plan(
            "recompute_backward", "without reduction each token has an upstream gradient of its own"
        )
    if options.softcap is not None and options.softcap > MOST_SOFTCAP:
        return Plan(
            "recompute_backward",
            f"a softcap over {MOST_SOFTCAP:.1f} lets logits lie further apart than saved "
            "probabilities can tell",
        )
    n, (v, d) = len(inputs.labels), inputs.weight.shape
    size = inputs.weight.element_size()
    each = call.blocks * call.tiles.width * size  # bytes of a token's logits
    of_wide = 4 * v * d if size < 4 and needs[1] else 0
    few = max(d, FEW)
    wide = False
    if options.workspace == "auto":
        most = max(cdiv(n, 4), few) if needs[1] else FEW
        if most > 3 * few:  # then fp32 sums and few tokens at a time take less
            most, wide = few, of_wide > 0
    else:
        most = options.workspace // each
        if most and cdiv(n, most) > PARTS and of_wide:
            most, wide = max(options.workspace - of_wide, 0) // each, True
    if most < min(n, LEAST):
        return Plan(
            "recompute_backward", f"a workspace of {options.workspace} bytes holds too few logits"
        )
    rows = call.tiles.rows
    n = max(n, 1)
    sizes = (min(cdiv(cdiv(n, parts), rows) * rows, n) for parts in itertools.count(1))
    tokens = next(size for size in sizes if size <= max(most, 1))
    return Plan("grad_in_forward", "a workspace holds logits of some tokens", tokens, wide)


def describe(call: LossCall) -> str:
    """The plan in words."""
    found, n = plan_for(call), len(call.inputs.labels)
    if found.how == "none":
        return f"one product, for {found.why}"
    if found.how == "filtered":
        return "some of the gradient's blocks are computed, drawn at random"
    products = 2 if call.needs[1] != call.needs[0] else 3
    if found.how == "recompute_backward":
        return f"{products + 1} products or a little less, for {found.why}"
    width = call.blocks * call.tiles.width
    size = found.tokens * width * call.inputs.weight.element_size()
    return (
        f"{products} products: gradients are made in the forward, {found.tokens:,} of {n:,} tokens "
        f"at a time, in a workspace of {size:,} bytes"
        + (" and dC's sums in fp32" if found.wide else "")
    )

"""The filtered backward: some pairs are recomputed, the others enter through low-rank products.

For a kept pair, S = (p − (1−β)[v = y]) · f with f = ∂logit/∂product. For a dropped pair of mass P,
S is modelled as P · q_v, where the profile q is the softmax within the block of the mean hidden
state's logits: every token's gradient still sums to zero over the vocabulary. A drawn pair of
weight w has w p and (1−w) P q. The uniform term −β/V · f needs no pairs. So with
W_j = Σ_{v∈j} q_v C_v, H_j = Σ_{v∈j} f_v C_v and the plan's coefficients m_ij (0, P or (1−w) P),

    dE_i = g_i (Σ_listed S C + Σ_j m_ij W_j − β/V Σ_j H_j)
    dC_v = Σ_listed g S E + q_v Σ_i m_ij g_i E_i − β/V f_v Σ_i g_i E_i

One kernel works through a queue whose items only wait for earlier ones: a tile of listed pairs
puts S into a ring and adds S · C to dE; a share of a block's dC sums Sᵀ · E over its tiles once
they are there. Profile and uniform direction ride along as two more rows of each block's tiles,
so q, W and H cost no pass of their own over the classifier.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from smoothce.options import Options
from smoothce.triton.accumulator import accumulator
from smoothce.triton.lowrank import block_sums_kernel, hidden_kernel
from smoothce.triton.plan import Plan, schedule
from smoothce.triton.prepare import Tokens
from smoothce.triton.queue import queue_kernel
from smoothce.triton.tiles import Tiles, cdiv, descriptor, programs


class Scale(NamedTuple):
    """Upstream gradient, as one factor and what is left of it per token."""

    top: Tensor  # () fp32, the largest |g_i|
    token: Tensor | None  # (padded,) fp32 g_i / top in the super-block's order; None: all alike
    total: Tensor  # (D,) fp32, Σ E_i g_i / top


def backward(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,
    tokens: Tokens,
    lse: Tensor,  # (padded,)
    plan: Plan,
    scale: Scale,
    options: Options,
    tiles: Tiles,
    d_hidden: Tensor | None,  # (N, D), the super-block's tokens are written
    d_weight: Tensor | None,  # (V, D) contiguous, written, or added to
    accumulate: bool,
) -> None:
    """Gradients of one super-block, as in this module's equations."""
    v, d = weight.shape
    blocks, padded = plan.mass.shape
    device = hidden.device
    need_weight, need_hidden = d_weight is not None, d_hidden is not None
    smoothing, capped = options.label_smoothing, options.softcap is not None
    common = {
        "D": d,
        "SOFTCAP": capped,
        "PER_TOKEN": scale.token is not None,
        "PRECISION": tiles.precision,
        "num_warps": tiles.warps,
    }

    rank_one = torch.empty(blocks, d, device=device) if need_weight else None
    lean = torch.empty(blocks, d, device=device) if need_weight and capped else rank_one
    if rank_one is not None:
        block_sums_kernel[(cdiv(blocks, tiles.wide), cdiv(d, tiles.slice))](
            hidden,
            plan.mass,
            tokens.order,
            scale.token,
            tokens.count,
            rank_one,
            lean,
            hidden.stride(0),
            padded,
            blocks,
            WIDE=tiles.wide,
            SLICE=tiles.slice,
            STEP=tiles.step,
            num_stages=tiles.kept_stages,
            **common,
        )

    most = cdiv(padded + 2, tiles.kept_rows)
    ring = max(tiles.ring, most)
    slices = cdiv(d, tiles.slice) if need_weight else 0
    ring_s = hidden.new_empty(ring * tiles.kept_rows if need_weight else 0, tiles.width)
    ring_rows = torch.empty(len(ring_s), device=device, dtype=torch.int32)
    profile = torch.empty(2, v, device=device)
    mean_offset = (tokens.mean.data_ptr() - hidden.data_ptr()) // hidden.element_size()
    acc, head = None, blocks
    if need_hidden:
        borrow = None if accumulate else d_weight
        acc, head = accumulator(
            (padded + blocks + (blocks if capped else 1), d), borrow, blocks, tiles, device
        )

    def run(phase: int, into_hidden: bool) -> None:
        queue = schedule(plan.kept, padded, slices, tiles, ring, phase, head)
        counters = torch.zeros(1 + 2 * blocks, device=device, dtype=torch.int32)
        queue_kernel[(programs(device),)](
            queue.items,
            queue.total,
            counters,
            hidden,
            descriptor(weight, [tiles.width, tiles.kept_depth], tiles.tma),
            descriptor(weight, [tiles.width, tiles.slice], tiles.tma),
            bias,
            tokens.order,
            tokens.labels,
            lse,
            scale.token,
            scale.top,
            plan.rows,
            plan.mass,
            plan.kept,
            queue.first,
            queue.owner,
            queue.readers,
            counters[1 : 1 + blocks],
            counters[1 + blocks :],
            ring_s,
            ring_rows,
            profile[0],
            profile[1],
            rank_one,
            lean,
            scale.total,
            acc,
            d_weight,
            mean_offset,
            hidden.stride(0),
            weight.stride(0),
            padded,
            blocks,
            v,
            smoothing,
            options.logit_scale if options.logit_scale is not None else 1.0,
            options.softcap or 1.0,
            # whether rows of `hidden` and the mean are whole pieces of 8 numbers apart
            ALIGNED=mean_offset % 8 == 0 and hidden.stride(0) % 8 == 0,
            ROWS=tiles.kept_rows,
            WIDTH=tiles.width,
            DEPTH=tiles.kept_depth,
            SLICE=tiles.slice,
            STEP=tiles.step,
            RING=ring,
            WIDE_STAGES=tiles.wide_stages,
            HAS_BIAS=bias is not None,
            RAGGED=v % tiles.width != 0,
            NEED_HIDDEN=into_hidden,
            NEED_WEIGHT=need_weight,
            ACCUMULATE=accumulate,
            TMA=tiles.tma,
            num_stages=tiles.kept_stages,
            **common,
        )

    run(1 if head < blocks else 0, need_hidden)
    if need_hidden:
        profiles = acc[padded : padded + blocks].to(hidden.dtype)
        evens = acc[padded + blocks :]
        flat = evens.sum(0)
        hidden_kernel[(cdiv(padded, tiles.rows), cdiv(d, tiles.slice))](
            plan.mass,
            tokens.order,
            scale.token,
            tokens.count,
            scale.top,
            acc,
            profiles,
            evens.to(hidden.dtype) if capped else profiles,
            flat,
            d_hidden,
            len(tokens.order),
            padded,
            blocks,
            d_hidden.stride(0),
            smoothing,
            v,
            ROWS=tiles.rows,
            SLICE=tiles.slice,
            STEP=tiles.step,
            num_stages=tiles.kept_stages,
            **common,
        )
    if head < blocks:
        # the accumulator is read out, so the blocks whose gradient it lay in can be written
        run(2, False)

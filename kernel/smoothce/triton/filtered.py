"""The filtered backward: some pairs are recomputed, the others enter through low-rank products.

For a kept pair, S = (p − (1−β)[v = y]) · f with f = ∂logit/∂product. For a dropped pair of mass P,
S is modelled as P · q_v, where the profile q is the softmax within the block of the mean hidden
state's logits: every token's gradient still sums to zero over the vocabulary. A drawn pair of
weight w has w p and (1−w) P q. The smoothing term −β u_v f needs no pairs. So with
W_j = Σ_{v∈j} q_v C_v, H_j = Σ_{v∈j} u_v f_v C_v and the plan's coefficients m_ij (0, P or (1−w) P),

    dE_i = g_i (Σ_listed S C + Σ_j m_ij W_j − β Σ_j H_j)
    dC_v = Σ_listed g S E + q_v Σ_i m_ij g_i E_i − β u_v f_v Σ_i g_i E_i

(a z-loss lifts a token's softmax, p, P and q, by 1 + 2ζ lse_i).

One kernel works through a queue whose items only wait for earlier ones: a tile of listed pairs
puts S into a ring and adds S · C to dE; a share of a block's dC sums Sᵀ · E over its tiles once
they are there. Profile and uniform direction ride along as two more rows of each block's tiles,
so q, W and H cost no pass of their own over the classifier.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from smoothce.triton.filter_kernels import block_sums_kernel, hidden_kernel, queue_kernel
from smoothce.triton.filter_plan import Plan, plan, schedule
from smoothce.triton.forward import Results, lse_forward
from smoothce.triton.recompute_backward import TOKENS
from smoothce.triton.tiles import descriptor, programs
from smoothce.triton.tokens import (
    ForwardGradients,
    LossCall,
    PackedTokens,
    coefficients,
    gather,
    valid_first,
)
from smoothce.vocab_parallel import all_reduce_gradient

STATISTICS = 2**25  # bytes of block statistics that a super-block may have


class Upstream(NamedTuple):
    """Upstream gradient g, as one factor and what is left of it per token."""

    relative: Tensor | None  # (padded,) fp32 g_i / largest, packed; None: all alike
    lift: Tensor | None  # (padded,) fp32 1 + 2ζ lse_i; None: 1
    largest: Tensor  # () fp32, the largest |g_i|
    hidden_sum: Tensor  # (D,) fp32, Σ E_i g_i / largest


def super_block(call: LossCall) -> int:
    """Tokens of a super-block, all of about the same size. Statistics are 4 bytes a pair."""
    n, rows = max(len(call.inputs.labels), 1), call.tiles.rows
    most = min(STATISTICS // (4 * call.blocks), TOKENS)
    return cdiv(cdiv(n, cdiv(n, max(most, rows))), rows) * rows


def with_forward(call: LossCall) -> bool:
    """Whether gradients are made in the forward: one super-block's statistics fit in the memory
    bound, several blocks' do not, and a reduced loss's upstream gradient is one factor."""
    return call.inputs.options.reduction != "none" and len(call.inputs.labels) > super_block(call)


def planned(
    call: LossCall, results: Results, order: Tensor, count: Tensor
) -> Iterator[tuple[PackedTokens, Plan]]:
    """The forward, super-block by super-block, valid tokens first."""
    size, every = super_block(call), slice(0, len(order))
    for start in range(0, len(order), size):
        own = order[start : start + size]
        inside = count if len(own) == len(order) else (count - start).clamp(0, len(own))
        tokens, packed = gather(call, own, inside)
        statistics = packed.new_empty(2, call.blocks, len(packed), dtype=torch.float16)
        tokens = lse_forward(call, packed, tokens, results, every, statistics=statistics)
        # after the large kernel's launch, so that the host's work is hidden; in two steps, since
        # torch's reduction of many rows to few sums takes 100 MB of its own
        groups = packed.view(-1, call.tiles.rows, packed.shape[1])
        total = groups.sum(1, dtype=torch.float32).sum(0)
        mean = (total / inside.clamp(min=1)).to(packed.dtype)
        tokens = tokens._replace(total=total, mean=mean)
        del packed, groups
        yield tokens, plan(statistics, tokens, call.eps, call.tiles)
        del tokens, statistics  # before the next super-block takes its memory


def forward_all(
    call: LossCall, results: Results
) -> list[tuple[PackedTokens, Plan]] | ForwardGradients:
    """Fill in the results; the backward's state."""
    order, count = valid_first(call)
    loss_scale = call.inputs.loss_scale()
    blocks, gradients = [], Gradients(call) if with_forward(call) else None
    for tokens, pairs in planned(call, results, order, count):
        if gradients is None:
            blocks.append((tokens, pairs))
        else:
            of_loss = torch.ones_like(loss_scale)
            gradients.add(tokens, pairs, upstream(call, tokens, of_loss, loss_scale))
        del tokens, pairs  # before the next super-block takes its memory
    return blocks if gradients is None else ForwardGradients(gradients.result())


def backward_all(
    call: LossCall,
    blocks: list[tuple[PackedTokens, Plan]],
    of_loss: Tensor,  # fp32, () or (N,)
    of_lse: None,
    loss_scale: Tensor,  # ()
) -> tuple[Tensor | None, ...]:
    """The gradients of hidden and weight that are wanted."""
    gradients = Gradients(call)
    for tokens, pairs in blocks:
        gradients.add(tokens, pairs, upstream(call, tokens, of_loss, loss_scale))
    return gradients.result()


def upstream(call: LossCall, tokens: PackedTokens, of_loss: Tensor, loss_scale: Tensor) -> Upstream:
    """The upstream gradient as the kernels take it."""
    inputs, order = call.inputs, tokens.order
    a, b = coefficients(call, tokens, of_loss, loss_scale, slice(0, len(inputs.labels)))
    lift = torch.where(b != 0, a / b, 1.0) if inputs.options.z_loss else None
    if inputs.options.reduction != "none" and inputs.token_weights is None:
        return Upstream(None, lift, of_loss * loss_scale, tokens.total)
    largest = b.abs().amax().clamp(min=1e-30)
    relative = b / largest
    total = torch.zeros_like(tokens.total)
    for i in range(0, len(order), 1024):
        part = order[i : i + 1024].long()
        total += relative[i : i + len(part)] @ inputs.hidden[part].float()
    return Upstream(relative, lift, largest, total)


class Gradients:
    """The filtered gradients that are wanted, filled super-block by super-block."""

    def __init__(self, call: LossCall) -> None:
        self.call, self.begun = call, False
        self.hidden, self.weight = (
            torch.empty_like(like) if need else None
            for like, need in zip(call.inputs[:2], call.needs[:2], strict=True)
        )

    def result(self) -> tuple[Tensor | None, ...]:
        for gradient in (self.hidden, self.weight):
            if gradient is not None and not self.begun:
                gradient.zero_()
        return all_reduce_gradient(self.hidden, self.call.inputs.shard), self.weight, None

    def add(self, tokens: PackedTokens, plan: Plan, upstream: Upstream) -> None:
        """Write dE of these tokens; write dC, or add to it: this module's equations."""
        call, d_weight = self.call, self.weight
        inputs, tiles = call.inputs, call.tiles
        hidden, weight, mixture = inputs.hidden, inputs.weight, inputs.smoothing_target
        (v, d), device, softcap = weight.shape, hidden.device, inputs.options.softcap
        smoothing = inputs.options.label_smoothing
        share = call.share if mixture is None else smoothing
        blocks, padded = plan.coefficient.shape
        common = {
            "D": d,
            "SLICE": tiles.slice,
            "STEP": tiles.step,
            "PRECISION": tiles.precision,
            "num_warps": tiles.warps,
            "num_stages": tiles.pair_stages,
        }
        profile_sums = uniform_sums = acc = None
        if d_weight is not None:
            profile_sums = torch.empty(blocks, d, dtype=torch.float32, device=device)
            uniform_sums = torch.empty_like(profile_sums) if softcap is not None else None
            block_sums_kernel[(cdiv(blocks, tiles.wide), cdiv(d, tiles.slice))](
                hidden, plan.coefficient, tokens.order, upstream.relative, upstream.lift,
                tokens.count, profile_sums,
                uniform_sums,
                padded, blocks, WIDE=tiles.wide,
                **common,
            )  # fmt: skip

        ring = max(tiles.ring, cdiv(padded + 2, tiles.pair_rows))
        slices = cdiv(d, tiles.slice) if d_weight is not None else 0
        ring_s = hidden.new_empty(ring * tiles.pair_rows if slices else 0, tiles.width)
        ring_source = torch.empty(len(ring_s), device=device, dtype=torch.int32)
        profile = torch.empty(2, v, dtype=torch.float32, device=device)
        mean_offset = (tokens.mean.data_ptr() - hidden.data_ptr()) // hidden.element_size()
        if self.hidden is not None:
            rows = padded + blocks + (1 if softcap is None else blocks)
            acc = torch.zeros(rows, d, dtype=torch.float32, device=device)
        counters = torch.zeros(1 + 2 * blocks, device=device, dtype=torch.int32)
        queue_kernel[(programs(device),)](
            *schedule(plan.listed, padded, slices, tiles, ring),
            *counters.split([1, blocks, blocks]),
            hidden,
            descriptor(weight, [tiles.width, tiles.pair_depth], tiles.tma),
            descriptor(weight, [tiles.width, tiles.slice], tiles.tma),
            inputs.bias, mixture, tokens.order, tokens.labels, tokens.lse,
            *upstream,
            *plan,
            ring_s, ring_source, profile, profile_sums, uniform_sums, acc, d_weight,
            mean_offset,
            padded, blocks, v, share, smoothing, inputs.scale, softcap,
            # whether rows of `hidden` and the mean are whole pieces of 8 numbers apart
            ALIGNED=mean_offset % 8 == 0 and d % 8 == 0,
            RAGGED=v % tiles.width != 0, ACCUMULATE=self.begun,
            ROWS=tiles.pair_rows, WIDTH=tiles.width, DEPTH=tiles.pair_depth, TMA=tiles.tma,
            RING=ring, WIDE_STAGES=tiles.wide_stages,
            **common,
        )  # fmt: skip
        del ring_s
        if acc is not None:
            uniforms = acc[padded + blocks :]
            hidden_kernel[(cdiv(padded, tiles.rows), cdiv(d, tiles.slice))](
                plan.coefficient, tokens.order, *upstream[:3], tokens.count,
                acc,
                acc[padded : padded + blocks].to(hidden.dtype),
                None if softcap is None else uniforms.to(hidden.dtype), uniforms.sum(0),
                self.hidden,
                len(tokens.order), padded, blocks, share, ROWS=tiles.rows,
                **common,
            )  # fmt: skip
        self.begun = True

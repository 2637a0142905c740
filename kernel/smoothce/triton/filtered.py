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

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from smoothce.triton import stored
from smoothce.triton.filter_kernels import block_sums_kernel, hidden_kernel, queue_kernel
from smoothce.triton.filter_plan import Plan, plan, schedule
from smoothce.triton.forward import forward
from smoothce.triton.tiles import descriptor, programs
from smoothce.triton.tokens import Inputs, Made, Tokens, gather, valid_first

STATISTICS = 2**25  # bytes of block statistics that a super-block may have
BORROW_FROM = 2**24  # bytes; a smaller sum of dE is simply allocated


class Upstream(NamedTuple):
    """Upstream gradient g, as one factor and what is left of it per token."""

    relative: Tensor | None  # (padded,) fp32 g_i / largest, packed; None: all alike
    largest: Tensor  # () fp32, the largest |g_i|
    hidden_sum: Tensor  # (D,) fp32, Σ E_i g_i / largest


def super_block(inputs: Inputs) -> int:
    """Tokens of a super-block, all of about the same size. Statistics are 4 bytes a pair."""
    n, rows = max(len(inputs.labels), 1), inputs.tiles.rows
    most = min(STATISTICS // (4 * inputs.blocks), stored.TOKENS)
    return cdiv(cdiv(n, cdiv(n, max(most, rows))), rows) * rows


def early(inputs: Inputs) -> bool:
    """Whether gradients are made in the forward: one super-block's statistics fit in the memory
    bound, several blocks' do not, and a reduced loss's upstream gradient is one factor."""
    return inputs.options.reduction != "none" and len(inputs.labels) > super_block(inputs)


def walk(
    inputs: Inputs, losses: Tensor, lse: Tensor, order: Tensor, count: Tensor
) -> Iterator[tuple[Tokens, Plan]]:
    """The forward, super-block by super-block, valid tokens first."""
    size = super_block(inputs)
    for start in range(0, len(order), size):
        own = order[start : start + size]
        inside = count if len(own) == len(order) else (count - start).clamp(0, len(own))
        tokens, packed = gather(inputs, own, inside)
        statistics = packed.new_empty(2, inputs.blocks, len(packed), dtype=torch.float16)
        tokens = forward(inputs, packed, tokens, losses, lse, statistics=statistics)
        # after the large kernel's launch, so that the host's work is hidden; in two steps, since
        # torch's reduction of many rows to few sums takes 100 MB of its own
        groups = packed.view(-1, inputs.tiles.rows, packed.shape[1])
        total = groups.sum(1, dtype=torch.float32).sum(0)
        mean = (total / inside.clamp(min=1)).to(packed.dtype)
        tokens = tokens._replace(total=total, mean=mean)
        del packed, groups
        yield tokens, plan(statistics, tokens, inputs.eps, inputs.tiles)
        del tokens, statistics  # before the next super-block takes its memory


def forward_all(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tokens, Plan]] | Made]:
    """Losses and log-sum-exps in the caller's order, 1 / tokens, and the backward's state."""
    losses = inputs.hidden.new_empty(len(inputs.labels), dtype=torch.float32)
    lse = torch.empty_like(losses)
    order, _, count, token_weight = valid_first(inputs)
    blocks, gradients = [], Gradients(inputs) if early(inputs) else None
    for tokens, pairs in walk(inputs, losses, lse, order, count):
        if gradients is None:
            blocks.append((tokens, pairs))
        else:
            gradients.add(tokens, pairs, Upstream(None, token_weight, tokens.total))
        del tokens, pairs  # before the next super-block takes its memory
    state = blocks if gradients is None else Made(gradients.result())
    return losses, lse, token_weight, state


def backward_all(
    inputs: Inputs,
    blocks: list[tuple[Tokens, Plan]],
    of_loss: Tensor,  # fp32, () or (N,)
    of_lse: None,
    token_weight: Tensor,  # ()
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight that are wanted."""
    gradients = Gradients(inputs)
    for tokens, pairs in blocks:
        gradients.add(tokens, pairs, upstream(inputs, tokens, of_loss, token_weight))
    return gradients.result()


def upstream(inputs: Inputs, tokens: Tokens, of_loss: Tensor, token_weight: Tensor) -> Upstream:
    """The upstream gradient as the kernels take it."""
    if inputs.options.reduction != "none":
        return Upstream(None, of_loss * token_weight, tokens.total)
    order = tokens.order.long()
    g = torch.where(tokens.labels[: len(order)] >= 0, of_loss[order], 0.0)
    largest = g.abs().amax().clamp(min=1e-30)
    relative = torch.zeros_like(tokens.lse)
    relative[: len(order)] = g / largest
    total = torch.zeros_like(tokens.total)
    for i in range(0, len(order), 1024):
        part = order[i : i + 1024]
        total += relative[i : i + len(part)] @ inputs.hidden[part].float()
    return Upstream(relative, largest, total)


def accumulator(
    rows: int,
    inputs: Inputs,
    d_weight: Tensor | None,  # (V, D) not yet written
) -> tuple[Tensor, int]:
    """Zeroed fp32 memory (rows, D) for dE, and the first vocabulary block whose dC must wait for
    it.

    A large one borrows the last rows of the weight gradient's own memory. They are written last,
    from dlogits that are then computed a second time: a few percent of one product."""
    (v, d), width = inputs.weight.shape, inputs.tiles.width
    if d_weight is not None and rows * d * 4 >= BORROW_FROM:
        size = d_weight.element_size()
        start = (v - cdiv(rows * 4, size)) // width * width
        if start > v // 2 and start * d * size % 16 == 0:
            tail = d_weight.view(-1)[start * d :]
            room = tail[: tail.numel() // 2 * 2].view(torch.float32)[: rows * d]
            return room.zero_().view(rows, d), start // width
    return inputs.weight.new_zeros(rows, d, dtype=torch.float32), inputs.blocks


class Gradients:
    """The filtered gradients that are wanted, filled super-block by super-block."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.begun = inputs, False
        self.hidden, self.weight = (
            torch.empty_like(like) if need else None
            for like, need in zip(inputs[:2], inputs.needs, strict=True)
        )

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        for gradient in (self.hidden, self.weight):
            if gradient is not None and not self.begun:
                gradient.zero_()
        return self.hidden, self.weight

    def add(self, tokens: Tokens, plan: Plan, upstream: Upstream) -> None:
        """Write dE of these tokens; write dC, or add to it: this module's equations."""
        inputs, d_weight = self.inputs, self.weight
        hidden, weight, tiles = inputs.hidden, inputs.weight, inputs.tiles
        (v, d), device, softcap = weight.shape, hidden.device, inputs.options.softcap
        smoothing = inputs.options.label_smoothing
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
                hidden, plan.coefficient, tokens.order, upstream.relative, tokens.count,
                profile_sums,
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
        deferred = blocks  # the first block whose dC is written in a second run
        if self.hidden is not None:
            rows = padded + blocks + (1 if softcap is None else blocks)
            acc, deferred = accumulator(rows, inputs, None if self.begun else d_weight)

        def run(begin: int, end: int, acc: Tensor | None) -> None:
            counters = torch.zeros(1 + 2 * blocks, device=device, dtype=torch.int32)
            queue_kernel[(programs(device),)](
                *schedule(plan.listed, padded, slices, tiles, ring, begin, end),
                *counters.split([1, blocks, blocks]),
                hidden,
                descriptor(weight, [tiles.width, tiles.pair_depth], tiles.tma),
                descriptor(weight, [tiles.width, tiles.slice], tiles.tma),
                inputs.bias, tokens.order, tokens.labels, tokens.lse,
                *upstream,
                *plan,
                ring_s, ring_source, profile, profile_sums, uniform_sums, acc, d_weight,
                mean_offset,
                padded, blocks, v, smoothing, inputs.scale, softcap,
                # whether rows of `hidden` and the mean are whole pieces of 8 numbers apart
                ALIGNED=mean_offset % 8 == 0 and d % 8 == 0,
                RAGGED=v % tiles.width != 0, ACCUMULATE=self.begun,
                ROWS=tiles.pair_rows, WIDTH=tiles.width, DEPTH=tiles.pair_depth, TMA=tiles.tma,
                RING=ring, WIDE_STAGES=tiles.wide_stages,
                **common,
            )  # fmt: skip

        run(0, deferred, acc)
        if acc is not None:
            uniforms = acc[padded + blocks :]
            hidden_kernel[(cdiv(padded, tiles.rows), cdiv(d, tiles.slice))](
                plan.coefficient, tokens.order, upstream.relative, upstream.largest, tokens.count,
                acc,
                acc[padded : padded + blocks].to(hidden.dtype),
                None if softcap is None else uniforms.to(hidden.dtype), uniforms.sum(0),
                self.hidden,
                len(tokens.order), padded, blocks, smoothing, v, ROWS=tiles.rows,
                **common,
            )  # fmt: skip
        if deferred < blocks:
            # the sum of dE is read out, so the blocks whose gradient it lay in can be written
            run(deferred, blocks, None)
        self.begun = True

"""The filtered backward: some pairs are recomputed, the others enter through low-rank products.

S = ∂loss/∂(E Cᵀ), as `tokens.Coefficients` defines it, is cut into what pairs of a token i and a
block j have. Of a listed pair, kept or drawn, the softmax's and the label's terms are computed:

    R_iv = g_i (w_ij lift_i p_iv − (1−β) [v = y_i]) f_iv

where w_ij is the draw's weight, 1 for a kept pair, f_iv is the slope ∂logit/∂product and lift_i is
1 + 2ζ lse_i. For a dropped pair of mass P the softmax p_iv f_iv is modelled as P q_v f_v, where the
profile q is the softmax within the block of the mean hidden state's logits, and f_v their slope. A
drawn pair has (1−w) P q_v f_v of the model. The smoothing term needs no pairs. So with W_j =
Σ_{v∈j} q_v f_v C_v, H_j = Σ_{v∈j} û_v f_v C_v (where κ û_v = β u_v: see `tokens`), the plan's
coefficients m_ij (0, P or (1−w) P), and sums Σ_listed over kept and drawn pairs,

    dE_i = Σ_listed R_iv C_v + g_i (lift_i Σ_j m_ij W_j − κ Σ_j H_j)
    dC_v = Σ_listed R_iv E_i + q_v f_v Σ_i m_ij lift_i g_i E_i − κ û_v f_v Σ_i g_i E_i

Without a softcap the gradient is right on average, and each token's sums to zero over the
vocabulary (but for a z-loss), as the exact one does. Under a softcap the slope differs from token
to token: there R_iv has −g_i κ û_v f_iv too, and the last terms' sums are over dropped pairs alone.
What stands for the smoothing term of dropped pairs is wrong then, and no draw corrects it: the
gradient is biased.

`plan_super_blocks` runs the forward and lets `pairs` choose them; `FilteredGradients`
launches `kernels`. Tokens are worked on in super-blocks, whose pair statistics bound the
memory. kernel/DERIVATION.md derives the equations and says why pairs are drawn.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton import cdiv

from smoothce.options import Gradients, LossCall, LossOutput, lacks_gradient_range
from smoothce.triton.filter.kernels import block_sums_kernel, filtered_hidden_kernel, queue_kernel
from smoothce.triton.filter.pairs import PairPlan, plan_pairs, schedule
from smoothce.triton.forward import run_forward
from smoothce.triton.recompute_backward import SUPER_BLOCK_TOKENS
from smoothce.triton.tiles import descriptor, programs
from smoothce.triton.tokens import (
    KernelCall,
    PackedTokens,
    coefficients,
    gather,
    valid_first,
)
from smoothce.vocab_parallel import all_reduce_gradient

# filter_eps="auto" is AUTO_EPS · V^(-1/4): 2^-8.3 at 256,000 entries and 2^-7.6 at 32,768, which
# gives about the same error for all. It was still faster than the exact gradient at 8,192 entries.
AUTO_EPS = 2.0**-8.3 * 256000**0.25
LEAST_FILTERED_ENTRIES = 8192  # with fewer there is too little to skip: "auto" is exact

SuperBlock: TypeAlias = tuple[PackedTokens, PairPlan]

STATISTICS_BYTES = 2**25  # of a super-block's pair statistics, before it is filled up to tiles
BYTES_OF_A_PAIR = 4  # two fp16 pair statistics
TOKENS_AT_ONCE = 1024  # whose hidden states are converted to fp32 together


class Upstream(NamedTuple):
    """The upstream gradient g of a super-block's tokens, as one factor and what is left of it per
    token, ĝ_i = g_i / common_factor. Token weights and the reduction's scale are in g.

    Where g_i is the same for all tokens the factor is g_i itself, of either sign. Otherwise it is
    the largest |g_i|, so that no |ĝ_i| is above 1.

    Fields have the names of `queue_kernel`'s parameters."""

    relative_upstream: Tensor | None  # (padded,) fp32 ĝ_i, packed; None where it is 1 for all
    lift: Tensor | None  # (padded,) fp32 1 + 2ζ lse_i; None where it is 1
    common_factor: Tensor  # () fp32
    hidden_sum: Tensor  # (D,) fp32, Σ_i ĝ_i E_i


class QueueMemory(NamedTuple):
    """What `queue_kernel` works in and writes. Fields have the names of its parameters."""

    ring: Tensor  # (·, width) in the inputs' dtype: R of tiles until dC has read it
    ring_source: Tensor  # (·,) int32: where each row's hidden state is
    mean_rows: Tensor  # (2, V) fp32: q f and û f, with f the slope and û as in `kernels`
    # (·, D) fp32, or None where dE is not wanted: for each token its sum over listed pairs, then W
    # of each block, then H, of each block under a softcap and else of all together.
    d_hidden_sums: Tensor | None
    ticket: Tensor  # (1,) int32, 0: the next item
    tiles_done: Tensor  # (blocks,) int32, 0
    shares_done: Tensor  # (blocks,) int32, 0


def threshold(call: LossCall) -> float | None:
    """Return the 2-norm of a block's probabilities below which it may be left out; None: exact.

    "auto" follows from the entries of the whole vocabulary and of the rank that has most of them.
    The filter adds with atomics, in an order that depends on timing. It makes no gradient of a
    bias, knows no upstream gradient of the log-sum-exps, and its factors need more range than fp16
    has. What it makes under a softcap is biased, which `plan.describe` says."""
    if torch.are_deterministic_algorithms_enabled():
        return None
    if call.options.return_lse or call.needs.bias or lacks_gradient_range(call.hidden.dtype):
        return None
    eps = call.options.filter_eps
    if not isinstance(eps, str):
        return eps
    # "auto"
    if call.most_rows < LEAST_FILTERED_ENTRIES:
        return None
    return AUTO_EPS * call.vocabulary**-0.25


def super_block_size(call: KernelCall) -> int:
    """Return how many tokens each super-block has; all are of about the same size.

    The pair statistics of one, 4 bytes for each (token, block) pair, take about STATISTICS_BYTES at
    most: super-blocks are filled up to whole tiles. All ranks that share a vocabulary have equal
    super-blocks, since they join each one's sums."""
    n_tokens = max(len(call.labels), 1)
    rows = call.tiles.rows
    fitting = STATISTICS_BYTES // (BYTES_OF_A_PAIR * call.most_blocks)
    most = max(min(fitting, SUPER_BLOCK_TOKENS), rows)
    n_super_blocks = cdiv(n_tokens, most)
    return cdiv(cdiv(n_tokens, n_super_blocks), rows) * rows


def makes_gradients_in_forward(call: KernelCall) -> bool:
    """Tell whether gradients are made in the forward, super-block by super-block.

    One super-block's pair statistics fit in the memory bound, those of several do not. It takes a
    reduced loss, whose upstream gradient is one factor that the backward can multiply by."""
    n_tokens = len(call.labels)
    return call.options.reduction != "none" and n_tokens > super_block_size(call)


def plan_super_blocks(
    call: KernelCall,
    output: LossOutput,
    order: Tensor,  # (N,) int32, valid tokens first
    valid_count: Tensor,  # (1,) int32, how many are valid
) -> Iterator[SuperBlock]:
    """Run the forward super-block by super-block, and plan the backward of each."""
    assert call.eps is not None
    size = super_block_size(call)
    # The order of the whole call is cut, so that `call` and `output` are the whole call's too.
    for start in range(0, len(order), size):
        own_order = order[start : start + size]
        own_count = valid_count
        if len(own_order) < len(order):
            own_count = (valid_count - start).clamp(0, len(own_order))
        tokens, packed = gather(call, own_order, own_count)
        pair_statistics = packed.new_empty(2, call.blocks, len(packed), dtype=torch.float16)
        run_forward(call, packed, tokens, output, pair_statistics=pair_statistics)
        # This comes after the large kernel's launch, so that the host's work is hidden. It is in
        # two steps, since torch's reduction of many rows to few sums takes 100 MB of its own.
        token_tiles = packed.view(-1, call.tiles.rows, packed.shape[1])
        hidden_total = token_tiles.sum(1, dtype=torch.float32).sum(0)
        mean_hidden = (hidden_total / own_count.clamp(min=1)).to(packed.dtype)
        tokens = tokens._replace(hidden_total=hidden_total, mean_hidden=mean_hidden)
        del packed, token_tiles
        yield tokens, plan_pairs(pair_statistics, tokens, call.eps, call.tiles)
        del tokens, pair_statistics  # before the next super-block takes its memory


def filtered_forward(call: KernelCall, output: LossOutput) -> list[SuperBlock] | Gradients:
    """Fill in the output. Returns what the backward needs: plans, or gradients already, which lack
    the upstream factor alone."""
    order, valid_count = valid_first(call)
    loss_scale = call.loss_scale()
    if not makes_gradients_in_forward(call):
        return list(plan_super_blocks(call, output, order, valid_count))
    gradients = FilteredGradients(call)
    upstream_loss = torch.ones_like(loss_scale)
    for tokens, pairs in plan_super_blocks(call, output, order, valid_count):
        gradients.add(tokens, pairs, upstream_gradient(call, tokens, upstream_loss, loss_scale))
        del tokens, pairs  # before the next super-block takes its memory
    return gradients.result()


def filtered_backward(
    call: KernelCall,
    super_blocks: list[SuperBlock],
    upstream_loss: Tensor,  # fp32, () or (N,)
    loss_scale: Tensor,  # ()
) -> Gradients:
    """Make the gradients of hidden and weight that are wanted. A call that wants the bias's is not
    filtered (`threshold`)."""
    gradients = FilteredGradients(call)
    for tokens, pairs in super_blocks:
        gradients.add(tokens, pairs, upstream_gradient(call, tokens, upstream_loss, loss_scale))
    return gradients.result()


def upstream_gradient(
    call: KernelCall,
    tokens: PackedTokens,
    upstream_loss: Tensor,  # fp32, () or (N,)
    loss_scale: Tensor,  # ()
) -> Upstream:
    """Return the upstream gradient of a super-block's tokens, as the kernels take it."""
    options = call.options
    assert tokens.hidden_total is not None
    token_coefficients = coefficients(call, tokens, upstream_loss, loss_scale)
    upstream = token_coefficients.label  # b_i is g_i
    lift = None
    if options.z_loss:
        lift = torch.where(upstream != 0, token_coefficients.softmax / upstream, 1.0)
    if options.reduction != "none" and call.token_weights is None:
        # g_i is the same for all tokens.
        return Upstream(None, lift, upstream_loss * loss_scale, tokens.hidden_total)
    common_factor = upstream.abs().amax().clamp(min=1e-30)
    relative_upstream = upstream / common_factor
    hidden_sum = torch.zeros_like(tokens.hidden_total)
    is_valid = torch.arange(len(tokens.order), device=upstream.device) < tokens.valid_count
    for start in range(0, len(tokens.order), TOKENS_AT_ONCE):
        stop = min(start + TOKENS_AT_ONCE, len(tokens.order))
        states = call.hidden[tokens.order[start:stop].long()].float()
        # A masked token's hidden state may hold NaN, which its ĝ of 0 would not undo.
        states.masked_fill_(~is_valid[start:stop, None], 0)
        hidden_sum += relative_upstream[start:stop] @ states
    return Upstream(relative_upstream, lift, common_factor, hidden_sum)


class FilteredGradients:
    """The filtered gradients that are wanted, filled super-block by super-block."""

    def __init__(self, call: KernelCall) -> None:
        needs_hidden, needs_weight, _ = call.needs
        self.call = call
        self.begun = False  # whether a super-block is in `weight`
        self.hidden = torch.empty_like(call.hidden) if needs_hidden else None
        self.weight = torch.empty_like(call.weight) if needs_weight else None

    def result(self) -> Gradients:
        """Return the gradients, when all super-blocks are in them."""
        if not self.begun:
            for gradient in (self.hidden, self.weight):
                if gradient is not None:
                    gradient.zero_()
        hidden = all_reduce_gradient(self.hidden, self.call.shard)
        return Gradients(hidden=hidden, weight=self.weight)

    @property
    def slice_settings(self) -> dict[str, int | str]:
        """Return the settings of kernels that work on slices of D."""
        tiles = self.call.tiles
        return {
            "D": self.call.hidden.shape[1],
            "SLICE": tiles.slice,
            "STEP": tiles.step,
            "PRECISION": tiles.precision,
            "num_warps": tiles.warps,
            "num_stages": tiles.pair_stages,
        }

    def add(self, tokens: PackedTokens, pairs: PairPlan, upstream: Upstream) -> None:
        """Write dE of these tokens. Write dC, or add to it: this module's equations."""
        profile_sums = None
        smoothing_sums = None
        if self.weight is not None:
            profile_sums, smoothing_sums = self._block_sums(tokens, pairs, upstream)
        d_hidden_sums = self._work_off_queue(tokens, pairs, upstream, profile_sums, smoothing_sums)
        if d_hidden_sums is not None:
            self._write_hidden(tokens, pairs, upstream, d_hidden_sums)
        self.begun = True

    def _block_sums(
        self, tokens: PackedTokens, pairs: PairPlan, upstream: Upstream
    ) -> tuple[Tensor, Tensor | None]:
        """Return Σ_i m_ij ĝ_i lift_i E_i of each block, (blocks, D) fp32. Under a softcap also the
        sums over dropped pairs of ĝ_i E_i, which the smoothing term takes there."""
        call = self.call
        hidden = call.hidden
        tiles = call.tiles
        blocks, padded = pairs.pair_coefficients.shape
        d = hidden.shape[1]
        profile_sums = torch.empty(blocks, d, dtype=torch.float32, device=hidden.device)
        smoothing_sums = None
        if call.options.softcap is not None:
            smoothing_sums = torch.empty_like(profile_sums)
        block_sums_kernel[(cdiv(blocks, tiles.low_rank_blocks), cdiv(d, tiles.slice))](
            hidden=hidden,
            pair_coefficients=pairs.pair_coefficients,
            order=tokens.order,
            relative_upstream=upstream.relative_upstream,
            lift=upstream.lift,
            valid_count=tokens.valid_count,
            profile_sums=profile_sums,
            smoothing_sums=smoothing_sums,
            padded=padded,
            blocks=blocks,
            BLOCKS=tiles.low_rank_blocks,
            **self.slice_settings,
        )
        return profile_sums, smoothing_sums

    def _work_off_queue(
        self,
        tokens: PackedTokens,
        pairs: PairPlan,
        upstream: Upstream,
        profile_sums: Tensor | None,  # (blocks, D) fp32; None where dC is not wanted
        smoothing_sums: Tensor | None,  # likewise; None without a softcap too
    ) -> Tensor | None:
        """Write dC, or add to it. Returns what dE is made of, `QueueMemory.d_hidden_sums`."""
        call = self.call
        tiles = call.tiles
        hidden = call.hidden
        weight = call.weight
        v, d = weight.shape
        blocks, padded = pairs.pair_coefficients.shape
        ring_tiles = max(tiles.ring, cdiv(padded + 2, tiles.pair_rows))
        slices = cdiv(d, tiles.slice) if self.weight is not None else 0
        memory = self._allocate_queue_memory(blocks, padded, ring_tiles)
        queue = schedule(pairs.listed, padded, slices, tiles, ring_tiles)
        assert tokens.mean_hidden is not None
        # The kernel gathers the mean as one more row of `hidden`, at this distance, which is
        # negative where the mean was allocated below. `tokens` holds the mean and `call` the hidden
        # states until the kernel is launched, and PyTorch gives freed memory to later kernels of
        # the stream only. Both begin at a multiple of their numbers' size.
        mean_start = (tokens.mean_hidden.data_ptr() - hidden.data_ptr()) // hidden.element_size()
        queue_kernel[(programs(hidden.device),)](
            **queue._asdict(),
            **memory._asdict(),
            **upstream._asdict(),
            **pairs._asdict(),
            hidden=hidden,
            weight=descriptor(weight, [tiles.width, tiles.pair_depth], tiles.tma),
            weight_slices=descriptor(weight, [tiles.width, tiles.slice], tiles.tma),
            bias=call.bias,
            smoothing_target=call.smoothing_target,
            order=tokens.order,
            labels=tokens.labels,
            lses_base2=tokens.lse_base2,
            profile_sums=profile_sums,
            smoothing_sums=smoothing_sums,
            d_weight=self.weight,
            mean_start=mean_start,
            padded=padded,
            blocks=blocks,
            V=v,
            smoothing_factor=self.call.smoothing_factor,
            smoothing=call.options.label_smoothing,
            scale=call.logit_scale,
            softcap=call.options.softcap,
            # Whether rows of `hidden` and the mean are whole pieces of 8 numbers apart.
            ALIGNED=mean_start % 8 == 0 and d % 8 == 0,
            RAGGED=v % tiles.width != 0,
            ACCUMULATE=self.begun,
            ROWS=tiles.pair_rows,
            WIDTH=tiles.width,
            DEPTH=tiles.pair_depth,
            TMA=tiles.tma,
            RING=ring_tiles,
            HIDDEN_STAGES=tiles.hidden_stages,
            **self.slice_settings,
        )
        return memory.d_hidden_sums

    def _allocate_queue_memory(self, blocks: int, padded: int, ring_tiles: int) -> QueueMemory:
        call = self.call
        tiles = self.call.tiles
        device = call.hidden.device
        v, d = call.weight.shape
        ring_rows = ring_tiles * tiles.pair_rows if self.weight is not None else 0
        ring = call.hidden.new_empty(ring_rows, tiles.width)
        ring_source = torch.empty(ring_rows, device=device, dtype=torch.int32)
        mean_rows = torch.empty(2, v, dtype=torch.float32, device=device)
        d_hidden_sums = None
        if self.hidden is not None:
            rows_of_h = 1 if call.options.softcap is None else blocks
            rows = padded + blocks + rows_of_h
            d_hidden_sums = torch.zeros(rows, d, dtype=torch.float32, device=device)
        counters = torch.zeros(1 + 2 * blocks, device=device, dtype=torch.int32)
        ticket, tiles_done, shares_done = counters.split([1, blocks, blocks])
        return QueueMemory(
            ring, ring_source, mean_rows, d_hidden_sums, ticket, tiles_done, shares_done
        )

    def _write_hidden(
        self, tokens: PackedTokens, pairs: PairPlan, upstream: Upstream, d_hidden_sums: Tensor
    ) -> None:
        """Write dE of a super-block's tokens, from what the queue has left in `d_hidden_sums`."""
        call = self.call
        tiles = call.tiles
        dtype = call.hidden.dtype
        blocks, padded = pairs.pair_coefficients.shape
        d = d_hidden_sums.shape[1]
        rows_of_h = d_hidden_sums[padded + blocks :]
        smoothing_products = None
        if call.options.softcap is not None:
            smoothing_products = rows_of_h.to(dtype)
        filtered_hidden_kernel[(cdiv(padded, tiles.rows), cdiv(d, tiles.slice))](
            pair_coefficients=pairs.pair_coefficients,
            order=tokens.order,
            relative_upstream=upstream.relative_upstream,
            lift=upstream.lift,
            common_factor=upstream.common_factor,
            valid_count=tokens.valid_count,
            d_hidden_sums=d_hidden_sums,
            profile_products=d_hidden_sums[padded : padded + blocks].to(dtype),
            smoothing_products=smoothing_products,
            smoothing_products_total=rows_of_h.sum(0),
            out=self.hidden,
            n_order=len(tokens.order),
            padded=padded,
            blocks=blocks,
            smoothing_factor=self.call.smoothing_factor,
            ROWS=tiles.rows,
            **self.slice_settings,
        )

"""The autograd function, and the two ways to its gradients: exact and filtered.

Tokens are worked off in super-blocks. The exact way's are slices of the caller's tokens, each with
its valid tokens packed; how many those are reaches the host while the forward runs, so that the
backward's products cost nothing for masked tokens. The filtered way's are slices of all tokens with
the valid ones first, and only the device knows how many are valid.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoothce.chunked import graph_is_kept
from smoothce.options import Options
from smoothce.triton import filtered, stored
from smoothce.triton.exact import Exact, spread
from smoothce.triton.filtered import Scale
from smoothce.triton.forward import Statistics, forward
from smoothce.triton.plan import Plan, plan
from smoothce.triton.prepare import Tokens, gather, valid_first
from smoothce.triton.scale import scale
from smoothce.triton.stored import Stored
from smoothce.triton.tiles import Tiles, cdiv, tiles_for

# filter_eps="auto" is AUTO · V^(-1/4): 2^-8.3 at 256,000 entries and 2^-7.6 at 32,768, which gives
# about the same error for all. It was still faster than the exact gradient at 8,192 entries.
AUTO = 2.0**-8.3 * 256000**0.25
SMALL = 8192  # entries under which there is too little to skip: "auto" is exact
STATISTICS = 2**25  # bytes of block statistics that a super-block may have


class Loss(torch.autograd.Function):
    """The loss and the log-sum-exps, differentiable once in hidden and weight."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, options, differentiable):
        needs = tuple(differentiable and need for need in ctx.needs_input_grad[:2])
        with torch.cuda.device_of(hidden):
            call = call_for(hidden, weight, bias, labels, options, needs)
            losses, lse, token_weight, ctx.state = call.forward()
        ctx.save_for_backward(hidden, weight, bias, labels, token_weight)
        ctx.options, ctx.needs = options, needs
        ctx.set_materialize_grads(False)
        if not options.return_lse:
            ctx.mark_non_differentiable(lse)
        if options.reduction == "none":
            return losses, lse
        return losses.sum() * token_weight, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, of_lse):
        if upstream is None and of_lse is None:
            return (None,) * 6
        hidden, weight, bias, labels, token_weight = ctx.saved_tensors
        device = torch.autocast(hidden.device.type, enabled=False)
        with torch.cuda.device_of(hidden), device:
            if upstream is None:
                upstream = torch.zeros((), device=hidden.device)
            call = call_for(hidden, weight, bias, labels, ctx.options, ctx.needs)
            found = call.backward(ctx.state, upstream.float(), token_weight, of_lse)
        if not graph_is_kept():
            ctx.state = None
        return *found, None, None, None, None


def call_for(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,
    labels: Tensor,  # (N,)
    options: Options,
    needs: tuple[bool, bool],  # gradients of hidden and weight
) -> "ExactCall | FilteredCall":
    eps = threshold(options, len(weight)) if any(needs) else None
    kind = ExactCall if eps is None else FilteredCall
    return kind(hidden, weight, bias, labels, options, needs)


class Part(NamedTuple):
    """What the forward leaves of one exact super-block."""

    tokens: Tokens
    lse: Tensor  # (padded,) base 2
    rank: Tensor  # (n,) int32


class ExactState(NamedTuple):
    """What the forward leaves for the exact backward; what is handed over becomes the gradients."""

    parts: list[Part]
    counts: "Counts"
    weight: list[Tensor]  # the weight gradient to be, until it is handed over
    stored: Stored | None  # logits of the first super-block
    made: list[tuple[Tensor | None, Tensor | None]]  # gradients made in the forward, likewise


class Counts:
    """Numbers of valid tokens, on their way to the host: None while a CUDA graph is captured."""

    def __init__(self, counts: list[Tensor]) -> None:
        self.event, self.host = None, None
        if not counts or not counts[0].is_cuda:
            self.host = counts
        elif not torch.cuda.is_current_stream_capturing():
            self.host = [count.to("cpu", non_blocking=True) for count in counts]
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self, parts: int) -> list[int | None]:
        """The numbers. The host waits for their kernel alone, which ran before the forward's."""
        if self.event is not None:
            self.event.synchronize()
        return [None] * parts if self.host is None else [count.item() for count in self.host]


class ExactCall:
    """The exact gradient, as `exact` makes it."""

    def __init__(self, hidden, weight, bias, labels, options, needs) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.labels, self.options, self.needs = labels, options, needs
        self.tiles = tiles_for(hidden, weight)
        self.at_once = 0
        if any(needs) and options.reduction != "none" and not options.return_lse:
            self.at_once = stored.tokens_at_once(
                hidden, weight, needs, options.workspace, self.tiles
            )
        size = self.at_once or stored.TOKENS
        n = len(labels)
        self.slices = [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def forward(self) -> tuple[Tensor, Tensor, Tensor, ExactState | None]:
        """Losses and log-sum-exps in the caller's order, 1 / tokens, and the backward's state."""
        labels, ignore = self.labels, self.options.ignore_index
        found = [valid_first(labels[part], ignore) for part in self.slices]
        one = len(found) == 1
        token_weight = found[0][3] if one else valid_first(labels, ignore)[3]
        if self.options.reduction != "mean":
            token_weight = torch.ones_like(token_weight)
        losses = self.hidden.new_empty(len(labels), dtype=torch.float32)
        lse = torch.empty_like(losses)
        training = any(self.needs)
        counts = Counts([count for _, _, count, _ in found]) if training else None
        gradient = kept = gradients = None
        if training:
            inputs = self.hidden, self.weight, self.needs, self.at_once, self.tiles
            gradient, kept = stored.room(*inputs)
            if self.at_once:
                gradients = Gradients(self, gradient)
        parts = []
        for i, (part, (order, rank, count, _)) in enumerate(zip(self.slices, found, strict=True)):
            inputs = self.hidden[part], self.weight, self.bias, labels[part], order, count
            tokens, packed = gather(*inputs, self.options, self.tiles)
            room = kept if i == 0 or self.at_once else None
            inputs = packed, self.weight, self.bias, tokens, self.options, self.tiles
            statistics = forward(*inputs, False, losses[part], lse[part], room)
            parts.append(Part(tokens, statistics.lse, rank))
            if gradients is not None:
                # asked for after the large kernel's launch, so that the device is busy meanwhile
                n = counts.values(len(self.slices))[i]
                gradients.add(part, parts[-1], n, token_weight, None, room, packed)
            del packed
        if not training:
            return losses, lse, token_weight, None
        made = [] if gradients is None else [gradients.result()]
        left = [gradient] if gradients is None else []
        return losses, lse, token_weight, ExactState(parts, counts, left, kept, made)

    def backward(
        self, state: ExactState, upstream: Tensor, token_weight: Tensor, of_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.at_once:
            # the first backward takes what there is, another makes it again
            made = state.made.pop() if state.made else self.forward()[3].made.pop()
            for gradient in made:
                if gradient is not None:
                    scale(gradient, upstream)
            return made
        kept = state.stored if state.weight else None
        gradients = Gradients(self, state.weight.pop() if state.weight else None)
        counts = state.counts.values(len(self.slices))
        token = upstream * token_weight
        for part, left, n in zip(self.slices, state.parts, counts, strict=True):
            g = token[part] if token.dim() else token
            h = None if of_lse is None else of_lse[part]
            gradients.add(part, left, n, g, h, kept)
            kept = None
        return gradients.result()


class Gradients:
    """The exact gradients that are wanted, filled super-block by super-block."""

    def __init__(self, call: ExactCall, weight: Tensor | None) -> None:
        self.call, self.weight, self.begun = call, weight, False
        hidden, (n, d) = call.hidden, call.hidden.shape
        self.wide = hidden.dtype != torch.float32
        self.memory = None
        if call.needs[0]:
            # A super-block's sum is fp32, twice the size of its part of dE: each reaches into the
            # next one's rows.
            most = max((part.stop - part.start for part in call.slices), default=0)
            self.memory = hidden.new_empty(n + most * self.wide, d)
        if call.needs[1] and weight is None:
            self.weight = torch.empty_like(call.weight, memory_format=torch.contiguous_format)
        self.regions = stored.regions_for(hidden, call.weight, call.needs, call.tiles)

    def add(
        self,
        where: slice,  # of the caller's tokens
        part: Part,
        count: int | None,  # valid tokens; None: as many as there may be
        token: Tensor,  # fp32, upstream gradient of the losses; () where all are alike
        of_lse: Tensor | None,  # of the log-sum-exps
        kept: Stored | None,
        packed: Tensor | None = None,  # the hidden states, valid ones first
    ) -> None:
        call, tokens = self.call, part.tokens
        size = where.stop - where.start
        n = size if count is None else count
        out = acc = None
        if self.memory is not None:
            out = self.memory[where.start : where.stop]
        if n == 0:
            if out is not None:
                out.zero_()
            return
        hidden, d = call.hidden[where], call.hidden.shape[1]
        order, labels = tokens.order[:n], tokens.labels[:n]
        if out is not None and self.wide:
            room = self.memory[where.start : where.stop + size]
            acc = room.view(-1).view(torch.float32).view(size, d)[size - n :]
        elif out is not None:
            acc = out if count == size else torch.empty_like(hidden[:n])
        if count != size and packed is not None:
            hidden = packed[:n]
        elif count != size:
            # in what the sum leaves of its memory, where they fit
            fits = acc is not None and self.wide and 3 * n <= 2 * size
            hidden = torch.index_select(
                hidden, 0, order, out=room[:n] if fits else hidden.new_empty(n, d)
            )
        g, h = (
            None if x is None else torch.where(labels >= 0, x[order] if x.dim() else x, 0.0)
            for x in (token, of_lse)
        )
        inputs = hidden, call.weight, call.bias, tokens.labels, tokens.target, part.lse, g, h
        settings = call.options, call.tiles, self.regions, kept
        Exact(*inputs, *settings).backward(acc, self.weight, self.begun)
        self.begun = True
        if acc is not None and acc is not out:
            spread(acc, part.rank, out)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        if self.weight is not None and not self.begun:
            self.weight.zero_()
        hidden = None if self.memory is None else self.memory[: len(self.call.hidden)]
        return hidden, self.weight


class Block(NamedTuple):
    """What one super-block's filtered backward needs."""

    tokens: Tokens
    lse: Tensor
    plan: Plan


class FilteredState(NamedTuple):
    blocks: list[Block]
    made: list["FilteredGradients"]  # gradients made in the forward, until they are handed over


class FilteredCall:
    """The filtered gradient, as `filtered` makes it."""

    def __init__(self, hidden, weight, bias, labels, options, needs) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.labels, self.options, self.needs = labels, options, needs
        self.tiles = tiles_for(hidden, weight)
        self.eps = threshold(options, len(weight))
        self.size = super_block(len(labels), len(weight), self.tiles)
        # One super-block's statistics fit in the memory bound, several blocks' do not: then a
        # reduced loss, whose upstream gradient is one factor, makes its gradients on the way.
        self.early = options.reduction != "none" and len(labels) > self.size

    def blocks(
        self, losses: Tensor, lse: Tensor, order: Tensor, count: Tensor
    ) -> Iterator[tuple[Tokens, Statistics]]:
        """The forward, super-block by super-block, valid tokens first."""
        inputs = self.hidden, self.weight, self.bias
        for start in range(0, len(order), self.size):
            own = order[start : start + self.size]
            inside = count if len(own) == len(order) else (count - start).clamp(0, len(own))
            tokens, packed = gather(*inputs, self.labels, own, inside, self.options, self.tiles)
            settings = tokens, self.options, self.tiles, True, losses, lse
            found = forward(packed, *inputs[1:], *settings)
            # after the large kernel's launch, so that the host's work is hidden
            tokens = tokens.with_mean(packed, self.tiles)
            del packed
            yield tokens, found
            del tokens, found  # before the next super-block takes its memory

    def forward(self) -> tuple[Tensor, Tensor, Tensor, FilteredState]:
        """Losses and log-sum-exps in the caller's order, 1 / tokens, and the backward's state."""
        losses = self.hidden.new_empty(len(self.labels), dtype=torch.float32)
        lse = torch.empty_like(losses)
        order, _, count, token_weight = valid_first(self.labels, self.options.ignore_index)
        if self.options.reduction != "mean":
            token_weight = torch.ones_like(token_weight)
        blocks: list[Block] = []
        gradients = FilteredGradients(self) if self.early else None
        for tokens, statistics in self.blocks(losses, lse, order, count):
            block = Block(tokens, statistics.lse, plan(statistics, tokens, self.eps, self.tiles))
            if gradients is None:
                blocks.append(block)
            else:
                gradients.add(block, Scale(token_weight, None, tokens.total))
            del tokens, statistics, block  # before the next super-block takes its memory
        made = [] if gradients is None else [gradients]
        return losses, lse, token_weight, FilteredState(blocks, made)

    def backward(
        self, state: FilteredState, upstream: Tensor, token_weight: Tensor, of_lse: None
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.early:
            # the first backward takes what there is, another makes it again
            gradients = state.made.pop() if state.made else self.forward()[3].made.pop()
            gradients.scale(upstream)
        else:
            gradients = FilteredGradients(self)
            for block in state.blocks:
                gradients.add(block, self.scale(block, upstream, token_weight))
        return gradients.result()

    def scale(self, block: Block, upstream: Tensor, token_weight: Tensor) -> Scale:
        """The upstream gradient as the kernels take it."""
        tokens = block.tokens
        if self.options.reduction != "none":
            return Scale(upstream * token_weight, None, tokens.total)
        order = tokens.order.long()
        g = torch.where(tokens.labels[: len(order)] >= 0, upstream[order], 0.0)
        top = g.abs().amax().clamp(min=1e-30)
        token = torch.zeros_like(block.lse)
        token[: len(order)] = g / top
        total = torch.zeros_like(tokens.total)
        for i in range(0, len(order), 1024):
            part = order[i : i + 1024]
            total += token[i : i + len(part)] @ self.hidden[part].float()
        return Scale(top, token, total)


class FilteredGradients:
    """The filtered gradients that are wanted, filled super-block by super-block."""

    def __init__(self, call: FilteredCall) -> None:
        self.call, self.begun = call, False
        self.hidden, self.weight = (
            torch.empty_like(like, memory_format=torch.contiguous_format) if need else None
            for like, need in zip((call.hidden, call.weight), call.needs, strict=True)
        )

    def add(self, block: Block, scale: Scale) -> None:
        call = self.call
        inputs = call.hidden, call.weight, call.bias, *block, scale, call.options, call.tiles
        filtered.backward(*inputs, self.hidden, self.weight, accumulate=self.begun)
        self.begun = True

    def scale(self, factor: Tensor) -> None:
        for gradient in (self.hidden, self.weight):
            if gradient is not None:
                scale(gradient, factor)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        for gradient in (self.hidden, self.weight):
            if gradient is not None and not self.begun:
                gradient.zero_()
        return self.hidden, self.weight


def threshold(options: Options, vocabulary: int) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact.

    The filter adds with atomics, in an order that depends on timing, and knows no upstream gradient
    of the log-sum-exps."""
    if options.return_lse or torch.are_deterministic_algorithms_enabled():
        return None
    if options.filter_eps == "auto":
        return AUTO * vocabulary**-0.25 if vocabulary >= SMALL else None
    return options.filter_eps


def super_block(tokens: int, vocabulary: int, tiles: Tiles) -> int:
    """Tokens of a super-block, all of about the same size. Statistics are 4 bytes a pair."""
    most = min(STATISTICS // (4 * cdiv(vocabulary, tiles.width)), stored.TOKENS)
    each = cdiv(max(tokens, 1), cdiv(max(tokens, 1), max(most, tiles.rows)))
    return cdiv(each, tiles.rows) * tiles.rows


@torch.no_grad()
def filter_statistics(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> tuple[Tensor, Tensor]:
    """What the filter does to these inputs: the share of (token, block) pairs whose gradient is
    computed, kept or drawn, and the mean over valid tokens of the softmax mass in the others, which
    the profiles stand in for. 0-d, on the device."""
    kept = torch.zeros((), device=hidden.device)
    mass = torch.zeros((), device=hidden.device)
    call = call_for(hidden, weight, bias, labels, options, (True, True))
    if isinstance(call, ExactCall):
        return kept + 1, mass
    with torch.cuda.device_of(hidden):
        losses, lse = torch.empty(2, len(labels), device=hidden.device)
        order, _, count, _ = valid_first(labels, options.ignore_index)
        for tokens, statistics in call.blocks(losses, lse, order, count):
            block = plan(statistics, tokens, call.eps, call.tiles)
            kept += block.kept.sum()
            mass += block.mass.clamp(min=0).sum(dtype=torch.float32)
        valid = count.clamp(min=1)[0]
        return kept / (valid * cdiv(len(weight), call.tiles.width)), mass / valid

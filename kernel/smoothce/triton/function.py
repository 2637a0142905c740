"""The autograd function: super-blocks of tokens, when their gradients are made, what is kept."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoothce.options import Options
from smoothce.triton import filtered, stored
from smoothce.triton.exact import Exact, with_sum
from smoothce.triton.filtered import Scale
from smoothce.triton.forward import Statistics, forward
from smoothce.triton.plan import Plan, plan
from smoothce.triton.prepare import Tokens, gather, valid_first
from smoothce.triton.scale import scale
from smoothce.triton.stored import Stored
from smoothce.triton.tiles import Tiles, cdiv, tiles_for

# What filter_eps="auto" is. Unbiased: AUTO · V^(-1/4), 2^-8.3 at 256,000 entries and 2^-7.6 at
# 32,768, which gives about the same error for all. Biased: BIASED · V^(1/4), 2^-10.6 at 256,000:
# what is dropped for good must be little, and all the less the fewer blocks there are.
AUTO = 2.0**-8.3 * 256000**0.25
BIASED = 2.0**-10.6 / 256000**0.25
# Vocabularies under these sizes have too little to skip: "auto" is exact there. The unbiased filter
# was still faster at 8,192 entries; the biased one slower at 32,768, faster at 60,160.
SMALL, SMALL_BIASED = 8192, 49152
STATISTICS = 2**25  # bytes of block statistics that a super-block may have


class Block(NamedTuple):
    """What one super-block's filtered backward needs."""

    tokens: Tokens
    lse: Tensor
    plan: Plan


class Loss(torch.autograd.Function):
    """The loss, differentiable once in hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, options, differentiable):
        needs = tuple(differentiable and need for need in ctx.needs_input_grad[:3])
        call = Call(hidden, weight, bias, labels, options, needs)
        losses, lse, ctx.blocks, ctx.gradients, ctx.stored = call.forward()
        ctx.save_for_backward(hidden, weight, bias, labels, lse, call.token_weight)
        ctx.options, ctx.needs = options, needs
        if options.reduction == "none":
            return losses
        return losses.sum() * call.token_weight if options.reduction == "mean" else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, bias, labels, lse, token_weight = ctx.saved_tensors
        call = Call(hidden, weight, bias, labels, ctx.options, ctx.needs)
        call.token_weight = token_weight
        upstream = upstream.float()
        if call.early:
            # handed over, not kept: the first backward takes them, another makes them again
            gradients, ctx.gradients = ctx.gradients or call.forward()[3], None
            gradients.scale(upstream)
        elif call.eps is None:
            # handed over as well: what is stored becomes the gradients
            kept, ctx.stored = ctx.stored, None
            gradients = call.exact(lse, upstream, kept)
        else:
            gradients = call.filtered(ctx.blocks, upstream)
        return *gradients.result(), None, None, None


class Call:
    """One call's inputs, and the decisions that follow from them alone."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: Options,
        needs: tuple[bool, bool, bool],
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.labels, self.options, self.needs = labels, options, needs
        self.tiles = tiles_for(hidden, weight)
        self.eps = threshold(options, len(weight)) if any(needs) else None
        filtering = self.eps is not None
        self.size = stored.TOKENS
        if filtering:
            self.size = super_block(len(labels), len(weight), self.tiles)
        # One super-block's statistics fit in the memory bound, several blocks' do not: then a
        # reduced loss, whose upstream gradient is one factor, makes its gradients on the way.
        reduced = options.reduction != "none"
        self.early = filtering and reduced and len(labels) > self.size
        if not filtering and any(needs) and reduced:
            inputs = hidden, weight, needs, options.workspace, self.tiles
            at_once = stored.tokens_at_once(*inputs)
            self.early, self.size = at_once > 0, at_once or self.size

    def valid_first(self) -> tuple[Tensor, Tensor]:
        """All tokens' order and how many are valid; `token_weight` follows from it."""
        order, count, weight = valid_first(self.labels, self.options.ignore_index)
        self.token_weight = weight if self.options.reduction == "mean" else torch.ones_like(weight)
        return order, count

    def blocks(
        self, statistics: bool, losses: Tensor, lse: Tensor, kept: Stored | None = None
    ) -> Iterator[tuple[Tokens, Statistics]]:
        """The forward, super-block by super-block, valid tokens first."""
        order, count = self.valid_first()
        inputs = self.hidden, self.weight, self.bias
        for part in self.parts():
            own = order[part]
            inside = count if len(own) == len(order) else (count - part.start).clamp(0, len(own))
            tokens, packed = gather(*inputs, self.labels, own, inside, self.options, self.tiles)
            settings = tokens, self.options, self.tiles, statistics, losses, lse, kept
            found = forward(packed, *inputs[1:], *settings)
            if statistics:  # after the large kernel's launch, so that the host's work is hidden
                tokens = tokens.with_mean(packed, self.tiles)
            del packed
            yield tokens, found
            del tokens, found  # before the next super-block takes its memory

    def forward(
        self,
    ) -> tuple[Tensor, Tensor, list[Block], "Gradients | None", Stored | None]:
        """Losses and log-sum-exps in the caller's order, and what the backward will need."""
        losses = self.hidden.new_empty(len(self.labels), dtype=torch.float32)
        lse = torch.empty_like(losses)
        blocks: list[Block] = []
        gradients = Gradients(self) if self.early else None
        kept = None
        if self.early and self.eps is None:
            self.exact_at_once(gradients, losses, lse)
            return losses, lse, blocks, gradients, kept
        if self.eps is None and any(self.needs):
            inputs = self.hidden, self.weight, self.needs
            kept = stored.room(*inputs, self.options.workspace, self.tiles)
        for tokens, statistics in self.blocks(self.eps is not None, losses, lse, kept):
            if self.eps is None:
                continue
            unbiased = self.options.filter_unbiased
            pairs = plan(statistics, tokens, self.eps, unbiased, self.tiles)
            block = Block(tokens, statistics.lse, pairs)
            if gradients is None:
                blocks.append(block)
            else:
                gradients.add(block, Scale(self.token_weight, None, tokens.total))
            del tokens, statistics, pairs, block  # before the next super-block takes its memory
        return losses, lse, blocks, gradients, kept

    def filtered(self, blocks: list[Block], upstream: Tensor) -> "Gradients":
        gradients = Gradients(self)
        for block in blocks:
            gradients.add(block, self.scale(block, upstream))
        return gradients

    def scale(self, block: Block, upstream: Tensor) -> Scale:
        """The upstream gradient as the kernels take it."""
        tokens = block.tokens
        if self.options.reduction != "none":
            return Scale(upstream * self.token_weight, None, tokens.total)
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

    def exact(self, lse: Tensor, upstream: Tensor, kept: Stored | None) -> "Gradients":
        gradients = Gradients(self, kept)
        valid = self.options.valid(self.labels)
        token = (upstream * self.token_weight).expand(valid.shape)
        inputs = self.hidden, self.weight, self.needs
        if kept is None:
            regions = stored.regions(*inputs, self.options.workspace, self.tiles)
            regions = regions._replace(near=0, far=0)
        else:
            regions = kept.regions
        for part in self.parts():
            inside = None if kept is None else kept.part(part)
            gradients.add_exact(part, lse[part], token[part], regions, inside)
        return gradients

    def exact_at_once(self, gradients: "Gradients", losses: Tensor, lse: Tensor) -> None:
        """Losses and, up to the upstream factor, gradients, with all logits of a super-block."""
        ignore = self.options.ignore_index
        self.valid_first()
        room = stored.room_at_once(self.hidden, self.weight, self.size, self.tiles)
        for part in self.parts():
            labels = self.labels[part]
            inputs = self.hidden[part], self.weight, self.bias, labels
            tokens, packed = gather(
                *inputs, *valid_first(labels, ignore)[:2], self.options, self.tiles
            )
            kept = room.part(slice(0, len(labels)))
            settings = tokens, self.options, self.tiles, False, losses[part], lse[part], kept
            forward(packed, self.weight, self.bias, *settings)
            del tokens, packed, settings
            token = self.token_weight.expand(labels.shape)
            gradients.add_exact(part, lse[part], token, room.regions, kept)

    def parts(self) -> Iterator[slice]:
        """The super-blocks of tokens."""
        n = len(self.labels)
        for start in range(0, n, self.size):
            yield slice(start, min(start + self.size, n))


class Gradients:
    """The gradients that are wanted, filled super-block by super-block."""

    def __init__(self, call: Call, kept: Stored | None = None) -> None:
        self.call = call
        like, needs = {"memory_format": torch.contiguous_format}, call.needs
        self.hidden = self.with_sum = self.weight = None
        if needs[0] and call.eps is None:
            self.with_sum = with_sum(call.hidden, call.size)
            self.hidden = self.with_sum[: len(call.hidden)]
        elif needs[0]:
            self.hidden = torch.empty_like(call.hidden, **like)
        if needs[1]:
            self.weight = torch.empty_like(call.weight, **like) if kept is None else kept.weight
        self.bias = torch.zeros_like(call.bias, dtype=torch.float32) if needs[2] else None
        self.begun = False

    def add(self, block: Block, scale: Scale) -> None:
        """One super-block by `filtered.backward`."""
        call = self.call
        filtered.backward(
            call.hidden,
            call.weight,
            call.bias,
            block.tokens,
            block.lse,
            block.plan,
            scale,
            call.options,
            call.tiles,
            self.hidden,
            self.weight,
            self.bias,
            accumulate=self.begun,
        )
        self.begun = True

    def add_exact(
        self,
        part: slice,  # of the tokens
        lse: Tensor,  # theirs, as all that follows
        token: Tensor,  # fp32, upstream gradient
        regions: stored.Regions,
        kept: Stored | None,
    ) -> None:
        """One super-block by `exact`."""
        call = self.call
        labels = call.labels[part]
        valid = call.options.valid(labels)
        block = Exact(
            call.hidden[part],
            call.weight,
            call.bias,
            torch.where(valid, labels, -1).to(torch.int32),
            lse,
            torch.where(valid, token, 0.0),
            call.options,
            call.tiles,
            call.needs,
            regions,
            kept,
        )
        d_hidden = self.with_sum
        if d_hidden is not None:
            wide = len(d_hidden) > len(call.labels)
            d_hidden = d_hidden[part.start : part.stop + wide * (part.stop - part.start)]
        block.backward(d_hidden, self.weight, self.bias, self.begun)
        self.begun = True

    def scale(self, factor: Tensor) -> None:
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                scale(gradient, factor)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if not self.begun:
            for gradient in (self.hidden, self.weight):
                if gradient is not None:
                    gradient.zero_()
        bias = self.bias
        return self.hidden, self.weight, bias if bias is None else bias.to(self.call.bias.dtype)


def threshold(options: Options, vocabulary: int) -> float | None:
    """The 2-norm of a block's probabilities below which it may be left out; None: exact."""
    if options.filter_eps == "auto":
        if options.filter_unbiased:
            return AUTO * vocabulary**-0.25 if vocabulary >= SMALL else None
        return BIASED * vocabulary**0.25 if vocabulary >= SMALL_BIASED else None
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
    call = Call(hidden, weight, bias, labels, options, (True, True, False))
    kept = torch.zeros((), device=hidden.device)
    mass = torch.zeros((), device=hidden.device)
    if call.eps is None:
        return kept + 1, mass
    losses = torch.empty(2, len(labels), device=hidden.device)
    for tokens, statistics in call.blocks(True, *losses):
        block = plan(statistics, tokens, call.eps, options.filter_unbiased, call.tiles)
        kept += block.kept.sum()
        mass += block.mass.clamp(min=0).sum(dtype=torch.float32)
    valid = options.valid(labels).sum().clamp(min=1)
    return kept / (valid * cdiv(len(weight), call.tiles.width)), mass / valid

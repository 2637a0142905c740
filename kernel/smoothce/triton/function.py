"""The autograd function: super-blocks of tokens, when their gradients are made, what is kept."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoothce.options import Options
from smoothce.triton import exact, filtered
from smoothce.triton.filtered import Scale
from smoothce.triton.forward import forward
from smoothce.triton.plan import Plan, plan
from smoothce.triton.prepare import Tokens, gather, valid_first
from smoothce.triton.tiles import Tiles, cdiv, tiles_for

AUTO_EPS = 2.0**-12
SMALL_VOCABULARY = 8192  # below it there is too little to skip
STATISTICS = 2**25  # bytes of block statistics that a super-block may have
MOST_TOKENS = 2**15 - 256  # row lists are int16
EXACT_TOKENS = 8192  # tokens a super-block of the exact backward


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
        eps = threshold(options, len(weight)) if any(needs) else None
        tiles = tiles_for(hidden, weight)
        order, count = valid_first(labels, options.ignore_index)
        size = tokens_at_once(len(weight), tiles) if eps is not None else MOST_TOKENS
        scalar = options.reduction != "none"
        # One super-block's statistics fit in the memory bound, several blocks' do not: then a
        # reduced loss, whose upstream gradient is one factor, makes its gradients on the way.
        early = eps is not None and scalar and len(labels) > size
        token_weight = options.token_weight(labels)
        gradients = Gradients(hidden, weight, bias, needs) if early else None
        losses = hidden.new_zeros(len(labels), dtype=torch.float32)
        lse = torch.full_like(losses, float("inf"))
        blocks = []
        for start in range(0, len(labels), size):
            part = order[start : start + size]
            inside = (count - start).clamp(0, len(part))
            tokens, packed = gather(hidden, weight, bias, labels, part, inside, options, tiles)
            statistics = forward(
                packed, weight, bias, tokens, options, tiles, statistics=eps is not None
            )
            del packed
            losses.scatter_(0, part.long(), statistics.losses[: len(part)])
            lse.scatter_(0, part.long(), statistics.lse[: len(part)])
            if eps is not None:
                kept = plan(statistics, tokens, len(weight), eps, tiles)
                block = Block(tokens, statistics.lse, kept)
                if early:
                    scale = Scale(token_weight, None, tokens.total)
                    gradients.add(block, scale, options, tiles)
                else:
                    blocks.append(block)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, order)
        ctx.options, ctx.needs, ctx.tiles, ctx.eps = options, needs, tiles, eps
        ctx.blocks, ctx.gradients = blocks, gradients
        return losses.sum() * token_weight if scalar else losses

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, bias, labels, lse, _ = ctx.saved_tensors
        options, tiles = ctx.options, ctx.tiles
        upstream = upstream.float()
        if ctx.gradients is not None:
            gradients, ctx.gradients = ctx.gradients, None
            gradients.scale(upstream)
        elif ctx.eps is not None:
            gradients = Gradients(hidden, weight, bias, ctx.needs)
            for block in ctx.blocks:
                scale = block_scale(hidden, block, upstream, options, labels)
                gradients.add(block, scale, options, tiles)
        else:
            gradients = Gradients(hidden, weight, bias, ctx.needs)
            gradients.exact(labels, lse, upstream, options, tiles)
        return *gradients.result(), None, None, None


class Gradients:
    """The gradients that are wanted, filled super-block by super-block."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self.inputs = hidden, weight, bias
        self.hidden = torch.empty_like(hidden, memory_format=CONTIGUOUS) if needs[0] else None
        self.weight = torch.empty_like(weight, memory_format=CONTIGUOUS) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        self.begun = False

    def add(self, block: Block, scale: Scale, options: Options, tiles: Tiles) -> None:
        """One super-block by `filtered.backward`."""
        filtered.backward(
            *self.inputs,
            block.tokens,
            block.lse,
            block.plan,
            scale,
            options,
            tiles,
            self.hidden,
            self.weight,
            self.bias,
            accumulate=self.begun,
        )
        self.begun = True

    def exact(
        self, labels: Tensor, lse: Tensor, upstream: Tensor, options: Options, tiles: Tiles
    ) -> None:
        """All tokens by `exact.backward`."""
        hidden, weight, bias = self.inputs
        token = (upstream * options.token_weight(labels)).expand(labels.shape)
        token = torch.where(options.valid(labels), token, 0.0)
        labels = torch.where(options.valid(labels), labels, -1).to(torch.int32)
        for start in range(0, len(labels), EXACT_TOKENS):
            part = slice(start, start + EXACT_TOKENS)
            exact.backward(
                hidden[part],
                weight,
                bias,
                labels[part],
                lse[part],
                token[part],
                options,
                tiles,
                None if self.hidden is None else self.hidden[part],
                self.weight,
                self.bias,
                accumulate=self.begun,
            )
            self.begun = True

    def scale(self, factor: Tensor) -> None:
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if not self.begun:
            self.scale(torch.zeros((), device=self.inputs[0].device))
        bias = self.bias
        return self.hidden, self.weight, bias if bias is None else bias.to(self.inputs[2].dtype)


CONTIGUOUS = torch.contiguous_format


def threshold(options: Options, vocabulary: int) -> float | None:
    """The probability below which a block of a token's gradient is not recomputed; None: exact."""
    if options.filter_eps == "auto":
        return AUTO_EPS if vocabulary >= SMALL_VOCABULARY else None
    return options.filter_eps


def tokens_at_once(vocabulary: int, tiles: Tiles) -> int:
    """Tokens whose block statistics, 4 bytes a pair, stay within bounds."""
    size = STATISTICS // (4 * cdiv(vocabulary, tiles.width))
    return max(min(size, MOST_TOKENS) // tiles.rows * tiles.rows, tiles.rows)


def block_scale(
    hidden: Tensor, block: Block, upstream: Tensor, options: Options, labels: Tensor
) -> Scale:
    """The upstream gradient as the kernels take it."""
    tokens = block.tokens
    if options.reduction != "none":
        return Scale(upstream * options.token_weight(labels), None, tokens.total)
    order = tokens.order.long()
    g = torch.where(tokens.labels[: len(order)] >= 0, upstream[order], 0.0)
    top = g.abs().amax().clamp(min=1e-30)
    token = torch.zeros_like(block.lse)
    token[: len(order)] = g / top
    total = torch.zeros_like(tokens.total)
    for i in range(0, len(order), 1024):
        part = order[i : i + 1024]
        total += token[i : i + len(part)] @ hidden[part].float()
    return Scale(top, token, total)

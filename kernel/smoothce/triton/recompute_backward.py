"""Exact gradients made in the backward, in little memory: every logit is computed a second time,
and S of a chunk of the vocabulary at a time goes into both products.

S lies in dC's own memory as far as rows that are not yet written leave room, so that chunks are
large: of the V − v entries that are left, as many as have room at the memory's end beside their own
rows of dC; in a workspace where that holds more. With N = 3 D and a workspace of one unit:

    dC's memory     |dC → 0 …      |                                      S of the first chunk|
                    | 0 … |dC →          |                             S of the second chunk  |
                    | 0 …              | … |dC →  written from the workspace, the rest of them |

Only valid tokens are in E and S: they are packed before and spread out again afterwards. No atomics
and no order that depends on timing, so a first backward on equal inputs gives equal bits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from smoothce.triton.dlogits import add_times, recompute, write_hidden
from smoothce.triton.forward import Results, lse_forward
from smoothce.triton.tokens import (
    Coefficients,
    LossCall,
    PackedTokens,
    coefficients,
    gather,
    valid_first,
)
from smoothce.vocab_parallel import all_reduce_gradient

TOKENS = 8192  # most of a super-block; the filter's row lists are int16
# Bytes of the workspace, and of what dE's fp32 sum takes beyond dE: at most so many, and at most
# this share of the two gradients; but so many for the workspace alone in any case.
MOST, OF_GRADIENTS, LEAST = 112 * 2**20, 0.0965, 2**25


class Counts:
    """Numbers of valid tokens, on their way to the host: None while a CUDA graph is captured."""

    def __init__(self, counts: list[Tensor]) -> None:
        self.event, self.host = None, [None] * len(counts)
        if counts and not counts[0].is_cuda:
            self.host = counts
        elif counts and not torch.cuda.is_current_stream_capturing():
            self.host = [count.to("cpu", non_blocking=True) for count in counts]
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> list[int | None]:
        """The numbers. The host waits for their kernel alone, which ran before the forward's."""
        if self.event is not None:
            self.event.synchronize()
        return [None if count is None else count.item() for count in self.host]


class State(NamedTuple):
    """What the forward leaves for the backward."""

    tokens: list[PackedTokens]  # of each super-block
    counts: Counts


def super_blocks(n: int, size: int = TOKENS) -> list[slice]:
    """Which of the caller's tokens are packed and worked on together."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def forward_all(call: LossCall, results: Results) -> State:
    """Fill in the results; what the backward needs, if there is to be one."""
    parts = super_blocks(len(call.inputs.labels))
    orders = [valid_first(call.part(part)) for part in parts]
    state = State([], Counts([count for _, count in orders]))
    for part, (order, count) in zip(parts, orders, strict=True):
        mine = call.part(part)
        tokens, packed = gather(mine, order, count)
        state.tokens.append(lse_forward(mine, packed, tokens, results, part))
        del packed  # before the next super-block takes its memory
    return state


def backward_all(
    call: LossCall,
    state: State,
    of_loss: Tensor,  # fp32, () or (N,)
    of_lse: Tensor | None,  # (N,)
    loss_scale: Tensor,  # ()
) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias that are wanted."""
    inputs, counts = call.inputs, state.counts.values()
    (v, d), hidden = inputs.weight.shape, inputs.hidden
    fp32 = {"device": hidden.device, "dtype": torch.float32}
    d_hidden, d_weight = None, torch.empty_like(inputs.weight) if call.needs[1] else None
    d_bias = torch.zeros(v, **fp32) if call.needs[2] else None
    begun = False
    for part, tokens, n in zip(super_blocks(len(hidden)), state.tokens, counts, strict=True):
        e = hidden[part]
        if n is None or n < len(e):
            e = e.index_select(0, tokens.order[:n])
        acc = torch.zeros(len(e), d, **fp32) if call.needs[0] else None
        if len(e):
            of = coefficients(call, tokens, of_loss, loss_scale, part, of_lse)
            idle = None if begun else d_weight
            for start, stop, s in dlogits(call, e, tokens, of, idle):
                if d_weight is not None and begun:
                    d_weight[start:stop].addmm_(s.T, e)
                elif d_weight is not None:
                    torch.mm(s.T, e, out=d_weight[start:stop])
                if acc is not None:
                    add_times(acc, s, inputs.weight[start:stop])
                if d_bias is not None:
                    d_bias[start:stop] += s.sum(0, dtype=torch.float32) / inputs.scale
            begun = True
            del s  # and with it the workspace, before dE is allocated
        if acc is not None:
            d_hidden = torch.empty_like(hidden) if d_hidden is None else d_hidden
            write_hidden(call, tokens, acc, d_hidden[part])
    if not begun and d_weight is not None:
        d_weight.zero_()
    if not len(hidden) and call.needs[0]:
        d_hidden = torch.empty_like(hidden)
    return all_reduce_gradient(d_hidden, inputs.shard), d_weight, d_bias


def dlogits(
    call: LossCall,
    hidden: Tensor,  # (n, D) packed
    tokens: PackedTokens,
    of: Coefficients,
    idle: Tensor | None,  # dC while its rows are not written: its memory may be used
) -> Iterator[tuple[int, int, Tensor]]:
    """S of entries [start, stop), each until the next is asked for."""
    v, (n, d), size = len(call.inputs.weight), hidden.shape, hidden.element_size()
    most = min(MOST, OF_GRADIENTS * (v + n) * d * size)
    most = max(most - (n * d * (4 - size) if call.needs[0] else 0), LEAST)
    width = call.tiles.width
    chunk = min(max(int(most) // (n * size) // width, 1) * width, -(-v // width) * width)
    workspace, start = hidden.new_empty(n, chunk), 0
    while start < v:
        out = workspace
        if idle is not None:
            entries = (idle.numel() - start * d - 8) // (n + d) // chunk * chunk
            if entries > chunk:
                begin = (idle.numel() - entries * n) // 8 * 8
                out = idle.view(-1)[begin : begin + entries * n].view(n, entries)
        stop = min(start + out.shape[1], v)
        yield start, stop, recompute(call, hidden, tokens, of, out, start, stop)
        start = stop

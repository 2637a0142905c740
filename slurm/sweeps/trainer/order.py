"""Which conversations make optimizer step s, and which of them are computed together.

Functions of seed, s and lengths alone, without state: a resumed run needs nothing but its step.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@lru_cache(maxsize=2)  # the next step's may be another epoch's
def permutation(examples: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch, (examples,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(examples, generator=generator)


class Micro(NamedTuple):
    """What one rank computes in one forward and backward."""

    rows: list[int]
    shared: list[int]  # the micro-batch by whose targets `mean` divides: rows, or more


@dataclass(frozen=True)
class Order:
    """Shuffled epochs cut into global batches of micro-batches.

    Step s of an epoch takes rows [s·G, (s+1)·G) of that epoch's permutation, G = size · ranks ·
    accumulation; the last step of an epoch may be short.
    """

    examples: int
    seed: int
    size: int  # examples of a micro-batch on one rank
    ranks: int
    accumulation: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples / (self.size * self.ranks * self.accumulation))

    def rows(self, step: int) -> list[int]:
        """The examples of a global step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = permutation(self.examples, self.seed, epoch)
        whole = self.size * self.ranks * self.accumulation
        return order[index * whole : (index + 1) * whole].tolist()

    def micro(self, rows: list[int], number: int, rank: int) -> list[int]:
        """What `rank` computes in micro-batch `number`; may be short or empty, never skipped."""
        start = (number * self.ranks + rank) * self.size
        return rows[start : start + self.size]

    def padded(self, step: int, rank: int, lengths: Sequence[int], *, mean: bool) -> list[Micro]:
        """`accumulation` micro-batches of `size` rows, of like lengths so that little is padded.

        A `mean` averages over its micro-batches, so there the shuffled order is kept.
        """
        rows = self.rows(step)
        if not mean:
            rows.sort(key=lambda row: (lengths[row], row))
        return [Micro(own, own) for own in self._split(rows, rank)]

    def packed(
        self,
        step: int,
        rank: int,
        lengths: Sequence[int],
        room: int,
        *,
        mean: bool,
        fixed: bool = False,
    ) -> list[Micro]:
        """As few micro-batches of at most `room` tokens as the step's conversations fit in.

        All ranks get equally many, except that a `mean` stays within its micro-batch of `size`
        rows. `fixed` asks for exactly `accumulation` of any length.
        """
        rows = self.rows(step)
        if mean:
            return [
                Micro(filled, own)
                for own in self._split(rows, rank)
                for filled in ([own] if fixed else fill(own, lengths, room, 1))
            ]
        if fixed:
            whole, count = sum(lengths[row] for row in rows), self.ranks * self.accumulation
            bins = fill(rows, lengths, whole, count)
        else:
            bins = fill(rows, lengths, room, self.ranks)
        return [Micro(filled, filled) for filled in bins[rank :: self.ranks]]

    def _split(self, rows: list[int], rank: int) -> list[list[int]]:
        return [self.micro(rows, number, rank) for number in range(self.accumulation)]


def fill(rows: Sequence[int], lengths: Sequence[int], room: int, multiple: int) -> list[list[int]]:
    """Rows spread evenly over the fewest bins of at most `room` tokens, a multiple of `multiple`.

    Longest first, each into the emptiest bin (Graham's LPT rule); a row longer than `room` makes
    the bins as long as itself. Bins may be empty.
    """
    longest_first = sorted(rows, key=lambda row: (-lengths[row], row))
    total = sum(int(lengths[row]) for row in rows)
    room = max(room, int(lengths[longest_first[0]]) if longest_first else 1)
    count = multiple * max(1, math.ceil(total / room / multiple))
    while True:
        loads = [(0, number) for number in range(count)]
        bins: list[list[int]] = [[] for _ in range(count)]
        for row in longest_first:
            load, number = loads[0]
            heapq.heapreplace(loads, (load + int(lengths[row]), number))
            bins[number].append(row)
        if max(loads)[0] <= room:
            return bins
        count += multiple


def held_out(examples: int, count: int) -> tuple[list[int], list[int]]:
    """The rows to train on, and `count` rows to hold out: the same ones whatever the seed."""
    if not count:
        return list(range(examples)), []
    shuffled = torch.randperm(examples, generator=torch.Generator().manual_seed(0))
    return sorted(shuffled[count:].tolist()), sorted(shuffled[:count].tolist())

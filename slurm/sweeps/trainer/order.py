"""Which examples make optimizer step s: a function of seed and s alone, without state."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def permutation(examples: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch, (examples,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(examples, generator=generator)


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

"""Laying out a batch of questions as arrays of tokens, each question's choices as a tree.

A row of a batch holds what follows the prefix that the batch shares: the rest of a question's
context, then the last token of each node of its choices' tree but (), then padding. So what choices
have in common is computed once. Of the choices a a b x and a c c y, whose nodes (see `Job.nodes`)
are (), a, aa, aab, ac and acc, a row reads

    tokens     context   a    a     b     c     c     padding
    nodes           ()   a    aa    aab   ac    acc
    position         n   n+1  n+2   n+3   n+2   n+3

A mask lets a node see the context and only those nodes that lead to it: the second c sees the first
a and the first c, but neither the second a nor b. Positions are those that the tokens have where
each choice is read by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibeval.ask.engines import Job, Tokens

PADDING = 0  # a token that every model has


@dataclass(frozen=True)
class Layout:
    """A batch of B jobs behind a prefix, W tokens wide with P places to read; on the CPU."""

    tokens: Tensor  # (B, W)
    positions: Tensor  # (B, W)
    # (B, P): where the nodes' logits are. A row with fewer nodes repeats its last place.
    places: Tensor
    # (B, W, W): which token sees which. None where causal attention is enough.
    visible: Tensor | None


def lay_out(jobs: Sequence[Job], prefix_length: int) -> Layout:
    """The batch of some jobs behind the `prefix_length` first tokens of their contexts."""
    rows = [_row(job, prefix_length) for job in jobs]
    width = max(len(row) for row in rows)
    # Padding goes right: causal attention keeps real tokens from seeing it; no mask is needed.
    padded = [row + (PADDING,) * (width - len(row)) for row in rows]
    positions = torch.arange(prefix_length, prefix_length + width).repeat(len(jobs), 1)
    visible = None
    if not all(job.is_chain for job in jobs):
        visible = _place_trees(jobs, prefix_length, positions)
    # The places of a row are its last ones: the context's end and the nodes after it.
    last = torch.tensor([[len(row) - 1] for row in rows])
    counts = torch.tensor([[len(job.nodes)] for job in jobs])
    places = last + 1 - counts + torch.arange(int(counts.max()))
    return Layout(torch.tensor(padded), positions, places.minimum(last), visible)


def _row(job: Job, prefix_length: int) -> Tokens:
    """The job's context without the prefix, and a node's last token for each node but ()."""
    return job.context[prefix_length:] + tuple(node[-1] for node in job.nodes[1:])


def _place_trees(jobs: Sequence[Job], prefix_length: int, positions: Tensor) -> Tensor:
    """Give the nodes their `positions`, and say which tokens each sees: (B, W, W) of bool."""
    batch_size, width = positions.shape
    causal = np.tri(width, dtype=bool)
    visible = causal[None].repeat(batch_size, 0)
    for row, job in enumerate(jobs):
        ancestors = _ancestors(job)
        start = len(job.context) - prefix_length - 1  # place of node (): the context's last token
        end = start + len(ancestors)
        visible[row, start:end, start:end] = ancestors
        depths = torch.from_numpy(ancestors.sum(1)) - 1
        positions[row, start:end] = len(job.context) - 1 + depths
        # A wide tree's padding would lie beyond the positions that a model has.
        positions[row, end:] = 0
    return torch.from_numpy(visible)


def _ancestors(job: Job) -> NDArray[np.bool_]:
    """(nodes, nodes): which nodes lie on the way to each, itself among them."""
    ancestors = np.eye(len(job.nodes), dtype=bool)
    index_of: dict[Tokens, int] = {}
    for index, node in enumerate(job.nodes):
        if node:
            parent = index_of[node[:-1]]
            ancestors[index] |= ancestors[parent]
        index_of[node] = index
    return ancestors


def separate_choices(job: Job) -> list[Job]:
    """A job for each choice, for models that cannot read a tree."""
    return [Job(job.index, job.context, (branch,)) for branch in dict.fromkeys(job.branches)]


def common_prefix(rows: Sequence[Tokens]) -> int:
    """Length of the longest prefix that all rows share."""
    # All other rows lie between these two in dictionary order.
    first = min(rows)
    last = max(rows)
    for index, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return index
    return min(len(first), len(last))

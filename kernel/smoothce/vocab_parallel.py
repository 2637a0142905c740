"""A vocabulary split over the ranks of a process group: each holds some of the classifier's rows.

Hidden states and labels are the same on every rank. A rank walks over its own rows; what it finds
of each token (log-sum-exp, the target's logit, Σ_v u_v z_v) is gathered and joined, a few numbers a
token, and from then on its gradient of the classifier is its own business. The gradient of the
hidden states is summed over the ranks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Shard(NamedTuple):
    """Which entries of the vocabulary this rank has: [offset, offset + its rows) of `total`."""

    group: dist.ProcessGroup
    offset: int
    total: int

    def local_part(self, vector: Tensor | None, rows: int) -> Tensor | None:
        """This rank's part of a vector over the whole vocabulary, or of its own part already."""
        if vector is None or len(vector) == rows:
            return vector
        return vector[self.offset : self.offset + rows]


def local_shard(weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Shard]:
    """This rank's rows, and where they lie. A plain tensor is taken for as many rows as every other
    rank has; a DTensor knows. Raises ValueError for one that is split another way."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if type(weight).__name__ != "DTensor":
        return weight, Shard(group, rank * len(weight), ranks * len(weight))
    split = weight.placements
    if len(split) != 1 or not split[0].is_shard(0) or weight.device_mesh.size() != ranks:
        raise ValueError(
            "weight must be split by rows over process_group, Shard(0) on a mesh of its "
            f"{ranks} ranks, not {tuple(split)} over {weight.device_mesh.size()}"
        )
    each = -(-len(weight) // ranks)  # as torch.chunk cuts
    return weight.to_local(), Shard(group, min(rank * each, len(weight)), len(weight))


def shards_agree(shard: Shard, labels: Tensor, rows: int) -> Tensor:  # () bool
    """Whether all ranks have the same labels, and parts that are one vocabulary."""
    place = torch.arange(1, len(labels) + 1, device=labels.device)
    mine = torch.stack([labels.new_tensor(shard.offset + rows), (labels * place).sum()])
    found = all_gather_stacked(mine, shard)
    ends = torch.cat([found.new_zeros(1), found[:, 0]])
    starts = all_gather_stacked(labels.new_tensor([shard.offset]), shard)[:, 0]
    whole = (starts == ends[:-1]).all() & (ends[-1] == shard.total)
    return whole & (found[:, 1] == found[0, 1]).all()


def all_gather_stacked(mine: Tensor, shard: Shard) -> Tensor:  # (ranks, *mine.shape)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, mine.contiguous(), group=shard.group)
    return torch.stack(parts)


class TokenLogitSums(NamedTuple):
    """What a walk over (a part of) the vocabulary finds of each token, (n,) each, in nats."""

    lse: Tensor
    target: Tensor  # the target's logit; 0 where it is another rank's
    mixed: Tensor  # Σ_v u_v z_v
    # The rest where statistics are asked.
    expected: Tensor | None = None  # Σ_v p_v z_v
    top: Tensor | None = None  # the largest logit ...
    argmax: Tensor | None = None  # ... and its entry in the whole vocabulary, int64


def merge_shards(mine: TokenLogitSums, shard: Shard | None) -> TokenLogitSums:
    """The same over the whole vocabulary."""
    if shard is None:
        return mine
    columns = torch.stack([x for x in mine[:5] if x is not None])
    lse, target, mixed, *rest = all_gather_stacked(columns, shard).unbind(1)
    whole = lse.logsumexp(0)
    found = TokenLogitSums(whole, target.sum(0), mixed.sum(0))
    if not rest:
        return found
    expected, top = rest
    first, share = top.argmax(0, keepdim=True), (lse - whole).exp()
    return found._replace(
        expected=torch.where(share > 0, share * expected, 0).sum(0),
        top=top.amax(0),
        argmax=all_gather_stacked(mine.argmax, shard).gather(0, first)[0],
    )


def all_reduce_gradient(gradient: Tensor | None, shard: Shard | None) -> Tensor | None:
    """The gradient of what every rank has, in place."""
    if gradient is not None and shard is not None:
        dist.all_reduce(gradient, group=shard.group)
    return gradient

"""A vocabulary split over the ranks of a process group: each holds some of the classifier's rows.

Hidden states and labels are the same on every rank. A rank goes over its own rows. What it finds of
each token (`TokenLogitSums`, a few numbers a token) is gathered and joined with what the others
find. From then on its gradient of the classifier is its own business, and the gradient of the
hidden states is summed over the ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Shard(NamedTuple):
    """Which entries of the vocabulary this rank has: those from `first_entry` on, of `entries`.

    Every rank has `most_rows` entries, the last one perhaps fewer."""

    group: dist.ProcessGroup
    first_entry: int
    entries: int

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def most_rows(self) -> int:
        """Rows of the rank that has most, the same number on every rank."""
        return -(-self.entries // self.ranks)

    @property
    def least_rows(self) -> int:
        """Rows of the rank that has least, the same number on every rank."""
        return max(self.entries - (self.ranks - 1) * self.most_rows, 0)

    def local_part(self, name: str, vector: Tensor | None, rows: int) -> Tensor | None:
        """Return this rank's part of a vector (V,) over the whole vocabulary.

        A vector that is as long as this rank has rows is taken for the part itself. Raises
        ValueError for any other length. All ranks raise alike, but for one length: a vector as long
        as another rank's part raises here and passes there."""
        if vector is None or vector.shape == (rows,):
            return vector
        if vector.shape != (self.entries,):
            raise ValueError(
                f"{name} must be ({rows},), this rank's part, or ({self.entries},), the whole "
                f"vocabulary's, not {tuple(vector.shape)}"
            )
        return vector[self.first_entry : self.first_entry + rows]


def local_shard(weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Shard]:
    """Return this rank's rows, and where they lie in the vocabulary.

    A DTensor knows where, and its last rank may have fewer rows. Of a plain tensor every rank has
    equally many. Raises ValueError, on every rank, for a DTensor that is split another way than by
    rows over this group, or that leaves a rank without rows.
    """
    if type(weight).__name__ == "DTensor":
        return _local_shard_of_dtensor(weight, group)
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    return weight, Shard(group, first_entry=rank * len(weight), entries=ranks * len(weight))


def _local_shard_of_dtensor(weight: Any, group: dist.ProcessGroup) -> tuple[Tensor, Shard]:
    # `weight` is Any because importing DTensor would cost those who have none.
    ranks = dist.get_world_size(group)
    placements = weight.placements
    by_rows = len(placements) == 1 and placements[0].is_shard(0)
    if not by_rows or weight.device_mesh.size() != ranks:
        raise ValueError(
            "weight must be split by rows over process_group, Shard(0) on a mesh of its "
            f"{ranks} ranks, not {tuple(placements)} over {weight.device_mesh.size()}"
        )
    entries = len(weight)
    shard = Shard(group, first_entry=0, entries=entries)
    if shard.least_rows < 1:
        raise ValueError(
            "weight must have at least one row on each rank of process_group, "
            f"not {entries} rows over {ranks} ranks, {shard.most_rows} on the first"
        )
    first_entry = dist.get_rank(group) * shard.most_rows
    return weight.to_local(), shard._replace(first_entry=first_entry)


def shards_agree(shard: Shard, labels: Tensor, rows: int) -> Tensor:  # () bool
    """Tell whether all ranks have the same labels, as far as a checksum of them tells, and parts
    that make one vocabulary.

    It stays on the device, so that nothing waits for the host.
    """
    place = torch.arange(1, len(labels) + 1, device=labels.device)
    checksum = (labels * place).sum()
    start = labels.new_tensor(shard.first_entry)
    of_this_rank = torch.stack([start, start + rows, checksum])
    starts, ends, checksums = all_gather_stacked(of_this_rank, shard).unbind(1)
    previous_ends = torch.cat([ends.new_zeros(1), ends[:-1]])
    one_vocabulary = (starts == previous_ends).all() & (ends[-1] == shard.entries)
    return one_vocabulary & (checksums == checksums[0]).all()


def all_gather_stacked(mine: Tensor, shard: Shard) -> Tensor:  # (ranks, *mine.shape)
    parts = [torch.empty_like(mine) for _ in range(shard.ranks)]
    dist.all_gather(parts, mine.contiguous(), group=shard.group)
    return torch.stack(parts)


class TokenLogitSums(NamedTuple):
    """What a walk over the vocabulary, or a part of it, finds of each token: (n,) each, in nats."""

    lse: Tensor  # logsumexp_v z_v
    label_logit: Tensor  # 0 where the label is another rank's entry
    smoothing_logit: Tensor  # Σ_v u_v z_v, the mean logit under the smoothing target
    # The rest is there where statistics are asked for.
    expected_logit: Tensor | None = None  # Σ_v p_v z_v, the mean logit under the softmax
    largest_logit: Tensor | None = None
    # int64, the entry of the largest logit, numbered in the whole vocabulary
    argmax: Tensor | None = None


def merge_shards(mine: TokenLogitSums, shard: Shard | None) -> TokenLogitSums:
    """Return the sums over the whole vocabulary, from this rank's and the others'."""
    if shard is None:
        return mine
    numbers = [mine.lse, mine.label_logit, mine.smoothing_logit]
    if mine.expected_logit is not None and mine.largest_logit is not None:
        numbers += [mine.expected_logit, mine.largest_logit]
    gathered = all_gather_stacked(torch.stack(numbers), shard)
    lse, label_logit, smoothing_logit, *statistics = gathered.unbind(1)
    merged = TokenLogitSums(lse.logsumexp(0), label_logit.sum(0), smoothing_logit.sum(0))
    if mine.argmax is None:
        return merged
    expected_logit, largest_logit = statistics
    argmax = all_gather_stacked(mine.argmax, shard)
    probability = (lse - merged.lse).exp()  # of a rank's part of the vocabulary
    # A part of probability 0 may have an expected logit of −∞, which adds nothing.
    terms = torch.where(probability > 0, probability * expected_logit, 0)
    best_rank = largest_logit.argmax(0, keepdim=True)
    return merged._replace(
        expected_logit=terms.sum(0),
        largest_logit=largest_logit.amax(0),
        argmax=argmax.gather(0, best_rank)[0],
    )


def all_reduce_gradient(gradient: Tensor | None, shard: Shard | None) -> Tensor | None:
    """Sum, in place, the ranks' parts of the gradient of what all of them have."""
    if gradient is not None and shard is not None:
        dist.all_reduce(gradient, group=shard.group)
    return gradient

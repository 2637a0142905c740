"""Which conversations each update of a run has, and in which micro-batches its ranks compute them.

Which conversations an update has follows from its step, the seed, the data with what is held out,
and the global batch size, which is a multiple of the number of ranks. Packing and an interruption
change how an update is computed, not what it is.

An update's conversations form one block, or under `reduce_loss: mean` several blocks of
per_device_train_batch_size conversations. The losses of a block are summed, and the sum is divided
by the block's divisor. A block is computed in one or several micro-batches, which have its divisor:
rows of a conversation each, padded, or one row of conversations end to end. (The descriptions of
the keys, which are for users, call each per_device_train_batch_size conversations a micro-batch.)

The loss of an update, which its gradient belongs to, is

    (1 / ranks) Σ_micro-batches (sum of the losses of the micro-batch's targets) / divisor

because micro-batches add their gradients and ranks average theirs.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from calibeval.io import InputError
from sweeps.training.options import TrainOptions
from sweeps.training.tokenization import IGNORE

# An epoch is shuffled with seed · stride + epoch, so that epoch 1 of seed 42 is not epoch 0 of
# seed 43.
EPOCH_SEED_STRIDE = 1_000_003


class Block(NamedTuple):
    """Conversations whose summed losses are divided by the same number."""

    conversations: np.ndarray
    divisor: float


class TokenCounts(NamedTuple):
    """How many tokens some updates have, and how many of them are targets of the loss."""

    tokens: int
    targets: int


class Updates(Sequence[list[Block]]):
    """The updates of a run over all ranks: `updates[step]` is the blocks of update `step`.

    Update s of an epoch takes conversations [s·G, (s+1)·G) of that epoch's permutation, where
    G = per_device_train_batch_size · ranks · gradient_accumulation_steps; the last update of an
    epoch may be short. A conversation is the number of its row in `tokens`, the result of
    `tokenize_file`.

    Raises InputError where no conversation is left to train on.
    """

    def __init__(self, train_options: TrainOptions, tokens: Dataset, ranks: int) -> None:
        self.train_options = train_options
        self.ranks = ranks
        self.fingerprint = tokens._fingerprint
        self.tokens = tokens.select_columns(["input_ids", "labels"])
        counts = tokens.select_columns(["length", "targets"]).with_format("numpy")[:]
        self.lengths = counts["length"]
        self.target_counts = counts["targets"]

        usable = np.flatnonzero(self.target_counts)
        held_out = train_options.held_out
        if len(usable) <= held_out:
            raise InputError(
                f"{train_options.train_file}: an assistant's token within max_seq_length="
                f"{train_options.max_seq_length} is in {len(usable)} of {len(tokens)} "
                f"conversations, less {held_out} of train.held_out: none is left to train"
            )
        # Which ones are held out depends on which conversations are usable, never on the run's
        # seed.
        order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(0)).numpy()
        self.held_out_conversations = np.sort(usable[order[:held_out]])
        self.train_conversations = np.sort(usable[order[held_out:]])
        self.global_batch_size = (
            train_options.per_device_train_batch_size
            * ranks
            * train_options.gradient_accumulation_steps
        )
        self.updates_per_epoch = math.ceil(len(self.train_conversations) / self.global_batch_size)

    def __len__(self) -> int:
        """The number of updates of the whole run."""
        if self.train_options.max_train_steps is not None:
            return self.train_options.max_train_steps
        return self.train_options.num_train_epochs * self.updates_per_epoch

    def __getitem__(self, step: Any) -> Any:
        """An update's blocks, each with what its summed loss is divided by.

        The loss of an update is a sum over its blocks, whichever ranks compute them. What a block
        adds to it, with Σ for the sum of the block's losses:

            reduce_loss   what a block adds to the loss        the block's divisor
            sum           Σ / (ranks · accumulation)           accumulation
            token_mean    Σ / targets of the update            targets of the update / ranks
            mean          Σ / (targets of the block            targets of the block · accumulation
                               · ranks · accumulation)

        where accumulation is gradient_accumulation_steps. The divisor lacks the factor `ranks`,
        because the average over ranks divides by it.

        Under `mean` a block is per_device_train_batch_size conversations, also at the end of an
        epoch, where an update has fewer blocks than ranks · accumulation, and so a smaller loss.
        """
        if step >= len(self):
            raise IndexError(step)
        conversations = self.conversations_of(step)
        accumulation = self.train_options.gradient_accumulation_steps
        if self.train_options.reduce_loss == "sum":
            return [Block(conversations, float(accumulation))]
        if self.train_options.reduce_loss == "token_mean":
            return [self._token_mean(conversations)]
        size = self.train_options.per_device_train_batch_size
        blocks = []
        for start in range(0, len(conversations), size):
            members = conversations[start : start + size]
            targets = int(self.target_counts[members].sum())
            blocks.append(Block(members, float(targets * accumulation)))
        return blocks

    def _token_mean(self, conversations: np.ndarray) -> Block:
        return Block(conversations, int(self.target_counts[conversations].sum()) / self.ranks)

    @property
    def held_out(self) -> list[list[Block]]:
        """The held-out conversations as one update, whose loss is the mean over their targets."""
        return [[self._token_mean(self.held_out_conversations)]]

    @property
    def summary(self) -> str:
        """One line about the data, for the run's log."""
        usable = self.target_counts > 0
        return (
            f"data: {usable.sum()} conversations, {self.lengths[usable].sum()} tokens, "
            f"{self.target_counts.sum()} targets, {(~usable).sum()} dropped"
        )

    def conversations_of(self, step: int) -> np.ndarray:
        """The conversations of an update, over all ranks."""
        epoch, index = divmod(step, self.updates_per_epoch)
        order = epoch_permutation(len(self.train_conversations), self.train_options.seed, epoch)
        start = index * self.global_batch_size
        return self.train_conversations[order[start : start + self.global_batch_size]]

    def count_tokens(self, steps: Iterable[int]) -> TokenCounts:
        """The tokens and targets of these updates, over all ranks."""
        conversations = np.concatenate([self.conversations_of(step) for step in steps])
        return TokenCounts(
            tokens=int(self.lengths[conversations].sum()),
            targets=int(self.target_counts[conversations].sum()),
        )

    def target_frequencies(self, vocabulary_size: int) -> Tensor:
        """The share of each token among the targets of an epoch, (vocabulary_size,) fp32."""
        table = self.tokens.with_format("arrow")[self.train_conversations.tolist()]
        labels = table["labels"].combine_chunks().flatten().to_numpy()
        counts = np.bincount(labels[labels != IGNORE], minlength=vocabulary_size)
        return torch.tensor(counts / counts.sum(), dtype=torch.float32)


class MicroBatches(torch.utils.data.Dataset):
    """The micro-batches of a rank: item i is one of update i // per_update.

    An item is the rows of its conversations, and what their summed loss is divided by. Every update
    has `per_update` of them on every rank, because ranks that share weights (FSDP, ZeRO-3) gather
    these in each; some may have no conversations.

    Padded, a micro-batch is per_device_train_batch_size conversations of similar lengths. Packed,
    it has at most max_tokens tokens, or one conversation; and the micro-batches of a block have
    about equally many tokens.
    """

    def __init__(
        self, data: Updates, updates: Sequence[list[Block]], rank: int, packed: bool
    ) -> None:
        self.data = data
        self.updates = updates
        self.rank = rank
        self.packed = packed
        blocks = len(updates[0])  # No update has more.
        self.per_block = self._fewest_of_a_block(1 if blocks > 1 else data.ranks)
        self.per_update = math.ceil(blocks * self.per_block / data.ranks)

    def __len__(self) -> int:
        return len(self.updates) * self.per_update

    def __getitem__(self, index: int) -> tuple[list[dict[str, list[int]]], float]:
        update, number = divmod(index, self.per_update)
        conversations, divisor = self.of_update(update, self.rank)[number]
        if not conversations:
            return [], divisor
        return self.data.tokens.__getitems__(conversations), divisor

    def of_update(self, update: int, rank: int) -> list[tuple[list[int], float]]:
        """A rank's micro-batches of an update: their conversations, and each one's divisor."""
        micro_batches = []
        for block in self.updates[update]:
            for conversations in self._split(block.conversations, self.per_block):
                micro_batches.append((conversations, block.divisor))
        own = micro_batches[rank :: self.data.ranks]
        own += [([], 1.0)] * (self.per_update - len(own))
        return own

    def _fewest_of_a_block(self, step: int) -> int:
        """The smallest multiple of `step` that every block can be split into."""
        count = step
        for update in self.updates:
            for block in update:
                while not self._fits(block.conversations, count):
                    count += step
        return count

    def _fits(self, conversations: np.ndarray, count: int) -> bool:
        """Whether so many micro-batches are enough for the conversations of a block."""
        if not self.packed:
            return len(conversations) <= count * self._padded_size
        limit = self.data.train_options.max_tokens
        return all(
            len(row) < 2 or self.data.lengths[row].sum() <= limit
            for row in self._split(conversations, count)
        )

    @property
    def _padded_size(self) -> int:
        return self.data.train_options.per_device_train_batch_size

    def _split(self, conversations: np.ndarray, count: int) -> list[list[int]]:
        """Conversations in at most `count` micro-batches."""
        if self.packed:
            return balanced_rows(conversations, self.data.lengths, count)
        ordered = sorted(conversations.tolist(), key=lambda i: (self.data.lengths[i], i))
        size = self._padded_size
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]


@lru_cache(maxsize=2)  # The updates between two rows of the log may belong to two epochs.
def epoch_permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits its conversations, (count,)."""
    generator = torch.Generator().manual_seed(seed * EPOCH_SEED_STRIDE + epoch)
    return torch.randperm(count, generator=generator).numpy()


def balanced_rows(conversations: np.ndarray, lengths: np.ndarray, count: int) -> list[list[int]]:
    """Conversations in `count` rows: the longest first, each into the row with fewest tokens."""
    rows: list[list[int]] = [[] for _ in range(count)]
    fill = [(0, number) for number in range(count)]  # a heap of (tokens, row)
    pairs = zip(lengths[conversations].tolist(), conversations.tolist(), strict=True)
    for length, conversation in sorted(pairs, reverse=True):
        tokens, number = fill[0]
        rows[number].append(conversation)
        heapq.heapreplace(fill, (tokens + length, number))
    return rows

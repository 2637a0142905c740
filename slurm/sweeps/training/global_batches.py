"""What each update of a run computes: conversations dealt to ranks and micro-batches, as tensors.

Which conversations an update has follows from its step, the seed, the data with what is held out,
and the global batch size, which is a multiple of the number of ranks. Packing and an interruption
change how an update is computed, not what it is.

An update's conversations form one block, or under `reduce_loss: mean` several blocks of
per_device_train_batch_size conversations. The losses of a block are summed, and the sum is divided
by the block's divisor. Here a micro-batch is what one rank computes at once: a packed row of
conversations end to end, or padded rows of one conversation each. Each block is split into such
micro-batches, which have its divisor, and these are dealt to the ranks. (The descriptions of the
keys, which are for users, call each per_device_train_batch_size conversations a micro-batch.)

The loss of an update, which its gradient belongs to, is

    (1 / ranks) Σ_micro-batches (sum of the losses of the micro-batch's targets) / divisor

because micro-batches add their gradients and ranks average theirs. `fit.install_loss` makes the
model's loss that sum, `SweepTrainer.training_step` divides it, and `_blocks_with_divisors` says by
what. So neither packing nor the number of micro-batches on a rank changes an update.

Another way of packing is another answer to two questions: which conversations a micro-batch has
(`split_into_micro_batches`), and which tensors they become (`collate`). All ranks must get equally
many micro-batches, one without conversations must have tensors too, and the divisor stays the
block's. `model_loading.try_packing` decides whether it is used, `attention` keeps conversations
apart.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening

from calibeval.io import InputError
from sweeps.training.options import TrainOptions
from sweeps.training.tokenization import IGNORE

LENGTH_STEP = 128  # tokens: `length_bound` is a multiple of it
# An epoch is shuffled with seed · stride + epoch, so that epoch 1 of seed 42 is not epoch 0 of
# seed 43.
EPOCH_SEED_STRIDE = 1_000_003


class Block(NamedTuple):
    """Conversations of an update whose summed losses are divided by the same number."""

    conversations: np.ndarray
    divisor: float


class PlannedMicroBatch(NamedTuple):
    """Which conversations a micro-batch has, and what its summed loss is divided by."""

    conversations: Sequence[int]
    divisor: float


class MicroBatch(NamedTuple):
    """The tensors of a micro-batch, and what its summed loss is divided by."""

    inputs: dict[str, Any]
    divisor: float


class TokenCounts(NamedTuple):
    """How many tokens some updates have, and how many of them are targets of the loss."""

    tokens: int
    targets: int


class GlobalBatchDataset(torch.utils.data.Dataset):
    """The updates of a run: `dataset[step]` is this rank's list of micro-batches of update `step`.

    Update s of an epoch takes conversations [s·G, (s+1)·G) of that epoch's permutation, where
    G = per_device_train_batch_size · ranks · gradient_accumulation_steps; the last update of an
    epoch may be short. A conversation is the number of its row in `tokens`, the result of
    `tokenize_file`.

    Raises InputError where no conversation is left to train on.
    """

    def __init__(
        self,
        train_options: TrainOptions,
        tokens: Dataset,
        *,
        ranks: int,
        rank: int,
        pad_token_id: int,
    ) -> None:
        self.train_options = train_options
        self.ranks = ranks
        self.rank = rank
        self.pad_token_id = pad_token_id
        self.packed = False
        self.row_multiple = 1
        self.length_bound = 0  # tokens of the longest segment or more, once `use_packing` is called
        self.fingerprint = tokens._fingerprint
        self.tokens = tokens.select_columns(["input_ids", "labels"]).with_format("torch")
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

    def use_packing(self, row_multiple: int) -> None:
        """Make packed batches from now on.

        Their rows are padded at the end to a multiple of `row_multiple` tokens.
        """
        self.packed = True
        self.row_multiple = row_multiple
        # Attention wants a bound on the length of every segment of a packed row. The padding at a
        # row's end is a segment too, of at most `row_multiple` tokens (see `_padding_length`).
        longest_segment = max(int(self.lengths.max()), row_multiple)
        self.length_bound = round_up(longest_segment, LENGTH_STEP)

    def __len__(self) -> int:
        """The number of updates of the whole run."""
        if self.train_options.max_train_steps is not None:
            return self.train_options.max_train_steps
        return self.train_options.num_train_epochs * self.updates_per_epoch

    def __getitem__(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of an update."""
        micro_batches = []
        for planned in self.plan_update(step)[self.rank]:
            inputs = self.collate(planned.conversations)
            micro_batches.append(MicroBatch(inputs, planned.divisor))
        return micro_batches

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

    def held_out_batches(self) -> Iterator[dict[str, Any]]:
        """This rank's batches of the held-out conversations; equally many for every rank."""
        micro_batches = self.split_into_micro_batches(self.held_out_conversations)
        while len(micro_batches) % self.ranks:
            micro_batches.append([])
        for conversations in micro_batches[self.rank :: self.ranks]:
            yield self.collate(conversations)

    def plan_update(self, step: int) -> list[list[PlannedMicroBatch]]:
        """For each rank the micro-batches of an update; equally many for every rank.

        A block's conversations may be packed into several micro-batches, which share its divisor.
        """
        planned = []
        for block in self._blocks_with_divisors(step):
            for conversations in self.split_into_micro_batches(block.conversations):
                planned.append(PlannedMicroBatch(conversations, block.divisor))
        by_rank = [planned[rank :: self.ranks] for rank in range(self.ranks)]
        most = max(len(micro_batches) for micro_batches in by_rank)
        for micro_batches in by_rank:
            while len(micro_batches) < most:  # Every rank takes part in every gathering.
                micro_batches.append(PlannedMicroBatch([], 1.0))
        return by_rank

    def _blocks_with_divisors(self, step: int) -> list[Block]:
        """An update's conversations in blocks, each with what its summed loss is divided by.

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
        conversations = self.conversations_of(step)
        accumulation = self.train_options.gradient_accumulation_steps
        if self.train_options.reduce_loss == "sum":
            return [Block(conversations, float(accumulation))]
        if self.train_options.reduce_loss == "token_mean":
            targets = int(self.target_counts[conversations].sum())
            return [Block(conversations, targets / self.ranks)]
        size = self.train_options.per_device_train_batch_size
        blocks = []
        for start in range(0, len(conversations), size):
            members = conversations[start : start + size]
            targets = int(self.target_counts[members].sum())
            blocks.append(Block(members, float(targets * accumulation)))
        return blocks

    def split_into_micro_batches(
        self, conversations: Sequence[int] | np.ndarray
    ) -> list[list[int]]:
        """Conversations split into micro-batches: packed rows, or batches of similar lengths."""
        numbers = [int(conversation) for conversation in conversations]
        by_length = sorted(numbers, key=lambda number: (self.lengths[number], number))
        if self.packed:
            return pack_rows(by_length[::-1], self.lengths, self.train_options.max_tokens)
        size = self.train_options.per_device_train_batch_size
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def collate(self, conversations: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """The model's inputs for some conversations: end to end in one row, or in a row each.

        Rows of one conversation each are padded to the longest. Without any conversation the inputs
        are padding alone, which has no target.
        """
        numbers = [int(conversation) for conversation in conversations]
        members: list[dict[str, Tensor]] = []  # `input_ids` and `labels` of each conversation
        if numbers:
            members = self.tokens.__getitems__(numbers)
        padding_length = self._padding_length(members)
        if padding_length > 0:
            # It is appended as a conversation of its own, which no other token sees.
            padding = {
                "input_ids": torch.full((padding_length,), self.pad_token_id),
                "labels": torch.full((padding_length,), IGNORE),
            }
            members.append(padding)
        if self.packed:
            batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(members)
            # One number for all batches, so that compiled layers are not compiled again.
            batch["max_length_q"] = self.length_bound
            batch["max_length_k"] = self.length_bound
            return batch
        # There is no attention mask: causal tokens never see the padding that follows them.
        ids = [member["input_ids"] for member in members]
        labels = [member["labels"] for member in members]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
        }

    def _padding_length(self, members: list[dict[str, Tensor]]) -> int:
        """How many tokens of padding follow the members, to a multiple of `row_multiple`.

        A micro-batch without members is `row_multiple` tokens of padding. Batches of padded rows,
        for which `row_multiple` is 1, get none otherwise.
        """
        if not members:
            return self.row_multiple
        total = sum(len(member["labels"]) for member in members)
        return round_up(total, self.row_multiple) - total


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


# Two epochs, as the updates between two rows of the log may belong to two (`count_tokens`).
@lru_cache(maxsize=2)
def epoch_permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits its conversations, (count,)."""
    generator = torch.Generator().manual_seed(seed * EPOCH_SEED_STRIDE + epoch)
    return torch.randperm(count, generator=generator).numpy()


def pack_rows(
    longest_first: Sequence[int], lengths: Sequence[int] | np.ndarray, max_tokens: int
) -> list[list[int]]:
    """Conversations in rows of at most `max_tokens`, each in the first row with room for it.

    A conversation that is longer than `max_tokens` has a row of its own. (First-fit decreasing.)
    """
    rows: list[list[int]] = []
    room: list[int] = []  # tokens that are free in each row
    for conversation in longest_first:
        length = int(lengths[conversation])
        place = next((i for i, free in enumerate(room) if length <= free), None)
        if place is None:
            rows.append([conversation])
            room.append(max_tokens - length)
        else:
            rows[place].append(conversation)
            room[place] -= length
    return rows

"""A file of conversations → tokens, kept by `datasets` → what each update computes."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening

from calibeval.engines import load_tokenizer
from calibeval.io import InputError, read_text, sha256
from sweeps.runs.conversations import conversations
from sweeps.runs.files import locked
from sweeps.runs.processes import end_with_parent
from sweeps.training.options import Train

IGNORE = -100
SHARE = 5000  # conversations that are worth a process
TILE = 128  # tokens: packed rows are filled up to a multiple of it on a GPU


def make_tokenizer(keys: Train):
    """The run's tokenizer, with the chat template asked for."""
    tokenizer = load_tokenizer(keys.tokenizer_name or keys.model_name_or_path)
    name = tokenizer.name_or_path
    if keys.chat_template_name or not tokenizer.chat_template:
        if tokenizer.eos_token is None:
            raise InputError(
                f"{name}: the tokenizer has neither a chat template nor an end-of-sequence token; "
                "set one in its tokenizer_config.json"
            )
        template = f"{keys.chat_template_name or 'tulu'}.jinja"
        tokenizer.chat_template = read_text(Path(__file__).parent / "chat_templates" / template)
    if keys.add_bos:
        template, bos = tokenizer.chat_template, tokenizer.bos_token
        if bos is None:
            raise InputError(f"train.add_bos: {name} has no such token")
        if "bos_token" in template or bos in template:
            raise InputError("train.add_bos: the chat template already adds that token")
        tokenizer.chat_template = "{{ bos_token }}" + template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # what is padded has no target: any token will do
    return tokenizer


def tokenised(keys: Train, tokenizer) -> Dataset:
    """Each conversation's `input_ids`, `labels` (−100 where nothing is learnt), their `length` and
    `targets`; made once for a file, tokenizer, template and length, by all cores."""
    path = Path(keys.train_file)
    limit = keys.max_train_samples and keys.max_train_samples + keys.held_out
    text = digest(sha256(path), limit)
    known = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template)
    made = digest(text, *known, tokenizer.special_tokens_map, keys.max_seq_length, 1)
    ids, count = List(Value("int32")), Value("int32")
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    os.register_at_fork(after_in_child=end_with_parent)  # of a killed run nobody stays behind
    with locked(folder / f"{made}.lock", math.inf, ""):  # ranks and runs that begin together
        try:
            given = {"path": path, "limit": limit}
            rows = Dataset.from_generator(texts, gen_kwargs=given, fingerprint=text)
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None
        threads = os.environ.get("TOKENIZERS_PARALLELISM", "true")
        found = rows.map(
            encoded,
            batched=True,
            fn_kwargs={"tokenizer": tokenizer, "longest": keys.max_seq_length},
            remove_columns="messages",
            features=Features({"input_ids": ids, "labels": ids, "length": count, "targets": count}),
            num_proc=min(len(os.sched_getaffinity(0)), math.ceil(len(rows) / SHARE)),
            new_fingerprint=made,
        )
    # datasets leaves it at false for good, and the prompts of scoring would have one core.
    os.environ["TOKENIZERS_PARALLELISM"] = threads
    return found


def digest(*known: object) -> str:
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def texts(path: Path, limit: int | None) -> Iterator[dict]:
    for messages in conversations(path, limit):
        yield {"messages": json.dumps(messages)}


def encoded(batch: dict, tokenizer, longest: int | None) -> dict:
    """The columns of a batch of conversations."""
    found = {"input_ids": [], "labels": [], "length": [], "targets": []}
    for ids, said in encode([json.loads(text) for text in batch["messages"]], tokenizer):
        ids, keep = np.asarray(ids[:longest], dtype=np.int32), np.asarray(said[:longest], bool)
        keep[:1] = False  # nothing predicts the first token
        row = (ids, np.where(keep, ids, IGNORE), len(ids), int(keep.sum()))
        for column, value in zip(found.values(), row, strict=True):
            column.append(value)
    return found


def encode(part: list[list[dict]], tokenizer) -> Iterator[tuple[list[int], Sequence[bool]]]:
    """Each conversation's tokens, and whether the assistant wrote them.

    Where the template has {% generation %}, it says so itself; else that is what the template
    writes for each of the assistant's messages. A token belongs to where its text begins.
    """
    if re.search(r"{%-?\s*generation", tokenizer.chat_template):
        marks = {"return_dict": True, "return_assistant_tokens_mask": True}
        read = tokenizer.apply_chat_template(part, **marks)
        yield from zip(read["input_ids"], read["assistant_masks"], strict=True)
        return
    written, spans = zip(*(render(messages, tokenizer) for messages in part), strict=True)
    read = tokenizer(list(written), add_special_tokens=False, return_offsets_mapping=True)
    for ids, places, said in zip(read["input_ids"], read["offset_mapping"], spans, strict=True):
        begins = np.asarray(places).reshape(-1, 2)[:, 0]
        keep = np.zeros(len(begins), dtype=bool)
        for start, end in said:
            keep |= (begins >= start) & (begins < end)
        yield ids, keep


def render(messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text, and the characters that the assistant wrote."""
    templated = partial(tokenizer.apply_chat_template, tokenize=False)
    text, spans = templated(messages), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Templates refuse to write nothing: of a first message its head is learnt too.
        before = templated(messages[:i], add_generation_prompt=True) if i else ""
        upto = text if i + 1 == len(messages) else templated(messages[: i + 1])
        if not (upto.startswith(before) and text.startswith(upto)):
            raise InputError(
                f"{tokenizer.name_or_path}: its chat template rewrites earlier messages, so the "
                "assistant's part cannot be told apart; use train.chat_template_name=tulu"
            )
        spans.append((len(before), len(upto)))
    return text, spans


class Updates(torch.utils.data.Dataset):
    """Each update of a run as the micro-batches of one rank: a function of seed and step alone.

    Update s of an epoch takes conversations [s·G, (s+1)·G) of that epoch's permutation, G = size ·
    ranks · accumulation, however they are computed; an epoch's last update may be short.
    """

    def __init__(self, keys: Train, data: Dataset, *, ranks: int, rank: int, pad: int) -> None:
        self.keys, self.ranks, self.rank, self.pad = keys, ranks, rank, pad
        self.packed, self.tile = False, 1
        self.data = data.select_columns(["input_ids", "labels"]).with_format("torch")
        self.digest = data._fingerprint
        counts = data.select_columns(["length", "targets"]).with_format("numpy")[:]
        self.lengths, self.targets = counts["length"], counts["targets"]
        self.longest = -(-int(self.lengths.max()) // 128) * 128  # the same for every batch
        usable = np.flatnonzero(self.targets)
        if len(usable) <= keys.held_out:
            raise InputError(
                f"{keys.train_file}: an assistant's token within max_seq_length="
                f"{keys.max_seq_length} is in {len(usable)} of {len(data)} conversations, less "
                f"{keys.held_out} of train.held_out: none is left to train"
            )
        apart = torch.randperm(len(usable), generator=torch.Generator().manual_seed(0)).numpy()
        self.held = np.sort(usable[apart[: keys.held_out]])
        self.kept = np.sort(usable[apart[keys.held_out :]])
        self.whole = keys.per_device_train_batch_size * ranks * keys.gradient_accumulation_steps
        self.an_epoch = math.ceil(len(self.kept) / self.whole)

    def __len__(self) -> int:
        return self.keys.max_train_steps or self.keys.num_train_epochs * self.an_epoch

    def rows(self, step: int) -> np.ndarray:
        """The conversations of an update, of all ranks."""
        epoch, index = divmod(step, self.an_epoch)
        order = permutation(len(self.kept), self.keys.seed, epoch)
        return self.kept[order[index * self.whole : (index + 1) * self.whole]]

    def counts(self, steps: Iterable[int]) -> tuple[int, int]:
        """Tokens and targets of these updates, of all ranks."""
        rows = np.concatenate([self.rows(step) for step in steps])
        return int(self.lengths[rows].sum()), int(self.targets[rows].sum())

    def frequencies(self, size: int) -> Tensor:
        """The share of each of `size` tokens among the targets of an epoch, (size,) fp32."""
        kept = self.data.with_format("arrow")[self.kept.tolist()]
        labels = kept["labels"].combine_chunks().flatten().to_numpy()
        counts = np.bincount(labels[labels != IGNORE], minlength=size)
        return torch.tensor(counts / counts.sum(), dtype=torch.float32)

    def held_out(self) -> Iterator[dict]:
        """This rank's batches of the conversations held out."""
        bins = self.bins(self.held)
        bins += [[]] * (-len(bins) % self.ranks)  # equally many for every rank
        for rows in bins[self.rank :: self.ranks]:
            yield self.batch(rows)

    @property
    def summary(self) -> str:
        usable = self.targets > 0
        return (
            f"data: {usable.sum()} conversations, {self.lengths[usable].sum()} tokens, "
            f"{self.targets.sum()} targets, {(~usable).sum()} dropped"
        )

    def __getitem__(self, step: int) -> list[tuple[dict, float]]:
        """This rank's micro-batches, and what the summed loss of each is divided by."""
        return [(self.batch(rows), divisor) for rows, divisor in self.micros(step)[self.rank]]

    def micros(self, step: int) -> list[list[tuple[Sequence[int], float]]]:
        """Conversations and divisor of each rank's micro-batches, equally many for every rank.

        Ranks' gradients are averaged. A mean divides by the targets of the `size` conversations
        that it is the mean of, however they are packed.
        """
        rows, size = self.rows(step), self.keys.per_device_train_batch_size
        steps = self.keys.gradient_accumulation_steps
        if self.keys.reduce_loss == "mean":
            blocks = [rows[i : i + size] for i in range(0, len(rows), size)]
            shares = [(block, steps * self.targets[block].sum()) for block in blocks]
        else:
            summed = self.keys.reduce_loss == "sum"
            shares = [(rows, steps if summed else self.targets[rows].sum() / self.ranks)]
        found = [(bin, divisor) for block, divisor in shares for bin in self.bins(block)]
        ranks = [found[rank :: self.ranks] for rank in range(self.ranks)]
        most = max(map(len, ranks))
        return [micros + [([], 1)] * (most - len(micros)) for micros in ranks]

    def bins(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows in micro-batches: packed, or of like lengths."""
        by_length = sorted((int(row) for row in rows), key=lambda row: (self.lengths[row], row))
        if self.packed:
            return fill(by_length[::-1], self.lengths, self.keys.max_tokens)
        size = self.keys.per_device_train_batch_size
        return [by_length[i : i + size] for i in range(0, len(rows), size)]

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor | int]:
        """The rows padded or end to end; without any, padding alone, which has no target."""
        found = self.data.__getitems__([int(row) for row in rows]) if len(rows) else []
        # What fills it up is a conversation of its own.
        if rest := -sum(len(row["labels"]) for row in found) % self.tile if found else self.tile:
            fills = {"input_ids": self.pad, "labels": IGNORE}
            found.append({name: torch.full((rest,), fill) for name, fill in fills.items()})
        if self.packed:
            flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(found)
            return flat | {"max_length_q": self.longest, "max_length_k": self.longest}
        ids, labels = ([row[name] for row in found] for name in ("input_ids", "labels"))
        # Without a mask: causal tokens never see the padding that follows them.
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
        }


@lru_cache(maxsize=2)  # the next update's may be another epoch's
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, (count,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).numpy()


def fill(longest_first: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows in bins of at most `room` tokens, each in the first with room for it; one that is
    longer than `room` has a bin of its own."""
    bins: list[list[int]] = []
    left: list[int] = []
    for row in longest_first:
        length = int(lengths[row])
        place = next((i for i, free in enumerate(left) if length <= free), len(bins))
        if place == len(bins):
            bins.append([])
            left.append(room)
        bins[place].append(row)
        left[place] -= length
    return bins

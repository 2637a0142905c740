"""Chat data: `messages` → tokens, with loss on what the assistant says and nowhere else."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sweeps.errors import SweepError

IGNORE = -100
CHUNK = 1000  # rows a tokenizer call: large enough for its threads, small enough for memory

# The Tulu format, for tokenizers without a template of their own.
TULU_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Examples:
    """Tokenised examples in two flat arrays; example i is [offsets[i], offsets[i + 1])."""

    tokens: np.ndarray  # (total,) int32
    supervised: np.ndarray  # (total,) bool: the loss counts this token as a target
    offsets: np.ndarray  # (n + 1,) int64
    dropped: int  # rows without a single target inside max_seq_length

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def targets(self) -> np.ndarray:
        """Targets of each example, (n,); its first token is never one, nothing predicts it."""
        inner = self.supervised.copy()
        inner[self.offsets[:-1]] = False
        return np.add.reduceat(inner.astype(np.int64), self.offsets[:-1])

    def collate(self, rows: list[int], size: int, pad: int) -> dict[str, Tensor]:
        """A right-padded batch of `size` rows; missing rows become one token without a target."""
        lengths = [int(self.offsets[row + 1] - self.offsets[row]) for row in rows]
        width = max(lengths, default=1)
        ids = torch.full((size, width), pad, dtype=torch.long)
        labels = torch.full((size, width), IGNORE, dtype=torch.long)
        mask = torch.zeros((size, width), dtype=torch.long)
        mask[:, 0] = 1
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            span = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
            ids[i, :length] = torch.from_numpy(self.tokens[span].astype(np.int64))
            keep = torch.from_numpy(self.supervised[span])
            labels[i, :length] = torch.where(keep, ids[i, :length], IGNORE)
            mask[i, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def set_template(tokenizer, name: str | None) -> None:
    """Give the tokenizer the Tulu template if asked for, or if it has none."""
    if name == "tulu" or not tokenizer.chat_template:
        if tokenizer.eos_token is None:
            raise SweepError(
                f"{tokenizer.name_or_path}: the tokenizer has neither a chat template nor an "
                "end-of-sequence token; set one in its tokenizer_config.json"
            )
        tokenizer.chat_template = TULU_TEMPLATE


def read_messages(path: Path, limit: int | None) -> list[list[dict]]:
    """The conversations of a JSON-lines file; raises SweepError naming the line that is not one."""
    rows = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            try:
                messages = json.loads(line)["messages"]
                fine = bool(messages) and all(
                    isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages
                )
            except (json.JSONDecodeError, KeyError, TypeError):
                fine = False
            if not fine:
                raise SweepError(
                    f'{path}:{number}: expected {{"messages": [{{"role": …, "content": …}}, …]}}, '
                    f"found {line.strip()[:80]!r}"
                )
            rows.append(messages)
    if not rows:
        raise SweepError(f"{path}: no examples in this file")
    return rows


def render(tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The conversation's text and the character spans that the assistant wrote."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:i], tokenize=False, add_generation_prompt=True
        )
        upto = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not (upto.startswith(before) and text.startswith(upto)):
            raise SweepError(
                f"{tokenizer.name_or_path}: its chat template rewrites earlier messages, so the "
                "assistant's part cannot be told apart; use train.chat_template_name=tulu"
            )
        spans.append((len(before), len(upto)))
    return text, spans


def load_examples(
    path: Path, tokenizer, max_length: int | None, limit: int | None = None
) -> Examples:
    """Tokenise a `messages` file.

    A token is a target when its first character lies in an assistant's span. Rows are cut at
    `max_length` tokens; rows left without a target are dropped and counted.
    """
    if not tokenizer.is_fast:
        raise SweepError(
            f"{tokenizer.name_or_path}: a fast tokenizer (tokenizer.json) is needed to find the "
            "assistant's tokens; convert it with transformers' AutoTokenizer"
        )
    conversations = read_messages(path, limit)
    tokens, supervised, lengths, dropped = [], [], [], 0
    for start in range(0, len(conversations), CHUNK):
        rendered = [render(tokenizer, m) for m in conversations[start : start + CHUNK]]
        encoded = tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        for ids, places, (_, spans) in zip(
            encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True
        ):
            ids = ids[:max_length]
            keep = [any(a <= first < b for a, b in spans) for first, _ in places[:max_length]]
            if not any(keep[1:]):
                dropped += 1
                continue
            tokens.append(np.asarray(ids, dtype=np.int32))
            supervised.append(np.asarray(keep, dtype=bool))
            lengths.append(len(ids))
    if not lengths:
        raise SweepError(
            f"{path}: none of the {dropped} conversations has an assistant's token within "
            f"max_seq_length={max_length}"
        )
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Examples(np.concatenate(tokens), np.concatenate(supervised), offsets, dropped)

"""Answers that a transformers model writes."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from calibeval.ask.engines import Tokens, Writing, Written
from calibeval.ask.engines.token_tree import PADDING

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

TOKENS_AT_ONCE = 8


@dataclass(frozen=True)
class Prefix:
    """What the model keeps of the tokens that a group of prompts shares."""

    length: int = 0
    cache: "Cache | None" = None

    def of_rows(self, count: int) -> "Cache | None":
        """Return a copy of the cache for a batch of so many rows."""
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            cache.batch_repeat_interleave(count)
        return cache


class _Ends(StoppingCriteria):
    """Notes where each row of a batch ends: at an end token, or where a stop text is complete."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", end_tokens: set[int], stop: tuple[str, ...]
    ):
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.stop = stop
        # A part of a character is decoded to U+FFFD.
        self.last_characters = {text[-1] for text in stop} | {"\ufffd"}
        self.may_complete_stop: dict[int, bool] = {}  # by token
        self.begin(0)

    def begin(self, answers_start: int) -> None:
        """Take another batch, in whose rows answers start at this place."""
        self.answers_start = answers_start
        self.length_of_row: dict[int, int] = {}

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended, (B,) of bool."""
        for row, tokens in enumerate(input_ids[:, self.answers_start :].tolist()):
            if row not in self.length_of_row and self._ends(tokens):
                self.length_of_row[row] = len(tokens)
        ended = [row in self.length_of_row for row in range(len(input_ids))]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, tokens: list[int]) -> bool:
        last = tokens[-1]
        if last in self.end_tokens:
            return True
        # Decoding every answer after each token would take longer than the model does.
        if last not in self.may_complete_stop:
            text = str(self.tokenizer.decode([last]))
            # By itself a token may lose a space at its beginning.
            is_possible = any(end in text or end == " " for end in self.last_characters)
            self.may_complete_stop[last] = is_possible
        if not self.may_complete_stop[last]:
            return False
        answer = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return any(stop in answer for stop in self.stop)


def write(
    model: "PreTrainedModel",
    contexts: Sequence[Tokens],
    how: Writing,
    tokenizer: "PreTrainedTokenizerBase",
    batch_size: int,
    prefix: Prefix,
) -> list[list[Written]]:
    """Return `how.count` answers to each context, from batches of so many answers.

    All contexts begin with the prefix. Answers are written a few tokens at a time: most are short,
    and a batch goes on until its longest has ended.
    """
    rows = [context for context in contexts for _ in range(how.count)]
    answers: list[Tokens] = [()] * len(rows)
    is_cut = [True] * len(rows)
    unfinished = [*range(len(rows))]
    written = 0  # tokens of each unfinished answer
    ends = _Ends(tokenizer, _end_tokens(model, tokenizer), how.stop)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(how.seed)
        while unfinished and written < how.max_tokens:
            more = min(TOKENS_AT_ONCE, how.max_tokens - written)
            with _settings_of(model, how, more):
                for start in range(0, len(unfinished), batch_size):
                    batch = unfinished[start : start + batch_size]
                    tokens, mask = _padded(
                        [rows[row] + answers[row] for row in batch], prefix.length
                    )
                    ends.begin(tokens.shape[1] - written)
                    output = model.generate(  # type: ignore[operator]
                        tokens.to(model.device),
                        attention_mask=mask.to(model.device),
                        past_key_values=prefix.of_rows(len(batch)),
                        stopping_criteria=StoppingCriteriaList([ends]),
                    )
                    found = output[:, ends.answers_start :].tolist()
                    for place, (row, answer) in enumerate(zip(batch, found, strict=True)):
                        length = ends.length_of_row.get(place)
                        answers[row] = tuple(answer[:length])
                        is_cut[row] = length is None
            unfinished = [row for row in unfinished if is_cut[row]]
            written += more
    every = [Written(answer, cut) for answer, cut in zip(answers, is_cut, strict=True)]
    return [every[start : start + how.count] for start in range(0, len(every), how.count)]


def _end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens with which the model ends a text: its tokenizer's and its own, as vLLM has it."""
    own = model.generation_config.eos_token_id
    end_tokens = set(own if isinstance(own, list) else [own])
    end_tokens.add(tokenizer.eos_token_id)
    return end_tokens - {None}


@contextmanager
def _settings_of(model: "PreTrainedModel", how: Writing, tokens: int) -> Iterator[None]:
    """Let the model write so many tokens in this way, and not as its folder says."""
    previous = model.generation_config
    options: dict[str, Any] = {"do_sample": False}
    if how.temperature > 0:
        options = {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(
        max_new_tokens=tokens,
        pad_token_id=PADDING,
        **options,
    )
    try:
        yield
    finally:
        model.generation_config = previous


def _padded(contexts: Sequence[Tokens], prefix_length: int) -> tuple[Tensor, Tensor]:
    """The contexts' tokens and which of them are no padding, (B, W) both.

    Padding goes between the prefix and the rest, so that all rows end together.
    """
    width = max(len(context) for context in contexts)
    tokens = []
    mask = []
    for context in contexts:
        padding = width - len(context)
        prefix, rest = context[:prefix_length], context[prefix_length:]
        tokens.append(prefix + (PADDING,) * padding + rest)
        mask.append([1] * len(prefix) + [0] * padding + [1] * len(rest))
    return torch.tensor(tokens), torch.tensor(mask)

"""Answers that a transformers model writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from calibeval.ask.engines import Tokens, Writing, Written
from calibeval.ask.engines.token_tree import PADDING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class _Ends(StoppingCriteria):
    """Notes where each row of a batch ends: at an end token, or where a stop text is complete."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: set[int],
        stop: tuple[str, ...],
        prompt_length: int,
    ):
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.stop = stop
        self.prompt_length = prompt_length
        self.length_of_row: dict[int, int] = {}

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended, (B,) of bool."""
        for row, tokens in enumerate(input_ids[:, self.prompt_length :].tolist()):
            if row not in self.length_of_row and self._ends(tokens):
                self.length_of_row[row] = len(tokens)
        ended = [row in self.length_of_row for row in range(len(input_ids))]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self.end_tokens:
            return True
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return any(stop in text for stop in self.stop)


@torch.inference_mode()
def write(
    model: "PreTrainedModel",
    contexts: Sequence[Tokens],
    how: Writing,
    tokenizer: "PreTrainedTokenizerBase",
    batch_size: int,
) -> list[list[Written]]:
    """Return `how.count` answers to each context, from batches of so many contexts."""
    answers = []
    end_tokens = _end_tokens(model, tokenizer)
    devices = [model.device] if model.device.type == "cuda" else []
    with _settings_of(model, how), torch.random.fork_rng(devices):
        for start in range(0, len(contexts), batch_size):
            tokens, mask = _padded(contexts[start : start + batch_size])
            ends = _Ends(tokenizer, end_tokens, how.stop, tokens.shape[1])
            torch.manual_seed(how.seed + start)
            output = model.generate(  # type: ignore[operator]
                tokens.to(model.device),
                attention_mask=mask.to(model.device),
                stopping_criteria=StoppingCriteriaList([ends]),
            )
            rows = output[:, tokens.shape[1] :].tolist()
            written = []
            for number, row in enumerate(rows):
                length = ends.length_of_row.get(number)
                written.append(Written(tuple(row[:length]), is_cut=length is None))
            for first in range(0, len(written), how.count):
                answers.append(written[first : first + how.count])
    return answers


def _end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens with which the model ends a text: its tokenizer's and its own, as vLLM has it."""
    own = model.generation_config.eos_token_id
    end_tokens = set(own if isinstance(own, list) else [own])
    end_tokens.add(tokenizer.eos_token_id)
    return end_tokens - {None}


@contextmanager
def _settings_of(model: "PreTrainedModel", how: Writing) -> Iterator[None]:
    """Let the model write so, and not as its folder says."""
    previous = model.generation_config
    options: dict[str, Any] = {"do_sample": False}
    if how.temperature > 0:
        options = {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(
        max_new_tokens=how.max_tokens,
        num_return_sequences=how.count,
        pad_token_id=PADDING,
        **options,
    )
    try:
        yield
    finally:
        model.generation_config = previous


def _padded(contexts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """The contexts' tokens and which of them are no padding, (B, W) both; padding goes left."""
    width = max(len(context) for context in contexts)
    tokens = [(PADDING,) * (width - len(context)) + context for context in contexts]
    mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
    return torch.tensor(tokens), torch.tensor(mask)

"""Engines: from prompts' token ids to the letters' log-probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from calibeval.io import InputError


@dataclass(frozen=True)
class Job:
    """One question for an engine: the context's tokens and how to read its letters (see `Plan`)."""

    index: int
    tokens: tuple[int, ...]
    spine: tuple[int, ...]
    letters: tuple[tuple[int, int], ...]  # (depth, id)


@dataclass
class Usage:
    """Prompt tokens that a run was given and those it computed."""

    prompt_tokens: int = 0
    computed_tokens: int = 0


class Engine(Protocol):
    """What scoring needs of an engine."""

    tokenizer: object
    max_length: int
    usage: Usage

    def score(self, groups: list[list[Job]]) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each letter); a group shares a prompt prefix."""

    def describe(self) -> dict:
        """Engine settings that the figures depend on."""

    def versions(self) -> dict[str, str]:
        """Versions of the packages that compute the figures."""


def load_tokenizer(model: str, revision: str | None = None):
    """The model's tokenizer; a folder without a usable one raises `InputError`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{model}: its tokenizer cannot be loaded: {first_line(error)}") from error


def load_max_length(model: str, revision: str | None = None) -> int:
    """Longest prompt of a model that is not loaded."""
    from transformers import AutoConfig

    try:
        return context_length(AutoConfig.from_pretrained(model, revision=revision))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{model}: its config cannot be loaded: {first_line(error)}") from error


def context_length(config) -> int:
    """Longest prompt: the model's positions less one, which the answer takes."""
    return (getattr(config, "max_position_embeddings", None) or 2**20) - 1


def first_line(error: Exception) -> str:
    """An exception's first line: libraries append pages of advice."""
    return str(error).strip().split("\n")[0]

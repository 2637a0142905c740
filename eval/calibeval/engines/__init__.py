"""Engines: from prompts' token ids to the letters' log-probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


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

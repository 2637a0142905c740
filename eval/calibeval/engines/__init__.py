"""Engines: from prompts' token ids to the choices' log-probabilities.

score(groups)   yields (job index, log-probability of each branch); a group shares a prefix
describe()      settings that the figures depend on, the precision in use among them
versions        of the packages that compute the figures
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from calibeval.io import InputError


@dataclass(frozen=True)
class Job:
    """One question for an engine: the context's tokens, and those of each choice."""

    index: int
    tokens: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """What follows the context where a branch's next token is asked for: () and, depth first,
        every beginning of a branch.

        Branches of one token, as most tokenizers make of letters, have the node () alone.
        """
        return tuple(sorted({branch[:i] for branch in self.branches for i in range(len(branch))}))

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node goes on from the last, so that causal attention is enough."""
        return all(len(node) == i for i, node in enumerate(self.nodes))

    @property
    def length(self) -> int:
        """Tokens of the longest prompt: the context and the deepest node."""
        return len(self.tokens) + max(map(len, self.nodes))


def load(auto, model: str, what: str, revision: str | None = None, **options):
    """`auto.from_pretrained`; a folder without a usable part raises `InputError`."""
    try:
        return auto.from_pretrained(model, revision=revision, **options)
    except Exception as error:  # whatever a damaged file makes a library raise
        why = f"{model}: cannot be loaded as {what}: {shortened(error) or type(error).__name__}"
        if not Path(model).exists():
            why += f" (there is no folder {model} here, so taken for a hub name)"
        raise InputError(why) from error


def load_tokenizer(model: str, revision: str | None = None):
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return load(AutoTokenizer, model, "a tokenizer", revision)


def text_config(config):
    """The language model's part of a config that has parts; transformers before 4.45 tells none."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(config) -> int | None:
    """Longest prompt: the model's positions less one, which the answer takes; None: no limit."""
    positions = getattr(text_config(config), "max_position_embeddings", None)
    return positions - 1 if positions else None


def shortened(error: Exception) -> str:
    """What an exception says, in one line: libraries append pages of advice."""
    return " ".join(str(error).split())[:300]

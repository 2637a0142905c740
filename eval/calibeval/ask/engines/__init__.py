"""Engines: from prompts' token ids to the choices' log-probabilities.

    transformers   `hf.TransformersEngine`, with `hf_model` (loading), `token_tree` (batches) and
                   `hf_writing` (answers); `adaptive.AdaptiveEngine` is one
    vllm           `vllm.VllmEngine`

An engine knows tokens alone, neither questions nor files: it gets groups of `Job`s.

To add an engine:

- write a module here with a class that has what the protocol `Engine` asks for;
- make one in `create_engine`, and add its name to `request.EngineName`;
- make whatever it needs to be told a field of `request.Request`, from which the command line has it
  too, and of `request.EngineOptions`; say in `Request._options_are_the_engines` which engine it is
  for, and pass it on in `create_engine`;
- where such an option changes scores, as a quantization does, put it under a name of its own into
  `describe`, and that name into `records.store.DECISIVE_OF_ENGINES`. A file begun with one value
  would go on with another otherwise, unnoticed.

Sweeps (`sweeps.training.fit`, `sweeps.launch.preflight`) know engines by name as well.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from typing_extensions import assert_never

from calibeval.ask.request import Request
from calibeval.io import InputError, refuse_what_is_waited_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Tokens = tuple[int, ...]
ERROR_LENGTH = 300  # characters of a library's message that are shown


@dataclass(frozen=True)
class Job:
    """One question for an engine: the context's tokens, and those of each choice."""

    index: int
    context: Tokens
    branches: tuple[Tokens, ...]

    @cached_property
    def nodes(self) -> tuple[Tokens, ...]:
        """The beginnings of branches after which a branch's next token is asked for.

        They are the nodes of a tree of tokens, depth first: the first is (), the context's end,
        and a node comes after its parent, which is the node without its last token. Branches of
        one token, as most tokenizers make of letters, have the node () alone.
        """
        beginnings = set()
        for branch in self.branches:
            for length in range(len(branch)):
                beginnings.add(branch[:length])
        return tuple(sorted(beginnings))

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it, so that causal attention is enough."""
        return all(len(node) == depth for depth, node in enumerate(self.nodes))

    @property
    def length(self) -> int:
        """The most tokens that are read to score a choice: the context and the deepest node.

        A choice's last token is not read, since nothing is asked of what follows it.
        """
        return len(self.context) + max(len(node) for node in self.nodes)


@dataclass(frozen=True)
class Writing:
    """How answers are to be written."""

    max_tokens: int
    stop: tuple[str, ...]  # texts, any of which ends an answer
    count: int = 1  # of answers to each context
    temperature: float = 0.0  # 0: the likeliest token each time
    seed: int = 0


class Written(NamedTuple):
    """An answer that a model has written."""

    tokens: Tokens  # with the one that ends it, by which a stop text is complete
    is_cut: bool  # whether `max_tokens` ended it


class Engine(Protocol):
    """What computes log-probabilities with a model."""

    versions: dict[str, str]
    """Versions of the packages that compute the scores; they go into every record."""

    def score(
        self, groups: list[list[Job]], skip: Container[int] = ()
    ) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, natural log-probability of each branch), in any order.

        The jobs of a group share a prefix. `skip` holds the indices of jobs whose scores are known.
        They are not left out of `groups`, since an engine may need to know them to batch the others
        as if nothing had been interrupted: padding to another width changes the last digits. It may
        yield their scores as well.
        """
        ...

    def write(
        self, contexts: Sequence[Tokens], how: "Writing", tokenizer: "PreTrainedTokenizerBase"
    ) -> list[list["Written"]]:
        """Return `how.count` answers to each context, of the model's own probabilities.

        Whatever the model's folder says of sampling, such as top-p, is left out.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Settings that the scores depend on, under the names that go into the sidecar."""
        ...

    def close(self) -> None:
        """Give back what the engine holds, and leave a model that came loaded as it was."""
        ...


def create_engine(
    model: "str | PreTrainedModel", request: Request, max_model_length: int
) -> Engine:
    """The engine that the request asks for, with the model loaded.

    `max_model_length` is what the function of this name says of all that will be scored. A model
    that the engine cannot run raises `InputError`.
    """
    if request.temperature_head is not None:
        from calibeval.ask.adaptive import AdaptiveEngine

        return AdaptiveEngine(
            model,
            Path(request.temperature_head),
            dtype=request.dtype,
            batch_size=request.batch_size,
            revision=request.revision,
        )
    if request.engine == "transformers":
        from calibeval.ask.engines.hf import TransformersEngine

        return TransformersEngine(
            model, dtype=request.dtype, batch_size=request.batch_size, revision=request.revision
        )
    if request.engine == "vllm":
        from calibeval.ask.engines.vllm import VllmEngine

        if not isinstance(model, str):
            raise InputError("engine vllm: loads a folder or a name on the hub, not a loaded model")
        return VllmEngine(
            model,
            max_model_length=max_model_length,
            dtype=request.dtype,
            revision=request.revision,
            gpu_memory_utilization=request.gpu_memory_utilization,
        )
    assert_never(request.engine)


def load(
    auto_class: Any, model: str, what: str, revision: str | None = None, **options: Any
) -> Any:
    """`auto_class.from_pretrained(model)`; a folder without a usable part raises `InputError`.

    `auto_class` is one of transformers' Auto classes, and `what` says in the message what it was
    to load: "a tokenizer". `options` are passed on. Code that comes with the model is not run.
    """
    if Path(model).is_dir():
        refuse_what_is_waited_for(Path(model))
    try:
        # Without a False, transformers asks whether to run it, and takes a piped y for an answer.
        return auto_class.from_pretrained(
            model, revision=revision, trust_remote_code=False, **options
        )
    except Exception as error:  # whatever a damaged file makes a library raise
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{model}: brings code of its own, which is not run (trust_remote_code=False): "
                "take a model of a class that transformers has; to score this one, load it by a "
                "script of yours and give it to calibeval.score"
            ) from error
        reason = shortened(error) or type(error).__name__
        message = f"{model}: cannot be loaded as {what}: {reason}"
        if not Path(model).exists():
            message += f" (there is no folder {model} here, so taken for a hub name)"
        raise InputError(message) from error


def load_tokenizer(model: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The model's tokenizer; `InputError` where there is none."""
    from transformers import AutoTokenizer

    return load(AutoTokenizer, model, "a tokenizer", revision)


def load_config(model: str, revision: str | None = None) -> "PretrainedConfig":
    """The model's configuration; `InputError` where there is none."""
    from transformers import AutoConfig

    return load(AutoConfig, model, "a config", revision)


def text_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """The language model's part of a config that has parts; transformers before 4.45 tells none."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config


# --- How long prompts may be ---
#
# Of a question a model reads the context and each choice but for the choice's last token, since
# nothing is asked of what follows that. vLLM then samples one token behind what is read. So of a
# model with P positions
#
#     letters   context + longest letter − 1 ≤ P − 1
#     texts     context + longest text       ≤ P − 1
#
# For example, P is 2048. Behind a context of 2047 tokens a letter of one token fits: 2047 tokens
# are read, and vLLM is told 2048. Behind a context of 2040 a text of 7 fits (2040 + 7): 2046 are
# read, and vLLM is told 2047. A text of 8 does not fit there, though only 2047 tokens would be
# read.
#
# P − 1 is `prompt_limit`. What is added to the context's length here is the way of scoring's to say
# (`prompts.ScoringMode.length_after_context`). What vLLM is told to have positions for, the tokens
# that are read and the one that is sampled, is `max_model_length`: P at most, of texts P − 1.
#
# So texts could have one token more, and both could have one more on transformers, which samples
# none. Neither is given: one token more for texts would change the prompts of old records, and
# one more on transformers would make prompts depend on the engine.


def prompt_limit(config: "PretrainedConfig") -> int | None:
    """The most tokens of a context and what counts after it: the model's positions less one.

    None where the model's positions have no limit, or its config calls it by another name than
    `max_position_embeddings`.
    """
    positions = getattr(text_config(config), "max_position_embeddings", None)
    if not positions:
        return None
    return positions - 1


def max_model_length(jobs: Iterable[Job]) -> int:
    """How many positions vLLM needs for these jobs: the tokens that are read, and one sampled."""
    return max(job.length for job in jobs) + 1


def shortened(error: Exception) -> str:
    """What an exception says, in one line: libraries append pages of advice."""
    return " ".join(str(error).split())[:ERROR_LENGTH]

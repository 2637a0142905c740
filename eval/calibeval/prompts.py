"""From questions to prompt text, and from text to token ids: the ways of scoring.

    letters       the choices are lettered in the prompt, and log P of " A", " B", … follows it:
                  hendrycks/test's evaluate.py, byte for byte
    continuation  log P of each choice's own text after the context: lm-evaluation-harness's
                  hellaswag, arc_* and mmlu_*_continuation

To add a way of scoring, derive a class from `ScoringMode`, put it into `SCORING_MODES` below, and
add its name to `request.ScoringName` and to `scoring` of `records.Record`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from calibeval.io import InputError
from calibeval.questions import LETTERS, Question, Subject
from calibeval.request import Normalization, ScoringName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The official formatter puts a space before each word of the subject, after one of its own.
LETTERS_HEADER = "The following are multiple choice questions (with answers) about  {}.\n\n"
TEXTS_AT_ONCE = 1000  # for a tokenizer

# Token ids of each choice. With c the context's ids and b the ids of choice i,
# log P(choice i) = Σ_j log P(b[j] | c, b[0], …, b[j − 1]).
Branches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Prompt:
    """A question's context, ready to be followed by " A", " B", … or by its `endings`."""

    question: Question
    text: str
    shots: int
    endings: tuple[str, ...] = ()  # empty where letters follow

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 text, and of the endings where there are any; kept in the record."""
        return hashlib.sha256("\0".join([self.text, *self.endings]).encode()).hexdigest()


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt, and of each choice after it."""

    context: list[int]
    branches: Branches


class ScoringMode(ABC):
    """A way of asking questions; an instance asks them of one tokenizer."""

    default_shots: ClassVar[int]
    """Few-shot examples of a task that does not say how many."""
    counts_last_token: ClassVar[bool]
    """Whether a prompt must leave room for all tokens of a choice, or for all but the last."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer

    @staticmethod
    @abstractmethod
    def build(subject: Subject, question: Question, shots: int) -> Prompt:
        """Header, the first `shots` examples with their answers, the question up to its answer."""

    @abstractmethod
    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids; `InputError` where the tokenizer cannot tell choices apart."""

    @staticmethod
    @abstractmethod
    def record_fields(prompt: Prompt, normalise: Normalization) -> dict[str, Any]:
        """What a question's record holds because it was asked in this way."""

    def length_after_context(self, branches: Branches) -> int:
        """How many tokens after the context must fit into what the model reads."""
        longest = max(len(branch) for branch in branches)
        return longest if self.counts_last_token else longest - 1


class LetterScoring(ScoringMode):
    """The choices are listed, and the letters that name them are scored."""

    default_shots = 5  # hendrycks/test's
    counts_last_token = False

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        super().__init__(tokenizer)
        self._branches: dict[tuple[str, int], Branches] = {}

    @staticmethod
    def build(subject: Subject, question: Question, shots: int) -> Prompt:
        """The prompt of hendrycks/test."""
        text = LETTERS_HEADER.format(subject.topic)
        for example in subject.shots[:shots]:
            text += f"{lettered(example)} {LETTERS[example.label]}\n\n"
        return Prompt(question, text + lettered(question), shots)

    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids, and those of the letters after them."""
        contexts = encode(self.tokenizer, [prompt.text for prompt in prompts])
        return [
            TokenizedPrompt(context, self._letters_after(prompt))
            for prompt, context in zip(prompts, contexts, strict=True)
        ]

    def _letters_after(self, prompt: Prompt) -> Branches:
        # The letters' ids depend on the end of the context alone, and with the same last line,
        # which is "Answer:" in all of them, they need to be found once.
        last_line = prompt.text.rpartition("\n")[2]
        key = (last_line, len(prompt.question.choices))
        if key not in self._branches:
            self._branches[key] = letter_branches(self.tokenizer, prompt.text, key[1])
        return self._branches[key]

    @staticmethod
    def record_fields(prompt: Prompt, normalise: Normalization) -> dict[str, Any]:
        """Nothing: this is what a record that does not say otherwise is of."""
        return {}


class ContinuationScoring(ScoringMode):
    """The choices' own texts are scored, each after the same context."""

    default_shots = 0  # lm-evaluation-harness's
    counts_last_token = True

    @staticmethod
    def build(subject: Subject, question: Question, shots: int) -> Prompt:
        """The prompt of lm-evaluation-harness."""
        text = subject.header
        for example in subject.shots[:shots]:
            text += f"{example.context} {example.endings[example.label]}\n\n"
        return Prompt(question, text + question.context, shots, question.endings)

    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids, and those of each ending after them.

        As lm-evaluation-harness splits them: context and ending are tokenized together and parted
        at the length of the context's own ids; spaces at the context's end go to the ending.
        """
        texts = []
        for prompt in prompts:
            texts.append(prompt.text.rstrip())
            texts += [f"{prompt.text} {ending}" for ending in prompt.endings]
        token_ids = iter(encode(self.tokenizer, texts))
        tokenized = []
        for prompt in prompts:
            context = next(token_ids)
            branches = []
            for ending in prompt.endings:
                branch = tuple(next(token_ids)[len(context) :])
                if not branch:
                    raise InputError(
                        f"the tokenizer has no token for {ending!r} after {prompt.text[-12:]!r}"
                    )
                branches.append(branch)
            tokenized.append(TokenizedPrompt(context, tuple(branches)))
        return tokenized

    @staticmethod
    def record_fields(prompt: Prompt, normalise: Normalization) -> dict[str, Any]:
        """The texts' lengths, by which their log-probabilities may be divided.

        They leave out the space before a text, as lm-evaluation-harness does.
        """
        return {
            "scoring": "continuation",
            "normalise": normalise,
            "bytes": [len(text.encode()) for text in prompt.endings],
            "characters": [len(text) for text in prompt.endings],
        }


SCORING_MODES: dict[ScoringName, type[ScoringMode]] = {
    "letters": LetterScoring,
    "continuation": ContinuationScoring,
}


def build(
    subject: Subject, question: Question, shots: int, scoring: ScoringName = "letters"
) -> Prompt:
    """The prompt of a question behind its subject's first `shots` examples."""
    return SCORING_MODES[scoring].build(subject, question, shots)


def lettered(question: Question) -> str:
    """The question, one lettered line a choice, and `Answer:` without a trailing space."""
    lines = [question.text]
    for letter, choice in zip(LETTERS, question.choices, strict=False):
        lines.append(f"{letter}. {choice}")
    lines.append("Answer:")
    return "\n".join(lines)


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids with the tokenizer's own start token, never with an end token."""
    token_ids: list[list[int]] = []
    # In parts: what a tokenizer makes beside the ids takes several times their memory.
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        token_ids += tokenizer(list(texts[start : start + TEXTS_AT_ONCE]))["input_ids"]
    if appends_end_token(tokenizer):
        return [row[:-1] for row in token_ids]
    return token_ids


def appends_end_token(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer puts an end token behind every text."""
    end = tokenizer.eos_token_id
    return end is not None and tokenizer("x")["input_ids"][-1:] == [end]


def letter_branches(tokenizer: "PreTrainedTokenizerBase", text: str, n_choices: int) -> Branches:
    """The letters' ids after a context; those that the tokenizer does not tell apart are refused.

    They are found in the tokenized context and letter: many tokenizers give " A" another id in
    text than alone, and some split it (SentencePiece without a piece "▁A": "▁", "A").
    """
    letters = [f" {letter}" for letter in LETTERS[:n_choices]]
    context, *whole = encode(tokenizer, [text, *(text + letter for letter in letters)])
    branches = tuple(tuple(token_ids[len(context) :]) for token_ids in whole)
    for letter, token_ids, branch in zip(letters, whole, branches, strict=True):
        merged = not branch or token_ids[: len(context)] != context
        unknown = tokenizer.unk_token_id in branch
        ambiguous = branches.count(branch) > 1
        if merged or unknown or ambiguous:
            tokens = tokenizer.convert_ids_to_tokens(token_ids[-6:])
            raise InputError(
                f"the tokenizer cannot score the letter {letter!r}: {text[-12:]!r} and it become "
                f"{tokens}, not tokens of its own for each letter"
            )
    return branches

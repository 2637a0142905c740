"""From questions to prompt text, and from text to token ids: the ways of scoring.

    letters       the choices are lettered in the prompt, and log P of " A", " B", … follows it:
                  hendrycks/test's evaluate.py, byte for byte
    continuation  log P of each choice's own text after the context: lm-evaluation-harness's
                  hellaswag, arc_* and mmlu_*_continuation. Pages and messages say "texts". The
                  text that is scored is an *ending*: the choice, or another that the task gives
    generate      the model writes the answer after the context (`calibeval.ask.written`)

In a chat (`chat`) the same texts are turns, and the answer, which begins the assistant's
turn, has no space before it; the header is lm-evaluation-harness's.

To add a way of scoring:

- derive a class from `ScoringMode`, and put it into `SCORING_MODES` below;
- add its name to `task_files.ScoringName` and to `scoring` of `records.Record`, whose rules say
  what a record of it must have;
- give it a header, in `task_files.HeaderTemplates`, `questions.Headers` and `tasks._Reader`;
- look at what else asks whether a scoring is "letters" or "continuation": `scoring.make_record` and
  `records.joined` (the letters' mass), `tasks.normaliser_of` and `comparable.same_normaliser`
  (lengths that texts are divided by), `scaling.scaled` (letters' probabilities sum to 1 again),
  `tasks._Reader._refuse_options_without_use`, and the summary of `__main__`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from calibeval.ask.chat import PARAGRAPH, ChatFormat, Exchange
from calibeval.ask.questions import LETTERS, Question, Subject
from calibeval.ask.task_files import Normaliser, ScoringName
from calibeval.io import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS_AT_ONCE = 1000  # for a tokenizer
USUAL_DELIMITER = " "  # between a question and an answer

# Token ids of each choice. With c the context's ids and b the ids of choice i,
# log P(choice i) = Σ_j log P(b[j] | c, b[0], …, b[j − 1]).
Branches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Prompt:
    """A question's context, ready to be followed by letters or by its `endings`."""

    question: Question
    text: str
    shots: int
    endings: tuple[str, ...] = ()  # empty where letters follow
    separator: str = USUAL_DELIMITER  # between the text and an answer; in a chat none
    chat_template_sha256: str | None = None  # of the template's text; None where there is no chat

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 text, and of the endings where there are any; kept in the record.

        A separator counts where it is not the usual one.
        """
        parts = [self.text, *self.endings]
        if self.separator != USUAL_DELIMITER and self.chat_template_sha256 is None:
            parts.append(self.separator)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt, and of each choice after it."""

    context: list[int]
    branches: Branches


class ScoringMode(ABC):
    """A way of asking questions; an instance asks them of one tokenizer."""

    default_shots: ClassVar[int]
    """Few-shot examples of a task that does not say how many."""
    counts_unread_token: ClassVar[bool]
    """Whether a choice's last token counts in `length_after_context`.

    No model reads it, since nothing is asked of what follows it. So it need not count, and of
    letters it does not. Of texts it has always counted, and to leave it out now would change the
    prompts of old records: where context and text together are one token more than
    `engines.prompt_limit`, the prompt loses an example (`scoring.fit_prompts`). The comment above
    `engines.prompt_limit` has the two inequalities, with an example.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat: ChatFormat | None = None,
        answer_room: int = 0,
    ):
        self.tokenizer = tokenizer
        self.chat = chat
        self.answer_room = answer_room  # tokens that a written answer needs after the context

    @classmethod
    def build(
        cls, subject: Subject, question: Question, shots: int, chat: ChatFormat | None = None
    ) -> Prompt:
        """Header, the first `shots` examples with their answers, the question up to its answer.

        No tokenizer is needed, unless the `chat` has one.
        """
        header = cls.header(subject, chat is not None)
        strips = chat is not None and subject.strips_in_chat
        examples = []
        for example in subject.examples[:shots]:
            shown_question = cls.ask(example, strips)
            delimiter = _delimiter_after(shown_question, subject)
            examples.append(Exchange(shown_question, cls.answer(example), delimiter))
        asked = cls.ask(question, strips)
        endings = cls.endings(question)
        if chat is None:
            text = header
            for shown in examples:
                text += f"{shown.text}{PARAGRAPH}"
            separator = _delimiter_after(asked, subject)
            return Prompt(question, text + asked, shots, endings, separator)
        text = chat.prompt(header, examples, asked)
        return Prompt(
            question, text, shots, endings, separator="", chat_template_sha256=chat.sha256
        )

    @staticmethod
    @abstractmethod
    def header(subject: Subject, in_chat: bool) -> str:
        """What stands before a subject's examples."""

    @staticmethod
    @abstractmethod
    def ask(question: Question, strips: bool) -> str:
        """The question's text up to its answer.

        With `strips` a text with letters loses white space around it; a context never does.
        """

    @staticmethod
    @abstractmethod
    def answer(question: Question) -> str:
        """The right answer as an example shows it."""

    @staticmethod
    @abstractmethod
    def endings(question: Question) -> tuple[str, ...]:
        """The texts that are scored; none where letters are."""

    @abstractmethod
    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids; `InputError` where the tokenizer cannot tell choices apart."""

    @staticmethod
    @abstractmethod
    def record_fields(prompt: Prompt, normalise: Normaliser) -> dict[str, Any]:
        """What a question's record holds because it was asked in this way."""

    def adds_start_token(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the tokenizer puts its start token before the prompts: the template may have.

        All prompts of a chat come from one template, so the first tells of all.
        """
        if self.chat is None or not prompts:
            return True
        return not self.chat.begins_with_start_token(prompts[0].text)

    def length_after_context(self, branches: Branches) -> int:
        """How many tokens count after the context, which must fit `engines.prompt_limit` with it.

        The inequalities stand above that function.
        """
        longest = max(len(branch) for branch in branches)
        return longest if self.counts_unread_token else longest - 1


class LetterScoring(ScoringMode):
    """The choices are listed, and the letters that name them are scored.

    Plain prompts are those of hendrycks/test, chats those of lm-evaluation-harness's `mmlu`.
    """

    default_shots = 5  # hendrycks/test's
    counts_unread_token = False

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat: ChatFormat | None = None,
        answer_room: int = 0,
    ):
        super().__init__(tokenizer, chat, answer_room)
        self._letters: dict[tuple[str, int], Letters] = {}

    @staticmethod
    def header(subject: Subject, in_chat: bool) -> str:
        """What the questions are about."""
        return subject.headers.letters_in_chat if in_chat else subject.headers.letters

    @staticmethod
    def ask(question: Question, strips: bool) -> str:
        """The question and its lettered choices."""
        return lettered(question, question.text.strip() if strips else question.text)

    @staticmethod
    def answer(question: Question) -> str:
        """The right letter."""
        return LETTERS[question.label]

    @staticmethod
    def endings(question: Question) -> tuple[str, ...]:
        """None: letters follow."""
        return ()

    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids, and those of the letters after them."""
        adds_start_token = self.adds_start_token(prompts)
        texts = [prompt.text for prompt in prompts]
        contexts = encode(self.tokenizer, texts, adds_start_token)
        tokenized = []
        for prompt, context in zip(prompts, contexts, strict=True):
            letters = self._letters_after(prompt, adds_start_token)
            kept = context[: len(context) - letters.replaced]
            tokenized.append(TokenizedPrompt(kept, letters.branches))
        return tokenized

    def _letters_after(self, prompt: Prompt, adds_start_token: bool) -> "Letters":
        # The letters' ids depend on the end of the context alone, which is "Answer:" and what a
        # chat's template writes after it; so they need to be found once for each end.
        n_choices = len(prompt.question.choices)
        key = (prompt.text.rpartition("Answer:")[2], n_choices)
        if key not in self._letters:
            self._letters[key] = find_letters(
                self.tokenizer,
                prompt.text,
                [prompt.separator + letter for letter in LETTERS[:n_choices]],
                in_chat=self.chat is not None,
                adds_start_token=adds_start_token,
            )
        return self._letters[key]

    @staticmethod
    def record_fields(prompt: Prompt, normalise: Normaliser) -> dict[str, Any]:
        """Nothing: this is what a record that does not say otherwise is of."""
        return {}


class ContinuationScoring(ScoringMode):
    """The choices' own texts are scored, each after the same context."""

    default_shots = 0  # lm-evaluation-harness's
    counts_unread_token = True  # to keep the prompts of old records, as said above

    @staticmethod
    def header(subject: Subject, in_chat: bool) -> str:
        """The task's own."""
        return subject.headers.continuation

    @staticmethod
    def ask(question: Question, strips: bool) -> str:
        """The context, in which no choice is named."""
        return question.context

    @staticmethod
    def answer(question: Question) -> str:
        """The right choice's text."""
        return question.endings[question.label]

    @staticmethod
    def endings(question: Question) -> tuple[str, ...]:
        """The choices' texts."""
        return question.endings

    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids, and those of each ending after them.

        As lm-evaluation-harness splits them: context and ending are tokenized together and parted
        where the context ends; spaces and newlines at the context's end go to the ending, as those
        do with which a chat's template begins the answer. Where the context's end and an ending's
        first characters make one token together, the context ends before that token, of all
        endings: what is scored is that end and the ending. lm-evaluation-harness parts at the
        length of the context's own ids there, so these characters are neither read nor scored.
        """
        texts = []
        for prompt in prompts:
            texts.append(prompt.text.rstrip())
            texts += [prompt.text + prompt.separator + ending for ending in prompt.endings]
        token_ids = iter(encode(self.tokenizer, texts, self.adds_start_token(prompts)))
        tokenized = []
        for prompt in prompts:
            context = next(token_ids)
            whole = [next(token_ids) for _ in prompt.endings]
            kept = min(_common_length(context, ids) for ids in whole)
            context = context[:kept]
            branches = []
            for ending, ids in zip(prompt.endings, whole, strict=True):
                branch = tuple(ids[kept:])
                if not branch:
                    raise InputError(
                        f"the tokenizer has no token for {ending!r} after {prompt.text[-12:]!r}"
                    )
                branches.append(branch)
            tokenized.append(TokenizedPrompt(context, tuple(branches)))
        return tokenized

    @staticmethod
    def record_fields(prompt: Prompt, normalise: Normaliser) -> dict[str, Any]:
        """The texts' lengths, by which their log-probabilities may be divided.

        They leave out the space before a text, and what a chat's template begins the answer with,
        as lm-evaluation-harness does.
        """
        return {
            "scoring": "continuation",
            "normalise": normalise,
            "bytes": [len(text.encode()) for text in prompt.endings],
            "characters": [len(text) for text in prompt.endings],
        }


class WrittenScoring(ContinuationScoring):
    """The model writes an answer after the context; examples show the first alias."""

    def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts' token ids, each with one branch that only keeps room for the answer."""
        texts = [prompt.text for prompt in prompts]
        contexts = encode(self.tokenizer, texts, self.adds_start_token(prompts))
        room = ((0,) * self.answer_room,)
        return [TokenizedPrompt(context, room) for context in contexts]

    @staticmethod
    def record_fields(prompt: Prompt, normalise: Normaliser) -> dict[str, Any]:
        """By what the answer's log-probability is divided."""
        return {"scoring": "generate", "normalise": normalise}


SCORING_MODES: dict[ScoringName, type[ScoringMode]] = {
    "letters": LetterScoring,
    "continuation": ContinuationScoring,
    "generate": WrittenScoring,
}


def _delimiter_after(text: str, subject: Subject) -> str:
    """What stands between a question's text and the answer to it."""
    if subject.delimiter is not None:
        return subject.delimiter
    return "" if text[-1:].isspace() else USUAL_DELIMITER


def lettered(question: Question, text: str) -> str:
    """The question's text, one lettered line a choice, and `Answer:` without a trailing space."""
    lines = [text]
    for letter, choice in zip(LETTERS, question.choices, strict=False):
        lines.append(f"{letter}. {choice}")
    lines.append("Answer:")
    return "\n".join(lines)


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], adds_start_token: bool = True
) -> list[list[int]]:
    """Token ids with the tokenizer's own start token, never with an end token.

    Texts that a chat template began with the start token are encoded with `adds_start_token` off.
    """
    token_ids: list[list[int]] = []
    # In parts: what a tokenizer makes beside the ids takes several times their memory.
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        part = list(texts[start : start + TEXTS_AT_ONCE])
        # Not `verbose`, or transformers warns of texts that are longer than the model takes. Those
        # are cut before a model reads them (`scoring.fit_prompts`).
        encoded = tokenizer(part, add_special_tokens=adds_start_token, verbose=False)
        token_ids += encoded["input_ids"]
    if adds_start_token and appends_end_token(tokenizer):
        return [row[:-1] for row in token_ids]
    return token_ids


def appends_end_token(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer puts an end token behind every text."""
    end = tokenizer.eos_token_id
    return end is not None and tokenizer("x")["input_ids"][-1:] == [end]


@dataclass(frozen=True)
class Letters:
    """The letters' token ids after a context.

    Where `replaced` is not 0, that many last tokens were cut off the context, and each branch
    begins with the text that they stood for (see `find_letters`).
    """

    branches: Branches
    replaced: int = 0


def find_letters(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    letters: Sequence[str],
    in_chat: bool = False,
    adds_start_token: bool = True,
) -> Letters:
    """The ids of " A", " B", … after a context; those that are not told apart are refused.

    They are found in the tokenized context and letter: many tokenizers give " A" another id in
    text than alone, and some split it (SentencePiece without a piece "▁A": "▁", "A"). Where a
    chat's template ends in a space or newline that becomes one token with the letter, the context
    is cut before that space, by `replaced` tokens, and each branch begins with it: the probability
    is of space and letter together.
    """
    context, *whole = encode(
        tokenizer, [text, *(text + letter for letter in letters)], adds_start_token
    )
    kept = len(context)
    if in_chat:
        kept = min(_common_length(context, token_ids) for token_ids in whole)
    branches = tuple(tuple(token_ids[kept:]) for token_ids in whole)
    for letter, token_ids, branch in zip(letters, whole, branches, strict=True):
        joins_context = not branch or token_ids[:kept] != context[:kept]
        unknown = tokenizer.unk_token_id in branch
        ambiguous = branches.count(branch) > 1
        if joins_context or unknown or ambiguous:
            tokens = tokenizer.convert_ids_to_tokens(token_ids[-6:])
            raise InputError(
                f"the tokenizer cannot score the letter {letter!r}: {text[-12:]!r} and it "
                f"become {tokens}, not tokens of its own for each letter"
            )
    return Letters(branches, len(context) - kept)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return length

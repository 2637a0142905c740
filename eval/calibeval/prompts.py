"""From questions to prompt text and token ids.

letters       hendrycks/test's evaluate.py, byte for byte
continuation  lm-evaluation-harness's hellaswag, arc_* and mmlu_*_continuation: the choices' own
              texts follow the context
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from calibeval.io import InputError
from calibeval.tasks import LETTERS, Question, Subject

# The official formatter puts a space before each word of the subject, after one of its own.
HEADER = "The following are multiple choice questions (with answers) about  {}.\n\n"
PART = 1000
# Tokens of each choice: log P(choice i) = Σ_j log P(branches[i][j] | context, branches[i][<j])
Branches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Prompt:
    """A question's context, ready to be followed by " A", " B", … or by its `endings`."""

    question: Question
    text: str
    shots: int
    endings: tuple[str, ...] | None = None

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 text, and of the endings where there are any; kept in the record."""
        return hashlib.sha256("\0".join([self.text, *(self.endings or ())]).encode()).hexdigest()


def build(subject: Subject, question: Question, shots: int, scoring: str = "letters") -> Prompt:
    """Header, the first `shots` examples with their answers, then the question up to its answer."""
    chosen = subject.shots[:shots]
    if scoring == "continuation":
        examples = [f"{shot.context} {shot.endings[shot.label]}\n\n" for shot in chosen]
        text = subject.header + "".join(examples) + question.context
        return Prompt(question, text, shots, question.endings)
    examples = [f"{body(shot)} {LETTERS[shot.label]}\n\n" for shot in chosen]
    text = HEADER.format(subject.topic) + "".join(examples) + body(question)
    return Prompt(question, text, shots)


def body(question: Question) -> str:
    """The question, one lettered line a choice, and `Answer:` without a trailing space."""
    lines = [f"{LETTERS[i]}. {choice}" for i, choice in enumerate(question.choices)]
    return "\n".join([question.text, *lines, "Answer:"])


def encode(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids with the tokenizer's own start token, never with an end token."""
    # In parts: what a tokenizer makes beside the ids takes several times their memory.
    parts = (tokenizer([*texts[i : i + PART]])["input_ids"] for i in range(0, len(texts), PART))
    ids, end = [*chain.from_iterable(parts)], tokenizer.eos_token_id
    appended = end is not None and tokenizer("x")["input_ids"][-1:] == [end]
    return [row[:-1] for row in ids] if appended else ids


def continuations(tokenizer, asked: Sequence[Prompt]) -> list[tuple[list[int], Branches]]:
    """Of each prompt: the context's token ids, and each ending's after it.

    As lm-evaluation-harness splits them: context and ending are tokenised together and parted at
    the length of the context's own ids; spaces at the context's end go to the ending.
    """
    texts = [t for p in asked for t in (p.text.rstrip(), *(f"{p.text} {e}" for e in p.endings))]
    ids, found = iter(encode(tokenizer, texts)), []
    for prompt in asked:
        context = next(ids)
        branches = tuple(tuple(next(ids)[len(context) :]) for _ in prompt.endings)
        if () in branches:
            ending = prompt.endings[branches.index(())]
            raise InputError(
                f"the tokenizer has no token for {ending!r} after {prompt.text[-12:]!r}"
            )
        found.append((context, branches))
    return found


def letters(tokenizer, text: str, n_choices: int) -> Branches:
    """The letters' ids after a context; those that the tokenizer does not tell apart are refused.

    Many tokenizers give " A" another id in text than alone, and some split it (SentencePiece
    without a piece "▁A": "▁", "A").
    """
    asked = [f" {letter}" for letter in LETTERS[:n_choices]]
    bare, *full = encode(tokenizer, [text, *(text + letter for letter in asked)])
    branches = tuple(tuple(ids[len(bare) :]) for ids in full)
    for letter, whole, ids in zip(asked, full, branches, strict=True):
        merged = not ids or whole[: len(bare)] != bare
        if merged or tokenizer.unk_token_id in ids or branches.count(ids) > 1:
            became = tokenizer.convert_ids_to_tokens(whole[-6:])
            note = f"cannot score the letter {letter!r}: {text[-12:]!r} and it become {became}"
            raise InputError(f"the tokenizer {note}, not tokens of its own for each letter")
    return branches


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    low, high = min(rows), max(rows)  # the rest lie between them in dictionary order
    differ = (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return next(differ, min(len(low), len(high)))

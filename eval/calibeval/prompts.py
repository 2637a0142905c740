"""From questions to prompt text, in the official MMLU format (hendrycks/test, evaluate.py)."""

import hashlib
from dataclasses import dataclass

from calibeval.tasks import LETTERS, Question, Subject


@dataclass(frozen=True)
class Prompt:
    """A question's prompt text, ready to be followed by " A", " B", …"""

    question: Question
    text: str
    shots: int

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 text, kept in the record."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def build(subject: Subject, question: Question, shots: int) -> Prompt:
    """Header, the first `shots` examples with their answers, then the question up to `Answer:`."""
    examples = "".join(f"{body(shot)} {LETTERS[shot.label]}\n\n" for shot in subject.shots[:shots])
    return Prompt(question, subject.header + examples + body(question), shots)


def body(question: Question) -> str:
    """The question, one lettered line a choice, and `Answer:` without a trailing space."""
    lines = [f"{LETTERS[i]}. {choice}" for i, choice in enumerate(question.choices)]
    return "\n".join([question.text, *lines, "Answer:"])

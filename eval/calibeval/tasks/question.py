"""What a task yields: one multiple-choice question with a known answer."""

from dataclasses import dataclass

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A question with 2 to 26 choices; `label` is the index of the right one."""

    id: str
    subject: str
    text: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Subject:
    """The questions that share a header and few-shot examples, so also a prompt prefix."""

    name: str
    header: str
    shots: tuple[Question, ...]
    questions: tuple[Question, ...]

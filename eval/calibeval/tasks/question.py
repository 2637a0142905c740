"""What a task yields: multiple-choice questions with known answers, by subject."""

from dataclasses import dataclass

from calibeval.io import InputError, counted

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
    """The questions that share a topic and few-shot examples, so also a prompt prefix."""

    name: str
    topic: str
    shots: tuple[Question, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Source:
    """What a loader is asked for."""

    data: str
    shots: int
    subjects: tuple[str, ...] | None = None
    split: str | None = None
    examples: str | None = None


def checked(where: str, id: str, subject: str, text, choices, label: int) -> Question:
    """A question whose text and choices are text, filled, and 2 to 26 in number."""
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: question is {text!r}, expected text")
    if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(LETTERS):
        several = isinstance(choices, (list, tuple))
        found = counted(len(choices), "choice") if several else f"choices {choices!r}"
        raise InputError(f"{where}: {found}, expected a list of 2 to {len(LETTERS)}")
    for letter, choice in zip(LETTERS, choices, strict=False):
        if not isinstance(choice, str) or not choice.strip():
            raise InputError(f"{where}: choice {letter} is {choice!r}, expected text")
    return Question(id, subject, text, tuple(choices), label)


def unseen(id: str, seen: dict[str, str], where: str) -> str:
    """The id, noted as seen at `where`; one that was seen already raises `InputError`."""
    if id in seen:
        raise InputError(f"{where}: id {id!r} is in {seen[id]} already; ids must be unique")
    seen[id] = where
    return id


def split_examples(
    questions: list[Question], examples: list[Question] | None, shots: int, where: str
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """(few-shot examples, questions to score): the first `shots` of the examples.

    Without a file of examples the first questions serve, and are then not scored.
    """
    pool = questions if examples is None else examples
    if len(pool) < shots:
        raise InputError(f"{where}: {counted(len(pool), 'row')}, but --shots {shots} needs {shots}")
    return tuple(pool[:shots]), tuple(questions[shots:] if examples is None else questions)

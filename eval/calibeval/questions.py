"""Multiple-choice questions, whatever data they come from.

A reader of `calibeval.tasks` turns its data into rows of one form, `QuestionRow`, and this module
checks the rows and makes `Question`s of them. `calibeval.prompts` asks them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from calibeval.io import InputError
from calibeval.validation import Seq, Text, Unicode, checked, encodable

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DEFAULT_SUBJECT = "general_knowledge"


@dataclass(frozen=True)
class Question:
    """One question with 2 to 26 choices."""

    id: str
    subject: str
    text: str
    choices: tuple[str, ...]
    label: int  # index of the right choice
    # What scoring by continuation reads in place of `text` and `choices`.
    context: str
    endings: tuple[str, ...]


@dataclass(frozen=True)
class Headers:
    """What stands before a subject's examples, by the way of scoring."""

    letters: str
    letters_in_chat: str
    continuation: str


@dataclass(frozen=True)
class Subject:
    """The questions that share a header and few-shot examples, so also a prompt prefix."""

    name: str
    examples: tuple[Question, ...]  # solved questions, of which the first `shots` are shown
    questions: tuple[Question, ...]
    headers: Headers
    strips_in_chat: bool = False  # whether white space around questions goes in chats


class QuestionRow(BaseModel, strict=True):
    """A row of a user's own file, into which the rows of other data are turned as well."""

    question: Text
    choices: Annotated[Seq[Text], Field(min_length=2, max_length=len(LETTERS))]
    answer: int | str  # an index from 0, a letter, or the text of a choice
    id: Annotated[str, Field(strict=False, coerce_numbers_to_str=True), AfterValidator(encodable)]
    subject: Unicode = DEFAULT_SUBJECT
    context: Unicode | None = None
    endings: Seq[Unicode] | None = None

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> "QuestionRow":
        if self._label() is None:
            last = len(self.choices) - 1
            expected = f"0 to {last}, A to {LETTERS[last]}, or the text of one choice"
            raise ValueError(f"answer is {self.answer!r}, expected {expected}")
        return self

    def _label(self) -> int | None:
        """Index of the right choice; None where the answer names no choice, or several."""
        count = len(self.choices)
        spellings: list[Sequence[object]] = [range(count), tuple(LETTERS[:count]), self.choices]
        for names in spellings:
            if names.count(self.answer) == 1:
                return names.index(self.answer)
        return None

    def to_question(self) -> Question:
        """The question, with what the row leaves out."""
        label = self._label()
        assert label is not None  # or the row would not be one
        return Question(
            id=self.id,
            subject=self.subject,
            text=self.question,
            choices=self.choices,
            label=label,
            context=self.context or f"Question: {self.question.strip()}\nAnswer:",
            endings=self.endings or self.choices,
        )


def questions_from_rows(
    rows: Iterable[tuple[str, dict[str, Any]]],
    source: str | Path,
    parse: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    numbers_each_subject: bool = False,
) -> list[Question]:
    """The questions of (place, row) pairs; `parse` turns a row into the keys of `QuestionRow`.

    A row without an id gets its subject and number, of all rows or of its subject's. A bad row, an
    id that repeats, or no rows at all raise `InputError`, which names the row's place, or `source`.
    """
    questions: dict[str, Question] = {}
    rows_of_subject: Counter[str] = Counter()
    for number, (place, row) in enumerate(rows):
        try:
            values = parse(row)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            columns = ", ".join(map(str, row))
            raise InputError(
                f"{place}: not a row of this task: {error}; its columns are {columns}"
            ) from error
        subject = str(values.get("subject", DEFAULT_SUBJECT))
        if values.get("id") is None:
            number_shown = rows_of_subject[subject] if numbers_each_subject else number
            values = {**values, "id": f"{subject}/{number_shown}"}
        rows_of_subject[subject] += 1
        question = checked(QuestionRow, values, place).to_question()
        if question.id in questions:
            raise InputError(f"{place}: id {question.id!r} is there already; ids must be unique")
        questions[question.id] = question
    if not questions:
        raise InputError(f"{source}: no questions")
    return list(questions.values())

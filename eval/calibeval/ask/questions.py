"""Multiple-choice questions, whatever data they come from.

A reader of `tasks` turns its data into rows of one form, `QuestionRow`, and this module
checks the rows and makes `Question`s of them. `calibeval.ask.prompts` asks them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from calibeval.ask.task_files import FILLING_ERRORS, RowTemplates, UnknownColumn
from calibeval.io import InputError
from calibeval.validation import (
    Problem,
    ProblemKind,
    Seq,
    Text,
    Unicode,
    did_you_mean,
    encodable,
    problems,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LISTS = ("choices", "endings", "aliases")  # the keys of a row that are lists
COLUMNS_AS_LIST = '["{{ COLUMN }}", "{{ ANOTHER }}"]'
DEFAULT_SUBJECT = "general_knowledge"


@dataclass(frozen=True)
class Question:
    """One question with 2 to 26 choices, or one whose answer the model writes."""

    id: str
    subject: str
    text: str
    choices: tuple[str, ...]  # empty where the model writes the answer
    label: int  # index of the right choice
    # What scoring by continuation reads in place of `text` and `choices`.
    context: str
    endings: tuple[str, ...]  # the right answers, where the model writes one


@dataclass(frozen=True)
class Headers:
    """What stands before a subject's examples, by the way of scoring: filled templates."""

    letters: str
    letters_in_chat: str
    continuation: str


@dataclass(frozen=True)
class Subject:
    """The questions that share a header and few-shot examples, so also a prompt prefix."""

    name: str
    # Solved questions. A prompt shows the first of them, as many as are asked for and fit into it.
    examples: tuple[Question, ...]
    questions: tuple[Question, ...]
    headers: Headers
    strips_in_chat: bool = False  # whether white space around questions is taken off in chats
    # Between a question and an answer; None: a space, unless the question ends in white space.
    delimiter: str | None = None


class _Row(BaseModel, strict=True):
    """A row of a user's own file, into which the rows of other data are turned as well.

    A task's file may make each key from a row's columns: `task_files.RowTemplates` has the same
    keys.
    """

    question: Text
    id: Annotated[str, Field(strict=False, coerce_numbers_to_str=True), AfterValidator(encodable)]
    subject: Unicode = DEFAULT_SUBJECT
    context: Unicode | None = None

    @property
    def _context(self) -> str:
        # An empty cell of a CSV file says nothing.
        return self.context or f"Question: {self.question.strip()}\nAnswer:"


class WrittenRow(_Row):
    """A row whose answer the model writes."""

    aliases: Annotated[Seq[Text], Field(min_length=1)]

    def to_question(self) -> Question:
        """The question."""
        return Question(
            id=self.id,
            subject=self.subject,
            text=self.question,
            choices=(),
            label=0,
            context=self._context,
            endings=self.aliases,
        )


class QuestionRow(_Row):
    """A row with choices."""

    choices: Annotated[Seq[Text], Field(min_length=2, max_length=len(LETTERS))]
    answer: int | str  # an index from 0, a letter, the text of a choice, or an index as a text
    endings: Seq[Text] | None = None

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> "QuestionRow":
        if self._label() is None:
            last = len(self.choices) - 1
            expected = f"0 to {last}, A to {LETTERS[last]}, or the text of one choice"
            raise ValueError(f"answer is {self.answer!r}, expected {expected}")
        return self

    @model_validator(mode="after")
    def _endings_are_one_a_choice(self) -> "QuestionRow":
        if self.endings is not None and len(self.endings) != len(self.choices):
            raise ValueError(
                f"endings is {list(self.endings)}: found {len(self.endings)}, "
                f"expected {len(self.choices)}, one a choice"
            )
        return self

    def _label(self) -> int | None:
        """Index of the right choice; None where no way to read the answer names exactly one.

        It is read as an index, then as a letter, then as a choice's text, and the first way that
        names exactly one choice counts: "A" is the first choice, though another's text may be "A".
        """
        count = len(self.choices)
        spellings: list[Sequence[object]] = [range(count), tuple(LETTERS[:count]), self.choices]
        for names in spellings:
            if names.count(self.answer) == 1:
                return names.index(self.answer)
        # All cells of a CSV file are texts, so an index is one as well where no choice is a number.
        if isinstance(self.answer, str) and not any(
            text.strip().isdecimal() for text in self.choices
        ):
            digits = self.answer.strip()
            if digits.isdecimal() and int(digits) < count:
                return int(digits)
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
            context=self._context,
            endings=self.endings or self.choices,
        )


def questions_from_rows(
    rows: Iterable[tuple[str, dict[str, Any]]],
    source: str | Path,
    templates: RowTemplates,
    task: str,
    numbers_each_subject: bool = False,
    row_type: type[QuestionRow] | type[WrittenRow] = QuestionRow,
) -> list[Question]:
    """The questions of (place, row) pairs; `templates` turn a row into the keys of `row_type`.

    A row without an id gets its subject and number, of all rows or of its subject's. A bad row, an
    id that repeats, or no rows at all raise `InputError`, which names the row's place, or `source`,
    and what of the task's file is at fault; `task` is the task's name or its file, as it was given.
    """
    questions: dict[str, Question] = {}
    rows_of_subject: Counter[str] = Counter()
    for number, (place, row) in enumerate(rows):
        values = _values_of(row, place, templates, task)
        subject = str(values.get("subject", DEFAULT_SUBJECT))
        if values.get("id") is None:
            number_shown = rows_of_subject[subject] if numbers_each_subject else number
            values = {**values, "id": f"{subject}/{number_shown}"}
        rows_of_subject[subject] += 1
        try:
            question = row_type.model_validate(values).to_question()
        except ValidationError as error:
            problem = problems(error)[0]
            raise InputError(f"{place}: {_described(problem, row, templates, task)}") from error
        if question.id in questions:
            raise InputError(f"{place}: id {question.id!r} is there already; ids must be unique")
        questions[question.id] = question
    if not questions:
        raise InputError(f"{source}: no questions")
    return list(questions.values())


def _values_of(
    row: dict[str, Any], place: str, templates: RowTemplates, task: str
) -> dict[str, Any]:
    """The keys of `QuestionRow` that a row has; `InputError` where a template cannot be filled."""
    columns = ", ".join(map(str, row))
    try:
        return templates.values(row)
    except UnknownColumn as error:
        hint = did_you_mean(error.column, [str(column) for column in row])
        raise InputError(
            f"{place}: no column {error.column!r}, which {task} asks for; it has: {columns}{hint}"
        ) from error
    except FILLING_ERRORS as error:
        raise InputError(
            f"{place}: not a row of this task, {task}: {error}; its columns are {columns}"
        ) from error


def _described(problem: Problem, row: dict[str, Any], templates: RowTemplates, task: str) -> str:
    """What is wrong with a row, in the columns that it has."""
    if problem.kind is ProblemKind.MISSING:
        key = problem.path[0]
        columns = [str(column) for column in row]
        hint = did_you_mean(key, columns)
        template = COLUMNS_AS_LIST if key in LISTS else '"{{ COLUMN }}"'
        return (
            f"no {key!r}; found {', '.join(columns)}{hint}; a task file takes another column by "
            f"`row: {{{key}: {template}}}`"
        )
    text = problem.describe()
    # A problem of no key is of a rule of the whole row. The messages of these rules begin with the
    # key, as "answer is …" of `QuestionRow._answer_is_a_choice` does.
    key = problem.path[0] if problem.path else text.partition(" ")[0]
    if key in LISTS and isinstance(row.get(key), str):
        # A cell of a CSV file is one text, whatever is written in it.
        text += f"; a task file makes one of columns by `row: {{{key}: {COLUMNS_AS_LIST}}}`"
    origin = templates.origin(key)
    return f"{text} (row.{key} in {task}: {origin})" if origin else text

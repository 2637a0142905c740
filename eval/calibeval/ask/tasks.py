"""Tasks: from a data folder, file or data set of the hub to subjects of multiple-choice questions.

What a task is stands in its file (`calibeval.ask.task_files`): the built-in ones are in the folder
`builtin_tasks`, and any other is read by the same code. To add a built-in task, put its file there.
"""

import csv
import glob
import io
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from calibeval import yaml_text
from calibeval.ask import task_files
from calibeval.ask.prompts import SCORING_MODES
from calibeval.ask.questions import (
    Headers,
    Question,
    QuestionRow,
    Subject,
    WrittenRow,
    questions_from_rows,
)
from calibeval.ask.request import ResolvedTask, Task
from calibeval.ask.task_files import (
    FILLING_ERRORS,
    Normaliser,
    TaskFile,
    Template,
    UnknownColumn,
)
from calibeval.io import (
    LARGE_FILE,
    InputError,
    counted,
    hanging,
    is_planted_link,
    json_lines,
    read_text,
    show,
)
from calibeval.validation import did_you_mean

HUB = "hub:"  # begins the `data` of a task that is read from the Hugging Face hub
HUB_NAME = re.compile(rf"{HUB}[\w-][\w.-]*/[\w-][\w.-]*")
# Where the YAML of a README stands, as the hub finds it.
CARD_HEAD = re.compile(r"^\s*---(\r\n|\r|\n)(?P<yaml>[\S\s]*?)(\r\n|\r|\n)---[ \t]*(\r\n|\n|$)")
# The types of columns, as `datasets` calls them, that hold what they say.
PLAIN_KINDS = {"Value", "List", "LargeList", "Sequence", "ClassLabel", "Json"}
ARCHIVES = ("tar", "zip", "rar", "7z")  # as `datasets` calls those that it unpacks into a folder
ANY_SUBJECT = "*"  # in the name of a file, for `glob`

PlacedRow = tuple[str, dict[str, Any]]  # "path, line number", and the row


def splits_of(task: str) -> tuple[str, str] | None:
    """The split that a task is scored on, and the one to choose and to fit on.

    `task` is a built-in task's name or a task file's path. None where the task has no other split
    to choose and fit on, and where its file cannot be read: records and sweeps may outlive it, and
    scoring, which needs it, says what is wrong with it.
    """
    if not task_files.is_task_name(task):
        return None
    try:
        task_file = task_files.read(task)
    except InputError:
        return None
    if task_file.other_split is None:
        return None
    return task_file.split, task_file.other_split


def load(task: Task) -> list[Subject]:
    """A task's subjects, with their examples and the questions up to the task's limit.

    Questions that serve as examples are not asked. Bad data raises `InputError`.
    """
    task = resolved(task)
    subjects = {
        subject.name: subject for subject in _Reader(task, task_files.read(task.task)).subjects()
    }
    if task.subjects:
        unknown = sorted(set(task.subjects) - set(subjects))
        if unknown:
            raise InputError(
                f"{task.data}: no subject {unknown[0]!r}; there are {', '.join(subjects)}"
            )
    chosen = []
    for name, subject in subjects.items():
        if task.subjects and name not in task.subjects:
            continue
        if len(subject.examples) < task.shots:
            there = counted(len(subject.examples), "example")
            raise InputError(
                f"{task.examples or task.data}, {name}: {there}, but --shots {task.shots}; give "
                f"--shots {len(subject.examples)}, or more examples"
            )
        questions = _not_shown(subject, task)
        if not questions:
            raise InputError(f"{task.data}, {name}: every question is an example as well")
        chosen.append(replace(subject, questions=tuple(questions[: task.limit])))
    return chosen


def _not_shown(subject: Subject, task: Task) -> list[Question]:
    """The subject's questions that are not among its examples.

    A file of examples may hold a question under another id, since one without an id is named by its
    row. Of a task's own splits only a question that is the same in all fields, its id too, is left
    out: one that its authors put into both splits, under two ids, is asked.
    """
    if not task.examples:
        return [question for question in subject.questions if question not in subject.examples]
    shown = [_without_id(example) for example in subject.examples]
    return [question for question in subject.questions if _without_id(question) not in shown]


def _without_id(question: Question) -> Question:
    """The question as it is asked, whatever its id and subject are."""
    return replace(question, id="", subject="")


def resolved(task: Task) -> ResolvedTask:
    """The task with what its convention says of scoring and shots."""
    task_file = task_files.read(task.task)
    scoring = task.scoring or task_file.scoring
    shots = task.shots
    if shots is None:
        shots = task_file.shots
    if shots is None:
        shots = SCORING_MODES[scoring].default_shots
    return ResolvedTask(**{**dict(task), "scoring": scoring, "shots": shots})


def normaliser_of(task: Task) -> Normaliser:
    """How the task's users compare the choices' log-probabilities."""
    if resolved(task).scoring == "letters":
        return "sum"
    return task_files.read(task.task).normalise


@dataclass(frozen=True)
class _Reader:
    """Reads a task's data as its file says."""

    task: ResolvedTask
    task_file: TaskFile

    def subjects(self) -> Iterator[Subject]:
        """All subjects, in alphabetical order."""
        self._refuse_options_without_use()
        asked = self._asked_questions()
        self._refuse_ids_twice(asked)
        questions = _by_subject(asked)
        examples: list[Question] = []
        # A file that is given is checked even if no example of it is shown.
        if self.task.shots or self.task.examples:
            examples = self._examples()
        if self.task.examples and not self.task.shots:
            note = f"{self.task.examples}: none of its examples is shown, since --shots is 0"
            show(hanging(f"warning: {note}"), to_stderr=True)
        for name in sorted(questions):
            variables = {"subject": name}
            variables["topic"] = self._filled("topic", self.task_file.topic, variables)
            yield Subject(
                name=name,
                examples=tuple(self._examples_of(name, examples)[: self.task.shots]),
                questions=tuple(questions[name]),
                headers=self._headers(variables),
                strips_in_chat=self.task_file.strips_in_chat,
                delimiter=self.task_file.delimiter,
            )

    def _refuse_options_without_use(self) -> None:
        task = self.task
        source = self.task_file.data
        if task.split and Path(task.data).is_file():
            raise InputError(f"{task.data}: is one file, so --split {task.split} chooses nothing")
        names_its_split = "split" in source.files.variables
        if task.split and task.split != self.task_file.split and not names_its_split:
            file_name = self._file_name(task.split)
            if any(Path(task.data).glob(file_name)):  # else it may be a copy of the hub's
                raise InputError(
                    f"{task.data}: {task.task} has one file for all splits, {file_name}, so "
                    f"--split {task.split} chooses nothing"
                )
        split = self.task_file.examples.split
        if task.examples and source.has_file_per_subject and split is not None:
            raise InputError(f"--examples {task.examples}: {task.task}'s are its {split} split's")
        if task.scoring == "letters" and not self.task_file.letters:
            raise InputError(
                f"--scoring letters: the right choice of {task.task} is always the first, so its "
                "letter tells nothing; expected continuation"
            )
        if task.scoring != self.task_file.scoring and "generate" in (
            task.scoring,
            self.task_file.scoring,
        ):
            raise InputError(
                f"--scoring {task.scoring}: {task.task} is asked by {self.task_file.scoring}; "
                "leave it out"
            )
        if task.samples and task.scoring != "generate":
            raise InputError(f"--samples {task.samples}: {task.task}'s answers are not written")
        if source.has_languages and task.language is None:
            raise InputError(f"--task {task.task}: is by language; give --language, such as de")
        if task.language is not None and not source.has_languages:
            raise InputError(f"--language {task.language}: {task.task} has one language")

    def _refuse_ids_twice(self, questions: list[Question]) -> None:
        """Raise `InputError` where two files of a task have an id in common.

        Records are known by their id, so one answer would take the other's place.
        """
        subject_of_id: dict[str, str] = {}
        for question in questions:
            if question.id in subject_of_id:
                raise InputError(
                    f"{self.task.data}: id {question.id!r} is of a question of subject "
                    f"{subject_of_id[question.id]!r} and of one of {question.subject!r}; ids must "
                    "be unique in a task; in its task file write "
                    "`row: {id: '{{ subject }}/{{ id }}'}`"
                )
            subject_of_id[question.id] = question.subject

    def _headers(self, variables: dict[str, str]) -> Headers:
        templates = self.task_file.headers
        letters = self._filled("headers.letters", templates.letters, variables)
        letters_in_chat = letters
        if templates.letters_in_chat is not None:
            letters_in_chat = self._filled(
                "headers.letters_in_chat", templates.letters_in_chat, variables
            )
        continuation = self._filled("headers.continuation", templates.continuation, variables)
        return Headers(letters, letters_in_chat, continuation)

    def _filled(self, key: str, template: Template, variables: dict[str, Any]) -> str:
        """A text of the task's file; `InputError` where it names a variable that is not there."""
        try:
            return str(template(variables))
        except UnknownColumn as error:
            raise InputError(
                f"{self.task.task}: {key} is {template.text!r}: no variable {error.column!r}; "
                f"there are {', '.join(variables)}{did_you_mean(error.column, variables)}"
            ) from error
        except FILLING_ERRORS as error:
            raise InputError(f"{self.task.task}: {key}: {error}") from error

    # --- Few-shot examples ---

    def _examples(self) -> list[Question]:
        """All examples, in the data's order."""
        if self.task.examples:
            return self._file_questions(Path(self.task.examples))
        split = self.task_file.examples.split
        if split is None:
            raise InputError(
                f"{self.task.task}: {counted(self.task.shots, 'solved example')} before each "
                "question, and it has none of its own; give --examples FILE, or --shots 0"
            )
        data = self.task.data
        if data.startswith(HUB):
            return self._questions(data, split)
        path = Path(data)
        if self.task_file.examples.else_first_asked and self._is_known_to_lack(path, split):
            return self._asked_questions()  # `_not_shown` then leaves out those that are shown
        if path.is_dir():
            return self._questions(data, split)
        return self._file_questions(self._file_beside(path, split))

    def _is_known_to_lack(self, data: Path, split: str) -> bool:
        """Whether a folder, or the folder that a file lies in, is known to have no such split.

        False where nobody knows: which splits a folder has that is a copy of a data set of the hub,
        only `datasets` can tell, when it loads it.
        """
        if data.is_dir():
            # The name of a split is a pattern where each subject has a file of its own.
            has_split = any(data.glob(self._file_name(split)))
            return not has_split and not _is_hub_folder(data)
        return not self._file_beside(data, split).is_file()

    def _file_beside(self, asked_file: Path, split: str) -> Path:
        """The file of a split, of the same data as the one file that is asked.

        That file may have any name. With data.files "{{ language }}/{{ split }}.jsonl" the dev file
        of DATA/de/any.jsonl is DATA/de/dev.jsonl; with "{{ split }}/all.jsonl" that of
        DATA/test/any.jsonl is DATA/dev/all.jsonl.
        """
        name = Path(self._file_name(split))
        asked_name = Path(self._file_name(self.task_file.split))
        if name.parent == asked_name.parent:
            return asked_file.parent / name.name
        folder = asked_file.absolute().parent
        for _ in asked_name.parent.parts:
            folder = folder.parent
        return folder / name

    def _examples_of(self, subject: str, examples: list[Question]) -> list[Question]:
        """The examples that stand before a subject's questions."""
        rule = self.task_file.examples.of_subject
        own = [example for example in examples if example.subject == subject]
        if rule == "always" or (own and rule == "where_it_has_any"):
            return own
        return examples

    # --- Questions ---

    def _asked_questions(self) -> list[Question]:
        """The questions that the task asks, in the data's order."""
        return self._questions(self.task.data, self.task.split or self.task_file.split)

    def _questions(self, data: str, split: str) -> list[Question]:
        """The questions of a file, or of a split of a folder or of the hub, in the data's order."""
        if data.startswith(HUB):
            return self._hub_questions(data, split)
        path = Path(data)
        if self.task_file.data.has_file_per_subject:
            return self._folder_questions(path, split)
        if path.is_dir():
            file = path / self._file_name(split)
            if not file.is_file() and _is_hub_folder(path):
                return self._hub_questions(data, split)
            path = file
        return self._file_questions(path)

    def _file_questions(self, path: Path) -> list[Question]:
        """The questions of one file, in its order."""
        return self._from_rows(self._file_rows(path), path)

    def _from_rows(
        self, rows: Iterable[PlacedRow], source: str | Path, numbers_each_subject: bool = False
    ) -> list[Question]:
        is_written = self.task_file.scoring == "generate"
        return questions_from_rows(
            rows,
            source,
            self.task_file.row,
            self.task.task,
            numbers_each_subject,
            WrittenRow if is_written else QuestionRow,
        )

    def _folder_questions(self, folder: Path, split: str) -> list[Question]:
        """The questions of a split that has one file for each subject, named by the subject."""
        file_name = self._file_name(split)
        pattern = folder / file_name
        if ANY_SUBJECT in str(Path(file_name).parent):
            raise InputError(
                f"{self.task.task}: data.files is {self.task_file.data.files.text!r}: expected "
                "{{ subject }} in the name of the file and not of its folder, such as "
                "'{{ split }}/{{ subject }}.csv'"
            )
        before, _, after = pattern.name.partition(ANY_SUBJECT)
        questions: list[Question] = []
        # In one order on every file system, since the first rows may be everybody's examples.
        for path in sorted(pattern.parent.glob(pattern.name)):
            subject = path.name.removeprefix(before).removesuffix(after)
            rows = ((place, {"subject": subject, **row}) for place, row in self._file_rows(path))
            questions += self._from_rows(rows, path)
        if not questions and _is_hub_folder(folder):
            return self._hub_questions(str(folder), split)
        if not questions:
            shown = pattern.name.replace(ANY_SUBJECT, "<subject>")
            raise InputError(f"{folder}: no folder {pattern.parent.name}/ with files {shown}")
        return questions

    def _hub_questions(self, data: str, split: str) -> list[Question]:
        """The questions of a data set of the hub, numbered as if each subject were a file.

        `data` is its name after "hub:", or the folder of a local copy.
        """
        return self._from_rows(self._hub_rows(data, split), data, numbers_each_subject=True)

    def _file_name(self, split: str) -> str:
        variables = {"split": split, "subject": ANY_SUBJECT, "language": self.task.language}
        name = self._filled("data.files", self.task_file.data.files, variables)
        if task_files.leaves_folder(name):
            raise InputError(
                f"{self.task.task}: data.files: {name} lies outside the folder of the data: name "
                "the folder that holds it by --data"
            )
        return name

    # --- Rows ---

    def _file_rows(self, path: Path) -> Iterator[PlacedRow]:
        if path.suffix == ".csv":
            rows = _csv_rows(path, self.task_file.data.columns)
        else:
            rows = json_lines(path)
        for place, row in rows:
            yield place, self.task_file.data.completed(row)

    def _hub_rows(self, data: str, split: str) -> Iterator[PlacedRow]:
        """The rows of a data set of the hub such as hub:cais/mmlu, or of a folder with its copy."""
        source = self.task_file.data
        config = None
        if source.config is not None:
            config = self._filled("data.config", source.config, {"language": self.task.language})
        hub_split = source.hub_splits.get(split, split)
        # `datasets` takes some words for readers of its own, such as pandas, which used to unpickle
        # what lies in the current folder.
        if not data.startswith(HUB):
            name = os.path.abspath(data)
        elif HUB_NAME.fullmatch(data):
            name = data.removeprefix(HUB)
            if os.path.lexists(name):
                raise InputError(
                    f"{data}: ./{name} would be read instead: rename it, or type this elsewhere"
                )
        else:
            raise InputError(f"{data}: expected {HUB}owner/name, such as {HUB}cais/mmlu")
        if not data.startswith(HUB):
            _refuse_files_elsewhere(Path(data))
        try:
            import datasets

            if not data.startswith(HUB):
                _refuse_archives(Path(data))
            with _silent(datasets):
                rows = datasets.load_dataset(name, config, split=hub_split, trust_remote_code=False)
                rows = rows.select_columns(_columns_without_files(rows.features))
        except InputError:
            raise
        except Exception as error:  # the library raises errors of many kinds
            if data.startswith(HUB):
                raise InputError(f"{data}: cannot be loaded from the hub: {error}") from error
            file_name = self._file_name(split).replace(ANY_SUBJECT, "<subject>")
            raise InputError(
                f"{data}: no file {file_name}, and as a copy of a data set of the hub "
                f"it cannot be loaded: {error}"
            ) from error
        for number, row in enumerate(rows):
            yield f"{data}, split {hub_split}, row {number}", source.completed(row)


def _refuse_files_elsewhere(folder: Path) -> None:
    """Raise `InputError` where a folder's card names data outside of it.

    The folder may be anybody's: `datasets` would ask the addresses, and read the files. So would it
    those that another user's links lead to, and wait for pipes. The folder's own name it takes for
    a pattern.
    """
    if "::" in os.path.abspath(folder) or glob.has_magic(os.path.abspath(folder)):
        raise InputError(
            f"{folder}: `datasets` reads a pattern in its name: rename it, without *?[:"
        )
    for path in _everything_below(folder):
        if not path.exists():  # a link that leads nowhere
            continue
        is_anothers = path.lstat().st_uid not in (0, os.geteuid())
        leads_on = is_anothers and path.is_symlink() and path.is_dir()
        if leads_on or is_planted_link(path, path.stat()):
            raise InputError(f"{path}: another user's link to {path.resolve()}: delete it")
        if not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: a pipe or a device, which would be waited for: delete it")
    for card in (folder / "README.md", folder / ".huggingface.yaml"):
        if not os.path.lexists(card):
            continue
        text = read_text(card)
        if card.suffix == ".md":
            head = CARD_HEAD.search(text)
            text = head["yaml"] if head is not None else ""
        keys, _ = yaml_text.parse(text, str(card))
        if not isinstance(keys, dict | None):
            raise InputError(f"{card}: expected keys with values, such as `configs: …`")
        for place in _texts((keys or {}).get("configs")):
            parts = place.split("/")
            # Each prefix of fsspec has a colon: https://, zip::, file:, local:.
            if ":" in place or os.path.isabs(place) or place.startswith("~") or ".." in parts:
                raise InputError(
                    f"{card}: configs: {place} lies outside the folder and would be read: put the "
                    "file there, and name it by its path in the folder"
                )


def _refuse_archives(folder: Path) -> None:
    """Raise `InputError` for an archive, whatever its name says: `datasets` would unpack it.

    The folder may be anybody's, and links in an archive can lead what is unpacked anywhere.
    """
    from datasets.utils.extract import Extractor

    for path in _everything_below(folder):
        if path.is_file() and Extractor.infer_extractor_format(str(path)) in ARCHIVES:
            raise InputError(
                f"{path}: an archive, which might be unpacked: unpack it yourself if it holds the "
                "data, and delete it, or move it out of the folder"
            )


def _everything_below(folder: Path) -> Iterator[Path]:
    """All files and folders below a folder; `InputError` where one of these cannot be listed."""

    def refuse(error: OSError) -> NoReturn:
        raise InputError(f"{error.filename}: cannot be listed ({error.strerror})") from error

    for parent, subfolders, files in os.walk(folder, onerror=refuse):
        for name in (*subfolders, *files):
            yield Path(parent, name)


def _texts(value: Any) -> Iterator[str]:
    """The texts in lists and mappings, the mappings' keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _columns_without_files(features: Any) -> list[str]:
    """The columns of texts, numbers, and lists and mappings of them.

    Values of other kinds, such as pictures, may be names of files or addresses, which reading a row
    would open.
    """
    kinds = {name: set(re.findall(r"\w+(?=\()", repr(kind))) for name, kind in features.items()}
    return [name for name, of_column in kinds.items() if of_column <= PLAIN_KINDS]


@contextmanager
def _silent(datasets: Any) -> Iterator[None]:
    """Keep `datasets` from printing remarks, which repeat what is in somebody's files."""
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        datasets.logging.set_verbosity(verbosity)


def _is_hub_folder(folder: Path) -> bool:
    """Whether a folder is a copy of a data set of the hub, which `datasets` reads."""
    if (folder / "README.md").is_file():
        return True
    return any(folder.rglob("*.parquet"))


def _by_subject(questions: list[Question]) -> dict[str, list[Question]]:
    """Questions by subject, in their order."""
    by_subject: dict[str, list[Question]] = {}
    for question in questions:
        by_subject.setdefault(question.subject, []).append(question)
    return by_subject


def _csv_rows(path: Path, columns: tuple[str, ...] | None) -> Iterator[PlacedRow]:
    """(place, row) of a CSV file, whose first line names the columns unless they are given."""
    reader = csv.reader(io.StringIO(read_text(path, LARGE_FILE), newline=""), strict=True)
    try:
        for cells in reader:
            if not cells:  # a blank line
                continue
            if columns is None:
                columns = tuple(cells)
                continue
            place = f"{path}, line {reader.line_num}"
            if len(cells) != len(columns):
                raise InputError(
                    f"{place}: {counted(len(cells), 'column')}, "
                    f"expected {len(columns)} ({', '.join(columns)})"
                )
            yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error

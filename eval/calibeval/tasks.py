"""Tasks: from a data folder or file to subjects of multiple-choice questions.

    mmlu       the official layout, `dev/<subject>_dev.csv` and `<split>/<subject>_<split>.csv`,
               without headers, columns question, A, B, C, D, answer; or hub:NAME, rows as of
               jsonl with their subjects in the configuration `all`
    hellaswag  JSON lines {"ctx", "endings", "label", "activity_label"[, "ind", "ctx_a", "ctx_b"]}
    arc_*      AI2's JSON lines {"id", "question": {"stem", "choices": [{"text", "label"}]},
               "answerKey"} in `<NAME>-Train.jsonl`, `-Dev` and `-Test`, or the hub's columns
    jsonl      any JSON lines {"question", "choices", "answer"[, "id", "subject"]}, the answer as
               index, letter or text; `context` and `endings` are texts for continuation where
               others are meant

Convention: mmlu and jsonl are scored by letters (hendrycks/test), hellaswag and arc_* by the
log-probability of each choice's text per character (lm-evaluation-harness's `acc_norm`). Scoring by
letters asks them with MMLU's prompt.

To add a built-in task, write a function that reads its data as `Subject`s (for one file of JSON
lines a `OneFileReader` with a function that parses a row), put it into `BUILTIN_TASKS` at the end
of this module, and add its name to `request.TaskName`.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibeval.io import InputError, counted, json_lines, read_text
from calibeval.prompts import SCORING_MODES
from calibeval.questions import Question, Subject, questions_from_rows
from calibeval.request import Normalization, ResolvedTask, ScoringName, Task, TaskName

HUB = "hub:"  # begins the `data` of a task that is read from the Hugging Face hub
MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def load(task: Task) -> list[Subject]:
    """A task's subjects, with their examples and the questions up to the task's limit.

    Questions that serve as examples are not asked. Bad data raises `InputError`.
    """
    if task.split and Path(task.data).is_file():
        raise InputError(f"{task.data}: is one file, so --split {task.split} chooses nothing")
    task = resolved(task)
    subjects = {subject.name: subject for subject in BUILTIN_TASKS[task.task].read(task)}
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
        if len(subject.shots) < task.shots:
            too_few = f"{counted(len(subject.shots), 'example')}, but --shots {task.shots}"
            raise InputError(f"{task.examples or task.data}, {name}: {too_few}")
        questions = [question for question in subject.questions if question not in subject.shots]
        if not questions:
            raise InputError(f"{task.data}, {name}: every question is an example as well")
        chosen.append(replace(subject, questions=tuple(questions[: task.limit])))
    return chosen


def resolved(task: Task) -> ResolvedTask:
    """The task with what its convention says of scoring and shots."""
    scoring = task.scoring or BUILTIN_TASKS[task.task].scoring
    shots = task.shots
    if shots is None:
        shots = SCORING_MODES[scoring].default_shots
    return ResolvedTask(**{**dict(task), "scoring": scoring, "shots": shots})


def normalization(task: Task) -> Normalization:
    """How the task's users compare the choices' log-probabilities."""
    if resolved(task).scoring == "continuation":
        return BUILTIN_TASKS[task.task].normalise
    return "sum"


# --- MMLU ---


def read_mmlu(task: ResolvedTask) -> Iterator[Subject]:
    """Every subject of the folder or the hub's data set, in alphabetical order."""
    if task.examples:
        raise InputError(f"--examples {task.examples}: mmlu's are its dev split's")
    read_split: Callable[[str, str], dict[str, list[Question]]]
    if task.data.startswith(HUB):
        source = task.data.removeprefix(HUB)
        read_split = _read_mmlu_from_hub
    else:
        source = task.data
        read_split = _read_mmlu_folder
    questions = read_split(source, task.split or "test")
    examples = read_split(source, "dev") if task.shots else {}
    for subject in sorted(questions):
        yield _subject_of_topic(subject, examples.get(subject, []), questions[subject], task.shots)


def _read_mmlu_folder(folder: str, split: str) -> dict[str, list[Question]]:
    """Questions by subject, of files in the official layout."""
    suffix = f"_{split}.csv"
    questions = {}
    for path in Path(folder, split).glob(f"*{suffix}"):
        subject = path.name.removesuffix(suffix)
        questions[subject] = questions_from_rows(_mmlu_csv_rows(path, subject), path)
    if not questions:
        raise InputError(f"{folder}: no folder {split}/ with files <subject>{suffix}")
    return questions


def _mmlu_csv_rows(path: Path, subject: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of one headerless CSV."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for cells in reader:
            if not cells:  # a blank line
                continue
            place = f"{path}, line {reader.line_num}"
            if len(cells) != len(MMLU_COLUMNS):
                raise InputError(
                    f"{place}: {counted(len(cells), 'column')}, "
                    f"expected 6 ({', '.join(MMLU_COLUMNS)})"
                )
            text, *choices, answer = cells
            row = {"question": text, "choices": choices, "answer": answer, "subject": subject}
            yield place, row
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def _read_mmlu_from_hub(name: str, split: str) -> dict[str, list[Question]]:
    """Questions by subject, of a data set of the hub such as cais/mmlu, or of its folder."""
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    try:
        from datasets import load_dataset

        for number, row in enumerate(load_dataset(name, "all", split=split)):
            place = f"{HUB}{name}, split {split}, row {number}"
            rows.setdefault(row["subject"], []).append((place, row))
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{HUB}{name}: cannot be loaded from the hub: {error}") from error
    return {
        subject: questions_from_rows(rows_of_subject, HUB + name)
        for subject, rows_of_subject in rows.items()
    }


def _subject_of_topic(
    name: str, examples: list[Question], questions: list[Question], shots: int
) -> Subject:
    """A subject whose name is its topic."""
    topic = name.replace("_", " ")
    return Subject(
        name=name,
        topic=topic,
        shots=tuple(examples[:shots]),
        questions=tuple(questions),
        header=f"The following are questions (with answers) about {topic}.\n\n",
    )


# --- Tasks that are one file of JSON lines a split ---


@dataclass(frozen=True)
class OneFileReader:
    """Reads a task that has one file of JSON lines for each split, and one subject.

    The task's `data` is such a file, or the folder of the split's. Few-shot examples are the first
    rows of the task's `examples`, or else of the training split's file beside it.
    """

    file_name: Callable[[str], str]  # of a split
    topic: str  # for the header of letters' prompts
    parse_row: Callable[[dict[str, Any]], dict[str, Any]]  # to the keys of `QuestionRow`
    asked_rows_may_be_examples: bool = False  # where there is no training split beside the file

    def __call__(self, task: ResolvedTask) -> list[Subject]:
        path = Path(task.data)
        if path.is_dir():
            path = path / self.file_name(task.split or SPLITS[task.task][0])
        examples: list[Question] = []
        if task.shots:
            examples = self._questions(self._examples_file(task, path), task)[: task.shots]
        questions = self._questions(path, task)
        return [Subject(task.task, self.topic, tuple(examples), tuple(questions))]

    def _examples_file(self, task: ResolvedTask, path: Path) -> Path:
        if task.examples:
            return Path(task.examples)
        training = path.with_name(self.file_name("train"))
        if self.asked_rows_may_be_examples and not training.is_file():
            return path
        return training

    def _questions(self, file: Path, task: ResolvedTask) -> list[Question]:
        def parse(row: dict[str, Any]) -> dict[str, Any]:
            return {**self.parse_row(row), "subject": task.task}

        return questions_from_rows(json_lines(file), file, parse)


def parse_hellaswag_row(row: dict[str, Any]) -> dict[str, Any]:
    """The question is the activity and the beginning, the choices are the endings.

    By continuation the text is lm-evaluation-harness's: ctx_a, then ctx_b with its first letter
    capital and the others small; a row that has only `ctx` keeps it as it is.
    """
    activity = ""
    if row.get("activity_label"):
        activity = f"{row['activity_label']}: "
    context = row["ctx"]
    if row.get("ctx_a") is not None and row.get("ctx_b") is not None:
        context = f"{row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    return {
        "id": f"hellaswag/{row['ind']}" if "ind" in row else None,
        "question": clean(activity + row["ctx"]),
        "choices": [clean(ending) for ending in row["endings"]],
        "answer": int(row["label"]),
        "context": clean_as_lm_eval(activity + context),
        "endings": [clean_as_lm_eval(ending) for ending in row["endings"]],
    }


def clean(text: str) -> str:
    """Text without WikiHow's markers: a title ends a sentence, other brackets vanish."""
    text = text.replace(" [title]", ". ")
    text = re.sub(r"\[.*?\]", "", text)
    return re.sub(r" {2,}", " ", text).strip()


def clean_as_lm_eval(text: str) -> str:
    """The same as lm-evaluation-harness does it: of more than two spaces some stay."""
    text = text.strip().replace(" [title]", ". ")
    text = re.sub(r"\[.*?\]", "", text)
    return text.replace("  ", " ")


def parse_arc_row(row: dict[str, Any]) -> dict[str, Any]:
    """Items have 3 to 5 choices, labeled by letters or digits; they are lettered by place."""
    if "choices" in row:  # the hub's columns
        stem = row["question"]
        labels = row["choices"]["label"]
        texts = row["choices"]["text"]
    else:  # AI2's files
        stem = row["question"]["stem"]
        labels = [choice["label"] for choice in row["question"]["choices"]]
        texts = [choice["text"] for choice in row["question"]["choices"]]
    return {
        "id": row["id"],
        "question": stem,
        "choices": texts,
        "answer": labels.index(row["answerKey"]),
        "context": f"Question: {stem}\nAnswer:",
    }


def _hellaswag_file(split: str) -> str:
    return f"hellaswag_{split}.jsonl"


def _arc_easy_file(split: str) -> str:
    return f"ARC-Easy-{split.capitalize()}.jsonl"


def _arc_challenge_file(split: str) -> str:
    return f"ARC-Challenge-{split.capitalize()}.jsonl"


# --- Users' own files ---


def read_jsonl(task: ResolvedTask) -> Iterator[Subject]:
    """Read a file; questions without a subject are of general knowledge.

    Few-shot examples come from the file `examples`, by subject where it has the subject.
    """
    if task.shots and not task.examples:
        raise InputError(f"--shots {task.shots} needs --examples FILE; or --shots 0")
    examples: list[Question] = []
    if task.examples:
        examples = _jsonl_questions(Path(task.examples))
    questions = _jsonl_questions(Path(task.data))
    for name in sorted({question.subject for question in questions}):
        of_subject = [question for question in questions if question.subject == name]
        pool = [example for example in examples if example.subject == name]
        yield _subject_of_topic(name, pool or examples, of_subject, task.shots)


def _jsonl_questions(file: Path) -> list[Question]:
    return questions_from_rows(json_lines(file), file)


# --- The built-in tasks ---


@dataclass(frozen=True)
class BuiltinTask:
    """How a task's data are read, and the convention by which its users score it."""

    read: Callable[[ResolvedTask], Iterable[Subject]]
    scoring: ScoringName
    # By what the texts' log-probabilities are divided where scoring is by continuation.
    normalise: Normalization = "sum"
    # The split that the task is scored on, and the one to choose and to fit on. Every task that a
    # `OneFileReader` reads has them.
    splits: tuple[str, str] | None = None


BUILTIN_TASKS: dict[TaskName, BuiltinTask] = {
    "mmlu": BuiltinTask(read_mmlu, scoring="letters", splits=("test", "val")),
    "hellaswag": BuiltinTask(
        OneFileReader(
            _hellaswag_file,
            topic="how an everyday situation goes on",
            parse_row=parse_hellaswag_row,
            asked_rows_may_be_examples=True,
        ),
        scoring="continuation",
        normalise="characters",
        splits=("val", "train"),
    ),
    "arc_easy": BuiltinTask(
        OneFileReader(_arc_easy_file, topic="grade-school science", parse_row=parse_arc_row),
        scoring="continuation",
        normalise="characters",
        splits=("test", "dev"),
    ),
    "arc_challenge": BuiltinTask(
        OneFileReader(_arc_challenge_file, topic="grade-school science", parse_row=parse_arc_row),
        scoring="continuation",
        normalise="characters",
        splits=("test", "dev"),
    ),
    "jsonl": BuiltinTask(read_jsonl, scoring="letters"),
}

SPLITS: dict[str, tuple[str, str]] = {
    name: builtin.splits for name, builtin in BUILTIN_TASKS.items() if builtin.splits
}

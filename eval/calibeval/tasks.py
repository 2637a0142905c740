"""Tasks: from a data folder or file to subjects of multiple-choice questions.

mmlu      the official layout, `dev/<subject>_dev.csv` and `<split>/<subject>_<split>.csv`, without
          headers, columns question, A, B, C, D, answer; or hub:NAME, rows as of jsonl with their
          subjects in the configuration `all`
hellaswag JSON lines {"ctx", "endings", "label", "activity_label"[, "ind", "ctx_a", "ctx_b"]}
arc_*     AI2's JSON lines {"id", "question": {"stem", "choices": [{"text", "label"}]},
          "answerKey"} in `<NAME>-Train.jsonl`, `-Dev` and `-Test`, or the hub's columns
jsonl     any JSON lines {"question", "choices", "answer"[, "id", "subject"]}, the answer as index,
          letter or text; `context` and `endings` are texts for continuation where others are meant

Convention: mmlu and jsonl are scored by letters (hendrycks/test), hellaswag and arc_* by the
log-probability of each choice's text per character (lm-evaluation-harness's `acc_norm`). Scoring by
letters asks them with MMLU's prompt.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from calibeval.io import InputError, counted, json_lines, read_text
from calibeval.request import Seq, Task, Text, checked

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHOTS = {"letters": 5, "continuation": 0}  # hendrycks/test's and lm-evaluation-harness's
# The split that a task is scored on, and the one to choose and to fit on.
SPLITS = {
    "mmlu": ("test", "val"),
    "hellaswag": ("val", "train"),
    "arc_easy": ("test", "dev"),
    "arc_challenge": ("test", "dev"),
}
HUB = "hub:"
GENERAL = "general_knowledge"
COLUMNS = ("question", "A", "B", "C", "D", "answer")


class Question(BaseModel, strict=True):
    """A row of jsonl, which the others are turned into: 2 to 26 choices, and the right one's index.

    `context`, `endings`: what continuation scoring reads.
    """

    text: Text = Field(alias="question")
    choices: Annotated[Seq[Text], Field(min_length=2, max_length=len(LETTERS))]
    label: int | str = Field(alias="answer")  # an index, a letter or a text; once read the index
    id: Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
    subject: str = GENERAL
    context: str | None = None
    endings: Seq[str] | None = None

    @model_validator(mode="after")
    def _whole(self):
        n, answer = len(self.choices), self.label
        spelled = range(n), tuple(LETTERS[:n]), self.choices
        found = [names.index(answer) for names in spelled if names.count(answer) == 1]
        if not found:
            expected = f"0 to {n - 1}, A to {LETTERS[n - 1]}, or the text of one choice"
            raise ValueError(f"answer is {answer!r}, expected {expected}")
        self.label = found[0]
        self.context = self.context or f"Question: {self.text.strip()}\nAnswer:"
        self.endings = self.endings or self.choices
        return self


@dataclass(frozen=True)
class Subject:
    """The questions that share a topic and few-shot examples, so also a prompt prefix."""

    name: str
    topic: str
    shots: tuple[Question, ...]
    questions: tuple[Question, ...]
    header: str = ""  # before continuation scoring's examples


def resolved(task: Task) -> Task:
    """The task with what its convention says of scoring and shots."""
    scoring = task.scoring or ("letters" if task.task in ("mmlu", "jsonl") else "continuation")
    shots = SHOTS[scoring] if task.shots is None else task.shots
    return task.model_copy(update={"scoring": scoring, "shots": shots})


def normalisation(task: Task) -> str:
    """How the task's users compare the choices' log-probabilities."""
    by_text = task.task not in ("mmlu", "jsonl") and resolved(task).scoring == "continuation"
    return "characters" if by_text else "sum"


def load(task: Task) -> list[Subject]:
    """A task's questions, cut to its limit, and few-shot examples, which are not asked; bad data
    raises `InputError`."""
    asked = resolved(task)
    if task.split and Path(task.data).is_file():
        raise InputError(f"{task.data}: is one file, so --split {task.split} chooses nothing")
    if task.examples and task.task == "mmlu":
        raise InputError(f"--examples {task.examples}: mmlu's are its dev split's")
    found = {subject.name: subject for subject in LOADERS[task.task](asked)}
    if unknown := sorted({*(task.subjects or ())} - {*found}):
        raise InputError(f"{task.data}: no subject {unknown[0]!r}; there are {', '.join(found)}")
    made = []
    for name, of in found.items():
        if task.subjects and name not in task.subjects:
            continue
        if len(of.shots) < asked.shots:
            few = f"{counted(len(of.shots), 'example')}, but --shots {asked.shots}"
            raise InputError(f"{task.examples or task.data}, {name}: {few}")
        rest = tuple(question for question in of.questions if question not in of.shots)
        if not rest:
            raise InputError(f"{task.data}, {name}: every question is an example as well")
        made.append(replace(of, questions=rest[: task.limit]))
    return made


def mmlu(task: Task) -> Iterator[Subject]:
    """Every subject of the folder or the hub's data set, in alphabetical order."""
    name = task.data.removeprefix(HUB)
    read = _folder if name == task.data else _hub
    asked = sorted(read(name, task.split or "test").items())
    examples = read(name, "dev") if task.shots else {}
    for subject, questions in asked:
        yield _topic(subject, examples.get(subject, []), questions, task.shots)


def _topic(name: str, pool: list[Question], questions: list[Question], shots: int) -> Subject:
    """A subject whose name is its topic."""
    topic = name.replace("_", " ")
    header = f"The following are questions (with answers) about {topic}.\n\n"
    return Subject(name, topic, tuple(pool[:shots]), tuple(questions), header)


def _folder(data: str, split: str) -> dict[str, list[Question]]:
    """Questions by subject, of files in the official layout."""
    suffix = f"_{split}.csv"
    paths = {path.name.removesuffix(suffix): path for path in Path(data, split).glob(f"*{suffix}")}
    if not paths:
        raise InputError(f"{data}: no folder {split}/ with files <subject>{suffix}")
    return {subject: _questions(_csv(path, subject), path) for subject, path in paths.items()}


def _csv(path: Path, subject: str) -> Iterator[tuple[str, dict]]:
    """(place, row) of one headerless CSV."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in filter(None, reader):
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(COLUMNS):
                found = counted(len(row), "column")
                raise InputError(f"{where}: {found}, expected 6 ({', '.join(COLUMNS)})")
            text, *choices, answer = row
            asked = {"question": text, "choices": choices, "answer": answer}
            yield where, asked | {"subject": subject}
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def _hub(name: str, split: str) -> dict[str, list[Question]]:
    """Questions by subject, of a data set of the hub such as cais/mmlu, or of its folder."""
    found: dict[str, list] = {}
    try:
        from datasets import load_dataset

        for place, row in enumerate(load_dataset(name, "all", split=split)):
            where = f"{HUB}{name}, split {split}, row {place}"
            found.setdefault(row["subject"], []).append((where, row))
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{HUB}{name}: cannot be loaded from the hub: {error}") from error
    return {subject: _questions(rows, HUB + name) for subject, rows in found.items()}


def one_file(name: str, topic: str, parse: Callable[[dict], dict], task: Task) -> list[Subject]:
    """Read a file, or the split's of a folder; few-shot examples are the first of `examples`, or of
    the training split beside the file, or, where HellaSwag's is absent, of the questions."""
    split, path = task.split or SPLITS[task.task][0], Path(task.data)
    if path.is_dir():
        path = path / name.format(split, split.capitalize())
    train = path.with_name(name.format("train", "Train"))

    def read(file: Path) -> list[Question]:
        return _questions(json_lines(file), file, lambda row: parse(row) | {"subject": task.task})

    pool = path if task.task == "hellaswag" and not train.is_file() else train
    shots = read(Path(task.examples or pool))[: task.shots] if task.shots else ()
    return [Subject(task.task, topic, tuple(shots), tuple(read(path)))]


def _hellaswag_row(row: dict) -> dict:
    """The question is the activity and the beginning, the choices are the endings.

    By continuation the text is lm-evaluation-harness's: ctx_a, then ctx_b with its first letter
    capital and the others small; a row that has only `ctx` keeps it as it is.
    """
    activity = f"{row['activity_label']}: " if row.get("activity_label") else ""
    beginning = row["ctx"]
    if row.get("ctx_a") is not None and row.get("ctx_b") is not None:
        beginning = f"{row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    return {
        "id": f"hellaswag/{row['ind']}" if "ind" in row else None,
        "question": clean(activity + row["ctx"]),
        "choices": [clean(ending) for ending in row["endings"]],
        "answer": int(row["label"]),
        "context": _lm_eval_clean(activity + beginning),
        "endings": [_lm_eval_clean(ending) for ending in row["endings"]],
    }


def clean(text: str) -> str:
    """Text without WikiHow's markers: a title ends a sentence, other brackets vanish."""
    text = re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()


def _lm_eval_clean(text: str) -> str:
    """The same as lm-evaluation-harness does it: of more than two spaces some stay."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc_row(row: dict) -> dict:
    """Items have 3 to 5 choices, labelled by letters or digits; they are lettered by place."""
    if "choices" in row:
        stem, labels, texts = row["question"], row["choices"]["label"], row["choices"]["text"]
    else:
        stem, choices = row["question"]["stem"], row["question"]["choices"]
        labels, texts = [c["label"] for c in choices], [c["text"] for c in choices]
    asked = {"id": row["id"], "question": stem, "choices": texts}
    context = f"Question: {stem}\nAnswer:"
    return asked | {"answer": labels.index(row["answerKey"]), "context": context}


def jsonl(task: Task) -> Iterator[Subject]:
    """Read a file; questions without a subject are of general knowledge.

    Few-shot examples come from the file `examples`, by subject where it has the subject.
    """
    if task.shots and not task.examples:
        raise InputError(f"--shots {task.shots} needs --examples FILE; or --shots 0")
    path, shown = Path(task.data), Path(task.examples or "")
    examples = _questions(json_lines(shown), shown) if task.examples else []
    questions = _questions(json_lines(path), path)
    for name in sorted({question.subject for question in questions}):
        pool = [e for e in examples if e.subject == name] or examples
        yield _topic(name, pool, [q for q in questions if q.subject == name], task.shots)


def _questions(
    rows: Iterable[tuple[str, dict]], source: object, parse: Callable[[dict], dict] = dict
) -> list[Question]:
    """(place, row) as questions; a bad row, or an id that repeats, raises `InputError`."""
    found: dict[str, Question] = {}
    for number, (where, row) in enumerate(rows):
        try:
            asked = parse(row)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{where}: not a row of this task: {error!r}") from error
        if asked.get("id") is None:
            asked = asked | {"id": f"{asked.get('subject', GENERAL)}/{number}"}
        made = checked(Question, asked, where)
        if made.id in found:
            raise InputError(f"{where}: id {made.id!r} is there already; ids must be unique")
        found[made.id] = made
    if not found:
        raise InputError(f"{source}: no questions")
    return list(found.values())


GOES_ON, SCIENCE = "how an everyday situation goes on", "grade-school science"
LOADERS = {
    "mmlu": mmlu,
    "hellaswag": partial(one_file, "hellaswag_{0}.jsonl", GOES_ON, _hellaswag_row),
    "arc_easy": partial(one_file, "ARC-Easy-{1}.jsonl", SCIENCE, _arc_row),
    "arc_challenge": partial(one_file, "ARC-Challenge-{1}.jsonl", SCIENCE, _arc_row),
    "jsonl": jsonl,
}

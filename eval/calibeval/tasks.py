"""Tasks: from a data folder or file to subjects of multiple-choice questions.

mmlu      the official layout, `dev/<subject>_dev.csv` and `<split>/<subject>_<split>.csv`, without
          headers, columns question, A, B, C, D, answer; or hub:NAME, rows as of jsonl with their
          subjects in the configuration `all`
hellaswag JSON lines {"ctx", "endings", "label", "activity_label"[, "ind", "ctx_a", "ctx_b"]}
arc_*     AI2's JSON lines {"id", "question": {"stem", "choices": [{"text", "label"}]},
          "answerKey"} in `<NAME>-Train.jsonl`, `-Dev` and `-Test`, or the hub's columns
jsonl     any JSON lines {"question", "choices", "answer"[, "id", "subject"]}, the answer as index,
          letter or text

Convention: mmlu and jsonl are scored by letters (hendrycks/test), hellaswag and arc_* by the
log-probability of each choice's text per character (lm-evaluation-harness's `acc_norm`).
`--scoring letters` asks the latter as the paper does, which adapts MMLU's prompt to them.
"""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from calibeval.io import InputError, counted, json_lines, read_text

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHOTS = {"letters": 5, "continuation": 0}  # hendrycks/test's and lm-evaluation-harness's
# The split that a task is scored on, and the one to fit a calibrator on.
SPLITS = {
    "mmlu": ("test", "val"),
    "hellaswag": ("val", "train"),
    "arc_easy": ("test", "dev"),
    "arc_challenge": ("test", "dev"),
}
HUB = "hub:"
COLUMNS = ("question", "A", "B", "C", "D", "answer")
HELLASWAG = "hellaswag_{split}.jsonl"


@dataclass(frozen=True)
class Question:
    """A question with 2 to 26 choices; `label` is the index of the right one.

    `context`, `endings`: what continuation scoring reads, where it is not `Question: <stripped
    text>`, `Answer:` and the choices. `unconditional`: the context that says how likely a choice is
    without the question.
    """

    id: str
    subject: str
    text: str
    choices: tuple[str, ...]
    label: int
    context: str | None = None
    endings: tuple[str, ...] | None = None
    unconditional: str = "Answer:"


@dataclass(frozen=True)
class Subject:
    """The questions that share a topic and few-shot examples, so also a prompt prefix."""

    name: str
    topic: str
    shots: tuple[Question, ...]
    questions: tuple[Question, ...]
    header: str = ""  # before continuation scoring's examples


@dataclass(frozen=True)
class Source:
    """What a loader is asked for."""

    data: str
    shots: int
    subjects: tuple[str, ...] | None = None
    split: str | None = None
    examples: str | None = None


def load(task: str, source: Source) -> list[Subject]:
    """Read a task's questions and few-shot examples; bad data raises `InputError`."""
    if task not in LOADERS:
        raise InputError(f"unknown task {task!r}; known: {', '.join(LOADERS)}")
    if source.subjects and task not in ("mmlu", "jsonl"):
        raise InputError(f"--subjects is for mmlu and jsonl; {task} has one subject")
    return LOADERS[task](source)


def convention(task: str, scoring: str | None = None) -> tuple[str, str]:
    """(scoring, normalisation): the task's own, or the one asked for with its normalisation."""
    per_character = task not in ("mmlu", "jsonl")
    scoring = scoring or ("continuation" if per_character else "letters")
    return scoring, "characters" if per_character and scoring == "continuation" else "sum"


def mmlu(source: Source) -> list[Subject]:
    """Every subject of the folder or the hub's data set, or those named, in alphabetical order."""
    split, name = source.split or "test", source.data.removeprefix(HUB)
    read = _folder if name == source.data else _hub
    asked = read(name, split, source.subjects)
    shown = read(name, "dev", tuple(asked)) if source.shots else {}
    return [
        _topic(subject, shown.get(subject, []), asked[subject], source.shots, f"{name}, split dev")
        for subject in asked
    ]


def _topic(
    name: str, pool: list[Question], questions: list[Question], shots: int, where: str
) -> Subject:
    """A subject whose name is its topic."""
    topic = name.replace("_", " ")
    header = f"The following are questions (with answers) about {topic}.\n\n"
    chosen = _first(pool, shots, f"{where}, {name}")
    return Subject(name, topic, chosen, tuple(questions), header)


def _first(pool: list[Question], shots: int, where: str) -> tuple[Question, ...]:
    """The few-shot examples; raises `InputError` where there are too few."""
    if len(pool) < shots:
        raise InputError(f"{where}: {counted(len(pool), 'row')}, but --shots {shots} needs {shots}")
    return tuple(pool[:shots])


def _chosen(present: list[str], wanted: tuple[str, ...] | None, where: str) -> list[str]:
    """The subjects to read; one that is not present raises `InputError`."""
    unknown = sorted(set(wanted or ()) - set(present))
    if unknown:
        raise InputError(f"{where}: no subject {unknown[0]!r}; there are {', '.join(present)}")
    return [name for name in present if not wanted or name in wanted]


def _folder(data: str, split: str, wanted: tuple[str, ...] | None) -> dict[str, list[Question]]:
    """Questions by subject, of files in the official layout."""
    suffix = f"_{split}.csv"
    present = [path.name.removesuffix(suffix) for path in Path(data, split).glob(f"*{suffix}")]
    if not present:
        raise InputError(
            f"{data}: no folder {split}/ with files <subject>{suffix}; expected the official "
            "layout, which also has dev/<subject>_dev.csv"
        )
    chosen = _chosen(sorted(present), wanted, f"{data}, split {split}")
    return {subject: _csv(Path(data, split, subject + suffix), subject) for subject in chosen}


def _csv(path: Path, subject: str) -> list[Question]:
    """Read one headerless CSV; a malformed row names its line, what it has and what is expected."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    questions = []
    try:
        for row in filter(None, reader):
            where = f"{path}, row {len(questions) + 1} (line {reader.line_num})"
            if len(row) != len(COLUMNS):
                found = counted(len(row), "column")
                raise InputError(f"{where}: {found}, expected 6 ({', '.join(COLUMNS)})")
            text, *choices, answer = row
            asked = {"question": text, "choices": choices, "answer": answer, "subject": subject}
            questions.append(_question(asked, where, len(questions)))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    if not questions:
        raise InputError(f"{path}: no rows; expected columns {', '.join(COLUMNS)}")
    return questions


def _hub(name: str, split: str, wanted: tuple[str, ...] | None) -> dict[str, list[Question]]:
    """Questions by subject, of a data set of the hub such as cais/mmlu, or of its folder."""
    found: dict[str, list[Question]] = {}
    try:
        from datasets import load_dataset

        rows = load_dataset(name, "all", split=split)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{HUB}{name}: cannot be loaded from the hub: {error}") from error
    for place, row in enumerate(rows):
        own = found.setdefault(row.get("subject"), [])
        own.append(_question(row, f"{HUB}{name}, split {split}, row {place}", len(own)))
    return {subject: found[subject] for subject in _chosen(sorted(found), wanted, HUB + name)}


def hellaswag(source: Source) -> list[Subject]:
    """Read a file, or `hellaswag_val.jsonl` of a folder; test labels were never published.

    Few-shot examples are the first of `--examples`, or of hellaswag_train.jsonl beside the file;
    where neither is, the first questions serve and are not scored.
    """
    path = Path(source.data)
    if path.is_dir():
        path = path / HELLASWAG.format(split=source.split or "val")
    train = path.parent / HELLASWAG.format(split="train")
    examples = Path(source.examples) if source.examples else train if train.is_file() else None
    questions = _read(path, _hellaswag_row)
    pool = questions
    if examples:
        pool = _read(examples, _hellaswag_row) if source.shots else []
    shots = _first(pool, source.shots, str(examples or path))
    asked = questions if examples else questions[source.shots :]
    return [Subject("hellaswag", "how an everyday situation goes on", shots, tuple(asked))]


def _hellaswag_row(row: dict, where: str, number: int) -> Question:
    """The question is the activity and the beginning, the choices are the endings.

    By continuation the text is lm-evaluation-harness's: ctx_a, then ctx_b with its first letter
    capital and the others small; a row that has only `ctx` keeps it as it is.
    """
    _need(row, ("ctx", "endings", "label"), where)
    endings, label = row["endings"], row["label"]
    if not isinstance(endings, list) or str(label) not in map(str, range(len(endings))):
        raise InputError(f"{where}: label is {label!r}, expected the index of an ending")
    asked = {"id": f"hellaswag/{row.get('ind', number)}", "subject": "hellaswag"}
    asked |= {"question": row["ctx"], "choices": endings, "answer": int(label)}
    question = _question(asked, where, number)
    activity = f"{row['activity_label']}: " if row.get("activity_label") else ""
    beginning = row["ctx"]
    if row.get("ctx_a") is not None and row.get("ctx_b") is not None:
        beginning = f"{row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    return replace(
        question,
        text=clean(activity + question.text),
        choices=tuple(map(clean, endings)),
        context=_lm_eval_clean(activity + beginning),
        endings=tuple(map(_lm_eval_clean, endings)),
        unconditional="",
    )


def clean(text: str) -> str:
    """Text without WikiHow's markers: a title ends a sentence, other brackets vanish."""
    text = re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()


def _lm_eval_clean(text: str) -> str:
    """The same as lm-evaluation-harness does it: of more than two spaces some stay."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def arc(name: str, source: Source) -> list[Subject]:
    """Read a split (default test); few-shot examples are the first of the training split."""
    data, split = Path(source.data), (source.split or "test").capitalize()
    path = data / f"{name}-{split}.jsonl"
    if not path.is_file():
        raise InputError(
            f"{data}: no {path.name}; expected the folder of {name}-Train, -Dev, -Test"
        )
    examples = Path(source.examples) if source.examples else data / f"{name}-Train.jsonl"
    subject = name.lower().replace("-", "_")
    row = partial(_arc_row, subject)
    pool = _read(examples, row) if source.shots else []
    shots = _first(pool, source.shots, str(examples))
    return [Subject(subject, "grade-school science", shots, tuple(_read(path, row)))]


def _arc_row(subject: str, row: dict, where: str, number: int) -> Question:
    """Items have 3 to 5 choices, labelled by letters or digits; they are lettered by place."""
    try:
        stem = row["question"]
        if isinstance(stem, str):
            labels, texts = row["choices"]["label"], row["choices"]["text"]
        else:
            stem, choices = stem["stem"], stem["choices"]
            labels, texts = [c["label"] for c in choices], [c["text"] for c in choices]
        asked, key = {"id": row["id"], "subject": subject}, row["answerKey"]
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{where}: not an ARC item (at {error}); expected id, question with stem and "
            "choices of text and label, answerKey; or the hub's columns"
        ) from error
    if not isinstance(labels, list) or labels.count(key) != 1:
        raise InputError(f"{where}: answerKey is {key!r}, expected one of {labels}")
    asked |= {"question": stem, "choices": texts, "answer": labels.index(key)}
    return replace(_question(asked, where, number), context=f"Question: {stem}\nAnswer:")


def jsonl(source: Source) -> list[Subject]:
    """Read a file; questions without a subject are of general knowledge.

    Few-shot examples come from the file `source.examples`, by subject where it has the subject.
    """
    path = Path(source.data)
    if source.shots and not source.examples:
        raise InputError(f"--shots {source.shots} needs --examples FILE; or --shots 0")
    questions = _read(path, _question)
    examples = _read(Path(source.examples), _question) if source.examples else []
    subjects = []
    for name in _chosen(sorted({q.subject for q in questions}), source.subjects, str(path)):
        own = [q for q in questions if q.subject == name]
        pool = [e for e in examples if e.subject == name] or examples
        subjects.append(_topic(name, pool, own, source.shots, f"{source.examples}"))
    return subjects


def _question(row: dict, where: str, number: int) -> Question:
    """A row of jsonl, which the others are turned into; a bad one raises `InputError`."""
    _need(row, ("question", "choices", "answer"), where)
    text, choices, answer = row["question"], row["choices"], row["answer"]
    subject = row.get("subject", "general_knowledge")
    if not isinstance(subject, str):
        raise InputError(f"{where}: subject is {subject!r}, expected text")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: question is {text!r}, expected text")
    several = isinstance(choices, list)
    if not several or not 2 <= len(choices) <= len(LETTERS):
        found = counted(len(choices), "choice") if several else f"choices {choices!r}"
        raise InputError(f"{where}: {found}, expected a list of 2 to {len(LETTERS)}")
    for letter, choice in zip(LETTERS, choices, strict=False):
        if not isinstance(choice, str) or not choice.strip():
            raise InputError(f"{where}: choice {letter} is {choice!r}, expected text")
    letters = LETTERS[: len(choices)]
    if type(answer) in (int, str):  # and not bool, which is an int
        for spelled in (range(len(choices)), list(letters), choices):
            if spelled.count(answer) == 1:
                id = str(row.get("id", f"{subject}/{number}"))
                return Question(id, subject, text, tuple(choices), spelled.index(answer))
    raise InputError(
        f"{where}: answer is {answer!r}, expected 0 to {len(choices) - 1}, A to {letters[-1]}, or "
        "the text of one choice"
    )


def _read(path: Path, question: Callable[[dict, str, int], Question]) -> list[Question]:
    """The questions of a JSON-lines file; an id that repeats raises `InputError`.

    `question` is given a row, where it stands, and the number it has among the rows, from 0.
    """
    found: dict[str, tuple[Question, str]] = {}
    for place, (number, row) in enumerate(json_lines(path)):
        where = f"{path}, line {number}"
        made = question(row, where, place)
        if made.id in found:
            raise InputError(
                f"{where}: id {made.id!r} is in {found[made.id][1]} already; ids must be unique"
            )
        found[made.id] = made, where
    if not found:
        raise InputError(f"{path}: no questions; expected one JSON object a line")
    return [made for made, _ in found.values()]


def _need(row: dict, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if key not in row:
            raise InputError(f"{where}: no {key!r}; found {', '.join(row)}")


LOADERS = {
    "mmlu": mmlu,
    "hellaswag": hellaswag,
    "arc_easy": partial(arc, "ARC-Easy"),
    "arc_challenge": partial(arc, "ARC-Challenge"),
    "jsonl": jsonl,
}

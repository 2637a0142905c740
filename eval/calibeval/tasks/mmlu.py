"""MMLU in the official layout: `dev/<subject>_dev.csv` and `<split>/<subject>_<split>.csv`.

No header; columns question, A, B, C, D, answer (hendrycks/test). Subjects are the files present.
"""

import csv
import io
from pathlib import Path

from calibeval.errors import InputError
from calibeval.files import read_text
from calibeval.tasks.question import LETTERS, Question, Subject

COLUMNS = ("question", "A", "B", "C", "D", "answer")


def load(data: Path, shots: int, subjects: list[str] | None, split: str) -> list[Subject]:
    """Read every subject under `data`, or those named, in alphabetical order."""
    present = subjects_of(data, split)
    unknown = sorted(set(subjects or ()) - set(present))
    if unknown:
        raise InputError(
            f"{data / split}: no {unknown[0]}_{split}.csv; subjects there: {', '.join(present)}"
        )
    loaded = []
    for name in present:
        if subjects and name not in subjects:
            continue
        examples = read_csv(data / "dev" / f"{name}_dev.csv", name) if shots else []
        if len(examples) < shots:
            raise InputError(
                f"{data / 'dev' / f'{name}_dev.csv'}: {len(examples)} rows, "
                f"but --shots {shots} needs {shots}"
            )
        questions = read_csv(data / split / f"{name}_{split}.csv", name)
        loaded.append(Subject(name, header(name), tuple(examples[:shots]), tuple(questions)))
    return loaded


def header(subject: str) -> str:
    """The official first line; its formatter leaves two spaces before the subject."""
    topic = "".join(f" {word}" for word in subject.split("_"))
    return f"The following are multiple choice questions (with answers) about {topic}.\n\n"


def subjects_of(data: Path, split: str) -> list[str]:
    """Names of the subjects that have a file in `data/split`."""
    folder, suffix = data / split, f"_{split}.csv"
    if not folder.is_dir():
        raise InputError(
            f"{data}: no folder {split}/; expected the official layout, "
            f"dev/<subject>_dev.csv and {split}/<subject>{suffix}"
        )
    names = sorted(p.name.removesuffix(suffix) for p in folder.glob(f"*{suffix}"))
    if not names:
        raise InputError(f"{folder}: no file named <subject>{suffix}")
    return names


def read_csv(path: Path, subject: str) -> list[Question]:
    """Read one headerless CSV; a malformed row names its line, what it has and what is expected."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    questions = []
    try:
        for row in reader:
            if row:
                questions.append(_question(row, len(questions), subject, path, reader.line_num))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    if not questions:
        raise InputError(f"{path}: no rows; expected columns {', '.join(COLUMNS)}")
    return questions


def _question(row: list[str], index: int, subject: str, path: Path, line: int) -> Question:
    where = f"{path}, row {index + 1} (line {line})"
    if len(row) != len(COLUMNS):
        raise InputError(
            f"{where}: {len(row)} columns, expected {len(COLUMNS)} ({', '.join(COLUMNS)})"
        )
    empty = [name for name, field in zip(COLUMNS, row, strict=True) if not field.strip()]
    if empty:
        raise InputError(f"{where}: column {empty[0]} is empty")
    *_, answer = row
    if answer not in LETTERS[:4]:
        raise InputError(f"{where}: answer is {answer!r}, expected one of A, B, C, D")
    return Question(f"{subject}/{index}", subject, row[0], tuple(row[1:5]), LETTERS.index(answer))

"""MMLU in the official layout: `dev/<subject>_dev.csv` and `<split>/<subject>_<split>.csv`.

No header; columns question, A, B, C, D, answer (hendrycks/test). Subjects are the files present.
"""

import csv
import io
from pathlib import Path

from calibeval.io import InputError, counted, read_text
from calibeval.tasks.question import LETTERS, Question, Source, Subject, checked

COLUMNS = ("question", "A", "B", "C", "D", "answer")
HUB = "hub:"


def load(source: Source) -> list[Subject]:
    """Read every subject, or those named, in alphabetical order.

    `source.data` is a folder in the official layout, or hub:NAME for a hub data set with the
    columns question, choices and answer, such as hub:cais/mmlu.
    """
    split = source.split or "test"
    if source.data.startswith(HUB):
        return _hub(source, split)
    data = Path(source.data)
    loaded = []
    for name in chosen(subjects_of(data, split), source.subjects, f"{data / split}"):
        examples = data / "dev" / f"{name}_dev.csv"
        shots = read_csv(examples, name) if source.shots else []
        _enough(len(shots), source.shots, str(examples))
        questions = read_csv(data / split / f"{name}_{split}.csv", name)
        loaded.append(_subject(name, shots[: source.shots], questions))
    return loaded


def _subject(name: str, shots: list[Question], questions: list[Question]) -> Subject:
    return Subject(name, name.replace("_", " "), tuple(shots), tuple(questions))


def _enough(found: int, shots: int, where: str) -> None:
    if found < shots:
        raise InputError(f"{where}: {counted(found, 'row')}, but --shots {shots} needs {shots}")


def chosen(present: list[str], wanted: tuple[str, ...] | None, where: str) -> list[str]:
    """The subjects to read; one that is not present raises `InputError`."""
    unknown = sorted(set(wanted or ()) - set(present))
    if unknown:
        raise InputError(f"{where}: no subject {unknown[0]!r}; there are {', '.join(present)}")
    return [name for name in present if not wanted or name in wanted]


def _hub(source: Source, split: str) -> list[Subject]:
    from datasets import load_dataset

    name = source.data.removeprefix(HUB)
    try:
        present = sorted(set(_hub_subjects(name)) - {"all", "auxiliary_train"})
        loaded = []
        for subject in chosen(present, source.subjects, name):
            parts = [load_dataset(name, subject, split=part) for part in ("dev", split)]
            shots, questions = ([_row(r, i, subject) for i, r in enumerate(p)] for p in parts)
            _enough(len(shots), source.shots, f"{name}, {subject}, split dev")
            loaded.append(_subject(subject, shots[: source.shots], questions))
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{source.data}: cannot be loaded from the hub: {error}") from error
    return loaded


def _hub_subjects(name: str) -> list[str]:
    """The configurations of a hub data set; offline those that its cached card lists."""
    from datasets import config, get_dataset_config_names
    from huggingface_hub import DatasetCard, hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError

    if Path(name).is_dir():
        return get_dataset_config_names(name)
    if not config.HF_HUB_OFFLINE:
        try:
            hf_hub_download(name, "README.md", repo_type="dataset")  # for later, without a network
        except LocalEntryNotFoundError:  # the hub did not answer
            raise
        except EntryNotFoundError:  # it did: this data set does without a card
            pass
        return get_dataset_config_names(name)
    # get_dataset_config_names would answer ["default"], and the cache's folders may be those of
    # some subjects only.
    card = DatasetCard.load(hf_hub_download(name, "README.md", repo_type="dataset"))
    listed = card.data.to_dict().get("configs") or []
    subjects = [entry["config_name"] for entry in listed if "config_name" in entry]
    if not subjects:
        raise InputError(
            f"{HUB}{name}: its card lists no configurations, so that its subjects are unknown "
            "without a network; give --data a folder in the official layout"
        )
    return subjects


def _row(row: dict, index: int, subject: str) -> Question:
    where = f"{subject}, row {index}"
    return checked(
        where, f"{subject}/{index}", subject, row["question"], row["choices"], row["answer"]
    )


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
            f"{where}: {counted(len(row), 'column')}, "
            f"expected {len(COLUMNS)} ({', '.join(COLUMNS)})"
        )
    empty = [name for name, field in zip(COLUMNS, row, strict=True) if not field.strip()]
    if empty:
        raise InputError(f"{where}: column {empty[0]} is empty")
    *_, answer = row
    if answer not in LETTERS[:4]:
        raise InputError(f"{where}: answer is {answer!r}, expected one of A, B, C, D")
    return Question(f"{subject}/{index}", subject, row[0], tuple(row[1:5]), LETTERS.index(answer))

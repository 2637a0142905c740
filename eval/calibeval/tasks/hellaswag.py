"""HellaSwag's JSON lines: {"ctx", "endings", "label", "activity_label"[, "ind"]}.

The question is the activity and the beginning, the choices are the endings. Markers that WikiHow
left in the original text ("[title]", "[step]") are taken out.
"""

import re
from pathlib import Path

from calibeval.io import InputError, json_lines
from calibeval.tasks.question import Question, Source, Subject, checked, split_examples, unseen

NAMES = "hellaswag_{split}.jsonl"


def load(source: Source) -> list[Subject]:
    """Read a file, or `hellaswag_val.jsonl` of a folder; test labels were never published.

    Few-shot examples are the first of `--examples`, or of hellaswag_train.jsonl beside the file;
    where neither is, the first questions serve and are not scored.
    """
    path = Path(source.data)
    if path.is_dir():
        path = path / NAMES.format(split=source.split or "val")
    train = path.parent / NAMES.format(split="train")
    examples = Path(source.examples) if source.examples else train if train.is_file() else None
    questions = read(path)
    pool = read(examples) if examples and source.shots else None
    shots, questions = split_examples(questions, pool, source.shots, str(examples or path))
    return [Subject("hellaswag", "how an everyday situation goes on", shots, questions)]


def read(path: Path) -> list[Question]:
    """Read and check one file."""
    questions, seen = [], {}
    for number, row in json_lines(path):
        where = f"{path}, line {number}"
        for key in ("ctx", "endings", "label"):
            if key not in row:
                raise InputError(f"{where}: no {key!r}; found {', '.join(row)}")
        endings, label = row["endings"], row["label"]
        if not isinstance(endings, list) or str(label) not in map(str, range(len(endings))):
            raise InputError(f"{where}: label is {label!r}, expected the index of an ending")
        activity = f"{row['activity_label']}: " if row.get("activity_label") else ""
        id = unseen(f"hellaswag/{row.get('ind', number - 1)}", seen, where)
        question = checked(where, id, "hellaswag", row["ctx"], endings, int(label))
        choices = tuple(clean(ending) for ending in question.choices)
        text = clean(activity + question.text)
        questions.append(Question(id, "hellaswag", text, choices, question.label))
    if not questions:
        raise InputError(f"{path}: no questions")
    return questions


def clean(text: str) -> str:
    """Text without WikiHow's markers: a title ends a sentence, other brackets vanish."""
    text = re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()

"""ARC-Easy and ARC-Challenge in AI2's JSON lines: `<NAME>-Train.jsonl`, `-Dev`, `-Test`.

{"id", "question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}, or the hub's columns,
{"id", "question", "choices": {"text": [], "label": []}, "answerKey"}; items have 3 to 5 choices and
letters or digits as labels. Choices are lettered anew by their place.
"""

from functools import partial
from pathlib import Path

from calibeval.io import InputError, json_lines
from calibeval.tasks.question import Question, Source, Subject, checked, split_examples, unseen


def load(name: str, source: Source) -> list[Subject]:
    """Read a split (default test); few-shot examples are the first of the training split."""
    data, split = Path(source.data), (source.split or "test").capitalize()
    path = data / f"{name}-{split}.jsonl"
    if not path.is_file():
        raise InputError(f"{data}: no {path.name}; expected AI2's files {name}-Train, -Dev, -Test")
    examples = Path(source.examples) if source.examples else data / f"{name}-Train.jsonl"
    subject = name.lower().replace("-", "_")
    questions = read(path, subject)
    pool = read(examples, subject) if source.shots else []
    shots, questions = split_examples(questions, pool, source.shots, str(examples))
    return [Subject(subject, "grade-school science", shots, questions)]


def read(path: Path, subject: str) -> list[Question]:
    """Read and check one file."""
    questions, seen = [], {}
    for number, row in json_lines(path):
        where = f"{path}, line {number}"
        try:
            stem = row["question"]
            if isinstance(stem, str):
                labels, texts = row["choices"]["label"], row["choices"]["text"]
            else:
                stem, choices = stem["stem"], stem["choices"]
                labels, texts = [c["label"] for c in choices], [c["text"] for c in choices]
            id, key = unseen(str(row["id"]), seen, where), row["answerKey"]
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{where}: not an ARC item (at {error}); expected id, question with stem and "
                f"choices of text and label, answerKey; or the hub's columns"
            ) from error
        if not isinstance(labels, list) or labels.count(key) != 1:
            raise InputError(f"{where}: answerKey is {key!r}, expected one of {labels}")
        questions.append(checked(where, id, subject, stem, texts, labels.index(key)))
    if not questions:
        raise InputError(f"{path}: no questions")
    return questions


easy = partial(load, "ARC-Easy")
challenge = partial(load, "ARC-Challenge")

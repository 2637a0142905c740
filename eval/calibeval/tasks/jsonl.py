"""Any JSON-lines file of questions: {"question", "choices", "answer"[, "id", "subject"]}.

`answer` is the index of the right choice, its letter, or its text.
"""

from pathlib import Path

from calibeval.io import InputError, json_lines
from calibeval.tasks.mmlu import chosen
from calibeval.tasks.question import (
    LETTERS,
    Question,
    Source,
    Subject,
    checked,
    split_examples,
    unseen,
)

SUBJECT = "general_knowledge"


def load(source: Source) -> list[Subject]:
    """Read a file; questions without a subject are of general knowledge.

    Few-shot examples come from the file `source.examples`, by subject where it has the subject.
    """
    path = Path(source.data)
    if source.shots and not source.examples:
        raise InputError(
            f"--shots {source.shots} needs --examples FILE with examples; or --shots 0"
        )
    questions = read(path)
    examples = read(Path(source.examples)) if source.examples else []
    present = sorted({q.subject for q in questions})
    subjects = []
    for name in chosen(present, source.subjects, str(path)):
        own = [q for q in questions if q.subject == name]
        pool = [e for e in examples if e.subject == name] or examples
        shots, own = split_examples(own, pool, source.shots, f"{source.examples}")
        subjects.append(Subject(name, name.replace("_", " "), shots, own))
    return subjects


def read(path: Path) -> list[Question]:
    """Read and check a file of questions."""
    questions, seen = [], {}
    for number, row in json_lines(path):
        where = f"{path}, line {number}"
        for key in ("question", "choices", "answer"):
            if key not in row:
                raise InputError(f"{where}: no {key!r}; found {', '.join(row)}")
        subject = row.get("subject", SUBJECT)
        id = unseen(str(row.get("id", f"{subject}/{len(questions)}")), seen, where)
        question = checked(where, id, subject, row["question"], row["choices"], 0)
        label = answer_index(row["answer"], question.choices, where)
        questions.append(Question(id, subject, question.text, question.choices, label))
    if not questions:
        raise InputError(f"{path}: no questions; expected one JSON object a line")
    return questions


def answer_index(answer, choices: tuple[str, ...], where: str) -> int:
    """Index of the right choice from an index, a letter or the choice's text."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if len(answer) == 1 and answer in LETTERS[: len(choices)]:
            return LETTERS.index(answer)
        if choices.count(answer) == 1:
            return choices.index(answer)
    raise InputError(
        f"{where}: answer is {answer!r}, expected 0 to {len(choices) - 1}, "
        f"A to {LETTERS[len(choices) - 1]}, or the text of one choice"
    )

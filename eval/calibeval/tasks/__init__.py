"""Tasks: from a data folder or file to subjects of questions."""

from pathlib import Path

from calibeval.errors import InputError
from calibeval.tasks import mmlu
from calibeval.tasks.question import LETTERS, Question, Subject

LOADERS = {"mmlu": mmlu.load}
__all__ = ["LETTERS", "LOADERS", "Question", "Subject", "load"]


def load(
    task: str, data: Path, shots: int = 5, subjects: list[str] | None = None, split: str = "test"
) -> list[Subject]:
    """Read a task's questions with `shots` examples a subject; bad data raises `InputError`."""
    if task not in LOADERS:
        raise InputError(f"unknown task {task!r}; known: {', '.join(LOADERS)}")
    if shots < 0:
        raise InputError(f"--shots is {shots}, expected 0 or more")
    return LOADERS[task](Path(data), shots, subjects, split)

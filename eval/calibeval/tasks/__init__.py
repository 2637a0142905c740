"""Tasks: from a data folder or file to subjects of questions."""

from calibeval.io import InputError
from calibeval.tasks import arc, hellaswag, jsonl, mmlu
from calibeval.tasks.question import LETTERS, Question, Source, Subject

LOADERS = {
    "mmlu": mmlu.load,
    "hellaswag": hellaswag.load,
    "arc_easy": arc.easy,
    "arc_challenge": arc.challenge,
    "jsonl": jsonl.load,
}
__all__ = ["LETTERS", "LOADERS", "Question", "Source", "Subject", "load"]


def load(task: str, source: Source) -> list[Subject]:
    """Read a task's questions and few-shot examples; bad data raises `InputError`."""
    if task not in LOADERS:
        raise InputError(f"unknown task {task!r}; known: {', '.join(LOADERS)}")
    if source.shots < 0:
        raise InputError(f"--shots is {source.shots}, expected 0 or more")
    if source.subjects and task not in ("mmlu", "jsonl"):
        raise InputError(f"--subjects is for mmlu and jsonl; {task} has one subject")
    return LOADERS[task](source)

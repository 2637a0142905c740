"""What is asked of a run's model: which records are there, and scoring the rest."""

import contextlib
from pathlib import Path

from calibeval import records as files
from calibeval.io import InputError
from calibeval.request import Request, Task
from calibeval.store import part_of
from calibeval.tasks import resolved
from sweeps.runs.run import Run
from sweeps.runs.schema import Score


def records(run: Run, task: Task) -> Path:
    """Where a task's records go."""
    return run.scores / f"{task.key}.jsonl"


def request(task: Task, score: Score) -> dict:
    """What decides the records, in their sidecar's words."""
    return {**resolved(task).model_dump(mode="json", exclude={"name"}), "engine": score.engine}


def _about(file: Path) -> dict:
    """The sidecar of records; empty where it is damaged or not there."""
    with contextlib.suppress(InputError):
        return files.meta(file)
    return {}


def missing(run: Run) -> list[Task]:
    """The tasks still to be scored."""
    score = run.config().score
    return [task for task in (score.tasks if score else ()) if gap(run, task)]


def gap(run: Run, task: Task) -> str | None:
    """Why a task has no figure; None where the records of exactly this request are there, as large
    as scoring left them."""
    file, about = records(run, task), _about(records(run, task))
    if other := conflict(run, task):
        return other
    if not (about and file.exists()):
        return "not scored" if run.trained else "not trained"
    there = file.stat().st_size
    if (size := about.get("bytes", there)) == there:
        return None
    return f"{file}: {there:,} bytes, scoring wrote {size:,}: damaged since"


def conflict(run: Run, task: Task) -> str | None:
    """Records, whole or begun, that answer another request, which nobody shall overwrite."""
    file, wanted = records(run, task), request(task, run.config().score)
    for one in (file, part_of(file)):
        asked = wanted | (_about(one).get("settings") or {})
        changed = [key for key, value in wanted.items() if asked[key] != value]
        if changed:
            said = ", ".join(f"{key} {asked[key]!r}, now {wanted[key]!r}" for key in changed)
            return f"{file}: was asked with {said}; give the task another `name`, or delete it"
    return None


def here(run: Run) -> None:
    """Score every missing task in this process; raises InputError where one cannot be."""
    import calibeval

    config = run.config()
    todo = missing(run)
    for task in todo:
        if wrong := conflict(run, task):
            raise InputError(wrong)
        if _about(file := records(run, task)) and file.exists():
            file.unlink()  # damaged since
    how = config.score.model_dump(include=set(Request.model_fields) - {"tasks"})
    name, how["revision"] = str(run.model), None
    if config.backend is None:  # the model before fine-tuning
        name = config.train["model_name_or_path"]
        how["revision"] = config.train.get("model_revision")
    if todo:
        calibeval.score(name, tasks=todo, out=run.scores, **how)

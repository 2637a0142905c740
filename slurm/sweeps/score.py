"""What is asked of a run's model: which records are there, and scoring the rest."""

import json
from pathlib import Path

from calibeval.io import InputError, write_text
from calibeval.request import Request, Task
from sweeps.config import Score
from sweeps.run import Run


def records(run: Run, task: Task) -> Path:
    """Where a task's records go."""
    return run.scores / f"{task.key}.jsonl"


def request(task: Task, score: Score) -> dict:
    """What decides the records."""
    return {**json.loads(task.model_dump_json()), "engine": score.engine}


def _asked(run: Run, task: Task) -> dict:
    """The request of the records that are there or begun, and their size once they were whole."""
    try:
        found = json.loads((run.scores / f"{task.key}.request.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    known = {*Task.model_fields, "engine", "bytes"}  # not what earlier versions could be asked
    return {k: v for k, v in found.items() if k in known} if isinstance(found, dict) else {}


def _note(run: Run, task: Task, score: Score, **more: int) -> None:
    text = json.dumps(request(task, score) | more, indent=2) + "\n"
    write_text(run.scores / f"{task.key}.request.json", text)


def missing(run: Run, score: Score | None) -> list[Task]:
    """The tasks still to be scored."""
    return [task for task in (score.tasks if score else ()) if gap(run, task, score)]


def gap(run: Run, task: Task, score: Score) -> str | None:
    """Why a task has no figure; None where the records of exactly this request are there, as large
    as scoring left them."""
    file, size = records(run, task), _asked(run, task).get("bytes")
    if other := conflict(run, task, score):
        return other
    if size is None:
        return "not scored" if run.trained else "not trained"
    if (there := file.stat().st_size if file.exists() else 0) == size:
        return None
    return f"{file}: {there:,} bytes, scoring wrote {size:,}: damaged since"


def conflict(run: Run, task: Task, score: Score) -> str | None:
    """Records that answer another request, which nobody shall overwrite; or None."""
    asked, wanted = _asked(run, task), request(task, score)
    asked.pop("bytes", None)
    changed = [key for key in {**asked, **wanted} if asked.get(key) != wanted.get(key)]
    said = [f"{key} {asked.get(key)!r}, now {wanted.get(key)!r}" for key in changed]
    if not asked or not said:
        return None
    mend = "give the task another `name`, or delete it"
    return f"{records(run, task)}: was asked with {', '.join(said)}; {mend}"


def here(run: Run) -> None:
    """Score every missing task in this process; raises InputError where one cannot be."""
    import calibeval
    from calibeval import store

    config = run.config()
    todo = missing(run, config.score)
    for task in todo:
        if wrong := conflict(run, task, config.score):
            raise InputError(wrong)
        if _asked(run, task).get("bytes") is not None:
            store.clear(records(run, task))  # damaged since
        run.scores.mkdir(parents=True, exist_ok=True)
        _note(run, task, config.score)
    how = config.score.model_dump(include=set(Request.model_fields) - {"tasks"})
    name, how["revision"] = str(run.model), None
    if config.backend is None:  # the model before fine-tuning
        name = config.train["model_name_or_path"]
        how["revision"] = config.train.get("model_revision")
    if todo:
        calibeval.score(name, tasks=todo, out=run.scores, **how)
    for task in todo:
        _note(run, task, config.score, bytes=records(run, task).stat().st_size)

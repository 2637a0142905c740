"""What is asked of a run's model: which of its records are there, and scoring the rest."""

import contextlib
from pathlib import Path
from typing import Any

from calibeval import records as record_files
from calibeval.ask.request import Request, Task
from calibeval.ask.tasks import resolved
from calibeval.io import InputError
from calibeval.records.store import part_of
from sweeps.runs.run import Run
from sweeps.runs.schema import Score


def records_file(run: Run, task: Task) -> Path:
    """The file of a task's records."""
    return run.scores / f"{task.key}.jsonl"


def record_settings(task: Task, score: Score) -> dict[str, Any]:
    """The settings that decide a task's records, under the keys of the records' sidecar."""
    settings = resolved(task).model_dump(mode="json", exclude={"name"})
    settings["engine"] = score.engine
    return settings


def _sidecar(file: Path) -> dict[str, Any]:
    """The sidecar of a record file; empty where it is damaged or absent."""
    with contextlib.suppress(InputError):
        return record_files.meta(file)
    return {}


def unscored_tasks(run: Run) -> list[Task]:
    """The tasks that are still to be scored."""
    score = run.config().score
    if score is None:
        return []
    return [task for task in score.tasks if gap(run, task) is not None]


def gap(run: Run, task: Task) -> str | None:
    """Why there is no figure for a task; None where its records are there.

    They are there if they answer exactly this request, and are as large as scoring left them.
    """
    other_request = conflict(run, task)
    if other_request is not None:
        return other_request
    file = records_file(run, task)
    sidecar = _sidecar(file)
    if not sidecar or not file.exists():
        return "not scored" if run.trained else "not trained"
    size = file.stat().st_size
    written = sidecar.get("bytes", size)
    if size == written:
        return None
    return f"{file}: {size:,} bytes, scoring wrote {written:,}: damaged since"


def conflict(run: Run, task: Task) -> str | None:
    """What to do about records that answer another request; None where there are none.

    Nobody shall overwrite such records, whether they are whole or only begun. What is asked now is
    not told: a folder may name a private task file, and its tables are for all.
    """
    score = run.config().score
    assert score is not None  # a run without it has no tasks
    file = records_file(run, task)
    wanted = record_settings(task, score)
    for whole_or_begun in (file, part_of(file)):
        settings = _sidecar(whole_or_begun).get("settings") or {}
        changes = [
            f"{key} {settings[key]!r}"
            for key, value in wanted.items()
            if key in settings and settings[key] != value
        ]
        if changes:
            return (
                f"{file}: was asked with {', '.join(changes)}, unlike now; give the task another "
                "`name`, or delete it"
            )
    return None


def score_here(run: Run) -> None:
    """Score what is not scored yet, in this process; raises InputError for what cannot be."""
    import calibeval

    config = run.config()
    tasks = unscored_tasks(run)
    if config.score is None or not tasks:
        return
    for task in tasks:
        problem = conflict(run, task)
        if problem is not None:
            raise InputError(problem)
        file = records_file(run, task)
        if _sidecar(file) and file.exists():
            # It is whole by its sidecar, answers this request, and the task is unscored all the
            # same: so its size has changed since. Score anew.
            file.unlink()
    # What the sweep file says under `score:`, apart from what is given here by itself.
    options = config.score.model_dump(include=set(Request.model_fields) - {"tasks", "revision"})
    if config.is_baseline:
        model = config.train["model_name_or_path"]
        revision = config.train.get("model_revision")
    else:
        model = str(run.model)
        revision = None
    calibeval.score(model, tasks=tasks, out=run.scores, revision=revision, **options)

"""Scoring a finished run, or the model before fine-tuning, through calibeval's command line."""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from sweeps import questions
from sweeps.assets import hub_cache, hub_snapshot, on_hub
from sweeps.backends.base import Program
from sweeps.children import Start, start_cold
from sweeps.config import Entropy, Score, Sweep, Task
from sweeps.files import SweepError, last_error, lease, make_folder, read_json, write_json
from sweeps.plan import Cell, neighbours
from sweeps.provenance import PROJECT
from sweeps.rundir import RunDir, readable


@dataclass(frozen=True)
class Subject:
    """Something to score: a model folder and where its records go."""

    name: str
    model: Path | str
    scores: Path
    log: Path

    @property
    def lock(self) -> Path:
        return self.scores / "score.lock"

    @property
    def failure(self) -> Path:
        """Why the last scoring did not arrive; absent once it has."""
        return self.scores / "failed.json"

    def records(self, task: Task) -> Path:
        return self.scores / f"{task.key}.jsonl"


def of_cell(cell: Cell) -> Subject:
    """A trained run."""
    folder = cell.folder
    return Subject(cell.config.name, folder / "model", folder / "scores", folder / "score.log")


def bases(sweep: Sweep, cells: list[Cell]) -> dict[str, Subject]:
    """The models before fine-tuning, by model_name_or_path; none if `score.base` is off.

    One at a revision of the hub is its snapshot's folder, which holds nothing else.
    """
    if sweep.score is None or not sweep.score.base:
        return {}
    found = {}
    for cell in cells:
        model = cell.config.train["model_name_or_path"]
        revision = cell.config.train.get("model_revision")
        if model not in found:
            key = f"{model}@{revision}" if revision else model
            place = str((revision and hub_snapshot(model, revision=revision)) or key)
            name, digest = readable(model), hashlib.sha256(key.encode()).hexdigest()[:8]
            folder = Path(sweep.output_root) / "base" / f"{name}-{digest}"
            log = folder / "score.log"
            found[model] = Subject(f"{name} (base)", place, folder / "scores", log)
    return found


def ready(sweep: Sweep, cells: list[Cell]) -> list[Subject]:
    """What can be scored: base models, then finished runs."""
    done = [cell for cell in cells if RunDir(cell.folder).done]
    return [*bases(sweep, cells).values(), *map(of_cell, done)]


def words(subject: Subject, task: Task | Entropy, score: Score) -> list[str]:
    """calibeval's command that scores one task, atomic by its own rename."""
    common = ["--model", str(subject.model), "--out", str(subject.records(task))]
    if isinstance(task, Entropy):
        found = ["entropy", *common]
        for key, value in task.model_dump().items():
            option = "--" + key.replace("temperatures", "temperature").replace("_", "-")
            found += [option, *map(str, value if isinstance(value, tuple) else [value])]
        return found
    found = ["score", *common, *questions.options(task), "--engine", score.engine]
    for option in ("batch_size", "gpu_memory_utilization"):
        if (value := getattr(score, option)) is not None:
            found += ["--" + option.replace("_", "-"), str(value)]
    return found


def request(task: Task | Entropy, score: Score) -> dict:
    """What decides the records; another request makes old records stale."""
    if isinstance(task, Entropy):
        return task.model_dump(exclude={"batch_size"})
    absent = {"scoring"} if task.scoring is None else None  # as before there was this key
    return {**task.model_dump(exclude=absent), "engine": score.engine}


def scored(subject: Subject, task: Task, score: Score) -> bool:
    """Whether the records of exactly this request exist, whole."""
    records = subject.records(task)
    return records.exists() and _asked(subject, task, score) and not damage(subject, task, score)


def damage(subject: Subject, task: Task, score: Score) -> str | None:
    """What happened to the records since scoring wrote them, told by their size; or nothing."""
    records = subject.records(task)
    if not records.exists() or not _asked(subject, task, score):
        return None
    found = records.stat().st_size
    written = read_json(_request_file(subject, task)).get("bytes")
    if found and written in (None, found):
        return None
    was = "" if written is None else f", scoring wrote {written:,}"
    return f"{records}: {found:,} bytes{was}: damaged since"


def _request_file(subject: Subject, task: Task) -> Path:
    return subject.scores / f"{task.key}.request.json"


def _asked(subject: Subject, task: Task, score: Score) -> bool:
    """Whether what was last begun for this task is this request."""
    file = _request_file(subject, task)
    asked = read_json(file) if file.exists() else {}
    asked.pop("bytes", None)
    return asked == json.loads(json.dumps(request(task, score)))


def missing(subject: Subject, score: Score) -> list[Task | Entropy]:
    """The tasks still to be scored."""
    return [task for task in score.measured if not scored(subject, task, score)]


def run(subject: Subject, score: Score, *, start: Start = start_cold) -> None:
    """Score every missing task; raises SweepError with calibeval's own message if one fails.

    Waits while another process scores the same subject, then does what that one left.
    """
    if not missing(subject, score):
        return
    if isinstance(subject.model, str) and on_hub(subject.model) and not hub_snapshot(subject.model):
        raise SweepError(
            f"scoring {subject.name}: {subject.model} is not in {hub_cache()}; `prefetch` fetches "
            "it where there is internet"
        )
    if isinstance(subject.model, Path) and not (subject.model / "config.json").exists():
        raise SweepError(
            f"scoring {subject.name}: {subject.model} is gone (deleted after an earlier scoring if "
            f"the sweep says `keep: scores`); to train it again, delete {subject.model.parent}"
        )
    make_folder(subject.scores)
    with lease(subject.lock, timeout=-1):
        if not (todo := missing(subject, score)):
            return
        write_json(subject.failure, {"error": "killed, or its machine died"})
        # Loading torch and reaching a GPU takes longer than many a task: one process for all, but
        # vLLM's own, which holds the GPU's memory, ends only with the one that started it.
        parts = [[task] for task in todo] if score.engine == "vllm" else [todo]
        try:
            for tasks in parts:
                _run_tasks(subject, tasks, score, start)
        except SweepError as error:
            write_json(subject.failure, {"error": str(error)})
            raise
        subject.failure.unlink()


def discard(cell: Cell, sweep: Sweep) -> None:
    """Under `keep: scores`, delete what a finished run no longer needs once all is scored.

    It may be a run of other sweeps too: then not before they have scored it, and under `keep: all`
    in one of them never.
    """
    subject, run = of_cell(cell), RunDir(cell.folder)
    gone = [folder for folder in (run.model, run.checkpoints) if folder.exists()]
    if not (gone and run.done and sweep.keep == "scores") or missing(subject, sweep.score):
        return
    try:
        for other, cells in neighbours(sweep):
            holds = any(one.config.name == cell.config.name for one in cells)
            if holds and (other.keep == "all" or missing(subject, other.score)):
                return
    except SweepError as error:
        print(f"{run.model} stays: {error}", flush=True)
        return
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)


def _run_tasks(subject: Subject, tasks: list, score: Score, start: Start) -> None:
    """Score these tasks in one process, which does one after another."""
    from calibeval.store import clear  # with NumPy, which `status` does without

    arguments: list[str] = []
    for task in tasks:
        if not _asked(subject, task, score) or damage(subject, task, score):
            clear(subject.records(task))  # whole or begun, they answer another request
        write_json(_request_file(subject, task), request(task, score))
        arguments += ["then"] * bool(arguments) + words(subject, task, score)
    offset = subject.log.stat().st_size if subject.log.exists() else 0
    paths = os.pathsep.join(str(PROJECT / part) for part in ("eval", "kernel"))
    other = {"PYTHONPATH": paths} if score.python else {}
    python = os.path.abspath(score.python) if score.python else sys.executable
    todo = Program(tuple(arguments), "calibeval", environment=other, python=python)
    code = start(todo, subject.log).wait()
    for task in tasks:
        if not subject.records(task).exists():
            with open(subject.log, encoding="utf-8", errors="replace") as log:
                log.seek(offset)
                last = last_error(log.read(), "error: ").removeprefix("error: ")
            last = f"killed by signal {-code}" if code < 0 else last
            raise SweepError(f"scoring {subject.name} on {task.key}: {last} (log: {subject.log})")
        size = subject.records(task).stat().st_size
        write_json(_request_file(subject, task), request(task, score) | {"bytes": size})

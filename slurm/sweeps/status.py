"""What every run of a sweep is doing, from its files and, where there is one, the queue."""

import contextlib
import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from calibeval.io import counted
from sweeps import score
from sweeps.config import Sweep
from sweeps.executors import slurm
from sweeps.files import SweepError, held, read_json, tail
from sweeps.plan import Cell, Plan
from sweeps.provenance import shown
from sweeps.rundir import RunDir

STATES = ("running", "queued", "preempted", "cancelled", "stopped", "interrupted", "failed")
STATES += ("unknown", "to do", "done")
LAST = 3  # lines of a dead job's output that are shown


@dataclass(frozen=True)
class Trouble:
    """Why something is dead: what is known of its end, where to read more, the last lines there."""

    cause: str
    file: Path | None = None
    lines: tuple[str, ...] = ()
    stopped: bool = False  # somebody wanted it so: there is nothing to mend


@dataclass(frozen=True)
class Status:
    """One run, as a line of the table."""

    name: str
    state: str
    detail: str
    restarts: int
    scored: str
    trouble: Trouble | None = None  # it is dead, or its scoring is: a retry starts it
    lost: bool = False  # its job died without a word, and nobody cancelled it
    error: str = ""  # why nobody knows whether it is queued


@dataclass
class _Queue:
    """What Slurm knows of a sweep."""

    submitted: bool  # once at least; else a run's job is not its own, but salloc's
    elements: dict[tuple[str, str], slurm.Element] = field(default_factory=dict)
    past: dict[tuple[str, str], slurm.Past] = field(default_factory=dict)
    answered: bool = False  # squeue did, of jobs that were its own
    error: str = ""  # what squeue said instead
    ends: dict[str, str] = field(default_factory=dict)

    def end(self, label: str | None) -> str:
        """How a job that is queued no more ended."""
        if label is None:
            return "no process holds it any more"
        return f"{label} {self.ends.get(label, 'is not queued any more')}"


def _queue(sweep: Sweep, cells: list[Cell]) -> _Queue:
    found = _Queue(slurm.submitted(sweep))
    if not shutil.which("squeue"):
        return found
    found.past = slurm.past(sweep)
    try:
        found.elements, found.answered = slurm.active(sweep), found.submitted
    except SweepError as error:
        found.error = str(error) if found.submitted else ""
        return found
    labels = {past.label for key, past in found.past.items() if key not in found.elements}
    begun = [run for cell in cells if (run := RunDir(cell.folder)).manifest_file.exists()]
    labels |= {job for run in begun if not run.done and (job := run.job())}
    found.ends = slurm.ends(sorted(labels))
    return found


def of_sweep(sweep: Sweep, cells: list[Cell]) -> tuple[list[Status], dict[str, Status]]:
    """The state of every run, and of the base models to be scored, by model_name_or_path.

    It is `unknown` where that is the queue's to say, which does not answer.
    """
    queue = _queue(sweep, cells)
    return [_of_run(sweep, cell, queue) for cell in cells], _of_bases(sweep, cells, queue)


def _of_bases(sweep: Sweep, cells: list[Cell], queue: _Queue) -> dict[str, Status]:
    found = {}
    for model, subject in score.bases(sweep, cells).items():
        scored, trouble, detail = _of_score(sweep, subject, queue)
        busy = "queued" if ("score", subject.name) in queue.elements else "to do"
        if queue.error and ("score", subject.name) in queue.past:
            busy = "unknown"
        state = "failed" if trouble else "running" if held(subject.lock) else busy
        if not score.missing(subject, sweep.score):
            state = "done"
        found[model] = Status(subject.name, state, detail, 0, scored, trouble, error=queue.error)
    return found


def _of_score(
    sweep: Sweep, subject: score.Subject, queue: _Queue
) -> tuple[str, Trouble | None, str]:
    """How many tasks are scored, and why no more, of what was begun and is not under way."""
    if sweep.score is None:
        return "-", None, ""
    left = score.missing(subject, sweep.score)
    scored = f"{len(sweep.score.measured) - len(left)}/{len(sweep.score.measured)}"
    key = ("score", subject.name)
    train = ("train", subject.name)  # which goes on to score
    if not left or key in queue.elements or train in queue.elements:
        return scored, None, "is being scored" if train in queue.elements and left else ""
    past = queue.past.get(key) or queue.past.get(train)
    if held(subject.lock) and not (queue.answered and past):
        return scored, None, "is being scored"
    damaged = [d for task in left if (d := score.damage(subject, task, sweep.score))]
    if damaged:
        return scored, Trouble(damaged[0]), damaged[0]
    said = read_json(subject.failure).get("error", "") if subject.failure.exists() else ""
    if not said and (not past or queue.error):
        return scored, None, ""
    lines = (said,) if said else tuple(tail(past.output, LAST))
    cause = "scoring: " + (queue.end(past.label) if past else "failed here")
    file = subject.log if said and subject.log.exists() else past and past.output
    trouble = Trouble(cause, file, lines, "CANCELLED" in cause)
    return scored, trouble, f"not scored: {(lines or (cause,))[-1]}"


def _of_run(sweep: Sweep, cell: Cell, queue: _Queue) -> Status:
    run = RunDir(cell.folder)
    key = ("train", cell.config.name)
    element, past = queue.elements.get(key), queue.past.get(key)
    scored, unscored, why = _of_score(sweep, score.of_cell(cell), queue)
    manifest = run.manifest() if run.manifest_file.exists() else {"state": "new", "attempts": []}
    restarts = manifest.get("restarts", 0)

    def found(state: str, detail: str = "", trouble: Trouble | None = None, lost: bool = False):
        return Status(run.name, state, detail, restarts, scored, trouble, lost, queue.error)

    if run.done:
        return found("done", why or _progress(run, live=False), unscored)
    job = manifest["attempts"][-1]["job"] if manifest["attempts"] and queue.submitted else None
    gone = queue.answered and element is None  # it is submitted no more, as it once was
    if held(run.lock) and not (gone and job):  # a lock outlives its killed job for a while
        return found("running", _progress(run, live=True))
    if element and element.state == "RUNNING":
        return found("running", "starting")
    state = manifest["state"]
    if element:
        where = "preempted" if state == "preempted" else "queued"
        return found(where, f"{element.job} {element.reason}" if job else element.reason)
    if state == "new" and past is None:
        return found("to do", _progress(run, live=False))
    if queue.error and state != "failed" and (past or job):
        return found("unknown", _progress(run, live=False))
    if state == "new":
        end, lines = queue.end(past.label), tuple(tail(past.output, LAST))
        cancelled = "CANCELLED" in end
        over = "cancelled" if cancelled else "failed"
        trouble = Trouble(f"{end}, before training", past.output, lines, cancelled)
        return found(over, (lines or (end,))[-1], trouble)
    end = queue.end(job if queue.answered else None)
    cancelled = "CANCELLED" in end
    if state == "failed":
        error = manifest.get("error", "")
        return found("failed", error, Trouble(error, run.log if run.log.exists() else None))
    progress = _progress(run, live=False)
    if state == "running":  # its files say so, its heartbeat does not
        output = past.output if past and past.label == job else None
        cause = f"{end}, {progress or 'at the start'}"
        trouble = Trouble(cause, output, tuple(tail(output, LAST)), cancelled)
        over = "cancelled" if cancelled else "interrupted"
        return found(over, f"{progress}  {end}".strip(), trouble, lost=not cancelled)
    saved = f"asked to stop, saved at step {run.step()}"
    if job is None:  # outside of Slurm's jobs only a person asks
        return found("stopped", progress, Trouble(saved, stopped=True))
    over = "cancelled" if cancelled else state
    return found(over, progress, Trouble(f"{end}: {saved}", stopped=cancelled))


def _progress(run: RunDir, *, live: bool) -> str:
    rows = []
    for line in reversed(tail(run.metrics, 99, 4096)):
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill, or by the window
            rows.append(json.loads(line))
    row = next((row for row in rows if "loss" in row), next(iter(rows), None))
    if row is None:
        return "starting" if live else ""
    text = f"step {row.get('step', '?')}/{row.get('steps', '?')}"
    if row.get("loss") is not None:
        text += f"  loss {row['loss']:.4f}"
    if row.get("tokens_per_second") is not None:
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
    if row.get("model_flops_utilisation") is not None:
        text += f" ({row['model_flops_utilisation']:.0%} of peak)"
    if live and row.get("eta_s") is not None:
        text += f"  ETA {timedelta(seconds=round(row['eta_s']))}"
    return text


def table(statuses: list[Status], title: str, bases: list[Status] = ()) -> str:
    """The table with its summary line, most urgent states first; base models where they lack."""
    counts = Counter(status.state for status in statuses)
    summary = " · ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    shown = [*statuses, *(base for base in bases if base.state != "done")]
    width = max((len(status.name) for status in shown), default=4)
    room = shutil.get_terminal_size().columns - width - 36
    limit = max(30, room) if sys.stdout.isatty() else None  # a file has no edge
    lines = [f"{title}: {counted(len(statuses), 'run')}: {summary}"]
    lines.append(f"{'RUN':{width}}  {'STATE':11}  {'RESTARTS':>8}  {'SCORED':>6}  DETAIL")
    for status in sorted(shown, key=lambda s: (STATES.index(s.state), s.name)):
        lines.append(
            f"{status.name:{width}}  {status.state:11}  {status.restarts:>8}  {status.scored:>6}  "
            f"{status.detail[:limit]}".rstrip()
        )
    return "\n".join(lines)


def troubles(statuses: list[Status], planned: Plan | None = None) -> str:
    """What is dead and why, alike ones together, and how `planned` goes on; or nothing."""
    alike: dict[tuple, list[Status]] = {}
    for status in statuses:
        if status.trouble:
            said = (status.trouble.cause, *status.trouble.lines[-1:])
            key = tuple(re.sub(r"\d+(_\d+)?", "#", text) for text in said)  # whatever the job's id
            alike.setdefault(key, []).append(status)
    lines = []
    for those in alike.values():
        first, more = those[0], len(those) - 1
        count = f" (and {more} more like it)" if more else ""
        lines.append(f"{first.name}{count}: {first.trouble.cause}")
        lines += [f"    | {line}" for line in first.trouble.lines]
        if first.trouble.file:
            lines.append(f"    {shown(first.trouble.file)}")
    if error := next((status.error for status in statuses if status.error), ""):
        return "\n".join([*lines, f"{error}; what is queued is not known"])
    if not lines or planned is None:
        return "\n".join(lines)
    if not all(status.trouble.stopped for status in statuses if status.trouble):
        lines.append(f"Once that is mended: {planned.again('retry')}")
        return "\n".join([*lines, "(a changed key makes other runs: launch the changed file)"])
    again = planned.again("retry")  # which goes where the launch went
    if any(status.state == "to do" for status in statuses):
        again = planned.again("launch")
        if shutil.which("sbatch") and not slurm.submitted(planned.sweep):
            again += " --executor local"
    return "\n".join([*lines, f"To go on: {again}"])

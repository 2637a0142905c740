"""What every run of a sweep is doing, from its files and, where there is one, the queue."""

import re
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from calibeval.io import InputError, counted
from sweeps.runs import scoring, slurm_queue, stages
from sweeps.runs.files import is_locked, read_rows, tail
from sweeps.runs.grid import SweepPlan
from sweeps.runs.run import Run
from sweeps.runs.yaml_io import cli_command

STATES = ("running", "queued", "dead", "stopped", "unknown", "to do", "done")


@dataclass(frozen=True)
class Status:
    """A run's state; of a dead one the last lines that say why, and the file they stand in."""

    name: str
    state: str
    detail: str = ""
    restarts: int = 0
    scored: str = "-"
    lines: tuple[str, ...] = ()
    file: Path | None = None


class Slurm:
    """What Slurm knows of a sweep; `error` is what squeue said instead."""

    def __init__(self, plan: SweepPlan) -> None:
        self.past, queue, self.error = slurm_queue.submitted_elements(plan.folder), [], ""
        gone = [run.name for run in plan.baselines + plan.runs if not run.done]
        if gone and self.past:
            try:
                queue = slurm_queue.queued_jobs(plan.folder)
            except InputError as error:
                self.error = str(error)
        self.queued = {one.run: one for one in sorted(queue, key=lambda q: q.state == "RUNNING")}
        gone = [self.past[x][0] for x in gone if x in self.past and x not in self.queued]
        self.ends = {} if self.error else slurm_queue.job_ends(sorted(set(gone)))


def of_sweep(plan: SweepPlan) -> tuple[list[Status], Slurm]:
    """The state of every run, and of the models before fine-tuning that are still to be scored."""
    known, found, launching = Slurm(plan), [], is_locked(plan.lock)
    for run in (*plan.baselines, *plan.runs):
        try:
            one = _of_run(run, known, launching)
        except (InputError, OSError) as error:
            one = Status(run.name, "unknown", str(error))
        if run.config().backend or one.state != "done":
            found.append(one)
    return found, known


def _of_run(run: Run, known: Slurm, launching: bool) -> Status:
    queued, asked = known.queued.get(run.name), run.config().score
    label, printed = known.past.get(run.name, (None, None))
    rows, tasks = run.attempts(), len(asked.tasks) if asked else 0
    restarts = max(0, sum(row.get("stage") == "train" for row in rows) - 1)
    scored = f"{tasks - len(scoring.missing(run))}/{tasks}" if tasks else "-"

    def found(state: str, *said: str, lines: tuple = (), file: Path | None = None) -> Status:
        detail = "  ".join(filter(None, said))
        return Status(run.name, state, detail, restarts, scored, lines, file)

    last = rows[-1] if rows else {}
    reached = f"scoring, {scored}" if run.trained else progress(run)
    if stages.next_stage(run) is None:
        return found("done", progress(run))
    if (
        is_locked(run.lock)
        or (launching and "began" in last)
        or (queued and queued.state == "RUNNING")
    ):
        age = ""
        if "began" in last and not run.trained and run.metrics.exists():
            seconds = max(0, int(time.time() - run.metrics.stat().st_mtime))
            age = f"{timedelta(seconds=seconds)} ago"
        return found("running", reached or "starting", age)
    if queued:
        return found("queued", queued.id, queued.reason, progress(run))
    if launching and "queued" in last:
        return found("queued", reached)
    if not last:
        return found("to do", *(f"{key}={value}" for key, value in run.values.items()))
    if known.error and label:
        return found("unknown", reached)
    if "error" in last:
        log = run.path / ("score.log" if run.trained else "train.log")
        return found("dead", last["error"], file=log if log.exists() else None)
    if "ended" in last:
        return found("stopped" if "stopped" in last else "to do", reached)
    end = f"{label} {known.ends.get(label, 'is not queued any more')}" if label else "killed"
    if "CANCELLED" in end:
        return found("stopped", end, reached)
    when = "before it began" if "queued" in last else reached or "at the start"
    lines = tuple(tail(printed, 3)) if printed else ()
    return found("dead", f"{end}, {when}", lines=lines, file=printed)


def progress(run: Run) -> str:
    """The last row of metrics, in words."""
    rows = [row for row in read_rows(run.metrics, 4096) if "step" in row]
    if not rows:
        return ""
    row = next((row for row in reversed(rows) if "loss" in row), rows[-1])
    text = f"step {row['step']}/{row.get('steps', '?')}"
    if row.get("loss") is not None:
        text += f"  loss {row['loss']:.4f}"
    if row.get("tokens_per_second") is not None:
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
    return text


def table(plan: SweepPlan) -> str:
    """The table with its summary line, most urgent states first, and why what is dead died."""
    found, known = of_sweep(plan)
    counts = Counter(one.state for one in found)
    summary = " · ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    width = max(len(one.name) for one in found)
    bases = len(found) - len(plan.runs)
    more = f" and {counted(bases, 'base model')} to score" if bases else ""
    lines = [f"{plan.folder.absolute()}: {counted(len(plan.runs), 'run')}{more}: {summary}"]
    lines.append(f"{'RUN':{width}}  {'STATE':8}  {'RESTARTS':>8}  {'SCORED':>6}  DETAIL")
    for one in sorted(found, key=lambda one: STATES.index(one.state)):
        said = f"{one.name:{width}}  {one.state:8}  {one.restarts:>8}  {one.scored:>6}"
        lines.append(f"{said}  {one.detail}".rstrip())
    here = {run.name for run in (*plan.baselines, *plan.runs)}
    made = (file.parent for file in plan.folder.glob("*/config.yaml"))
    if others := [folder for folder in made if folder.name not in here]:
        done = sum((folder / "DONE").exists() for folder in others)
        lines.append(f"Also in this folder: {counted(len(others), 'run')}, {done} done")
    alike: dict[tuple, list[Status]] = {}
    for one in found:
        if one.state == "dead":
            key = tuple(re.sub(r"\d+(_\d+)?", "#", text) for text in (one.detail, *one.lines[-1:]))
            alike.setdefault(key, []).append(one)
    for first, *more in alike.values():
        count = f" (and {len(more)} more like it)" if more else ""
        lines += ["", f"{first.name}{count}: {first.detail}", *(f"    | {x}" for x in first.lines)]
        lines += [f"    {first.file.absolute()}"] if first.file else []
    launch = cli_command("launch", plan.folder)
    if known.error:
        lines += ["", f"{known.error}; what is queued is not known"]
    elif alike:
        lines += ["", f"Once that is mended: {launch}"]
    elif counts["stopped"]:
        lines += ["", f"To go on: {launch}"]
    elif known.queued and None not in known.queued:
        lines += [
            "",
            f"No collect job is queued; at the end: {cli_command('collect', plan.folder)}",
        ]
    return "\n".join(lines)

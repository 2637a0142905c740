"""What every run of a sweep is doing, from its files and, where there is one, Slurm's queue."""

import re
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from calibeval.io import InputError, counted
from sweeps.runs import scoring, slurm_queue, stages
from sweeps.runs.files import is_locked, read_rows, tail
from sweeps.runs.grid import SweepPlan
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import QueuedJob, SubmittedElement
from sweeps.runs.yaml_io import cli_command

PRINTED_LINES = 3  # of what a job printed, where that is all that is known of its end
TABLE_CHARACTERS = 60  # of a reason, in the table
METRICS_BYTES = 4096  # at the end of metrics.jsonl, among which the last row is looked for


class State(Enum):
    """What a run is doing, the most urgent first; the value is what the table shows."""

    RUNNING = "running"
    QUEUED = "queued"
    DEAD = "dead"
    STOPPED = "stopped"
    UNKNOWN = "unknown"
    TO_DO = "to do"
    DONE = "done"


@dataclass(frozen=True)
class Status:
    """A run's state; why it died or was refused, the lines that say so and the file they are in."""

    name: str
    state: State
    detail: str = ""
    reason: str = ""  # the whole of it, which is told below the table
    restarts: int = 0
    scored: str = "-"  # tasks scored / tasks asked
    lines: tuple[str, ...] = ()
    file: Path | None = None


@dataclass(frozen=True)
class SlurmView:
    """What Slurm knows of a sweep's runs, by their names."""

    submitted: dict[str, SubmittedElement]
    queued: dict[str | None, QueuedJob]  # under None a collect job
    ends: dict[str, str]  # how elements ended, by their labels
    error: str  # what squeue said if it did not answer


def ask_slurm(plan: SweepPlan) -> SlurmView:
    """Ask Slurm about the runs that were submitted and are not done."""
    submitted = slurm_queue.submitted_elements(plan.folder)
    undone = [run.name for run in plan.baselines_and_runs if not run.done]
    jobs: list[QueuedJob] = []
    error = ""
    if undone and submitted:
        try:
            jobs = slurm_queue.queued_jobs(plan.folder)
        except InputError as refusal:
            error = str(refusal)
    # Of several jobs for a run, one that is running counts.
    queued = {job.run: job for job in sorted(jobs, key=lambda job: job.state == "RUNNING")}
    ends: dict[str, str] = {}
    if not error:
        gone = [name for name in undone if name in submitted and name not in queued]
        labels = [submitted[name].label for name in gone]
        ends = slurm_queue.job_ends(sorted({label for label in labels if label is not None}))
    return SlurmView(submitted, queued, ends, error)


@dataclass(frozen=True)
class Evidence:
    """All that tells what a run is doing."""

    run: Run
    last: dict[str, Any]  # the last row of attempts.jsonl; empty before the first
    locked: bool  # whether a process on this machine trains or scores the run
    launching: bool  # whether a launch without Slurm is under way
    queued: QueuedJob | None
    submitted: SubmittedElement | None
    end: str  # how the last element that was submitted for it ended, as far as Slurm knows
    slurm_error: str
    scored: str

    @property
    def reached(self) -> str:
        """How far the run has got."""
        if self.run.trained:
            return f"scoring, {self.scored}"
        return progress(self.run)


def of_sweep(plan: SweepPlan) -> tuple[list[Status], SlurmView]:
    """The state of every run, and of the models before fine-tuning that are still to be scored."""
    slurm = ask_slurm(plan)
    launching = is_locked(plan.lock)
    statuses = []
    for run in plan.baselines_and_runs:
        try:
            status = of_run(run, slurm, launching)
        except (InputError, OSError) as error:
            status = Status(run.name, State.UNKNOWN, str(error))
        if run.config().backend or status.state is not State.DONE:
            statuses.append(status)
    return statuses, slurm


def of_run(run: Run, slurm: SlurmView, launching: bool) -> Status:
    """The state of one run; raises InputError where its config cannot be read."""
    attempts = run.attempts()
    submitted = slurm.submitted.get(run.name)
    end = "killed"
    if submitted is not None and submitted.label is not None:
        end = f"{submitted.label} {slurm.ends.get(submitted.label, 'is not queued any more')}"
    evidence = Evidence(
        run=run,
        last=attempts[-1] if attempts else {},
        locked=is_locked(run.lock),
        launching=launching,
        queued=slurm.queued.get(run.name),
        submitted=submitted,
        end=end,
        slurm_error=slurm.error,
        scored=_scored(run),
    )
    state = classify(evidence)
    detail = describe(state, evidence)
    reason = ""
    lines: tuple[str, ...] = ()
    file = None
    if state is State.DEAD:
        reason = evidence.last.get("error", detail)
        lines, file = _cause(evidence)
    elif state is State.TO_DO:
        reason = evidence.last.get("refused", "")
    times_trained = sum(1 for row in attempts if row.get("stage") == stages.TRAIN)
    return Status(
        name=run.name,
        state=state,
        detail=detail,
        reason=reason,
        restarts=max(0, times_trained - 1),
        scored=evidence.scored,
        lines=lines,
        file=file,
    )


def classify(evidence: Evidence) -> State:
    """What a run is doing."""
    last = evidence.last
    queued = evidence.queued
    if stages.next_stage(evidence.run) is None:
        return State.DONE
    if evidence.locked or (queued is not None and queued.state in ("RUNNING", "COMPLETING")):
        return State.RUNNING
    if evidence.launching and "began" in last:
        return State.RUNNING
    if queued is not None or (evidence.launching and "queued" in last):
        return State.QUEUED
    if not last:
        return State.TO_DO
    if evidence.slurm_error and evidence.submitted is not None:
        return State.UNKNOWN
    if "error" in last:
        return State.DEAD
    if "ended" in last:
        return State.STOPPED if "stopped" in last else State.TO_DO
    if _never_queued(evidence):
        return State.TO_DO
    # It was queued or had begun, and is gone without a word.
    if "CANCELLED" in evidence.end:
        return State.STOPPED
    return State.DEAD


def _never_queued(evidence: Evidence) -> bool:
    """Whether a launch on Slurm ended before sbatch had taken the run."""
    submitted = evidence.submitted
    on_slurm = "queued" in evidence.last and "job" in evidence.last
    return on_slurm and submitted is not None and submitted.label is None


def describe(state: State, evidence: Evidence) -> str:
    """What the table says beside a run's state."""
    run = evidence.run
    last = evidence.last
    queued = evidence.queued
    parts = []
    if state is State.DONE:
        parts = [progress(run)]
    elif state is State.RUNNING:
        parts = [evidence.reached or "starting", _age_of_last_step(evidence)]
        if queued is not None and queued.stopping:
            parts.append("stopping")
    elif state is State.QUEUED and queued is not None:
        parts = [queued.id, _why_pending(queued, evidence), progress(run)]
    elif state is State.TO_DO and not last:
        parts = [f"{key}={value}" for key, value in run.values.items()]
    elif state is State.TO_DO and "refused" in last:
        parts = [_shortened(f"not queued: {last['refused']}")]
    elif state is State.TO_DO and _never_queued(evidence):
        parts = ["not queued: its launch ended before sbatch took it"]
    elif state is State.DEAD and "error" in last:
        parts = [_shortened(last["error"])]
    elif state is State.DEAD:
        when = evidence.reached or "at the start"
        if "queued" in last:
            when = "before it began"
        parts = [f"{evidence.end}, {when}"]
    elif state is State.STOPPED and "ended" not in last:
        parts = [evidence.end, evidence.reached]
    else:
        parts = [evidence.reached]
    return "  ".join(part for part in parts if part)


def _why_pending(queued: QueuedJob, evidence: Evidence) -> str:
    """For what a queued run waits."""
    if queued.reason == "BeginTime" and "stopped" in evidence.last:
        saved = "what is scored" if evidence.run.trained else f"at step {evidence.run.step()}"
        return f"saved {saved}; Slurm starts it again shortly"
    return queued.reason


def _shortened(reason: str) -> str:
    """A reason as the table shows it; the whole of it stands below."""
    if len(reason) <= TABLE_CHARACTERS:
        return reason
    return reason[:TABLE_CHARACTERS].rsplit(" ", 1)[0] + " …"


def _cause(evidence: Evidence) -> tuple[tuple[str, ...], Path | None]:
    """Of a dead run: the last lines that its job printed, and the file that says more."""
    run = evidence.run
    if "error" in evidence.last:  # which the table shows
        log = run.path / (f"{stages.SCORE}.log" if run.trained else f"{stages.TRAIN}.log")
        return (), log if log.exists() else None
    if evidence.submitted is None:
        return (), None
    printed = evidence.submitted.log
    if printed is None:
        return (), None
    return tuple(tail(printed, PRINTED_LINES)), printed


def _scored(run: Run) -> str:
    """How many of the run's tasks are scored, such as 1/2; - where nobody asks for scores."""
    score = run.config().score
    if score is None:
        return "-"
    count = len(score.tasks)
    return f"{count - len(scoring.unscored_tasks(run))}/{count}"


def _age_of_last_step(evidence: Evidence) -> str:
    """How long ago a trainer that runs has written its last step: one that hangs gets old."""
    run = evidence.run
    if "began" not in evidence.last or run.trained or not run.metrics.exists():
        return ""
    # Not below 0, where the clock of a file server is ahead.
    seconds = max(0, int(time.time() - run.metrics.stat().st_mtime))
    return f"{timedelta(seconds=seconds)} ago"


def progress(run: Run) -> str:
    """The last row of metrics that has a loss, else the last one, in words."""
    rows = [row for row in read_rows(run.metrics, METRICS_BYTES) if "step" in row]
    if not rows:
        return ""
    with_loss = [row for row in rows if "loss" in row]
    row = (with_loss or rows)[-1]
    text = f"step {row['step']}/{row.get('steps', '?')}"
    if row.get("loss") is not None:
        text += f"  loss {row['loss']:.4f}"
    if row.get("tokens_per_second") is not None:
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
    return text


def table(plan: SweepPlan) -> str:
    """The table with its summary line, most urgent states first, and why what is dead died."""
    statuses, slurm = of_sweep(plan)
    lines = [_summary(plan, statuses), *_rows(statuses), *_others(plan)]
    for alike in _alike([status for status in statuses if status.reason]):
        lines += _describe_reason(alike)
    lines += _describe_stuck(plan, slurm)
    advice = _advice(plan, statuses, slurm)
    if advice:
        lines += ["", advice]
    return "\n".join(lines)


def _summary(plan: SweepPlan, statuses: list[Status]) -> str:
    """How many runs there are, and how many in each state."""
    counts = Counter(status.state for status in statuses)
    states = " · ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
    runs = counted(len(plan.runs), "run")
    baselines = len(statuses) - len(plan.runs)
    if baselines:
        runs += f" and {counted(baselines, 'base model')} to score"
    return f"{plan.folder.absolute()}: {runs}: {states}"


def _rows(statuses: list[Status]) -> list[str]:
    """A line for each run, below their heading."""
    width = max(len(status.name) for status in statuses)
    lines = [f"{'RUN':{width}}  {'STATE':8}  {'RESTARTS':>8}  {'SCORED':>6}  DETAIL"]
    order = list(State)
    for status in sorted(statuses, key=lambda status: order.index(status.state)):
        line = (
            f"{status.name:{width}}  {status.state.value:8}  {status.restarts:>8}  "
            f"{status.scored:>6}  {status.detail}"
        )
        lines.append(line.rstrip())
    return lines


def _others(plan: SweepPlan) -> list[str]:
    """A line about the folder's runs that the last launch did not ask for, if there are any."""
    planned = {run.name for run in plan.baselines_and_runs}
    folders = [file.parent for file in plan.folder.glob("*/config.yaml")]
    others = [folder for folder in folders if folder.name not in planned]
    if not others:
        return []
    done = sum(1 for folder in others if (folder / "DONE").exists())
    return [f"Also in this folder: {counted(len(others), 'run')}, {done} done"]


def _alike(statuses: list[Status]) -> list[list[Status]]:
    """Runs in groups of the same reason and words, whatever the numbers in them."""
    groups: dict[tuple[str, ...], list[Status]] = {}
    for status in statuses:
        words = (status.reason, *status.lines[-1:])
        key = tuple(re.sub(r"\d+(_\d+)?", "#", text) for text in words)
        groups.setdefault(key, []).append(status)
    return list(groups.values())


def _describe_reason(alike: list[Status]) -> list[str]:
    """Why the first of some runs died, or was refused, and the file that says more."""
    first = alike[0]
    count = f" (and {len(alike) - 1} more like it)" if len(alike) > 1 else ""
    lines = ["", f"{first.name}{count}: {first.reason}"]
    lines += [f"    | {line}" for line in first.lines]
    if first.file is not None:
        lines.append(f"    {first.file.absolute()}")
    return lines


def _describe_stuck(plan: SweepPlan, slurm: SlurmView) -> list[str]:
    """Which runs are queued and cannot start, why, and what to type."""
    counts = Counter(job.reason for job in slurm.queued.values() if job.state == "PENDING")
    lines = []
    for reason, count in counts.items():
        meaning = slurm_queue.explain_stuck(reason)
        if meaning is not None:
            lines += ["", f"{counted(count, 'job')} will not start ({reason}): {meaning}"]
    if lines:
        cancel = cli_command("cancel", plan.folder)
        launch = cli_command("launch", plan.folder)
        lines.append(f"    {cancel}; correct the profile; then {launch}")
    return lines


def _advice(plan: SweepPlan, statuses: list[Status], slurm: SlurmView) -> str:
    """What to type next, if anything is to be typed."""
    states = {status.state for status in statuses}
    launch = cli_command("launch", plan.folder)
    if slurm.error:
        return f"{slurm.error}; what is queued is not known"
    if State.DEAD in states:
        return f"Fix the cause shown above, then type: {launch}"
    if State.STOPPED in states:
        return f"To go on: {launch}"
    if slurm.queued and None not in slurm.queued:
        collect = cli_command("collect", plan.folder)
        return f"No collect job is queued; at the end: {collect}"
    return ""

"""What every run of a sweep is doing, from its files and, where there is one, Slurm's queue."""

import contextlib
import re
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path

from calibeval.io import InputError, counted, one_line
from sweeps.runs import scoring, slurm_queue, stages
from sweeps.runs.events import Event, EventKind
from sweeps.runs.files import closed_by_owner, is_locked, numbers_of, read_rows, tail
from sweeps.runs.grid import SweepPlan
from sweeps.runs.processes import cli_command
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import ElementEnd, LiveElement, Remedy, StuckReason, SubmittedElement

PRINTED_LINES = 3  # how many lines of a job's output are shown where its end has no other words
LOG_LINES = 40  # how many lines of each log `logs` shows
TABLE_CHARACTERS = 60  # how much of a reason stands in the table
NODES_SHOWN = 4  # how many of the nodes that are down are named
METRICS_BYTES = 4096  # how much of the end of metrics.jsonl is searched for the last row


class State(Enum):
    """What a run is doing, and what the table shows of it, in at most eight letters.

    Tables and their summary keep this order: first what is under way, then what needs somebody, and
    last what is done. A new state is decided in `classify`, and `describe` must have words for it.
    """

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
    reason: str = ""  # why it died or was refused, uncut: `detail` has its beginning
    restarts: int = 0
    scored: str = "-"  # tasks scored / tasks asked
    lines: tuple[str, ...] = ()
    file: Path | None = None


@dataclass(frozen=True)
class SlurmView:
    """What Slurm knows of a sweep's runs, by their names."""

    # Of each run, the last element, of any launch, that was to do its next stage.
    submitted: dict[str, SubmittedElement]
    # Of each run that has live elements, the one that tells most: see `ask_slurm`.
    live_element_of: dict[str, LiveElement]
    collect_job: LiveElement | None  # that makes the tables, whatever runs it waits for
    ends: dict[SubmittedElement, ElementEnd]  # how those ended that are not live
    error: str  # what squeue said if it did not answer


def ask_slurm(plan: SweepPlan) -> SlurmView:
    """Ask Slurm about the runs that were submitted and have something left to do."""
    stage_of = _next_stages(plan)
    submitted: dict[str, SubmittedElement] = {}
    elements_in_queue: list[LiveElement] = []
    error = ""
    try:
        elements = slurm_queue.submitted_elements(plan.folder)
        for name, stage in stage_of.items():
            if name in elements:
                submitted[name] = _element_for(stage, elements[name])
        if submitted:
            elements_in_queue = slurm_queue.live_elements(plan.folder)
    except (InputError, PermissionError) as refusal:
        error = closed_by_owner(refusal, plan.folder) or str(refusal)
    live_element_of = {}
    collect_job = None

    def tells_more(element: LiveElement) -> tuple[bool, bool]:
        """A key to sort the elements of one run by: the last one is the one to show.

        That is an element that runs; if none does, the one that is to do the run's next stage.
        """
        is_running = element.state == "RUNNING"
        next_stage = None if element.run is None else stage_of.get(element.run)
        only_scoring_is_left = next_stage == stages.SCORE
        does_next_stage = element.only_scores == only_scoring_is_left
        return is_running, does_next_stage

    # In ascending order, so that of each run the element that tells most overwrites the others.
    for element in sorted(elements_in_queue, key=tells_more):
        if element.run is None:
            collect_job = element
        else:
            live_element_of[element.run] = element
    ends: dict[SubmittedElement, ElementEnd] = {}
    if not error:
        ends = slurm_queue.element_ends(
            element for name, element in submitted.items() if name not in live_element_of
        )
    return SlurmView(submitted, live_element_of, collect_job, ends, error)


def _next_stages(plan: SweepPlan) -> dict[str, str]:
    """The next stage of each run that has one, by its name; of one that cannot be asked, training.

    `of_sweep` says of the latter what is wrong with it.
    """
    stage_of = {}
    for run in plan.baselines_and_runs:
        try:
            stage = stages.next_stage(run)
        except (InputError, OSError):
            stage = stages.TRAIN
        if stage is not None:
            stage_of[run.name] = stage
    return stage_of


def _element_for(stage: str, elements: list[SubmittedElement]) -> SubmittedElement:
    """Of a run's elements, the last one that was to do this stage.

    Of a run of several processes, an element that scores waits for the one that trains. Slurm
    cancels it when that one fails, which says nothing about the failure.
    """
    if stage == stages.TRAIN:
        trainers = [element for element in elements if not element.only_scores]
        if trainers:
            return trainers[-1]
    return elements[-1]


@dataclass(frozen=True)
class Evidence:
    """All that tells what a run is doing."""

    run: Run
    last: Event | None  # what has happened to it last
    is_locked: bool  # whether a process trains or scores it: here, or on a node whose locks we see
    is_launching: bool  # whether a launch without Slurm is under way
    live_element: LiveElement | None
    submitted: SubmittedElement | None
    end: ElementEnd | None  # how that element ended, as far as Slurm knows
    slurm_error: str
    scored: str

    @property
    def reached(self) -> str:
        """How far the run has got."""
        if self.run.trained:
            return f"scoring, {self.scored}"
        metrics = last_metrics(self.run)
        step = self.run.last_saved_step()
        if metrics or step == 0:
            return metrics
        return f"saved at step {step}"  # a script of the user's own may write no metrics

    @property
    def unanswered_launch(self) -> Event | None:
        """The last event, if that is a launch: then nothing has begun since."""
        if self.last is not None and self.last.kind is EventKind.LAUNCHED:
            return self.last
        return None

    @property
    def was_never_queued(self) -> bool:
        """Whether that launch, on Slurm, ended before sbatch had taken the run."""
        if self.unanswered_launch is None or self.unanswered_launch.tag is None:
            return False
        return self.submitted is not None and not self.submitted.was_taken

    def describe_end(self) -> str:
        """How what was to work on the run ended."""
        if self.submitted is None or self.submitted.label is None:
            return "killed"
        how = "is not queued any more" if self.end is None else self.end.describe()
        if self.end is not None and self.end.could_not_write and self.submitted.log is not None:
            how += f": {self.end.node} cannot write {self.submitted.log.parent}"
        return f"{self.submitted.label} {how}"


def of_sweep(plan: SweepPlan) -> tuple[list[Status], SlurmView]:
    """The state of every run, and of the models before fine-tuning that are still to be scored."""
    slurm = ask_slurm(plan)
    is_launching = is_locked(plan.lock)
    statuses = []
    for run in plan.baselines_and_runs:
        try:
            status = of_run(run, slurm, is_launching)
        except (InputError, OSError) as error:
            reason = closed_by_owner(error, plan.folder) or str(error)
            status = Status(run.name, State.UNKNOWN, _shortened(reason), reason)
        is_baseline = run.config().is_baseline
        if not is_baseline or status.state is not State.DONE:
            statuses.append(status)
    return statuses, slurm


def of_run(run: Run, slurm: SlurmView, is_launching: bool) -> Status:
    """The state of one run; raises InputError or OSError where scoring cannot be asked."""
    events = run.events()
    submitted = None
    if not _was_launched_here(events):
        submitted = slurm.submitted.get(run.name)
    end = None
    if submitted is not None:
        end = slurm.ends.get(submitted)
    evidence = Evidence(
        run=run,
        last=events[-1] if events else None,
        is_locked=is_locked(run.lock_file),
        is_launching=is_launching,
        live_element=slurm.live_element_of.get(run.name),
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
    last = evidence.last
    if state is State.DEAD:
        reason = detail
        if last is not None and last.error is not None:
            reason = last.error
        elif end is not None and end.remedy:
            reason += f": {end.remedy}"
        lines, file = _cause(evidence)
    elif state is State.TO_DO and last is not None and last.refusal is not None:
        reason = last.refusal
    times_trained = sum(1 for event in events if event.stage == stages.TRAIN)
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


def _was_launched_here(events: list[Event]) -> bool:
    """Whether the last launch of a run was one without Slurm: no job has to do with it since."""
    launches = [event for event in events if event.kind is EventKind.LAUNCHED]
    return bool(launches) and launches[-1].tag is None


def classify(evidence: Evidence) -> State:
    """What a run is doing. The first of these that holds decides:

    1. nothing is left to do: DONE, whatever else is known;
    2. somebody works on it, or will by itself: RUNNING, QUEUED;
    3. nothing ever happened to it: TO_DO;
    4. it may be queued, and Slurm does not answer: UNKNOWN;
    5. what happened last, once nobody works on it any more: DEAD, STOPPED, TO_DO.
    """
    if stages.next_stage(evidence.run) is None:
        return State.DONE
    live_state = _live_state(evidence)
    if live_state is not None:
        return live_state
    if evidence.last is None:
        return State.TO_DO
    if evidence.slurm_error and evidence.submitted is not None:
        return State.UNKNOWN
    return _state_after(evidence.last, evidence)


def _live_state(evidence: Evidence) -> State | None:
    """The state of a run that somebody works on, or will without being asked again; else None."""
    element = evidence.live_element
    if evidence.is_locked:
        return State.RUNNING
    if element is not None:  # its program takes the lock seconds after the element begins
        is_pending = element.state not in ("RUNNING", "COMPLETING")
        return State.QUEUED if is_pending else State.RUNNING
    if evidence.is_launching and evidence.last is not None:
        if evidence.last.kind is EventKind.BEGAN:  # and its program has not taken the lock yet
            return State.RUNNING
        if evidence.last.kind is EventKind.LAUNCHED:
            return State.QUEUED
    return None


def _state_after(last: Event, evidence: Evidence) -> State:
    """The state of a run that nobody works on, by what happened to it last."""
    if last.error is not None:
        return State.DEAD
    if last.was_stopped:
        return State.STOPPED
    # The run was refused; or was killed, and not tried again; or another process was met at it; or
    # its training went well, and its scoring is still to come.
    if last.kind is EventKind.ENDED:
        return State.TO_DO
    if evidence.was_never_queued:
        return State.TO_DO
    # It was queued or had begun, and is gone without a word.
    if evidence.end is not None and evidence.end.was_cancelled:
        return State.STOPPED
    return State.DEAD


def describe(state: State, evidence: Evidence) -> str:
    """What the table says beside a run's state."""
    return "  ".join(part for part in _parts(state, evidence) if part)


def _parts(state: State, evidence: Evidence) -> list[str]:
    """The parts of a description; mypy refuses this function if a state is missing."""
    match state:
        case State.RUNNING:
            return _describe_running(evidence)
        case State.QUEUED:
            return _describe_queued(evidence)
        case State.DEAD:
            return _describe_dead(evidence)
        case State.STOPPED:
            return _describe_stopped(evidence)
        case State.UNKNOWN:
            return [evidence.reached]
        case State.TO_DO:
            return _describe_to_do(evidence)
        case State.DONE:
            return [last_metrics(evidence.run)]


def _describe_running(evidence: Evidence) -> list[str]:
    parts = [evidence.reached or "starting", _age_of_last_step(evidence)]
    element = evidence.live_element
    if element is not None and element.stopping:
        parts.append("stopping")
    if element is not None and element.state == "PENDING" and evidence.last is not None:
        host = evidence.last.details.get("host")
        label = element.label
        if evidence.last.details.get("job") == label:
            parts.append(f"still on {host}, which Slurm has given up; {label} is queued again")
    return parts


def _describe_queued(evidence: Evidence) -> list[str]:
    element = evidence.live_element
    if element is None:  # it waits for a worker of a launch without Slurm
        return [evidence.reached]
    return [
        element.label,
        _why_pending(element, evidence),
        _expected_start(element),
        last_metrics(evidence.run),
    ]


def _describe_dead(evidence: Evidence) -> list[str]:
    if evidence.last is not None and evidence.last.error is not None:
        return [_shortened(evidence.last.error)]
    when = evidence.reached or "at the start"
    if evidence.unanswered_launch is not None:
        when = "before it began"
    return [f"{evidence.describe_end()}, {when}"]


def _describe_stopped(evidence: Evidence) -> list[str]:
    if evidence.last is not None and evidence.last.kind is EventKind.ENDED:  # and it saved
        return [evidence.reached]
    return [evidence.describe_end(), evidence.reached]


def _describe_to_do(evidence: Evidence) -> list[str]:
    if evidence.last is None:
        return [f"{key}={value}" for key, value in evidence.run.grid_values.items()]
    if evidence.last.refusal is not None:
        return [_shortened(f"not queued: {evidence.last.refusal}")]
    if evidence.was_never_queued:
        return ["not queued: its launch ended before sbatch took it"]
    return [evidence.reached]


def _why_pending(element: LiveElement, evidence: Evidence) -> str:
    """For what a queued run waits."""
    if element.reason == "BeginTime" and evidence.last is not None and evidence.last.was_stopped:
        step = evidence.run.last_saved_step()
        saved = "what is scored" if evidence.run.trained else f"at step {step}"
        return f"saved {saved}; Slurm starts it again shortly"
    return _shortened(element.reason)


def _expected_start(element: LiveElement) -> str:
    """Say when Slurm expects a pending element to start; nothing where it does not tell."""
    with contextlib.suppress(ValueError):  # N/A
        return f"starts about {datetime.fromisoformat(element.start):%d %b %H:%M}"
    return ""


def _shortened(reason: str) -> str:
    """A reason as the table shows it; the whole of it stands below."""
    if len(reason) <= TABLE_CHARACTERS:
        return reason
    return reason[:TABLE_CHARACTERS].rsplit(" ", 1)[0] + " …"


def _cause(evidence: Evidence) -> tuple[tuple[str, ...], Path | None]:
    """Of a dead run: the last lines that its job printed, and the file that says more."""
    run = evidence.run
    if evidence.last is not None and evidence.last.error is not None:  # which is shown already
        log = run.path / (f"{stages.SCORE}.log" if run.trained else f"{stages.TRAIN}.log")
        return (), log if log.exists() else None
    if evidence.submitted is None:
        return (), None
    printed = evidence.submitted.log
    if printed is None:
        return (), None
    return tuple(tail(printed, PRINTED_LINES)), printed if printed.exists() else None


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
    is_under_way = evidence.last is not None and evidence.last.kind is EventKind.BEGAN
    if not is_under_way or run.trained or not run.metrics.exists():
        return ""
    # Not below 0, where the clock of a file server is ahead.
    seconds = max(0, int(time.time() - run.metrics.stat().st_mtime))
    return f"{timedelta(seconds=seconds)} ago"


def last_metrics(run: Run) -> str:
    """The last row of metrics that has a loss, else the last one, in words."""
    rows = [numbers_of(row) for row in read_rows(run.metrics, METRICS_BYTES)]
    rows = [row for row in rows if "step" in row]
    if not rows:
        return ""
    with_loss = [row for row in rows if "loss" in row]
    row = (with_loss or rows)[-1]
    steps = f"{row['steps']:.0f}" if "steps" in row else "?"
    text = f"step {row['step']:.0f}/{steps}"
    if "loss" in row:
        text += f"  loss {row['loss']:.4f}"
    if "tokens_per_second" in row:
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
    return text


def table(plan: SweepPlan) -> str:
    """The table with its summary line, in the order of `State`; why runs died or were refused."""
    text, _ = table_of_now(plan)
    return text


def table_of_now(plan: SweepPlan) -> tuple[str, bool]:
    """The table, and whether a run is queued or running."""
    statuses, slurm = of_sweep(plan)
    goes_on = any(status.state in (State.RUNNING, State.QUEUED) for status in statuses)
    lines = [_summary(plan, statuses), *_rows(statuses), *_others(plan)]
    for group in _with_same_cause([status for status in statuses if status.reason]):
        lines += _describe_reason(group)
    lines += _describe_stuck(plan, slurm)
    advice = _advice(plan, statuses, slurm)
    if advice:
        lines += ["", advice]
    return "\n".join(lines), goes_on


def logs(folder: Path, run: Run) -> str:
    """The last lines of a run's logs, the one that was written last at the end."""
    files = [run.path / f"{stage}.log" for stage in stages.STAGES]
    for element in slurm_queue.submitted_elements(folder).get(run.name, [])[-1:]:
        if element.log is not None:
            files.append(element.log)
    written = sorted(
        (file for file in files if file.exists()), key=lambda file: file.stat().st_mtime
    )
    if not written:
        return f"{run.path.absolute()}: has not begun"
    parts = []
    for file in written:
        parts.append("\n".join([f"==> {file.absolute()}", *tail(file, LOG_LINES)]))
    return "\n\n".join(parts)


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
    width = max((len(status.name) for status in statuses), default=0)
    lines = [f"{'RUN':{width}}  {'STATE':8}  {'RESTARTS':>8}  {'SCORED':>6}  DETAIL"]
    order = list(State)
    for status in sorted(statuses, key=lambda status: order.index(status.state)):
        line = (
            f"{status.name:{width}}  {status.state.value:8}  {status.restarts:>8}  "
            f"{status.scored:>6}  {status.detail}"
        )
        lines.append(one_line(line).rstrip())
    return lines


def _others(plan: SweepPlan) -> list[str]:
    """A line about the folder's runs that the typed file and overrides do not ask for, if any."""
    planned = {run.name for run in plan.baselines_and_runs}
    folders = [file.parent for file in plan.folder.glob("*/config.yaml")]
    others = [folder for folder in folders if folder.name not in planned]
    if not others:
        return []
    done = sum(1 for folder in others if Run(folder).done)
    return [f"Also in this folder: {counted(len(others), 'run')}, {done} done"]


def _with_same_cause(statuses: list[Status]) -> list[list[Status]]:
    """Runs in groups of the same reason and words, whatever the numbers in them."""
    groups: dict[tuple[str, ...], list[Status]] = {}
    for status in statuses:
        words = (status.reason, *status.lines[-1:])
        key = tuple(re.sub(r"\d+(_\d+)?", "#", text) for text in words)
        groups.setdefault(key, []).append(status)
    return list(groups.values())


def _describe_reason(group: list[Status]) -> list[str]:
    """Why the first of these runs died, or was refused, and the file that says more."""
    first = group[0]
    count = f" (and {len(group) - 1} more like it)" if len(group) > 1 else ""
    lines = ["", one_line(f"{first.name}{count}: {first.reason}")]
    lines += [f"    | {one_line(line)}" for line in first.lines]
    if first.file is not None:
        lines.append(f"    {first.file.absolute()}")
    return lines


def _describe_stuck(plan: SweepPlan, slurm: SlurmView) -> list[str]:
    """Which runs are queued and cannot start, why, and what to type."""
    pending_for_reason: dict[tuple[str, str | None], list[LiveElement]] = {}
    elements = list(slurm.live_element_of.values())
    if slurm.collect_job is not None:
        elements.append(slurm.collect_job)
    for element in elements:
        if element.state == "PENDING":
            key = (element.reason, element.cluster)
            pending_for_reason.setdefault(key, []).append(element)
    lines = []
    for (reason, _), pending in pending_for_reason.items():
        stuck = slurm_queue.explain_stuck(reason)
        if stuck is not None:
            lines += ["", *_describe_stuck_elements(plan, stuck, reason, pending)]
    return lines


def _describe_stuck_elements(
    plan: SweepPlan, stuck: StuckReason, reason: str, elements: list[LiveElement]
) -> list[str]:
    """Why these elements cannot start, and what to type."""
    count = counted(len(elements), "job")  # as users call what squeue lists
    cancel = cli_command("cancel", plan.folder)
    launch = cli_command("launch", plan.folder)
    other_profile = f"{cancel}; correct the profile; then {launch}"
    if stuck.remedy is Remedy.RELEASE:
        words = ["scontrol"]
        if elements[0].cluster is not None:
            words.append(f"--clusters={elements[0].cluster}")
        words += ["release", *(element.label for element in elements)]
        return [
            f"{count} will not start ({reason}): {stuck.meaning}",
            f"    To let it go: {' '.join(words)}",
        ]
    if stuck.remedy is Remedy.PATIENCE:
        lines = [f"{count} cannot start now ({reason}): {stuck.meaning}"]
        nodes = slurm_queue.unavailable_nodes(elements[0].cluster)
        if nodes:
            more = f"; {len(nodes) - NODES_SHOWN} more" if len(nodes) > NODES_SHOWN else ""
            lines.append(f"    sinfo says: {'; '.join(nodes[:NODES_SHOWN])}{more}")
        lines.append("    Once they are back, Slurm starts it, and nothing is to be typed.")
        lines.append(f"    For other nodes: {other_profile}")
        return lines
    return [f"{count} will not start ({reason}): {stuck.meaning}", f"    {other_profile}"]


def _advice(plan: SweepPlan, statuses: list[Status], slurm: SlurmView) -> str:
    """What to type next, if anything is to be typed."""
    states = {status.state for status in statuses}
    launch = cli_command("launch", plan.folder)
    if not (plan.folder / "jobs").is_dir():  # nothing was ever queued
        launch += " --executor local"
    if slurm.error:
        return f"{slurm.error}; what is queued is not known"
    if State.DEAD in states:
        return (
            f"Fix the cause shown above, then type: {launch}\n"
            "(or launch the sweep's file, where you have changed that)"
        )
    if State.STOPPED in states:
        return f"To go on: {launch}"
    if slurm.live_element_of and slurm.collect_job is None:
        collect = cli_command("collect", plan.folder)
        return f"No collect job is queued; at the end: {collect}"
    return ""

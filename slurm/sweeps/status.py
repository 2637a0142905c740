"""What every run of a sweep is doing, from its files and, where there is one, the queue."""

import contextlib
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibeval.io import counted
from sweeps import score
from sweeps.config import Sweep
from sweeps.errors import SweepError
from sweeps.grid import Cell
from sweeps.locks import held
from sweeps.rundir import RunDir

if TYPE_CHECKING:
    from sweeps.executors.slurm import Element

STATES = ("running", "queued", "preempted", "interrupted", "failed", "to do", "done")


@dataclass(frozen=True)
class Status:
    """One run, as a line of the table."""

    name: str
    state: str
    detail: str
    restarts: int
    scored: str


def of_sweep(sweep: Sweep, cells: list[Cell]) -> list[Status]:
    """The state of every run; a queue that does not answer costs the word `queued`, no more."""
    elements, answered = {}, False
    if shutil.which("squeue"):
        from sweeps.executors import slurm

        try:
            elements, answered = slurm.active(sweep), slurm.submitted(sweep)
        except SweepError:
            elements = {}
    found = []
    for cell in cells:
        element = elements.get(("train", cell.config.name))
        found.append(_of_run(sweep, cell, element, gone=answered and element is None))
    return found


def _of_run(sweep: Sweep, cell: Cell, element: "Element | None", *, gone: bool) -> Status:
    """`gone`: the queue answered and has no element that trains this run, as it once had."""
    run = RunDir(cell.folder)
    tasks = sweep.score.tasks if sweep.score else ()
    subject = score.of_cell(cell)
    count = sum(subject.records(task).exists() for task in tasks)
    scored = f"{count}/{len(tasks)}" if tasks else "-"
    if not run.manifest_file.exists():
        state = "queued" if element else "to do"
        return Status(run.name, state, element.reason if element else "", 0, scored)
    manifest = run.manifest()
    restarts = manifest.get("restarts", 0)
    if run.done:
        return Status(run.name, "done", _progress(run, live=False), restarts, scored)
    live = held(run.lock) and not (gone and run.job())  # a lock outlives its killed job for a while
    if live:
        return Status(run.name, "running", _progress(run, live=True), restarts, scored)
    if element and element.state == "RUNNING":
        return Status(run.name, "running", "starting", restarts, scored)
    state = manifest["state"]
    if state == "failed" and not element:
        return Status(run.name, "failed", manifest.get("error", ""), restarts, scored)
    if element:
        where = "preempted" if state == "preempted" else "queued"
        return Status(run.name, where, f"{element.job} {element.reason}", restarts, scored)
    if state == "running":  # its files say so, its heartbeat does not
        return Status(run.name, "interrupted", _progress(run, live=False), restarts, scored)
    known = {"new": "to do", "preempted": "preempted"}
    return Status(run.name, known.get(state, state), _progress(run, live=False), restarts, scored)


def _progress(run: RunDir, *, live: bool) -> str:
    rows = _last_rows(run.metrics)
    row = next((row for row in rows if "loss" in row), next(iter(rows), None))
    if row is None:
        return "starting" if live else ""
    text = f"step {row.get('step', '?')}/{row.get('steps', '?')}"
    if isinstance(row.get("loss"), (int, float)):
        text += f"  loss {row['loss']:.4f}"
    if isinstance(row.get("tokens_per_second"), (int, float)):
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
    if isinstance(row.get("model_flops_utilisation"), (int, float)):
        text += f" ({row['model_flops_utilisation']:.0%} of peak)"
    if live and isinstance(row.get("eta_s"), (int, float)):
        text += f"  ETA {duration(row['eta_s'])}"
    return text


def _last_rows(path: Path) -> list[dict]:
    """The last rows of a JSON-lines file, newest first."""
    try:
        with open(path, "rb") as data:
            data.seek(max(0, os.fstat(data.fileno()).st_size - 4096))
            lines = data.read().splitlines()
    except OSError:
        return []
    rows = []
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def duration(seconds: float) -> str:
    """Seconds as people say them: 42s, 7m12s, 3h05m, 2d04h."""
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02}m"
    return f"{s // 86400}d{s % 86400 // 3600:02}h"


def table(statuses: list[Status], title: str) -> str:
    """The table with its summary line, most urgent states first."""
    counts = Counter(status.state for status in statuses)
    summary = " · ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    width = max((len(status.name) for status in statuses), default=4)
    room = shutil.get_terminal_size().columns - width - 36
    limit = max(30, room) if sys.stdout.isatty() else None  # a file has no edge
    lines = [f"{title}: {counted(len(statuses), 'run')}: {summary}"]
    lines.append(f"{'RUN':{width}}  {'STATE':11}  {'RESTARTS':>8}  {'SCORED':>6}  DETAIL")
    for status in sorted(statuses, key=lambda s: (STATES.index(s.state), s.name)):
        lines.append(
            f"{status.name:{width}}  {status.state:11}  {status.restarts:>8}  {status.scored:>6}  "
            f"{status.detail[:limit]}".rstrip()
        )
    return "\n".join(lines)

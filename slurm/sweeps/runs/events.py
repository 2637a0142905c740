"""What happened to a run: the rows of its attempts.jsonl.

In the file, a row is an object with the time under the event's name, and the details beside it:

    {"queued": "2026-11-28T02:00:00Z", "tag": "a1b2c3", "code": "5eed5eed"}
"""

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from sweeps.runs.files import read_rows


class EventKind(Enum):
    """What happened; the value is the name in the file."""

    # A launch has asked for the run: it is about to hand it to sbatch, or to a worker on this
    # machine. The name in the file is from when there was Slurm alone, and stays for older files.
    LAUNCHED = "queued"
    BEGAN = "began"  # an attempt has begun: one program, started for one stage
    ENDED = "ended"  # an attempt has ended, or sbatch did not take the run


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    kind: EventKind
    time: str
    details: dict[str, Any]

    @property
    def stage(self) -> str | None:
        """Of an attempt that began: the stage that it is at."""
        return self.details.get("stage")

    @property
    def error(self) -> str | None:
        """Why an attempt failed, in words; None if it did not."""
        return self.details.get("error")

    @property
    def refusal(self) -> str | None:
        """Why sbatch did not take the run, in words; None if it did."""
        return self.details.get("refused")

    @property
    def was_stopped(self) -> bool:
        """Whether an attempt ended, and saved, because somebody asked."""
        return "stopped" in self.details

    @property
    def tag(self) -> str | None:
        """The name of the job's folder through which a launch on Slurm asked for the run."""
        return self.details.get("tag", self.details.get("job"))  # `job` in earlier versions


def read_events(file: Path) -> list[Event]:
    """The events in a file, in their order; damaged rows are left out, as are unknown ones."""
    events = []
    for row in read_rows(file):
        for kind in EventKind:
            if kind.value in row:
                details = {key: value for key, value in row.items() if key != kind.value}
                events.append(Event(kind, row[kind.value], details))
                break
    return events


def append_event(file: Path, kind: EventKind, details: dict[str, Any]) -> None:
    """Add what has happened just now to a file."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    row = {kind.value: now, **details}
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")

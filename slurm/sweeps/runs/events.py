"""What happened to a run: the rows of its attempts.jsonl.

In the file, a row is an object with the time under the event's name, and the details beside it:

    {"queued": "2026-11-28T02:00:00Z", "tag": "a1b2c3", "code": "5eed5eed"}

The details of each kind:

    LAUNCHED  code      the folder of the snapshot that runs
              tag       of a launch on Slurm: the job's folder below `jobs`
    BEGAN     stage     what the attempt is to do, `train` or `score`
              progress  what the run has got so far: see `Run.progress`
              files     the hashes of the files that its config names, by their paths
              host, job, gpus, and the versions of packages: where and with what it runs
    ENDED     exit      the exit code; absent if the attempt did not get as far as a program
              stopped   true: somebody asked for an end; it has saved, or had not begun
              killed    true: a signal ended it, and it will be tried again
              busy      true: another process holds the run
              error     in words: it has failed, and will not be tried again
              refused   in words: there was no attempt, as sbatch did not take the run

Of `stopped`, `killed`, `busy`, `error` and `refused` an ENDED row has one, or none if its attempt
did what it was for.
"""

import json
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any

from calibeval.io import regular_file
from sweeps.runs.files import read_rows

# The details that are texts, where they are there.
TEXTS = ("code", "tag", "stage", "host", "job", "error", "refused")


class EventKind(Enum):
    """What happened; the value is the name in the file."""

    # A launch has asked for the run: it is about to hand it to sbatch, or to a worker on this
    # machine.
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
        """Whether somebody asked for an end, and the attempt has saved, or had not begun."""
        return "stopped" in self.details

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended an attempt, before it could save."""
        return "killed" in self.details

    @property
    def met_another_process(self) -> bool:
        """Whether an attempt gave up because another process held the run."""
        return "busy" in self.details

    @property
    def tag(self) -> str | None:
        """The name of the job's folder through which a launch on Slurm asked for the run.

        None of other launches, and of events that are no launch.
        """
        return self.details.get("tag")


def read_events(file: Path) -> list[Event]:
    """The events in a file, in their order; damaged rows are left out, as are unknown ones."""
    events = []
    for row in read_rows(file):
        for kind in EventKind:
            if kind.value in row:
                details = {key: value for key, value in row.items() if key != kind.value}
                if isinstance(row[kind.value], str) and _are_sound(details):
                    events.append(Event(kind, row[kind.value], details))
                break
    return events


def _are_sound(details: dict[str, Any]) -> bool:
    """Whether the details are of the types that this package writes: a file may be anybody's."""
    if not all(isinstance(details.get(key), (str, NoneType)) for key in TEXTS):
        return False
    files = details.get("files", {})
    return isinstance(files, dict) and all(isinstance(value, str) for value in files.values())


def append_event(file: Path, kind: EventKind, details: dict[str, Any]) -> None:
    """Add what has happened just now to a file.

    It begins a line of its own also where the row before was cut off, as by a disk that was full.
    """
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    line = json.dumps({kind.value: now, **details}) + "\n"
    with open(file, "a+b", opener=regular_file) as out:
        if out.tell() > 0:
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                line = f"\n{line}"
        out.write(line.encode())

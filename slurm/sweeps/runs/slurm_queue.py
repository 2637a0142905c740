"""What Slurm knows of a sweep's jobs; nothing here changes anything."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sweeps.runs.processes import run_checked, run_or_empty


def describe_job(job: str) -> dict[str, str]:
    """What the controller knows of a job; nothing where it does not answer."""
    words = run_or_empty("scontrol", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


@dataclass(frozen=True)
class QueuedJob:
    """A queued or running element, or collect job."""

    id: str  # as squeue prints it: 12_3
    state: str
    reason: str
    run: str | None  # None: it collects


def queued_jobs(folder: Path) -> list[QueuedJob]:
    """What of a sweep is queued or runs; raises InputError if squeue does not answer."""
    found, files = [], [*folder.glob("jobs/*/names")]
    if not files:
        return []
    names = {file.parent.name: file.read_text().splitlines() for file in files}
    users = {file.stat().st_uid for file in files}
    whose = f"--user={','.join(map(str, users | {os.getuid()}))}"  # a folder may be shared
    said = run_checked("squeue", "--noheader", "--array", whose, "--format=%F|%K|%T|%j|%r")
    for line in said.splitlines():
        job, index, state, name, reason = line.split("|", 4)
        if (tag := name.rpartition(".")[2]) in names:
            run = names[tag][int(index)] if index.isdigit() else None
            found.append(QueuedJob(f"{job}_{index}" if run else job, state, reason, run))
    return found


def submitted_elements(folder: Path) -> dict[str, tuple[str, Path]]:
    """run → the last element that was submitted for it: its label, and what it printed."""
    found = {}
    for names in sorted(folder.glob("jobs/*/names"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(FileNotFoundError):
            job = (names.parent / "id").read_text().strip()
            for number, name in enumerate(names.read_text().splitlines()):
                found[name] = f"{job}_{number}", names.parent / f"{job}_{number}_0_log.out"
    return found


def job_ends(labels: list[str]) -> dict[str, str]:
    """How jobs ended, by label, such as `OUT_OF_MEMORY, exit 0:125`; what nobody knows is absent.

    Asked of sacct where there is accounting, of the controller, which soon forgets, elsewhere.
    """
    asked = ("sacct", "-nPX", "-o", "JobID,State,ExitCode", "-j", ",".join(labels))
    rows = [line.split("|") for line in run_or_empty(*asked).splitlines()] if labels else []
    # What was cancelled before it began has one record, the array's: 12_[0-7].
    found = {label.partition("_[")[0]: f"{state}, exit {code}" for label, state, code in rows}
    for label in labels:
        if whole := found.get(label.partition("_")[0]):
            found.setdefault(label, whole)
        elif label not in found and (keys := describe_job(label)):
            found[label] = f"{keys['JobState']}, exit {keys['ExitCode']}"
    return found

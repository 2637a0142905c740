"""What Slurm knows of a sweep's jobs; nothing here changes anything.

A launch writes `<sweep>/jobs/<tag>/names`, the runs of an array line by line, and gives the job a
name that ends in the tag. So squeue alone tells which run a queued element works on.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from sweeps.runs.processes import run_checked, run_or_empty


def describe_job(job: str) -> dict[str, str]:
    """What the controller says of a job, `JobState` and the like; empty if it does not answer."""
    words = run_or_empty("scontrol", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


@dataclass(frozen=True)
class QueuedJob:
    """An element of an array, or a collect job, that is queued or running."""

    id: str  # as squeue prints it: 12_3
    state: str
    reason: str
    run: str | None  # the name of the run that it works on; None: it collects


@dataclass(frozen=True)
class SubmittedElement:
    """An element of an array that a launch handed to sbatch."""

    label: str  # as squeue prints it: 12_3
    log: Path  # what it prints, once it begins


def queued_jobs(folder: Path) -> list[QueuedJob]:
    """The jobs of a sweep's folder that are queued or running.

    Raises InputError if squeue does not answer.
    """
    names_files = list(folder.glob("jobs/*/names"))
    if not names_files:
        return []
    names_of_tag = {file.parent.name: file.read_text().splitlines() for file in names_files}
    # Several users may launch in a folder that they share.
    users = {os.getuid()}
    users.update(file.stat().st_uid for file in names_files)
    listed = run_checked(
        "squeue",
        "--noheader",
        "--array",
        f"--user={','.join(map(str, users))}",
        "--format=%F|%K|%T|%j|%r",
    )
    jobs = []
    for line in listed.splitlines():
        job, index, state, job_name, reason = line.split("|", 4)
        tag = job_name.rpartition(".")[2]
        if tag not in names_of_tag:
            continue
        if index.isdigit():
            run = names_of_tag[tag][int(index)]
            jobs.append(QueuedJob(f"{job}_{index}", state, reason, run))
        else:
            jobs.append(QueuedJob(job, state, reason, None))
    return jobs


def submitted_elements(folder: Path) -> dict[str, SubmittedElement]:
    """The last element that was submitted for each run, by the run's name."""
    elements = {}
    names_files = folder.glob("jobs/*/names")
    for names_file in sorted(names_files, key=lambda path: path.stat().st_mtime_ns):
        place = names_file.parent
        try:
            job = (place / "id").read_text().strip()
        except FileNotFoundError:  # the launch was killed before sbatch had answered
            continue
        for index, name in enumerate(names_file.read_text().splitlines()):
            label = f"{job}_{index}"
            elements[name] = SubmittedElement(label, place / f"{label}_0_log.out")
    return elements


def job_ends(labels: list[str]) -> dict[str, str]:
    """How jobs ended, by their labels, such as `OUT_OF_MEMORY, exit 0:125`.

    sacct is asked first. Where there is no accounting, the controller is, which soon forgets. A
    label of which neither knows is absent.
    """
    if not labels:
        return {}
    recorded = _accounted_ends(labels)
    ends = {}
    for label in labels:
        array = label.partition("_")[0]
        if label in recorded:
            ends[label] = recorded[label]
        elif array in recorded:
            ends[label] = recorded[array]
        else:
            known = describe_job(label)
            if known:
                ends[label] = f"{known['JobState']}, exit {known['ExitCode']}"
    return ends


def _accounted_ends(labels: list[str]) -> dict[str, str]:
    """The ends that sacct tells, by the labels of elements or of whole arrays."""
    printed = run_or_empty("sacct", "-nPX", "-o", "JobID,State,ExitCode", "-j", ",".join(labels))
    ends = {}
    for line in printed.splitlines():
        label, state, code = line.split("|")
        # Elements that were cancelled before they began share one record, 12_[0-7].
        ends[label.partition("_[")[0]] = f"{state}, exit {code}"
    return ends

"""What Slurm knows of a sweep's jobs; nothing here changes anything.

A launch writes `<sweep>/jobs/<tag>/names`, the runs of an array line by line, and gives the job the
name SWEEP.KIND.TAG (`launch.sbatch.job_name`). KIND is the value of a `launch.sbatch.JobKind`: that
of an array is the name of the stage with which it begins, that of the job that makes the tables is
collect. So squeue alone tells which run a queued element works on.

A `launch.sbatch.Job` is one call of sbatch. Here everything is about single elements, each named by
its label (see `processes.job_label`): a run of several processes has two, one that trains and one
that scores. A job that collects has one, which works on no run.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from calibeval.io import InputError
from sweeps.runs.files import text_of
from sweeps.runs.processes import run_checked, run_or_empty
from sweeps.runs.stages import SCORE

# What launches call jobs. Anybody can write into a folder that is shared: whatever stands in it, a
# job that is called otherwise is no sweep's.
JOB_NAME = re.compile(r"[A-Za-z0-9._-]+\.(?P<kind>train|score|collect)\.(?P<tag>[0-9a-f]{6})")


class Remedy(Enum):
    """What lets a pending job start that does not start by itself; `status` has the words."""

    PROFILE = "profile"  # a cancel, and a launch with a profile that asks for something else
    PATIENCE = "patience"  # waiting until nodes are back, or else another profile
    RELEASE = "release"  # by scontrol


@dataclass(frozen=True)
class StuckReason:
    """Why jobs are pending that will not start for now."""

    pattern: str  # a regular expression that is found in what squeue prints as the reason
    meaning: str
    remedy: Remedy = Remedy.PROFILE


STUCK_REASONS = (
    StuckReason(
        "PartitionConfig|PartitionNodeLimit",
        "no node of the partition has what a job asks for: cpus_per_process, gpus_per_process "
        "(both times world.processes_per_node) and memory_per_node; or it has fewer nodes than "
        "world.nodes",
    ),
    StuckReason("PartitionTimeLimit", "the partition allows less than `time` or `score_time`"),
    StuckReason("BadConstraints", "no node has what `constraint`, `gpu_type` or `extra` ask for"),
    StuckReason("PartitionDown|PartitionInactive", "the partition is closed"),
    StuckReason(
        "ReqNodeNotAvail|DOWN, DRAINED",
        "nodes that it needs are down, drained or reserved",
        Remedy.PATIENCE,
    ),
    StuckReason("InvalidAccount|InvalidQOS", "`account` or `qos` may not be used any more"),
    StuckReason(
        "(Assoc|QOS)Max.*PerJob|(Assoc|QOS)Max.*PerNode|MaxMemPerLimit",
        "account or QOS allow less than one job asks for",
    ),
    StuckReason("DependencyNeverSatisfied", "the job that it waits for has failed"),
    StuckReason(
        "launch failed requeued held",
        "a node failed while it started there, and Slurm holds it",
        Remedy.RELEASE,
    ),
    StuckReason("(?i)held", "somebody holds it", Remedy.RELEASE),
)


def explain_stuck(reason: str) -> StuckReason | None:
    """Why a pending job with this reason does not start by itself; None where it may."""
    for stuck in STUCK_REASONS:
        if re.search(stuck.pattern, reason):
            return stuck
    return None


def unavailable_nodes() -> list[str]:
    """The nodes that Slurm does not use now, and why: `n2 down* (Not responding)`."""
    states = "--states=down,drain,fail,no_respond"
    listed = run_or_empty("sinfo", "--noheader", "--Node", states, "--format=%N|%T|%E")
    nodes = []
    for line in listed.splitlines():
        name, state, reason = line.split("|", 2)
        node = f"{name} {state}"
        if reason != "none":
            node += f" ({reason})"
        if node not in nodes:  # a node has a line for each of its partitions
            nodes.append(node)
    return nodes


def describe_job(label: str) -> dict[str, str]:
    """What the controller says of a job, `JobState` and the like; empty if it does not answer."""
    words = run_or_empty("scontrol", "show", "job", label).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


@dataclass(frozen=True)
class LiveElement:
    """An element of an array, or a collect job, that squeue lists: pending, running or leaving."""

    label: str  # as squeue prints it: 12_3, or 12 of a collect job
    state: str
    reason: str
    run: str | None  # the name of the run that it works on; None: it collects
    tag: str = ""  # the name of its folder below `jobs`
    only_scores: bool = False  # whether its array scores and does not train: `JobKind.SCORE`

    @property
    def stopping(self) -> bool:
        """Whether it has been told to end, or has ended, and its processes are still there."""
        return self.state == "COMPLETING"


@dataclass(frozen=True)
class SubmittedElement:
    """An element of an array that a launch handed to sbatch, or was about to.

    A launch that was killed before sbatch had answered knows no label; the name of a log tells it
    once the element has begun.
    """

    label: str | None  # as squeue prints it: 12_3
    log: Path | None  # what it prints, once it begins
    only_scores: bool = False  # whether its array scores and does not train: `JobKind.SCORE`

    @property
    def was_taken(self) -> bool:
        """Whether sbatch has taken it, as far as files tell."""
        return self.label is not None


def _noted_id(job_folder: Path) -> str | None:
    """The id that sbatch gave a folder's job; None where its launch did not live to write it."""
    with contextlib.suppress(FileNotFoundError):
        noted = text_of(job_folder / "id").strip()
        if noted.isdigit():
            return noted
    return None


def live_elements(folder: Path) -> list[LiveElement]:
    """The elements of a sweep's jobs that are queued or running, and its collect job.

    Raises InputError if squeue does not answer, or a list of an array's runs was cut.
    """
    names_files = list(folder.glob("jobs/*/names"))
    if not names_files:
        return []
    names_of_tag = {file.parent.name: text_of(file).splitlines() for file in names_files}
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
    elements = []
    for line in listed.splitlines():
        array_id, index, state, job_name, reason = line.split("|", 4)
        name = JOB_NAME.fullmatch(job_name)
        if name is None or name["tag"] not in names_of_tag:
            continue
        tag = name["tag"]
        kind = name["kind"]
        if _noted_id(folder / "jobs" / tag) not in (None, array_id):
            continue  # of another sweep's job, which happens to be called so
        if index.isdigit():
            label = f"{array_id}_{index}"
            names = names_of_tag[tag]
            if int(index) >= len(names):
                raise InputError(
                    f"{folder / 'jobs' / tag / 'names'}: has no line {int(index) + 1}, which says "
                    f"on which run {label} works: scancel {label}"
                )
            run = names[int(index)]
            only_scores = kind == SCORE
            elements.append(LiveElement(label, state, reason, run, tag, only_scores))
        else:
            elements.append(LiveElement(array_id, state, reason, None, tag))
    return elements


def names_of_runs(elements: Iterable[LiveElement]) -> list[str]:
    """The names of the runs that these elements work on, in order, each once."""
    return list(dict.fromkeys(element.run for element in elements if element.run is not None))


def largest_array() -> int | None:
    """How many elements an array may have here; None where Slurm does not say."""
    settings = run_or_empty("scontrol", "show", "config")
    limits = []
    # Indices begin at 0 and stay below MaxArraySize.
    for pattern in (r"^MaxArraySize\s*=\s*(\d+)", r"\bmax_array_tasks=(\d+)"):
        match = re.search(pattern, settings, re.MULTILINE)
        if match:
            limits.append(int(match[1]))
    return min(limits, default=0) or None  # 0: no arrays at all, as sbatch will say


def submitted_elements(folder: Path) -> dict[str, list[SubmittedElement]]:
    """The elements that were submitted for each run, by its name, in the order of submission."""
    elements: dict[str, list[SubmittedElement]] = {}
    names_files = folder.glob("jobs/*/names")
    for names_file in sorted(names_files, key=lambda path: path.stat().st_mtime_ns):
        job_folder = names_file.parent
        only_scores = _only_scores(job_folder)
        for index, name in enumerate(text_of(names_file).splitlines()):
            label, log = _label_and_log(job_folder, index)
            elements.setdefault(name, []).append(SubmittedElement(label, log, only_scores))
    return elements


def _only_scores(job_folder: Path) -> bool:
    """Whether a folder's job scores and does not train, as its name in its script tells."""
    name = rf"^#SBATCH --job-name=.*\.{SCORE}\.{job_folder.name}$"
    with contextlib.suppress(FileNotFoundError):  # the launch was killed before it wrote it
        return re.search(name, text_of(job_folder / "script.sh"), re.MULTILINE) is not None
    return False


def _label_and_log(job_folder: Path, index: int) -> tuple[str | None, Path | None]:
    """The label and the log of the element at this index of a folder's array, as far as known."""
    ending = "_0_log.out"  # 0 is the element's only task, as srun counts
    try:
        label = f"{text_of(job_folder / 'id').strip()}_{index}"
    except FileNotFoundError:
        for log in job_folder.glob(f"*_{index}{ending}"):
            return log.name.removesuffix(ending), log
        return None, None
    return label, job_folder / f"{label}{ending}"


@dataclass(frozen=True)
class ElementEnd:
    """How an element ended."""

    state: str  # as sacct says it: OUT_OF_MEMORY, CANCELLED by 1000
    exit_code: str  # and behind it the signal, as sacct prints them: 0:125

    def describe(self) -> str:
        """The same in words."""
        return f"{self.state}, exit {self.exit_code}"

    @property
    def was_cancelled(self) -> bool:
        """Whether a scancel ended it, or Slurm because of the job that it waited for."""
        return self.state.startswith("CANCELLED")


def element_ends(labels: list[str]) -> dict[str, ElementEnd]:
    """How elements ended, by their labels.

    sacct is asked first. Where there is no accounting, the controller is, which soon forgets. A
    label of which neither knows is absent.
    """
    if not labels:
        return {}
    recorded = _accounted_ends(labels)
    ends = {}
    for label in labels:
        array_id = label.partition("_")[0]
        if label in recorded:
            ends[label] = recorded[label]
        elif array_id in recorded:  # its elements were cancelled together, before they began
            ends[label] = recorded[array_id]
        else:
            known = describe_job(label)
            if known:
                ends[label] = ElementEnd(known["JobState"], known["ExitCode"])
    return ends


def _accounted_ends(labels: list[str]) -> dict[str, ElementEnd]:
    """The ends that sacct tells, by the labels of elements, or by the ids of whole arrays."""
    printed = run_or_empty("sacct", "-nPX", "-o", "JobID,State,ExitCode", "-j", ",".join(labels))
    ends = {}
    for line in printed.splitlines():
        label, state, exit_code = line.split("|")
        # Elements that were cancelled before they began share one record, 12_[0-7].
        ends[label.partition("_[")[0]] = ElementEnd(state, exit_code)
    return ends

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from calibeval.io import InputError
from sweeps.runs.files import text_of
from sweeps.runs.processes import run_checked, slurm_or_empty
from sweeps.runs.stages import SCORE
from sweeps.runs.yaml_io import read_yaml


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


def unavailable_nodes(cluster: str | None) -> list[str]:
    """The nodes that a cluster does not use now, and why: `n2 down* (Not responding)`."""
    states = "--states=down,drain,fail,no_respond"
    words = ("--noheader", "--Node", states, "--format=%N|%T|%E")
    listed = slurm_or_empty("sinfo", *words, cluster=cluster)
    nodes = []
    for line in listed.splitlines():
        name, state, reason = line.split("|", 2)
        node = f"{name} {state}"
        if reason != "none":
            node += f" ({reason})"
        if node not in nodes:  # a node has a line for each of its partitions
            nodes.append(node)
    return nodes


def prints_into(array_id: str, job_folder: Path, cluster: str | None = None) -> bool:
    """Whether a job is this user's, and Slurm says that it prints into this folder.

    What the folder itself says of its jobs, somebody else may have written.
    """
    shown = slurm_or_empty("scontrol", "show", "job", array_id, cluster=cluster)
    owners = set(re.findall(r"^ *UserId=[^(]*\((\d+)\)", shown, re.MULTILINE))
    outputs = re.findall(r"^ *StdOut=(.*)$", shown, re.MULTILINE)
    if owners != {str(os.getuid())} or not outputs:
        return False
    folder = os.path.realpath(job_folder)
    return all(os.path.realpath(os.path.dirname(output)) == folder for output in outputs)


def describe_job(label: str, cluster: str | None = None) -> dict[str, str]:
    """What the controller says of a job, `JobState` and the like; empty if it does not answer."""
    words = slurm_or_empty("scontrol", "show", "job", label, cluster=cluster).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


TAG = re.compile("[0-9a-f]{6}")  # the name of a folder below `jobs`
# A line of squeue about a job whose name is of our form. Another job's name may have line breaks.
LISTED_ELEMENT = re.compile(
    r"(?P<array>\d+)\|(?P<index>[^|]*)\|(?P<state>\w+)\|"
    r"[A-Za-z0-9._-]+\.(?P<kind>train|score|collect)\.(?P<tag>[0-9a-f]{6})\|"
    r"(?P<reason>[^|]*)(\|(?P<start>.*))?"
)


@dataclass(frozen=True)
class LiveElement:
    """An element of an array, or a collect job, that squeue lists: pending, running or leaving."""

    label: str  # as squeue prints it: 12_3, or 12 of a collect job
    state: str
    reason: str
    run: str | None  # the name of the run that it works on; None: it collects
    tag: str = ""  # the name of its folder below `jobs`
    only_scores: bool = False  # whether its array scores and does not train: `JobKind.SCORE`
    cluster: str | None = None  # None: the default one
    start: str = ""  # when it has started, or is expected to, as squeue prints it

    @property
    def array_id(self) -> str:
        """The id of the array that it belongs to: 12 of 12_3."""
        return self.label.partition("_")[0]

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
    cluster: str | None = None  # None: the default one

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
    names_files = _names_files(folder)
    # Several users may launch in a folder that they share.
    users = {os.getuid()}
    users.update(file.stat().st_uid for file in names_files)
    job_folders: dict[str | None, list[Path]] = {}
    for file in names_files:
        job_folders.setdefault(cluster_of_job(file.parent), []).append(file.parent)
    elements = []
    for cluster, folders_there in job_folders.items():
        names_of_tag = {}
        for job_folder in folders_there:
            names_of_tag[job_folder.name] = text_of(job_folder / "names").splitlines()
        listed = run_checked(
            "squeue",
            "--noheader",
            "--array",
            f"--user={','.join(map(str, users))}",
            "--format=%F|%K|%T|%j|%r|%S",
            cluster=cluster,
        )
        id_of_tag = {tag: _noted_id(folder / "jobs" / tag) for tag in names_of_tag}
        for line in listed.splitlines():
            match = LISTED_ELEMENT.fullmatch(line)
            if match is None or match["tag"] not in names_of_tag:
                continue
            if id_of_tag[match["tag"]] not in (None, match["array"]):
                continue  # of another sweep's job, which happens to be called so
            elements.append(_live_element(match, folder, names_of_tag, cluster))
    return elements


def _names_files(folder: Path) -> list[Path]:
    """The lists of runs of a sweep's jobs; raises PermissionError if another user keeps one closed.

    A glob would leave that out in silence, and its jobs would be queued again.
    """
    files = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for tag in os.listdir(folder / "jobs"):
            file = folder / "jobs" / tag / "names"
            if TAG.fullmatch(tag) and file.exists():
                files.append(file)
    return files


def _live_element(
    match: re.Match[str],
    folder: Path,
    names_of_tag: Mapping[str, Sequence[str]],
    cluster: str | None,
) -> LiveElement:
    """What a line of squeue tells, by the lists of runs of the folder's jobs there."""
    tag = match["tag"]
    names = names_of_tag[tag]
    label = match["array"]
    index = 0  # of a job without an array
    if match["index"].isdigit():
        index = int(match["index"])
        label += f"_{index}"
    run = None
    if match["index"].isdigit() or names:
        if index >= len(names):
            raise InputError(
                f"{folder / 'jobs' / tag / 'names'}: has no line {index + 1}, which says "
                f"on which run {label} works: scancel {label}"
            )
        run = names[index]
    return LiveElement(
        label=label,
        state=match["state"],
        reason=match["reason"],
        run=run,
        tag=tag,
        only_scores=match["kind"] == SCORE,
        cluster=cluster,
        start=match["start"] or "",
    )


def cluster_of_job(job_folder: Path) -> str | None:
    """The cluster to which a launch has handed a folder's job, as its profile says."""
    file = job_folder / "profile.yaml"
    if not file.exists():  # the launch was killed before it wrote it
        return None
    profile, _ = read_yaml(file)
    cluster = profile.get("clusters")
    return cluster if isinstance(cluster, str) else None


def names_of_runs(elements: Iterable[LiveElement]) -> list[str]:
    """The names of the runs that these elements work on, in order, each once."""
    return list(dict.fromkeys(element.run for element in elements if element.run is not None))


def largest_array(cluster: str | None) -> int | None:
    """How many elements an array may have on a cluster; None where Slurm does not say.

    0 is said where there are no arrays at all.
    """
    settings = slurm_or_empty("scontrol", "show", "config", cluster=cluster)
    limits = []
    # Indices begin at 0 and stay below MaxArraySize.
    for pattern in (r"^MaxArraySize\s*=\s*(\d+)", r"\bmax_array_tasks=(\d+)"):
        match = re.search(pattern, settings, re.MULTILINE)
        if match:
            limits.append(int(match[1]))
    return min(limits, default=None)


def submitted_elements(folder: Path) -> dict[str, list[SubmittedElement]]:
    """The elements that were submitted for each run, by its name, in the order of submission."""
    elements: dict[str, list[SubmittedElement]] = {}
    for names_file in sorted(_names_files(folder), key=lambda path: path.stat().st_mtime_ns):
        job_folder = names_file.parent
        script = ""
        with contextlib.suppress(FileNotFoundError):  # the launch was killed before it wrote it
            script = text_of(job_folder / "script.sh")
        name = rf"^#SBATCH --job-name=.*\.{SCORE}\.{job_folder.name}$"
        only_scores = re.search(name, script, re.MULTILINE) is not None
        is_array = "\n#SBATCH --array=" in script
        cluster = cluster_of_job(job_folder)
        array_id = _noted_id(job_folder)
        for index, run in enumerate(text_of(names_file).splitlines()):
            label, log = _label_and_log(job_folder, array_id, f"_{index}" if is_array else "")
            element = SubmittedElement(label, log, only_scores, cluster)
            elements.setdefault(run, []).append(element)
    return elements


def _label_and_log(
    job_folder: Path, array_id: str | None, index: str
) -> tuple[str | None, Path | None]:
    """The label and the log of an element of a folder's array, as far as known.


    `index` is the label's end, _3 of 12_3, and "" of a job without an array.
    """
    ending = "_0_log.out"  # 0 is the element's only task, as srun counts
    if array_id is None:
        for log in job_folder.glob(f"*{index}{ending}"):
            label = log.name.removesuffix(ending)
            if re.fullmatch(r"\d+(_\d+)?", label):  # nobody's --option, since scontrol gets it
                return label, log
        return None, None
    label = f"{array_id}{index}"
    return label, job_folder / f"{label}{ending}"


@dataclass(frozen=True)
class ElementEnd:
    """How an element ended."""

    state: str  # as sacct says it: OUT_OF_MEMORY, CANCELLED by 1000
    exit_code: str  # and behind it the signal, as sacct prints them: 0:125
    node: str = "its node"  # or the nodes, where it ran

    def describe(self) -> str:
        """The same in words."""
        return f"{self.state}, exit {self.exit_code}"

    @property
    def could_not_write(self) -> bool:
        """Whether its node could not open the file that it was to print into."""
        return self.exit_code == "0:53"

    @property
    def remedy(self) -> str:
        """Say what to do about such an end, as far as it tells."""
        if self.could_not_write:
            return (
                "the sweep's folder must be at this path on all nodes, and writable there; was it "
                "moved?"
            )
        if self.state.startswith("TIMEOUT"):
            return "it had not saved when its time was over: raise the profile's signal_seconds"
        if self.state.startswith("OUT_OF_MEMORY"):
            return "raise the profile's memory_per_node, or lower the batch"
        return ""

    @property
    def was_cancelled(self) -> bool:
        """Whether a scancel ended it, or Slurm because of the job that it waited for."""
        return self.state.startswith("CANCELLED")


def element_ends(elements: Iterable[SubmittedElement]) -> dict[SubmittedElement, ElementEnd]:
    """How elements ended that sbatch has taken.

    sacct is asked first. Where there is no accounting, the controller is, which soon forgets. An
    element of which neither knows is absent.
    """
    of_cluster: dict[str | None, list[SubmittedElement]] = {}
    for element in elements:
        of_cluster.setdefault(element.cluster, []).append(element)
    ends = {}
    for cluster, elements_there in of_cluster.items():
        labels = sorted({element.label for element in elements_there if element.label is not None})
        ends_there = _ends_on(cluster, labels)
        for element in elements_there:
            if element.label in ends_there:
                ends[element] = ends_there[element.label]
    return ends


def _ends_on(cluster: str | None, labels: list[str]) -> dict[str, ElementEnd]:
    """How the elements of a cluster ended, by their labels."""
    if not labels:
        return {}
    recorded = _accounted_ends(cluster, labels)
    ends = {}
    for label in labels:
        array_id = label.partition("_")[0]
        if label in recorded:
            ends[label] = recorded[label]
        elif array_id in recorded:  # its elements were cancelled together, before they began
            ends[label] = recorded[array_id]
        else:
            known = describe_job(label, cluster)
            if known:
                node = known.get("NodeList", "its node")
                ends[label] = ElementEnd(known["JobState"], known["ExitCode"], node)
    return ends


def _accounted_ends(cluster: str | None, labels: list[str]) -> dict[str, ElementEnd]:
    """The ends that sacct tells, by the labels of elements, or by the ids of whole arrays."""
    columns = "JobID,State,ExitCode,NodeList"
    words = ("-nPX", "-o", columns, "-j", ",".join(labels))
    ends = {}
    for line in slurm_or_empty("sacct", *words, cluster=cluster).splitlines():
        if line.count("|") != columns.count(","):
            continue  # a banner, as wrappers of Slurm's tools print
        label, state, exit_code, node = line.split("|")
        # Elements that were cancelled before they began share one record, 12_[0-7].
        ends[label.partition("_[")[0]] = ElementEnd(state, exit_code, node)
    return ends

"""Runs on Slurm: one submission is arrays of elements and a collect job behind them, by submitit.

What is queued is read off squeue by job name, so a submission that was killed halfway is seen by
the next one, and nothing is submitted twice.
"""

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from sweeps import score
from sweeps.cluster import Cluster, load_cluster
from sweeps.config import Sweep, dump_yaml, read_yaml
from sweeps.executors import element as inside
from sweeps.executors import scripts
from sweeps.executors.scripts import Places
from sweeps.files import SweepError, last_error, lease, make_folder, unlockable, write_text
from sweeps.plan import Cell, sweep_folder
from sweeps.provenance import output
from sweeps.rundir import RunDir

PATIENCE = 20  # seconds; twice what Slurm's tools wait for a controller that is busy
FINISHED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}


@dataclass(frozen=True)
class Element:
    """A queued or running array element."""

    job: str  # as squeue prints it: 12_3
    state: str
    reason: str
    name: str = ""  # of the job: sweep.stage.submission
    folder: Path | None = None  # of its submission

    @property
    def number(self) -> int:
        """Its place in the array; one element is no array."""
        return int(self.job.partition("_")[2] or 0)


@dataclass(frozen=True)
class Job:
    """One sbatch call: what it does, for which runs or base models, and what it waits for."""

    stage: str  # train-0, score-0, late-0, collect
    what: str  # train, score, collect
    names: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # aftercorr:train-0, afterany:score-0, afterany:12_3, …

    def dependency(self, ids: dict[str, str]) -> str:
        """The same with the jobs' ids."""
        terms = [term.partition(":")[::2] for term in self.after]
        return ",".join(f"{kind}:{ids.get(stage, stage)}" for kind, stage in terms)


@dataclass(frozen=True)
class Past:
    """The element of the last submission that was to train or score something."""

    label: str  # 12_3
    output: Path | None  # what the job printed


def jobs_root(sweep: Sweep) -> Path:
    """Where this sweep's submissions lie."""
    return sweep_folder(sweep) / "jobs"


def submitted(sweep: Sweep) -> bool:
    """Whether Slurm was ever given this sweep.

    If not, a run's job is not of its making: a launch without Slurm that sits in salloc.
    """
    return any(jobs_root(sweep).glob("*"))


def ask(tool: str, *words: str) -> str:
    """What one of Slurm's tools prints; raises SweepError if it fails, or waits for ever."""
    try:
        done = subprocess.run(
            [tool, *words], text=True, capture_output=True, check=False, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        config = os.environ.get("SLURM_CONF")
        why = f"nothing for {PATIENCE:g} s" + (f" (SLURM_CONF={config})" if config else "")
    else:
        if done.returncode == 0:
            return done.stdout
        why = last_error(done.stderr)
    raise SweepError(f"{tool} does not answer: {why}; try again in a minute")


def queue() -> list[Element]:
    """This user's jobs; raises SweepError if squeue does not answer."""
    printed = ask("squeue", "--noheader", "--array", "--me", "--format=%F|%K|%T|%j|%r")
    found = []
    for line in printed.splitlines():
        job, index, state, name, reason = line.split("|", 4)
        if state not in FINISHED:
            label = f"{job}_{index}" if index.isdigit() else job
            found.append(Element(label, state, reason, name))
    return found


def active(sweep: Sweep, jobs: list[Element] | None = None) -> dict[tuple[str, str], Element]:
    """(stage, run or subject) → its queued or running element, over every sweep in output_root."""
    found = {}
    for element in queue() if jobs is None else jobs:
        rest, _, tag = element.name.rpartition(".")
        name, _, stage = rest.rpartition(".")
        folder = sweep_folder(sweep).parent / name / "jobs" / tag
        names = _names(folder, stage)
        if element.number < len(names):
            found[_kind(stage), names[element.number]] = replace(element, folder=folder)
    return found


def _names(folder: Path, stage: str) -> list[str]:
    """What the elements of a submission's array work on."""
    listing = folder / f"{stage}.txt"
    return listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []


def _kind(stage: str) -> str:
    return "train" if stage.startswith("train") else "score"


def past(sweep: Sweep) -> dict[tuple[str, str], Past]:
    """(stage, run or subject) → the last element of this sweep that was submitted for it."""
    found = {}
    for known in sorted(jobs_root(sweep).glob("*/*.id"), key=lambda path: path.stat().st_mtime_ns):
        job, names = known.read_text(encoding="utf-8").strip(), _names(known.parent, known.stem)
        for number, name in enumerate(names):
            label = f"{job}_{number}" if len(names) > 1 else job
            printed = known.parent / f"{label}_0_log.out"
            found[_kind(known.stem), name] = Past(label, printed if printed.exists() else None)
    return found


def ends(labels: list[str]) -> dict[str, str]:
    """How jobs ended, by label, such as `OUT_OF_MEMORY, exit 0:125`; what nobody knows is absent.

    Asked of sacct where there is accounting, of the controller, which soon forgets, elsewhere.
    """
    jobs = sorted({label.partition("_")[0] for label in labels})
    asked = ("sacct", "-nPX", "-o", "JobID,State,ExitCode", "-j", ",".join(jobs))
    found = {}
    for line in (output(*asked) or "").splitlines() if jobs else ():
        label, state, code = line.split("|")
        found[label.partition("_[")[0]] = f"{state}, exit {code}"
    for job in sorted({label.partition("_")[0] for label in labels if label not in found}):
        for line in (output("scontrol", "show", "job", "--oneliner", job) or "").splitlines():
            keys = dict(word.split("=", 1) for word in line.split() if "=" in word)
            index = keys.get("ArrayTaskId", "")
            label = f"{keys.get('ArrayJobId')}_{index}" if index.isdigit() else keys["JobId"]
            found[label] = f"{keys['JobState']}, exit {keys['ExitCode']}"
    for label in labels:  # those cancelled before they began have one record, the array's
        if (whole := found.get(label.partition("_")[0], "")).startswith("CANCELLED"):
            found.setdefault(label, whole)
    return {label: found[label] for label in labels if label in found}


def design(
    sweep: Sweep,
    cells: list[Cell],
    busy: dict[tuple[str, str], Element],
    tag: str,
    *,
    train: bool = True,
    ready: bool = True,
    collecting: bool = True,
) -> tuple[Places, list[Job]]:
    """The jobs that are missing, in order; none if everything is done or queued.

    Without `train` only what is trained already is scored, without `ready` only what is trained
    now. `collecting` says that a collect job waits for what is queued: a submission that was killed
    halfway left none, nor the scores of what it trains.
    """
    limit = load_cluster(sweep.cluster).array_limit
    places = Places(Path.cwd(), (jobs_root(sweep) / tag).absolute())
    training = {n: busy["train", n] for c in cells if ("train", n := c.config.name) in busy}
    jobs: list[Job] = []

    def add(stage: str, what: str, names: list[str]) -> None:
        for part, first in enumerate(range(0, len(names), limit)):
            chunk = tuple(names[first : first + limit])
            after = tuple(f"afterany:{training[n].job}" for n in chunk if n in training)
            jobs.append(Job(f"{stage}-{part}", what, chunk, after))

    done = {cell.config.name for cell in cells if RunDir(cell.folder).done}
    todo = [n for c in cells if (n := c.config.name) not in done and n not in training]
    if train:
        add("train", "train", todo)
    if sweep.score is not None:
        if sweep.score.separate:  # aftercorr is for arrays
            jobs += [
                Job(job.stage.replace("train", "score"), "score", job.names,
                    (f"after{'corr' if len(job.names) > 1 else 'ok'}:{job.stage}",))
                for job in jobs
            ]  # fmt: skip
        subjects = score.ready(sweep, cells) if ready else []
        late = [c for c in cells if train and (e := training.get(c.config.name))
                and c.config.name not in done and not _scores_itself(e, sweep)]  # fmt: skip
        for stage, those in (("ready", subjects), ("late", map(score.of_cell, late))):
            add(stage, "score", [
                x.name for x in those if ("score", x.name) not in busy
                and (stage == "late" or x.name not in training)
                and score.missing(x, sweep.score)
            ])  # fmt: skip
    if jobs or (training and not collecting):
        last = [f"afterany:{job.stage}" for job in jobs]
        if not collecting:
            last += [f"afterany:{j}" for j in sorted({e.job.split("_")[0] for e in busy.values()})]
        jobs.append(Job("collect", "collect", (), tuple(last)))
    return places, jobs


def _scores_itself(element: Element, sweep: Sweep) -> bool:
    """Whether a queued training goes on to score what this sweep asks for."""
    queued = read_yaml(element.folder / "sweep.yaml").get("score")
    return not sweep.score.separate and queued == sweep.model_dump(mode="json")["score"]


def dry_run(sweep: Sweep, cells: list[Cell]) -> str:
    """What submitit would hand to sbatch, in order; needs no Slurm."""
    cluster = load_cluster(sweep.cluster)
    places, jobs = design(sweep, cells, {}, "TAG")
    ids = {job.stage: job.stage.replace("-", "_").upper() for job in jobs}
    parts = []
    for job in jobs:
        count, waits = max(1, len(job.names)), job.dependency(ids)
        script = scripts.text(sweep, cluster, places, job.what, job.stage, count, dependency=waits)
        parts.append(f"### {job.stage}, whose job is called {ids[job.stage]} here\n{script}")
        parts += [f"# element {number}: {name}\n" for number, name in enumerate(job.names)]
    return "".join(parts)


def submit(
    sweep: Sweep, cells: list[Cell], *, train: bool = True, ready: bool = True
) -> dict[str, str]:
    """Queue what is neither done nor queued; returns {stage: job id}, empty if nothing was.

    `train`, `ready`: see design.
    """
    for tool in ("sbatch", "srun", "squeue"):
        if shutil.which(tool) is None:
            raise SweepError(
                f"{tool} is not on the PATH: run this on a login node, or --executor local"
            )
    lock = Path(sweep.output_root) / "submit.lock"
    make_folder(lock.parent)
    try:
        with lease(lock, timeout=60):
            return _submit(sweep, cells, train, ready)
    except Timeout:
        raise SweepError(
            f"{lock}: another submission holds this lock for a minute already; "
            "wait for it, or type the same command again"
        ) from None
    except OSError as error:
        raise unlockable(lock, error) from error


def _submit(sweep: Sweep, cells: list[Cell], train: bool, ready: bool) -> dict[str, str]:
    queued = queue()
    collecting = any(element.name.startswith(f"{sweep.name}.collect.") for element in queued)
    places, jobs = design(
        sweep, cells, active(sweep, queued), secrets.token_hex(3),
        train=train, ready=ready, collecting=collecting,
    )  # fmt: skip
    if not jobs:
        return {}
    make_folder(places.jobs)
    for cell in cells:
        RunDir(cell.folder).create(cell.config)
    # The jobs read this copy: editing the sweep file later does not change what is queued.
    write_text(places.jobs / "sweep.yaml", dump_yaml(sweep.model_dump(mode="json")))
    cluster, ids = load_cluster(sweep.cluster), {}
    for job in jobs:
        if job.names:
            write_text(places.jobs / f"{job.stage}.txt", "\n".join(job.names) + "\n")
        ids[job.stage] = _sbatch(sweep, cluster, places, job, ids)
        write_text(places.jobs / f"{job.stage}.id", ids[job.stage] + "\n")
    return ids


def _sbatch(sweep: Sweep, cluster: Cluster, places: Places, job: Job, ids: dict[str, str]) -> str:
    from submitit.core.utils import FailedJobError

    waits = job.dependency(ids)
    executor = scripts.executor(sweep, cluster, places, job.what, job.stage, dependency=waits)
    file = str(places.jobs / "sweep.yaml")
    work = inside.Element(file, job.what, scripts.limit(cluster, job.what))
    try:
        return executor.map_array(work, job.names or [""])[0].job_id.partition("_")[0]
    except FailedJobError as error:
        raise SweepError(
            f"{places.jobs}: sbatch refused {job.stage}: {last_error(str(error))}; queued "
            f"so far: {ids or 'none'}; `cancel` takes them back, the same command queues the rest"
        ) from None


def queued(sweep: Sweep) -> list[str]:
    """The ids of this sweep's jobs, collect included, that wait or run."""
    ids = set()
    for element in queue():
        name, _, tag = element.name.rpartition(".")
        if name.rpartition(".")[0] == sweep.name and (jobs_root(sweep) / tag).is_dir():
            ids.add(element.job.partition("_")[0])
    return sorted(ids)


def cancel(sweep: Sweep) -> list[str]:
    """scancel every job of this sweep; running trainers save first. Returns the job ids."""
    if not submitted(sweep):  # no matter whether there is a Slurm
        return []
    if shutil.which("squeue") is None or shutil.which("scancel") is None:
        raise SweepError(
            f"{jobs_root(sweep)}: this sweep was submitted to Slurm, and squeue or scancel is not "
            "on the PATH: cancel its jobs on a login node"
        )
    ids = queued(sweep)
    if ids:
        command = ["scancel", "--full", *ids]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise SweepError(f"scancel: {done.stderr.strip()}")
    return ids

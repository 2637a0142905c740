"""Runs on Slurm: one submission is arrays of elements and a collect job behind them, by submitit.

What is queued is read off squeue by job name, so a submission that was killed halfway is seen by
the next one, and nothing is submitted twice.
"""

import secrets
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from sweeps import score
from sweeps.cluster import Cluster, load_cluster
from sweeps.config import Sweep, dump_yaml, read_yaml
from sweeps.errors import SweepError
from sweeps.executors import element as inside
from sweeps.executors import scripts
from sweeps.executors.scripts import Places
from sweeps.files import make_folder, write_text
from sweeps.grid import Cell, sweep_folder
from sweeps.locks import lease, unlockable
from sweeps.rundir import RunDir

FINISHED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}


@dataclass(frozen=True)
class Element:
    """A queued or running array element."""

    job: str  # as squeue prints it: 12_3
    state: str
    reason: str
    folder: Path | None = None  # of its submission


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


def queue() -> dict[str, dict[int | None, Element]]:
    """This user's jobs by name and array index; raises SweepError if squeue does not answer."""
    done = subprocess.run(
        ["squeue", "--noheader", "--array", "--me", "--format=%F|%K|%T|%j|%r"],
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise SweepError(f"squeue does not answer: {done.stderr.strip()}; try again in a minute")
    found: dict[str, dict[int | None, Element]] = {}
    for line in done.stdout.splitlines():
        job, index, state, name, reason = line.split("|", 4)
        number = int(index) if index.isdigit() else None
        label = f"{job}_{index}" if number is not None else job
        if state not in FINISHED:
            found.setdefault(name, {})[number] = Element(label, state, reason)
    return found


def active(sweep: Sweep) -> dict[tuple[str, str], Element]:
    """(stage, run or subject) → its queued or running element, over every sweep in output_root."""
    found = {}
    for name, elements in queue().items():
        sweep_name, _, rest = name.rpartition(".")[0].rpartition(".")
        stage, tag = rest, name.rpartition(".")[2]
        folder = Path(sweep.output_root) / "sweeps" / sweep_name / "jobs" / tag
        listing = folder / f"{stage}.txt"
        if not listing.is_file():
            continue
        lines = listing.read_text(encoding="utf-8").splitlines()
        for index, element in elements.items():  # one element is no array
            if (index or 0) < len(lines):
                kind = "train" if stage.startswith("train") else "score"
                found[kind, lines[index or 0]] = replace(element, folder=folder)
    return found


def past(sweep: Sweep) -> dict[tuple[str, str], Past]:
    """(stage, run or subject) → the last element of this sweep that was submitted for it."""
    found = {}
    folders = sorted(jobs_root(sweep).glob("*/"), key=lambda path: path.stat().st_mtime_ns)
    for folder in folders:
        for known in folder.glob("*.id"):
            stage, job = known.stem, known.read_text(encoding="utf-8").strip()
            listing = folder / f"{stage}.txt"
            lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else [""]
            for index, line in enumerate(lines):
                label = f"{job}_{index}" if len(lines) > 1 else job
                output = folder / f"{label}_0_log.out"
                kind = "train" if stage.startswith("train") else "score" if line else stage
                found[kind, line] = Past(label, output if output.exists() else None)
    return found


def ends(labels: list[str]) -> dict[str, str]:
    """How jobs ended, by label, such as `OUT_OF_MEMORY, exit 0:125`; what nobody knows is absent.

    Asked of sacct where there is accounting, of the controller, which soon forgets, elsewhere.
    """
    jobs = sorted({label.partition("_")[0] for label in labels})
    if not jobs:
        return {}
    found = {}
    for line in _lines("sacct", "-nPX", "-o", "JobID,State,ExitCode", "-j", ",".join(jobs)):
        label, state, code = line.split("|")
        found[label] = f"{state}, exit {code}"
    for job in jobs:
        if any(label.partition("_")[0] == job and label not in found for label in labels):
            for line in _lines("scontrol", "show", "job", "--oneliner", job):
                keys = dict(word.split("=", 1) for word in line.split() if "=" in word)
                index = keys.get("ArrayTaskId", "")
                label = f"{keys.get('ArrayJobId')}_{index}" if index.isdigit() else keys["JobId"]
                found[label] = f"{keys['JobState']}, exit {keys['ExitCode']}"
    return {label: found[label] for label in labels if label in found}


def _lines(*command: str) -> list[str]:
    """What a command of Slurm prints, nothing if it has no answer."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


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
        for part, chunk in enumerate(_chunks(names, limit)):
            after = tuple(f"afterany:{training[n].job}" for n in chunk if n in training)
            jobs.append(Job(f"{stage}-{part}", what, tuple(chunk), after))

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


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def dry_run(sweep: Sweep, cells: list[Cell]) -> str:
    """What submitit would hand to sbatch, in order; needs no Slurm."""
    cluster = load_cluster(sweep.cluster)
    places, jobs = design(sweep, cells, {}, "TAG")
    ids = {job.stage: job.stage.replace("-", "_").upper() for job in jobs}
    parts = []
    for job in jobs:
        waits = job.dependency(ids)
        count = max(1, len(job.names))
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
    root = Path(sweep.output_root)
    make_folder(root)
    try:
        with lease(root / "submit.lock", timeout=60):
            return _submit(sweep, cells, train, ready)
    except Timeout:
        raise SweepError(
            f"{root / 'submit.lock'}: another submission holds this lock for a minute already; "
            "wait for it, or type the same command again"
        ) from None
    except OSError as error:
        raise unlockable(root / "submit.lock", error) from error


def _submit(sweep: Sweep, cells: list[Cell], train: bool, ready: bool) -> dict[str, str]:
    tag, mine = secrets.token_hex(3), f"{sweep.name}.collect."
    collecting = any(name.startswith(mine) for name in queue())
    places, jobs = design(
        sweep, cells, active(sweep), tag, train=train, ready=ready, collecting=collecting
    )
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
    work = inside.Element(
        str(places.jobs / "sweep.yaml"), job.what, scripts.limit(cluster, job.what)
    )
    try:
        return executor.map_array(work, job.names or [""])[0].job_id.partition("_")[0]
    except FailedJobError as error:
        reason = str(error).strip().splitlines()[-1]
        raise SweepError(
            f"{places.jobs}: sbatch refused {job.stage}: {reason}; queued so far: {ids or 'none'}; "
            "`cancel` takes them back, the same command queues the rest"
        ) from None


def cancel(sweep: Sweep) -> list[str]:
    """scancel every job of this sweep; running trainers save first. Returns the job ids."""
    if not submitted(sweep):  # no matter whether there is a Slurm
        return []
    if shutil.which("squeue") is None or shutil.which("scancel") is None:
        raise SweepError(
            f"{jobs_root(sweep)}: this sweep was submitted to Slurm, and squeue or scancel is not "
            "on the PATH: cancel its jobs on a login node"
        )
    names, ids = {folder.name for folder in jobs_root(sweep).glob("*")}, set()
    for name, elements in queue().items():
        sweep_name = name.rpartition(".")[0].rpartition(".")[0]
        if sweep_name == sweep.name and name.rpartition(".")[2] in names:
            ids |= {element.job.partition("_")[0] for element in elements.values()}
    if ids:
        done = subprocess.run(
            ["scancel", "--full", *sorted(ids)], text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise SweepError(f"scancel: {done.stderr.strip()}")
    return sorted(ids)

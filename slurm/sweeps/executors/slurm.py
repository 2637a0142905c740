"""Runs on Slurm: one submission is train arrays, score arrays behind them, and a collect job.

What is queued is read off squeue by job name, so a submission that was killed halfway is seen by
the next one, and nothing is submitted twice.
"""

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from sweeps import score
from sweeps.cluster import Cluster, load_cluster
from sweeps.config import Sweep, dump_yaml
from sweeps.errors import SweepError
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


@dataclass(frozen=True)
class Job:
    """One sbatch call: a script, the lists it reads, and what it waits for."""

    stage: str  # train-0, score-0, ready-0, late-0, collect
    script: str
    lines: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # aftercorr:train-0, afterany:score-0, afterany:12_3, …


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
        for index, element in elements.items():
            if index is not None and index < len(lines):
                kind = "train" if stage.startswith("train") else "score"
                found[kind, Path(lines[index]).name] = element
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
                label = f"{job}_{index}" if line else job
                output = folder / "logs" / f"{stage}-{label}.out"
                kind = "train" if stage.startswith("train") else "score" if line else stage
                found[kind, Path(line).name] = Past(label, output if output.exists() else None)
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
    cluster = load_cluster(sweep.cluster)
    places = Places(Path.cwd(), (jobs_root(sweep) / tag).absolute())
    todo = [
        cell
        for cell in cells
        if train and not RunDir(cell.folder).done and ("train", cell.config.name) not in busy
    ]
    jobs = []
    for part, chunk in enumerate(_chunks(todo, cluster.array_limit)):
        lines = tuple(str(cell.folder.absolute()) for cell in chunk)
        script = scripts.train(sweep, cluster, places, len(chunk), part)
        jobs.append(Job(f"train-{part}", script, lines))
        if sweep.score is not None:
            script = scripts.score(sweep, cluster, places, len(chunk), "score", part)
            names = tuple(cell.config.name for cell in chunk)
            jobs.append(Job(f"score-{part}", script, names, (f"aftercorr:train-{part}",)))
    training = {
        c.config.name: busy["train", c.config.name].job
        for c in cells
        if ("train", c.config.name) in busy
    }
    if sweep.score is not None and ready:
        subjects = list(score.bases(sweep, cells).values())
        subjects += [score.of_cell(cell) for cell in cells if RunDir(cell.folder).done]
        late = [score.of_cell(cell) for cell in cells if train and cell.config.name in training]
        for stage, those in (("ready", subjects), ("late", late)):
            names = [
                subject.name
                for subject in those
                if ("score", subject.name) not in busy and score.missing(subject, sweep.score)
            ]
            for part, chunk in enumerate(_chunks(names, cluster.array_limit)):
                script = scripts.score(sweep, cluster, places, len(chunk), stage, part)
                after = tuple(f"afterany:{training[n]}" for n in chunk if n in training)
                jobs.append(Job(f"{stage}-{part}", script, tuple(chunk), after))
    if jobs or (training and not collecting):
        queued = {element.job.partition("_")[0] for element in busy.values()} if training else ()
        last = [f"afterany:{job.stage}" for job in jobs]
        last += [f"afterany:{job}" for job in sorted(queued)] if not collecting else []
        jobs.append(Job("collect", scripts.collect(sweep, cluster, places), (), tuple(last)))
    return places, jobs


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def dry_run(sweep: Sweep, cells: list[Cell]) -> str:
    """Every script and every sbatch call, exactly as a launch would make them; needs no Slurm."""
    places, jobs = design(sweep, cells, {}, "TAG")
    parts = []
    for job in jobs:
        flags = " ".join(_dependency(job, {j.stage: f"${_variable(j.stage)}" for j in jobs}))
        path = places.jobs / f"{job.stage}.sh"
        parts.append(f"### {path}\n{job.script}")
        for number, line in enumerate(job.lines):
            parts.append(f"# element {number}: {line}\n")
        parts.append(
            f"{_variable(job.stage)}=$(sbatch --parsable {flags} {path})\n".replace("  ", " ")
        )
    return "".join(parts)


def _variable(stage: str) -> str:
    return stage.replace("-", "_").upper()


def _dependency(job: Job, ids: dict[str, str]) -> list[str]:
    if not job.after:
        return []
    terms = []
    for term in job.after:
        kind, _, stage = term.partition(":")
        terms.append(f"{kind}:{ids.get(stage, stage)}")
    # A score whose training failed for good must not wait for ever.
    return [f"--dependency={','.join(terms)}", "--kill-on-invalid-dep=yes"]


def environment(cluster: Cluster) -> dict[str, str]:
    """What sbatch itself gets to see: SBATCH_ACCOUNT and the like would override the profile."""
    allowed = {*scripts.EXPORTED, *cluster.pass_environment}
    return {key: value for key, value in os.environ.items() if key in allowed}


def submit(
    sweep: Sweep, cells: list[Cell], *, train: bool = True, ready: bool = True
) -> dict[str, str]:
    """Queue what is neither done nor queued; returns {stage: job id}, empty if nothing was.

    `train`, `ready`: see design.
    """
    if shutil.which("sbatch") is None:
        raise SweepError("sbatch is not on the PATH: run this on a login node, or --executor local")
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
    make_folder(places.jobs / "logs")
    for cell in cells:
        RunDir(cell.folder).create(cell.config)
    # The jobs read this copy: editing the sweep file later does not change what is queued.
    write_text(places.jobs / "sweep.yaml", dump_yaml(sweep.model_dump(mode="json")))
    ids: dict[str, str] = {}
    for job in jobs:
        if job.lines:
            write_text(places.jobs / f"{job.stage}.txt", "\n".join(job.lines) + "\n")
        path = places.jobs / f"{job.stage}.sh"
        write_text(path, job.script)
        done = subprocess.run(
            ["sbatch", "--parsable", *_dependency(job, ids), str(path)],
            text=True,
            capture_output=True,
            check=False,
            env=environment(load_cluster(sweep.cluster)),
        )
        if done.returncode != 0:
            raise SweepError(
                f"{path}: sbatch refused it: {done.stderr.strip()}; queued so far: {ids or 'none'}"
                "; `python -m sweeps cancel` takes them back, the same command queues the rest"
            )
        ids[job.stage] = done.stdout.strip().split(";")[0]
        write_text(places.jobs / f"{job.stage}.id", ids[job.stage] + "\n")
    return ids


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

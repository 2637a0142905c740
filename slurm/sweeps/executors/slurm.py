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

    stage: str  # train-0, score-0, ready-0, collect
    script: str
    lines: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # aftercorr:train-0, afterany:score-0, …


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


def design(
    sweep: Sweep,
    cells: list[Cell],
    busy: dict[tuple[str, str], Element],
    tag: str,
    train: bool = True,
) -> tuple[Places, list[Job]]:
    """The jobs that are missing, in order; none if everything is done or queued.

    Without `train` only what is trained already is scored.
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
    if sweep.score is not None:
        ready = list(score.bases(sweep, cells).values())
        ready += [score.of_cell(cell) for cell in cells if RunDir(cell.folder).done]
        names = [
            subject.name
            for subject in ready
            if score.missing(subject, sweep.score) and ("score", subject.name) not in busy
        ]
        for part, chunk in enumerate(_chunks(names, cluster.array_limit)):
            script = scripts.score(sweep, cluster, places, len(chunk), "ready", part)
            jobs.append(Job(f"ready-{part}", script, tuple(chunk)))
    if jobs:
        last = tuple(f"afterany:{job.stage}" for job in jobs)
        jobs.append(Job("collect", scripts.collect(sweep, cluster, places), (), last))
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
        terms.append(f"{kind}:{ids[stage]}")
    # A score whose training failed for good must not wait for ever.
    return [f"--dependency={','.join(terms)}", "--kill-on-invalid-dep=yes"]


def environment(cluster: Cluster) -> dict[str, str]:
    """What sbatch itself gets to see: SBATCH_ACCOUNT and the like would override the profile."""
    allowed = {*scripts.EXPORTED, *cluster.pass_environment}
    return {key: value for key, value in os.environ.items() if key in allowed}


def submit(sweep: Sweep, cells: list[Cell], *, train: bool = True) -> dict[str, str]:
    """Queue what is neither done nor queued; returns {stage: job id}, empty if nothing was."""
    if shutil.which("sbatch") is None:
        raise SweepError("sbatch is not on the PATH: run this on a login node, or --executor local")
    root = Path(sweep.output_root)
    make_folder(root)
    try:
        with lease(root / "submit.lock", timeout=60):
            return _submit(sweep, cells, train)
    except Timeout:
        raise SweepError(
            f"{root / 'submit.lock'}: another submission holds this lock for a minute already; "
            "wait for it, or type the same command again"
        ) from None
    except OSError as error:
        raise unlockable(root / "submit.lock", error) from error


def _submit(sweep: Sweep, cells: list[Cell], train: bool) -> dict[str, str]:
    tag = secrets.token_hex(3)
    places, jobs = design(sweep, cells, active(sweep), tag, train)
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

"""Launching on Slurm: arrays with an element for each run, and a collect job behind them.

Each call of sbatch has a folder of its own, `<sweep>/jobs/<tag>/`:

    names         the runs of its elements, line by line
    script.sh     what sbatch was handed
    element.pkl   what each element calls; see launch/element.py
    id            the id of the job, once sbatch has answered
    *_log.out     what the elements printed

The name of a job ends in its tag, so squeue alone tells what is queued, also of a launch that was
killed or whose sbatch timed out: the script finds all that it needs in the folder.
"""

import getpass
import os
import re
import secrets
import subprocess
from pathlib import Path

from calibeval.io import InputError, counted, write_text
from sweeps.launch.element import Element
from sweeps.launch.sbatch import Job, JobKind, exported, job_name, script
from sweeps.launch.snapshot import snapshot
from sweeps.launch.submitit_adapter import write_pickle
from sweeps.runs.files import is_locked, last_error, locked
from sweeps.runs.grid import SweepPlan
from sweeps.runs.processes import run_checked, run_or_empty
from sweeps.runs.run import Run
from sweeps.runs.schema import Cluster, Sweep, load_cluster
from sweeps.runs.slurm_queue import QueuedJob, queued_jobs
from sweeps.runs.stages import SCORE, STAGES, TRAIN, next_stage

SUBMIT_PATIENCE = 300  # seconds to wait for another launch that is submitting


def design(plan: SweepPlan, busy: list[QueuedJob]) -> list[Job]:
    """The jobs that are missing, in the order of submission; none if all is done or queued.

    A run of one process trains and scores in one element. Of a run of several processes, scoring
    has an array of its own with one process's share, whose elements wait for those that train.
    """
    queued_runs = {job.run for job in busy if job.run is not None}
    collects = any(job.run is None for job in busy)
    to_train = []
    to_score = []
    for run in plan.baselines_and_runs:
        if run.name in queued_runs:
            continue
        stage = next_stage(run)
        if stage == TRAIN:
            to_train.append(run.name)
        elif stage == SCORE:
            to_score.append(run.name)
    jobs = []
    if to_train:
        jobs.append(Job(JobKind.TRAIN, tuple(to_train)))
        if plan.sweep.score is not None and not plan.sweep.world.single_process:
            jobs.append(Job(JobKind.SCORE, tuple(to_train), after_training=True))
    if to_score:
        jobs.append(Job(JobKind.SCORE, tuple(to_score)))
    if jobs or (queued_runs and not collects):
        jobs.append(Job(JobKind.COLLECT))
    return jobs


def dry_run(plan: SweepPlan) -> str:
    """What would be handed to sbatch, in order; needs no Slurm."""
    cluster = load_cluster(plan.sweep.cluster)
    folder = plan.folder.absolute()
    code = folder / "code" / "HASH"
    text = ""
    earlier: list[str] = []
    for number, job in enumerate(design(plan, [])):
        place = folder / "jobs" / f"TAG{number}"
        text += f"### JOB{number}: {job.kind.value} of {counted(len(job.runs), 'run')}\n"
        text += script(plan.sweep, cluster, job, place, code, earlier)
        earlier.append(f"JOB{number}")
    return text


def submit(plan: SweepPlan) -> dict[str, JobKind]:
    """Queue what is neither done nor queued, all or nothing; returns what each new job does, by id.

    Raises InputError if sbatch refuses one of the jobs, or somebody else is launching the sweep.
    """
    if is_locked(plan.lock):
        raise InputError(f"{plan.folder}: a launch without Slurm is at it; Ctrl-C there ends it")
    cluster = load_cluster(plan.sweep.cluster)
    jobs_folder = plan.folder / "jobs"
    jobs_folder.mkdir(parents=True, exist_ok=True)
    busy_message = f"{jobs_folder}: another launch has been submitting for minutes"
    with locked(jobs_folder / ".lock", SUBMIT_PATIENCE, busy_message):
        busy = queued_jobs(plan.folder)
        jobs = design(plan, busy)
        if not jobs:
            return {}
        plan.create()
        code = snapshot(plan.folder)
        # The collect job waits for those that an earlier launch has queued, too.
        queued_before = sorted({_array(job) for job in busy if job.run is not None})
        submitted: dict[str, JobKind] = {}
        for job in jobs:
            place = _new_place(jobs_folder)
            earlier = [*queued_before, *submitted]
            _write_job(plan.sweep, cluster, job, place, code, earlier)
            runs = [Run(plan.folder / name) for name in job.runs]
            for run in runs:
                run.note("queued", job=place.name, code=code.name)
            try:
                job_id = sbatch(plan.sweep, cluster, job, place)
            except InputError as error:
                for run in runs:
                    run.note("ended", error=str(error))
                if submitted:
                    run_checked("scancel", *submitted)
                profile = plan.sweep.cluster or "no --cluster"
                raise InputError(f"{profile}: {error}") from error
            write_text(place / "id", f"{job_id}\n")
            submitted[job_id] = job.kind
    return submitted


def _array(job: QueuedJob) -> str:
    """The id of the array that an element belongs to."""
    return job.id.partition("_")[0]


def _new_place(jobs_folder: Path) -> Path:
    """A new folder for a job, named by a tag that no other job of the sweep has."""
    place = (jobs_folder / secrets.token_hex(3)).absolute()
    place.mkdir()
    return place


def _write_job(
    sweep: Sweep, cluster: Cluster, job: Job, place: Path, code: Path, earlier: list[str]
) -> None:
    """Write all that a job needs into its folder, before sbatch is called."""
    write_text(place / "names", "".join(f"{name}\n" for name in job.runs))
    write_text(place / "script.sh", script(sweep, cluster, job, place, code, earlier))
    stages: tuple[str, ...] = (job.kind.value,)
    if job.kind is JobKind.TRAIN and sweep.world.single_process:
        stages = STAGES
    write_pickle(Element(stages), place)


def sbatch(sweep: Sweep, cluster: Cluster, job: Job, place: Path) -> str:
    """Hand a job's script to sbatch; returns the job's id. Raises InputError with its refusal."""
    # SBATCH_ACCOUNT and the like, of the shell, would override the profile.
    seen = {name: os.environ[name] for name in exported(sweep, cluster) if name in os.environ}
    # The name is given here once more: a profile's `extra` may hold another one.
    done = subprocess.run(
        ["sbatch", "--parsable", f"--job-name={job_name(sweep, job, place)}"],
        input=(place / "script.sh").read_text(),
        text=True,
        capture_output=True,
        check=False,
        env=seen,
    )
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    refusal = last_error(done.stderr.splitlines()).removeprefix("error: ")
    raise InputError(f"sbatch refuses: {refusal}{advice(refusal, cluster)}")


def advice(refusal: str, cluster: Cluster) -> str:
    """What to do about a refusal of sbatch whose words do not say it; else nothing."""
    if re.search("job submit limit|job array spec", refusal):
        return "; MaxSubmitJobs or MaxArraySize: launch fewer runs at a time, or wait for others"
    text = ""
    if "nvalid account" in refusal:
        mine = f"user={getpass.getuser()}"
        listing = ("sacctmgr", "-nP", "show", "associations", mine, "format=account")
        text += _choices("account", cluster.account, *listing)
    if "nvalid partition" in refusal:
        text += _choices("partition", cluster.partition, "sinfo", "-aho", "%R")
    return text


def _choices(key: str, found: str | None, *command: str) -> str:
    """What the profile says of a key, and what a command says there is."""
    names = sorted(set(run_or_empty(*command).split()))
    if not names:
        return ""
    return f"; {key}: found {found}, there is {', '.join(names)}"


def cancel(folder: Path) -> list[str]:
    """scancel every job of a sweep's folder; running trainers save first. Returns the job ids."""
    ids = sorted({_array(job) for job in queued_jobs(folder)})
    if ids:
        run_checked("scancel", *ids)
    return ids

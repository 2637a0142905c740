"""Runs on Slurm, by submitit: arrays of elements with a collect job behind them.

A launch is a folder a job in `<sweep>/jobs/`: `names`, what its elements work on; the script; the
pickle that submitit runs; `id`; what the elements printed. A job's name ends in its folder's, so
squeue alone tells what is queued, also of a launch that was killed or whose sbatch timed out: the
script itself finds all that it needs.
"""

import getpass
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from submitit.core.utils import DelayedSubmission
from submitit.helpers import Checkpointable

from calibeval.io import InputError, counted, write_text
from sweeps.launch import worker
from sweeps.launch.sbatch import ENDLESS, Job, exported, script
from sweeps.launch.snapshot import snapshot
from sweeps.runs import stages
from sweeps.runs.files import is_locked, last_error, locked
from sweeps.runs.grid import SweepPlan
from sweeps.runs.processes import job_id, run_checked, run_or_empty
from sweeps.runs.run import Run
from sweeps.runs.schema import Cluster, Sweep, load_cluster
from sweeps.runs.slurm_queue import QueuedJob, describe_job, queued_jobs
from sweeps.runs.stages import Outcome


class Element(Checkpointable):
    """An element of an array: submitit calls it, and on USR2 its `checkpoint`, before requeueing.

    Signals are only noted: `work` then lets the run save, and what comes next is done afterwards.
    """

    def __init__(self, stages: tuple[str, ...]) -> None:
        self.stages = stages

    def __call__(self) -> None:
        """Work on the run whose line in `names` is this element's."""
        folder, heard = Path(os.environ["SUBMITIT_FOLDER"]), []
        name = (folder / "names").read_text().splitlines()[int(os.environ["SLURM_ARRAY_TASK_ID"])]
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's: checkpoint, requeue, leave
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda number, _: heard.append(number))
        outcome = worker.work(Run(folder.parents[1] / name), lambda: bool(heard), self.stages)
        while outcome is Outcome.STOPPED and not (signal.SIGTERM in heard and cancelled()):
            try:
                requeue(signal.SIGUSR2, None)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{error}; again in 10 s", flush=True)  # until Slurm ends this job itself
                time.sleep(10)
        sys.exit(outcome.value)  # what is to be said stands above


def cancelled() -> bool:
    """Whether TERM came from scancel, or for a requeue that is under way.

    Otherwise it came at the time limit, or with the GraceTime of a preemption: then Slurm still
    says RUNNING, and requeues nothing that leaves by itself.
    """
    while not (keys := describe_job(job_id() or "")):
        time.sleep(5)
    goes_on = keys.get("JobState") == "RUNNING" or keys.get("Reason") == "TimeLimit"
    return not goes_on and keys.get("PreemptTime", "None") == "None"


def design(plan: SweepPlan, busy: list[QueuedJob]) -> list[Job]:
    """The jobs that are missing, in order; none if everything is done or queued.

    A run of one process trains and scores in one element. Of several, scoring has an array of its
    own, on one process's share, which waits for theirs element by element.
    """
    queued = {one.run for one in busy}
    next_stages = {run.name: stages.next_stage(run) for run in plan.baselines + plan.runs}
    todo = {name: stage for name, stage in next_stages.items() if stage and name not in queued}
    train, rest = (tuple(n for n, s in todo.items() if s == what) for what in stages.STAGES)
    jobs = [Job("train", train)]
    if plan.sweep.score and not plan.sweep.world.single_process:
        jobs.append(Job("score", train, after_training=True))
    jobs = [job for job in (*jobs, Job("score", rest)) if job.names]
    if jobs or (queued and None not in queued):  # nothing that collects
        jobs.append(Job("collect"))
    return jobs


def dry_run(plan: SweepPlan) -> str:
    """What would be handed to sbatch, in order; needs no Slurm."""
    cluster, parts = load_cluster(plan.sweep.cluster), []
    for number, job in enumerate(design(plan, [])):
        place = plan.folder.absolute() / "jobs" / f"TAG{number}"
        ids, code = [f"JOB{n}" for n in range(number)], place.parents[1] / "code" / "HASH"
        parts.append(f"### JOB{number}: {job.what} of {counted(len(job.names), 'run')}\n")
        parts.append(script(plan.sweep, cluster, job, place, code, ids))
    return "".join(parts)


def submit(plan: SweepPlan) -> dict[str, str]:
    """Queue what is neither done nor queued, all or nothing; returns {job id: what it does}."""
    jobs, cluster, made = plan.folder / "jobs", load_cluster(plan.sweep.cluster), {}
    if is_locked(plan.lock):
        raise InputError(f"{plan.folder}: a launch without Slurm is at it; Ctrl-C there ends it")
    jobs.mkdir(parents=True, exist_ok=True)
    with locked(jobs / ".lock", 300, f"{jobs}: another launch has been submitting for minutes"):
        busy = queued_jobs(plan.folder)
        others = sorted({one.id.partition("_")[0] for one in busy if one.run})
        if todo := design(plan, busy):
            plan.create()
            code = snapshot(plan.folder)
        for job in todo:
            place = (jobs / secrets.token_hex(3)).absolute()
            place.mkdir()
            write_text(place / "names", "".join(f"{name}\n" for name in job.names))
            text = script(plan.sweep, cluster, job, place, code, [*others, *made])
            write_text(place / "script.sh", text)
            both = job.what == "train" and plan.sweep.world.single_process
            delayed = DelayedSubmission(Element(stages.STAGES if both else (job.what,)))
            delayed.set_timeout(1, ENDLESS)
            delayed.dump(place / "element.pkl")
            runs = [Run(plan.folder / name) for name in job.names]
            for run in runs:
                run.note("queued", job=place.name, code=code.name)
            try:
                one = sbatch(
                    text, plan.sweep, cluster, f"{plan.sweep.name}.{job.what}.{place.name}"
                )
            except InputError as error:
                for run in runs:
                    run.note("ended", error=str(error))
                if made:
                    run_checked("scancel", *made)
                raise InputError(f"{plan.sweep.cluster or 'no --cluster'}: {error}") from error
            write_text(place / "id", f"{one}\n")
            made[one] = job.what
    return made


def sbatch(text: str, sweep: Sweep, cluster: Cluster, name: str) -> str:
    """Hand a script to sbatch; returns its job's id."""
    # SBATCH_ACCOUNT and the like, of the shell, would override the profile.
    names = os.environ.keys() & set(exported(sweep, cluster))
    keys = {"text": True, "capture_output": True, "env": {x: os.environ[x] for x in names}}
    named = ["sbatch", "--parsable", f"--job-name={name}"]  # by which `queue` knows it
    done = subprocess.run(named, input=text, **keys)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    said = last_error(done.stderr.splitlines()).removeprefix("error: ")
    raise InputError(f"sbatch refuses: {said}{advice(said, cluster)}")


def advice(said: str, cluster: Cluster) -> str:
    """What to do about a refusal whose words do not say it."""
    if re.search("job submit limit|job array spec", said):
        return "; MaxSubmitJobs or MaxArraySize: launch fewer runs at a time, or wait for others"
    mine = ("show", "associations", f"user={getpass.getuser()}", "format=account")
    there = {"account": ("sacctmgr", "-nP", *mine), "partition": ("sinfo", "-aho", "%R")}
    return "".join(
        f"; {key}: found {getattr(cluster, key)}, there is {', '.join(sorted({*names.split()}))}"
        for key, words in there.items()
        if f"nvalid {key}" in said and (names := run_or_empty(*words))
    )


def cancel(folder: Path) -> list[str]:
    """scancel every job of this sweep; running trainers save first. Returns the job ids."""
    ids = sorted({one.id.partition("_")[0] for one in queued_jobs(folder)})
    if ids:
        run_checked("scancel", *ids)
    return ids

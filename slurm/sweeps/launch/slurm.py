"""Launching on Slurm: arrays with an element for each run, and a collect job behind them.

More runs than Slurm allows in one array get several.

Each call of sbatch has a folder of its own, `<sweep>/jobs/<tag>/`:

    names         the runs of its elements, line by line
    profile.yaml  the cluster profile
    script.sh     what sbatch was handed
    element.pkl   of an array: what each element calls; see launch/element.py
    id            the id of the job, once sbatch has answered
    *_log.out     what the elements, or the job that collects, printed

The name of a job ends in its tag, so squeue alone tells what is queued, also of a launch that was
killed or whose sbatch timed out: the script finds all that it needs in the folder.
"""

import contextlib
import getpass
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from calibeval.io import InputError, counted, regular_file, show, write_text
from sweeps.launch.element import Element
from sweeps.launch.sbatch import Job, JobKind, exported, job_name, parameters, script
from sweeps.launch.snapshot import snapshot
from sweeps.launch.submitit_adapter import write_pickle
from sweeps.launch.worker import finish_complete
from sweeps.runs.events import EventKind
from sweeps.runs.files import is_locked, last_error, locked
from sweeps.runs.grid import SweepPlan
from sweeps.runs.processes import cli_command, run_checked, shell_variables, slurm_or_empty
from sweeps.runs.run import Run
from sweeps.runs.schema import Cluster, Sweep, load_cluster
from sweeps.runs.slurm_queue import (
    LiveElement,
    largest_array,
    live_elements,
    names_of_runs,
    prints_into,
)
from sweeps.runs.stages import SCORE, STAGES, TRAIN, next_stage
from sweeps.runs.yaml_io import dump_yaml, read_yaml

SUBMIT_PATIENCE = 300  # seconds to wait for another launch that is submitting
STOP_PATIENCE = 120  # seconds to wait for runs that were cancelled, and still save
STOP_PAUSE = 2  # seconds between looks at them
SBATCH_SILENCE = 30  # seconds after which a word is said about an sbatch that does not answer
SBATCH_PATIENCE = 600  # seconds after which it is ended; by itself it gives up after two minutes
# What sacctmgr is asked for: each QOS, and how many jobs a user may have queued in it.
QOS_COLUMNS = "format=name,maxsubmitjobsperuser"


class NoAnswerOfSbatch(InputError):
    """sbatch has not answered: Slurm may have taken the job, or may still take it."""


@dataclass(frozen=True)
class Submission:
    """What a launch has queued, and what else there is to say of the runs that it asks for."""

    jobs: dict[str, Job]  # the new jobs, by their ids
    collect_refusal: str  # why sbatch did not take the job that makes the tables; "" if it did
    # Elements of earlier launches that work on these runs:
    already_there: list[LiveElement]  # queued or running
    stopping: list[LiveElement]  # told to end, and still saving: their runs are left out
    # Those of `already_there` that are pending, and were queued with another profile.
    with_other_profile: list[LiveElement]
    profile_differences: list[str]  # of that profile from this launch's: `key: value, now value`

    def describe_present(self, plan: SweepPlan) -> str:
        """How many runs are there already: `3 done, 2 queued or running`."""
        done = [run.name for run in plan.baselines_and_runs if next_stage(run) is None]
        # The job of one that is done may be about to leave.
        there = set(names_of_runs(self.already_there)) - set(done)
        counts = []
        if done:
            counts.append(f"{len(done)} done")
        if there:
            counts.append(f"{len(there)} queued or running")
        return ", ".join(counts)

    def problems(self, plan: SweepPlan) -> list[str]:
        """What was asked for and is not queued, one sentence for each."""
        lines = []
        if self.stopping:
            names = ", ".join(names_of_runs(self.stopping))
            lines.append(f"still stopping, and left out: {names}; later type the same once more")
        if self.collect_refusal:
            collect = cli_command("collect", plan.folder)
            lines.append(
                f"the tables will not be made by themselves: {self.collect_refusal}\n"
                f"Once the runs are done: {collect}"
            )
        return lines

    def notes(self, plan: SweepPlan) -> list[str]:
        """What the user may not expect, one sentence for each."""
        if not self.with_other_profile:
            return []
        count = len(names_of_runs(self.with_other_profile))
        verb = "is" if count == 1 else "are"
        runs = f"{counted(count, 'run')} {verb}"
        cancel = cli_command("cancel", plan.folder)
        differences = "; ".join(self.profile_differences)
        return [
            f"{runs} queued with another profile ({differences}). For this one: {cancel}, "
            "then launch again"
        ]


def design(plan: SweepPlan, live: list[LiveElement], array_limit: int | None = None) -> list[Job]:
    """The jobs to submit, in the order of submission.

    Where all is done there are none. Where the rest is queued there is a collect job alone, and not
    even that if one is live.

    `live` are the elements that are queued or running. A run without torchrun, of one process and
    not sharded, trains and scores in one element. Of any other run, scoring has an array of its
    own, whose elements have the CPUs and GPUs of one process and all the memory, and wait for those
    that train. No array has more elements than `array_limit`; where that is 0, each run has a job
    of its own.
    """
    queued_runs = set(names_of_runs(live))
    collects = any(element.run is None and not element.stopping for element in live)
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
    jobs = _train_arrays(plan.sweep, to_train, array_limit)
    jobs += _score_arrays(plan.sweep, to_score, array_limit, first_position=len(jobs))
    if jobs or (queued_runs and not collects):
        jobs.append(Job(JobKind.COLLECT))
    return jobs


def _train_arrays(sweep: Sweep, names: list[str], array_limit: int | None) -> list[Job]:
    """The arrays that train these runs, and behind each of them the one that scores apart."""
    scored_apart = sweep.score is not None and not sweep.world.single_process
    is_array = array_limit != 0
    jobs: list[Job] = []
    trainers: list[int] = []  # the positions of the arrays so far
    scorers: list[int] = []
    for part in _parts(names, array_limit):
        after = _awaited(sweep, trainers, array_limit)
        trainers.append(len(jobs))
        jobs.append(Job(JobKind.TRAIN, part, after_array=after, is_array=is_array))
        if scored_apart:
            after = _awaited(sweep, scorers, array_limit)
            scorers.append(len(jobs))
            jobs.append(
                Job(
                    JobKind.SCORE,
                    part,
                    trained_by=trainers[-1],
                    after_array=after,
                    is_array=is_array,
                )
            )
    return jobs


def _score_arrays(
    sweep: Sweep, names: list[str], array_limit: int | None, first_position: int
) -> list[Job]:
    """The arrays that score runs which are trained already."""
    jobs: list[Job] = []
    scorers: list[int] = []
    for part in _parts(names, array_limit):
        after = _awaited(sweep, scorers, array_limit)
        scorers.append(first_position + len(jobs))
        jobs.append(Job(JobKind.SCORE, part, after_array=after, is_array=array_limit != 0))
    return jobs


def _awaited(sweep: Sweep, before: list[int], array_limit: int | None) -> int | None:
    """Return the position of the array for which the next one waits, so that the throttle holds.

    Of several arrays one runs at a time; of jobs without arrays, as many as the throttle says.
    """
    if sweep.throttle is None:
        return None
    at_a_time = sweep.throttle if array_limit == 0 else 1
    return before[-at_a_time] if len(before) >= at_a_time else None


def _parts(names: list[str], array_limit: int | None) -> list[tuple[str, ...]]:
    """The names in parts that an array may have, all in one without a limit; no part of none."""
    size = len(names) or 1
    if array_limit is not None:
        size = max(1, array_limit)
    return [tuple(names[start : start + size]) for start in range(0, len(names), size)]


def planned_jobs(plan: SweepPlan) -> str:
    """The jobs that a launch would hand to sbatch if nothing were queued, a line for each."""
    cluster = load_cluster(plan.sweep.cluster)
    lines = []
    for number, job in enumerate(design(plan, [], largest_array(cluster.clusters))):
        job_folder = plan.folder / "jobs" / f"TAG{number}"
        dependency = job.dependency([f"JOB{other}" for other in range(number)])
        asked = parameters(plan.sweep, cluster, job, job_folder, dependency)
        shown = dict(asked["additional_parameters"])
        for name, value in asked.items():
            shown[name.replace("_", "-")] = value
        options = []
        for name in ("nodes", "time", "cpus-per-task", "gpus-per-node", "mem"):
            is_plain = name == "nodes" and shown[name] == 1
            if name in shown and not is_plain:
                options.append(f"--{name}={shown[name]}")
        lines.append(f"{_title(job, number)}: {' '.join(options)}\n")
    return "".join(lines)


def planned_scripts(plan: SweepPlan) -> str:
    """What would be handed to sbatch if nothing were queued, in order; needs no Slurm."""
    cluster = load_cluster(plan.sweep.cluster)
    folder = plan.folder.absolute()
    code_folder = folder / "code" / "HASH"
    text = ""
    for number, job in enumerate(design(plan, [], largest_array(cluster.clusters))):
        job_folder = folder / "jobs" / f"TAG{number}"
        dependency = job.dependency([f"JOB{other}" for other in range(number)])
        text += f"### {_title(job, number)}\n"
        text += script(plan.sweep, cluster, job, job_folder, code_folder, dependency)
    return text


def _title(job: Job, number: int) -> str:
    """What the planned job of this number does, and after which others."""
    if job.kind is JobKind.COLLECT:
        awaited = list(range(number))
    else:
        awaited = [other for other in (job.after_array, job.trained_by) if other is not None]
    title = f"JOB{number} {job.describe()}"
    if len(awaited) > 2:
        title += f", after JOB{awaited[0]} to JOB{awaited[-1]}"
    elif awaited:
        title += f", after {' and '.join(f'JOB{other}' for other in awaited)}"
    return title


def submit(plan: SweepPlan, stop_patience: float = STOP_PATIENCE) -> Submission:
    """Queue what is neither done nor queued: all arrays, or none where sbatch refuses one.

    Runs that a cancel has stopped and that still save are waited for, at most `stop_patience`
    seconds, and then left out. A job that makes the tables and is not taken costs no run. Raises
    InputError if sbatch refuses an array or does not answer, or somebody else is launching the
    sweep.
    """
    cluster = load_cluster(plan.sweep.cluster)
    jobs_folder = plan.folder / "jobs"
    jobs_folder.mkdir(parents=True, exist_ok=True)
    busy_message = f"{jobs_folder}: another launch is submitting"
    with locked(jobs_folder / ".lock", SUBMIT_PATIENCE, busy_message):
        refuse_a_launch_here(plan)
        live = _settled_queue(plan, stop_patience)
        _note_ids(jobs_folder, live)
        live_of_plan = _of_plan(plan, live)
        already_there = [element for element in live_of_plan if not element.stopping]
        with_other_profile, differences = _compare_profiles(jobs_folder, cluster, already_there)
        planned = design(plan, live, largest_array(cluster.clusters))
        plan.create()
        worked_on = set(names_of_runs(live))
        finish_complete(run for run in plan.baselines_and_runs if run.name not in worked_on)
        jobs: dict[str, Job] = {}
        collect_refusal = ""
        if planned:
            jobs, collect_refusal = _submit_jobs(plan, cluster, planned, live)
    return Submission(
        jobs=jobs,
        collect_refusal=collect_refusal,
        already_there=already_there,
        stopping=[element for element in live_of_plan if element.stopping],
        with_other_profile=with_other_profile,
        profile_differences=differences,
    )


def refuse_a_launch_here(plan: SweepPlan) -> None:
    """Raise InputError while the folder's runs are trained by a launch without Slurm."""
    if is_locked(plan.lock):
        raise InputError(f"{plan.folder}: a launch without Slurm is at it; Ctrl-C there ends it")


def _of_plan(plan: SweepPlan, live: list[LiveElement]) -> list[LiveElement]:
    """Those of the live elements that work on runs which this launch asks for."""
    names = {run.name for run in plan.baselines_and_runs}
    return [element for element in live if element.run in names]


def _settled_queue(plan: SweepPlan, patience: float) -> list[LiveElement]:
    """The folder's live elements, once those that are leaving this launch's runs have left.

    After a scancel they save, and could not be queued again. Those that take more than `patience`
    seconds are still there.
    """
    end = time.monotonic() + patience
    live = live_elements(plan.folder)
    stopping = [element for element in _of_plan(plan, live) if element.stopping]
    if stopping:
        runs = counted(len(names_of_runs(stopping)), "run")
        message = f"waiting for {runs} to stop, at most {patience} s; Ctrl-C is safe"
        show(message, to_stderr=True)
    while stopping and time.monotonic() < end:
        time.sleep(STOP_PAUSE)
        live = live_elements(plan.folder)
        stopping = [element for element in _of_plan(plan, live) if element.stopping]
    return live


def _note_ids(jobs_folder: Path, live: list[LiveElement]) -> None:
    """Write the `id` of live arrays and collect jobs whose launch did not live to write it."""
    for element in live:
        file = jobs_folder / element.tag / "id"
        if not file.exists():
            write_text(file, f"{element.array_id}\n")


def _compare_profiles(
    jobs_folder: Path, cluster: Cluster, already_there: list[LiveElement]
) -> tuple[list[LiveElement], list[str]]:
    """The pending elements that were submitted with another profile; how that one differs."""
    pending = [element for element in already_there if element.state == "PENDING"]
    with_other_profile: list[LiveElement] = []
    all_differences: dict[str, None] = {}  # in order, each once
    for tag in sorted({element.tag for element in pending}):
        differences = _profile_differences(jobs_folder / tag / "profile.yaml", cluster)
        if differences:
            with_other_profile += [element for element in pending if element.tag == tag]
        all_differences.update(dict.fromkeys(differences))
    return with_other_profile, list(all_differences)


def _profile_differences(file: Path, cluster: Cluster) -> list[str]:
    """What a job's profile says differently from this one: `key: value, now value`."""
    earlier, _ = read_yaml(file)
    differences = []
    for key, value in cluster.model_dump(mode="json").items():
        if key in earlier and earlier[key] != value:
            differences.append(f"{key}: {earlier[key]}, now {value}")
    return differences


def _submit_jobs(
    plan: SweepPlan, cluster: Cluster, jobs: list[Job], live: list[LiveElement]
) -> tuple[dict[str, Job], str]:
    """Hand jobs to sbatch; returns them by their ids, and why the collect job was not taken.

    If sbatch refuses an array, those before it are cancelled. Their runs and its own are told why;
    those of later arrays, which nobody has submitted, are not. Then InputError is raised. If sbatch
    does not answer, Slurm may have the array or not. So all stays as it is, as at a Ctrl-C, and the
    next launch, which finds in the queue what there is, submits the rest.
    """
    code_folder = snapshot(plan.folder)
    queued_before = {
        element.array_id
        for element in live
        if element.run is not None and element.cluster == cluster.clusters
    }
    submitted: dict[str, Job] = {}
    for job in jobs:
        job_folder = _new_job_folder(plan.folder / "jobs")
        dependency = job.dependency(list(submitted), sorted(queued_before))
        _write_job(plan.sweep, cluster, job, job_folder, code_folder, dependency)
        for name in job.runs:
            Run(plan.folder / name).note(
                EventKind.LAUNCHED, tag=job_folder.name, code=code_folder.name
            )
        try:
            job_id = call_sbatch(plan.sweep, cluster, job, job_folder)
        except NoAnswerOfSbatch as error:
            if job.kind is JobKind.COLLECT:
                return submitted, str(error)
            raise
        except InputError as error:
            if "clusters: found" in str(error):
                # Else every look would ask a cluster that is not there. A refusal of another kind
                # may come of a job that Slurm has taken all the same.
                (job_folder / "names").unlink()
            if job.kind is JobKind.COLLECT:
                return submitted, str(error)
            refusal = str(error)
            taken_back = [name for other in (*submitted.values(), job) for name in other.runs]
            for name in dict.fromkeys(taken_back):
                Run(plan.folder / name).note(EventKind.ENDED, refused=refusal)
            problem = _take_back(plan, cluster, list(submitted))
            profile = plan.sweep.cluster or "no --cluster"
            raise InputError(f"{profile}: {refusal}{problem}") from error
        write_text(job_folder / "id", f"{job_id}\n")
        submitted[job_id] = job
    return submitted, ""


def _take_back(plan: SweepPlan, cluster: Cluster, job_ids: list[str]) -> str:
    """Cancel the jobs of a launch that was refused; returns what is to be said if that fails."""
    if not job_ids:
        return ""
    try:
        run_checked("scancel", *job_ids, cluster=cluster.clusters)
    except InputError as error:
        cancel = cli_command("cancel", plan.folder)
        jobs = ", ".join(job_ids)
        return f"\n{error}: what was queued before ({jobs}) still is; to take it back: {cancel}"
    return ""


def _new_job_folder(jobs_folder: Path) -> Path:
    """A new folder for a job, named by a tag that no other job of the sweep has."""
    job_folder = (jobs_folder / secrets.token_hex(3)).absolute()
    job_folder.mkdir()
    return job_folder


def _write_job(
    sweep: Sweep,
    cluster: Cluster,
    job: Job,
    job_folder: Path,
    code_folder: Path,
    dependency: str,
) -> None:
    """Write all that a job needs into its folder, before sbatch is called."""
    write_text(job_folder / "names", "".join(f"{name}\n" for name in job.runs))
    write_text(job_folder / "profile.yaml", dump_yaml(cluster.model_dump(mode="json")))
    write_text(
        job_folder / "script.sh", script(sweep, cluster, job, job_folder, code_folder, dependency)
    )
    if job.kind is not JobKind.COLLECT:
        write_pickle(Element(stages_of(job, sweep)), job_folder)


def stages_of(job: Job, sweep: Sweep) -> tuple[str, ...]:
    """The stages through which an element of an array brings its run.

    Where a run trains without torchrun (one process, not sharded), the element goes on to score.
    """
    if job.kind is JobKind.SCORE:
        return (SCORE,)
    if sweep.world.single_process:
        return STAGES
    return (TRAIN,)


def call_sbatch(sweep: Sweep, cluster: Cluster, job: Job, job_folder: Path) -> str:
    """Hand a job's script to sbatch; returns the job's id. Raises InputError with its refusal.

    What sbatch says is shown as it says it: while Slurm's queue is full it tries again for minutes.
    """
    # SBATCH_ACCOUNT and the like, of the shell, would override the profile.
    seen = shell_variables(exported(sweep, cluster))
    # The name is given here once more, since SBATCH_JOB_NAME would win over the script's: a profile
    # may name it in `pass_environment`.
    words = ["sbatch", "--parsable", f"--job-name={job_name(sweep, job, job_folder)}"]
    with (
        open(job_folder / "script.sh", opener=regular_file) as text,
        subprocess.Popen(
            words, stdin=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=seen
        ) as process,
    ):
        assert process.stdout is not None and process.stderr is not None  # they are pipes
        messages: list[str] = []
        listener = Thread(target=_pass_on, args=(process.stderr, messages), daemon=True)
        listener.start()
        try:
            _wait_for_sbatch(process)
        except BaseException:  # Ctrl-C as well: what it has submitted is found by its name
            process.kill()
            raise
        listener.join()
        answer = process.stdout.read()
    if process.returncode == 0:
        return _job_id(answer)
    refusal = last_error(messages).removeprefix("error: ")
    raise InputError(f"sbatch refuses: {refusal}{advice(refusal, sweep, cluster, job)}")


def _job_id(answer: str) -> str:
    """Find the id in what sbatch printed: the last line that is one, after a wrapper's banner.

    Raises NoAnswerOfSbatch if there is none.
    """
    ids = re.findall(r"^(\d+)(?:;\S+)?\s*$", answer, re.MULTILINE)
    if not ids:
        raise NoAnswerOfSbatch(
            f"sbatch has printed no job's id: {answer.strip()[:200]!r}; the same command finds "
            "what it has queued"
        )
    last_id: str = ids[-1]
    return last_id


def _pass_on(stream: IO[str], messages: list[str]) -> None:
    """Show what sbatch says, line by line, and keep it."""
    for line in stream:
        show(line, to_stderr=True, end="")
        messages.append(line.rstrip())


def _wait_for_sbatch(process: subprocess.Popen) -> None:
    """Wait for its end, not in silence; raises NoAnswerOfSbatch after SBATCH_PATIENCE."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SBATCH_SILENCE)
        return
    print(
        f"sbatch has not answered for {SBATCH_SILENCE} s: Slurm's queue may be full, or its "
        "controller busy. Ctrl-C is safe; the same command then queues what is missing.",
        file=sys.stderr,
        flush=True,
    )
    try:
        process.wait(SBATCH_PATIENCE - SBATCH_SILENCE)
    except subprocess.TimeoutExpired:
        raise NoAnswerOfSbatch(
            f"sbatch has not answered for {SBATCH_PATIENCE} s; the same command then queues what "
            "is missing"
        ) from None


def _asked_of_nodes(sweep: Sweep, cluster: Cluster) -> str:
    """Say what a job that trains asks for, by the keys that ask for it."""
    return (
        f"asked for: world.nodes {sweep.world.nodes}; on each memory_per_node "
        f"{cluster.memory_per_node or 'of the cluster'} and, for each of "
        f"world.processes_per_node {sweep.world.processes_per_node}, cpus_per_process "
        f"{cluster.cpus_per_process} and gpus_per_process {cluster.gpus_per_process}"
    )


def advice(refusal: str, sweep: Sweep, cluster: Cluster, job: Job) -> str:
    """What to do about a refusal of sbatch whose words do not say it; else nothing."""
    if "job submit limit" in refusal:
        limits = _submit_limits(cluster, job)
        return f"; {limits}: launch fewer runs at a time, or wait for others to end"
    if "job array spec" in refusal:
        limit = largest_array(cluster.clusters) or "not known"
        return f"; MaxArraySize is {limit}: launch fewer runs at a time"
    if "Resource temporarily unavailable" in refusal:
        return "; Slurm's queue is full, of all users' jobs (MaxJobCount): the same command, later"
    if "Node count" in refusal or "node configuration" in refusal:
        return f"; {_asked_of_nodes(sweep, cluster)}"
    text = ""
    if "--cluster" in refusal:
        clusters = slurm_or_empty("sacctmgr", "-nP", "show", "clusters", "format=cluster")
        text += _choices("clusters", cluster.clusters, clusters)
    if "nvalid account" in refusal:
        accounts = _own_associations(cluster, "account")
        text += _choices("account", cluster.account, accounts)
    if "nvalid partition" in refusal:
        partitions = slurm_or_empty("sinfo", "-aho", "%R", cluster=cluster.clusters)
        text += _choices("partition", cluster.partition, partitions)
    return text


def _own_associations(cluster: Cluster, columns: str) -> str:
    """List this user's accounts in these columns, as sacctmgr prints them."""
    words = ["-nP", "show", "associations", f"user={getpass.getuser()}", f"format={columns}"]
    if cluster.clusters is not None:  # sacctmgr has no option --clusters
        words.append(f"cluster={cluster.clusters}")
    return slurm_or_empty("sacctmgr", *words)


def _submit_limits(cluster: Cluster, job: Job) -> str:
    """How many jobs this user may have queued, as far as Slurm tells; how many are asked for."""
    limits = []
    for line in _own_associations(cluster, "account,maxsubmitjobs").splitlines():
        account, _, limit = line.partition("|")
        if limit and cluster.account in (None, account):
            limits.append(f"MaxSubmitJobs is {limit} for {account}")
    for line in slurm_or_empty("sacctmgr", "-nP", "show", "qos", QOS_COLUMNS).splitlines():
        qos, _, limit = line.partition("|")
        if limit and cluster.qos in (None, qos):
            limits.append(f"MaxSubmitJobsPerUser is {limit} for QOS {qos}")
    asked = max(1, len(job.runs))
    return ", ".join([*limits, f"{asked} are asked for"])


def _choices(key: str, found: str | None, listed: str) -> str:
    """What the profile says of a key, and what Slurm lists."""
    names = sorted(set(listed.split()))
    if not names:
        return ""
    return f"; {key}: found {found}, there is {', '.join(names)}"


def cancel(plan: SweepPlan, of_whole_folder: bool) -> tuple[list[LiveElement], list[str]]:
    """scancel the jobs of a plan's runs, or all of its folder's; returns their elements.

    The names of the folder's other runs that are live come with them. The job that makes the tables
    goes once it waits for nothing else. Trainers that run hear of it and save. Slurm kills those
    that have not ended after its KillWait, 30 seconds unless the cluster has another: what they
    learnt since their last checkpoint is lost.
    """
    live = []
    is_ours: dict[tuple[str, str | None], bool] = {}
    for element in live_elements(plan.folder):
        key = (element.array_id, element.cluster)
        job_folder = plan.folder / "jobs" / element.tag
        if key not in is_ours:
            is_ours[key] = prints_into(element.array_id, job_folder, element.cluster)
        if is_ours[key] and element.run not in (".", "..") and "/" not in (element.run or ""):
            live.append(element)
        else:
            remedy = f"if it is yours all the same: scancel {element.label}"
            reason = f"Slurm does not say that it is yours and prints into {job_folder}"
            show(f"left alone: job {element.label}: {reason}; {remedy}", to_stderr=True)
    cancelled = _of_plan(plan, live)
    others = [element for element in live if element.run is not None and element not in cancelled]
    if of_whole_folder or not others:
        cancelled = sorted(live, key=lambda element: element.run is None)
        others = []
    labels_on: dict[str | None, list[str]] = {}
    for element in cancelled:
        labels_on.setdefault(element.cluster, []).append(element.label)
    for cluster, labels in labels_on.items():
        run_checked("scancel", *_by_array(labels), cluster=cluster)
    for element in cancelled:
        # One that runs notes its end itself. Of one that has not begun Slurm may keep no record.
        if element.state == "PENDING" and element.run is not None:
            Run(plan.folder / element.run).note(EventKind.ENDED, stopped=True)
    return cancelled, names_of_runs(others)


def _by_array(labels: list[str]) -> list[str]:
    """Spell labels as scancel takes them at once: 12_[0,3] for 12_0 and 12_3; 13 stays 13."""
    words = []
    indices_of_array: dict[str, list[str]] = {}
    for label in labels:
        array_id, underscore, index = label.partition("_")
        if underscore:
            indices_of_array.setdefault(array_id, []).append(index)
        else:
            words.append(label)
    for array_id, indices in indices_of_array.items():
        words.append(f"{array_id}_[{','.join(indices)}]")
    return words

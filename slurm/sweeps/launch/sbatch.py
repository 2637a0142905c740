"""What sbatch is handed: the text of its script.

It is a function of the sweep, its profile and folders, and of where the launch is typed: in which
folder, by which Python, and with which variables for Hugging Face's cache. It needs no Slurm;
`launch.slurm` submits. Options go where submitit takes them: those that
`SlurmExecutor.update_parameters` has go into `parameters`, all others into
`_additional_parameters`.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from calibeval.io import counted
from sweeps.launch.hub_cache import job_variables
from sweeps.launch.submitit_adapter import (
    ENDLESS,
    copy_pickle_lines,
    element_command,
    label_in_script,
    script_text,
)
from sweeps.runs import stages
from sweeps.runs.backend import environment_variables
from sweeps.runs.processes import LOGIN_VARIABLES
from sweeps.runs.schema import Cluster, Sweep

# The ending of the file by which an element asks its batch script for a requeue.
REQUEUE_REQUEST = ".requeue"
# Shell lines that export the NAME=value lines of the file $secrets_file, and run nothing in it.
READ_SECRETS = r"""number=0
while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    line=${line#export }
    case $line in "" | \#*) continue ;; esac
    name=${line%%=*} value=${line#*=}
    case $value in
    \'*\' | \"*\") value=${value:1:-1} ;;
    *[[:space:]]*) name= ;;
    esac
    if ! [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
        echo "error: $secrets_file, line $number: write NAME=value, without spaces" >&2
        exit 1
    fi
    export "$name=$value"
done <"$secrets_file" || exit 1"""
COLLECT_MEMORY = "4G"  # is enough for tables over hundreds of record files


class JobKind(Enum):
    """What a job does; the value is part of its name, from which `runs.slurm_queue` reads it.

    An array that trains also scores, if its runs train without torchrun: `slurm.stages_of` says so.
    An array that scores has the runs that are scored apart: see `slurm.design`.
    """

    TRAIN = stages.TRAIN
    SCORE = stages.SCORE
    COLLECT = "collect"


@dataclass(frozen=True)
class Job:
    """One call of sbatch: what the job does, for which runs, and for which other jobs it waits.

    A job that trains or scores is an array with an element for each run. Other jobs are named by
    their positions in the list of `slurm.design`, in the order of which they are submitted. Four
    runs of several processes, two in an array, under a throttle:

        0  trains A and B
        1  scores A and B   trained_by=0
        2  trains C and D                 after_array=0
        3  scores C and D   trained_by=2  after_array=1
        4  makes the tables, after all others
    """

    kind: JobKind
    runs: tuple[str, ...] = ()
    # The array that trains the same runs: each element waits for the one of its own run there.
    trained_by: int | None = None
    # The array that must end before this one begins: a throttle counts within one array only.
    after_array: int | None = None
    # False where Slurm has no arrays: the job then has one run. Never of a job that collects.
    is_array: bool = True

    def describe(self) -> str:
        """What the job does, in words."""
        if self.kind is JobKind.COLLECT:
            return "makes the tables"
        verb = "trains" if self.kind is JobKind.TRAIN else "scores"
        return f"{verb} {counted(len(self.runs), 'run')}"

    def dependency(self, submitted: Sequence[str], queued_before: Sequence[str] = ()) -> str:
        """For which jobs it waits, as the value of sbatch's --dependency; "" if for none.

        `submitted` are the ids of the launch's own jobs, by their positions. `queued_before` are
        those of arrays that earlier launches have queued: tables are made after them, too.
        """
        if self.kind is JobKind.COLLECT:
            return ",".join(f"afterany:{job_id}" for job_id in (*queued_before, *submitted))
        conditions = []
        if self.trained_by is not None:
            condition = "aftercorr" if self.is_array else "afterok"
            conditions.append(f"{condition}:{submitted[self.trained_by]}")
        if self.after_array is not None:
            conditions.append(f"afterany:{submitted[self.after_array]}")
        return ",".join(conditions)


def exported(sweep: Sweep, cluster: Cluster) -> list[str]:
    """The names of the submitting shell's variables that jobs see."""
    return [*LOGIN_VARIABLES, *environment_variables(sweep.backend), *cluster.pass_environment]


def job_name(sweep: Sweep, job: Job, job_folder: Path) -> str:
    """The name by which squeue tells which job of which sweep this is."""
    return f"{sweep.name}.{job.kind.value}.{job_folder.name}"


def parameters(
    sweep: Sweep, cluster: Cluster, job: Job, job_folder: Path, dependency: str
) -> dict[str, Any]:
    """The job's parameters, under submitit's names, as far as they have a value.

    `job_folder` is the job's folder, `dependency` what `Job.dependency` says of it.
    """
    nodes = _nodes(sweep, job)
    memory = cluster.memory_per_node
    if job.kind is JobKind.TRAIN:
        processes = sweep.world.processes_per_node
        time = cluster.time
    elif job.kind is JobKind.SCORE:
        processes = 1
        time = cluster.score_time
    else:
        processes = 0  # it reads files, on one CPU and no GPU
        time = cluster.score_time
        # A profile that asks for no memory may be of a cluster whose sbatch refuses --mem.
        if memory is not None:
            memory = COLLECT_MEMORY
    cpus = max(1, cluster.cpus_per_process * processes)
    extra = cluster.extra_options()
    values: dict[str, Any] = {
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "job_name": job_name(sweep, job, job_folder),
        "time": time,
        "nodes": nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "gpus_per_node": _gpus(cluster, processes),
        "mem": memory,
        "signal_delay_s": cluster.signal_seconds,
        "stderr_to_stdout": True,
        "additional_parameters": _additional_parameters(sweep, cluster, job, dependency),
    }
    if nodes > 1:
        # The element is then the batch job itself, on the first node, and starts the run's program
        # on each node by an srun of its own. That srun has all CPUs and GPUs of the job, and passes
        # on a preemption's TERM. If the element were itself started by an srun, as elsewhere, that
        # outer srun would hear TERM as well, and would kill the element and what it has started.
        values["use_srun"] = False
    elif job.kind is not JobKind.COLLECT:
        # Since Slurm 22.05, srun does not take the number of CPUs from its job.
        values["srun_args"] = [f"--cpus-per-task={extra.get('cpus-per-task', cpus)}"]
    if job.kind is not JobKind.COLLECT and job.is_array:
        values["map_count"] = len(job.runs)
        values["array_parallelism"] = sweep.throttle or ENDLESS
    values = _without_replaced(values, extra)
    parameters_with_value = {key: value for key, value in values.items() if value is not None}
    # submitit has a wckey of its own for whoever gives none; None is how to have none.
    parameters_with_value["wckey"] = None
    return parameters_with_value


def _without_replaced(values: Mapping[str, Any], extra: Mapping[str, str | bool]) -> dict[str, Any]:
    """The parameters without those that the profile's `extra` gives itself, and so replaces.

    Otherwise the script would have two lines for one option, of which sbatch takes the last. That
    may be ours: submitit sorts the lines by name, and `cpus-per-task`, as `extra` spells it, comes
    before `cpus_per_task`, as a parameter is called.
    """
    replaced = {name.replace("-", "_") for name in extra}
    return {name: value for name, value in values.items() if name not in replaced}


def _nodes(sweep: Sweep, job: Job) -> int:
    """On how many nodes a job, or each element of an array, runs."""
    return sweep.world.nodes if job.kind is JobKind.TRAIN else 1


def _gpus(cluster: Cluster, processes: int) -> str | int | None:
    """The value of `--gpus-per-node`; None for none."""
    count = cluster.gpus_per_process * processes
    if count == 0:
        return None
    if cluster.gpu_type:
        return f"{cluster.gpu_type}:{count}"
    return count


def _additional_parameters(
    sweep: Sweep, cluster: Cluster, job: Job, dependency: str
) -> dict[str, Any]:
    """The options of sbatch that submitit has no parameter for.

    True makes a flag without a value, as --requeue. An option that is not wanted must be absent: of
    None submitit would write --name=None.
    """
    # The list replaces sbatch's default, ALL: the submitting shell's tokens must not travel.
    options: dict[str, Any] = {"export": ",".join(exported(sweep, cluster)), "requeue": True}
    if _nodes(sweep, job) > 1:
        # With B:, Slurm signals the batch script, which is the element here: see `parameters`.
        # Without it, only what a job has started by srun would get the signal.
        options["signal"] = f"B:USR2@{cluster.signal_seconds}"
    if cluster.clusters is not None:
        options["clusters"] = cluster.clusters
    options.update(cluster.extra_options())
    if job.trained_by is not None:
        # An element whose training failed must not wait for ever.
        options["kill-on-invalid-dep"] = "yes"
    if dependency:
        options["dependency"] = dependency
    return options


def script(
    sweep: Sweep,
    cluster: Cluster,
    job: Job,
    job_folder: Path,
    code_folder: Path,
    dependency: str,
) -> str:
    """The script of a job.

    Its files are in `job_folder`, and it runs the packages in `code_folder`. `dependency` is what
    `Job.dependency` says of it.
    """
    python = cluster.python
    if python == "auto":
        python = shlex.quote(sys.executable)
    lines = setup(cluster, code_folder)
    if job.kind is JobKind.COLLECT:
        sweep_folder = job_folder.parents[1]
        command = f"{python} -m sweeps collect {shlex.quote(str(sweep_folder))}"
    else:
        lines += copy_pickle_lines(job_folder, job.is_array)
        command = element_command(python, job_folder)
        if _nodes(sweep, job) > 1:
            command = f"exec {command}"  # signals reach the batch job's own process alone
    is_in_container = " " in cluster.python and job.kind is not JobKind.COLLECT
    if is_in_container:
        lines.append("trap : TERM  # of the time limit, which the lines behind the command outlive")
    text = script_text(
        command, job_folder, lines, parameters(sweep, cluster, job, job_folder, dependency)
    )
    if is_in_container:
        text += "\n".join(["", *requeue_lines(job_folder, job.is_array), ""])
    return text


def requeue_lines(job_folder: Path, is_array: bool) -> list[str]:
    """Shell lines behind the command, which requeue the job where an element has asked for it.

    In a container there may be no scontrol: see `element.ask_script`. What Slurm says of the job
    decides, as in `element.may_requeue`: it does not come back from a scancel, and not twice from a
    requeue by somebody else. Where Slurm does not answer, it is asked again.
    """
    folder = shlex.quote(str(job_folder))
    return [
        f"code=$? job={label_in_script(is_array)}",
        f"request={folder}/$job{REQUEUE_REQUEST}",
        'while [ -e "$request" ]; do',
        '    case $(scontrol show job "$job") in',
        '    *JobState=CANCELLED* | *JobState=PENDING*) rm "$request" ;;',
        "    *JobState=RUNNING* | *Reason=TimeLimit* | *PreemptTime=[0-9]*)",
        '        scontrol requeue "$job" && rm "$request" || sleep 10 ;;',
        '    *JobState=*) rm "$request" ;;',
        "    *) sleep 10 ;;",
        "    esac",
        "done",
        "exit $code",
    ]


def setup(cluster: Cluster, code_folder: Path) -> list[str]:
    """The shell lines of a job before its command."""
    lines = [
        # Whoever reads the script finds the list in its line with --export.
        "unset SLURM_EXPORT_ENV  # srun hands on what this job has, which is the list above",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
    ]
    if not cluster.cache:
        # These come first, so that /etc/profile, modules and setup lines can still override them.
        for name, value in job_variables().items():
            if name not in cluster.pass_environment:
                lines.append(f"export {name}={shlex.quote(value)}")
    if cluster.modules:
        lines.append("command -v module >/dev/null || . /etc/profile")
        lines.append(f"module load {shlex.join(cluster.modules)} || exit 1")  # module says why
    if cluster.offline:
        lines.append("export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1")
        lines.append("export WANDB_MODE=offline")
    if cluster.cache:
        lines.append(f"export HF_HOME={_quoted(cluster.cache)}")
    if cluster.setup:
        lines.append("set -e")
        lines.extend(cluster.setup)
        lines.append("set +e")
    lines.append(f"export PYTHONPATH={shlex.quote(str(code_folder))}${{PYTHONPATH:+:$PYTHONPATH}}")
    if cluster.secrets_file:
        lines.append(f"secrets_file={_quoted(cluster.secrets_file)}")
        lines.extend(READ_SECRETS.splitlines())
    lines.append("set -u")  # only now: module files and setup lines rarely stand it
    lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cluster.cpus_per_process}}}"')
    return lines


def _quoted(path: str) -> str:
    """A path of the profile in double quotes: the job replaces `$NAME`, `$$` is a dollar.

    All else that a shell would read in double quotes is escaped.
    """
    read_by_shells = r'\$\$|\$(?![A-Za-z_{])|[\\"`]'
    escaped = re.sub(read_by_shells, lambda match: "\\" + match[0][0], path)
    return f'"{escaped}"'

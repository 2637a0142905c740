"""What sbatch is handed: a function of sweep, profile and places alone, in submitit's words."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from submitit.slurm.slurm import _make_sbatch_string

from sweeps.runs.backend import environment_variables
from sweeps.runs.schema import Cluster, Sweep

# What a job may see of the submitting shell, apart from its backend's variables and the profile's
# pass_environment.
EXPORTED = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "SLURM_CONF")
COLLECT_MEMORY = "4G"  # tables over hundreds of record files
ENDLESS = 1_000_000  # timeouts that submitit allows; runs give up without progress


@dataclass(frozen=True)
class Job:
    """One sbatch call: what it does, and for which runs."""

    what: str  # train, score, collect
    names: tuple[str, ...] = ()
    after_training: bool = False  # each element after that of the array before


def exported(sweep: Sweep, cluster: Cluster) -> list[str]:
    """The names of the submitting shell's variables that jobs see."""
    return [*EXPORTED, *environment_variables(sweep.backend), *cluster.pass_environment]


def parameters(sweep: Sweep, cluster: Cluster, job: Job, place: Path, ids: list[str]) -> dict:
    """What submitit is told of a job."""
    trains, collects = job.what == "train", job.what == "collect"
    processes = sweep.world.processes_per_node if trains else not collects
    cpus, gpus = cluster.cpus_per_process * processes or 1, cluster.gpus_per_process * processes
    # A list, not ALL: the submitting shell's tokens must not travel.
    more = {"export": ",".join(exported(sweep, cluster)), "requeue": True}
    for option in cluster.extra:
        key, _, value = option.removeprefix("--").partition("=")
        more[key] = value or True
    found = {key: getattr(cluster, key) for key in ("account", "partition", "qos", "constraint")}
    found |= {
        "job_name": f"{sweep.name}.{job.what}.{place.name}",
        "time": cluster.time if trains else cluster.score_time,
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "gpus_per_node": f"{cluster.gpu_type}:{gpus}" if gpus and cluster.gpu_type else gpus,
        "mem": cluster.memory_per_node
        and (COLLECT_MEMORY if collects else cluster.memory_per_node),
        "signal_delay_s": cluster.signal_seconds,
        "stderr_to_stdout": True,
        "additional_parameters": more,
    }
    if job.after_training:  # what waits for a training that failed must not wait for ever
        more |= {"dependency": f"aftercorr:{ids[-1]}", "kill-on-invalid-dep": "yes"}
    if collects:
        more["dependency"] = ",".join(f"afterany:{one}" for one in ids)
        found["use_srun"] = False
    else:  # srun takes the number of CPUs from nobody since 22.05
        found["srun_args"] = [f"--cpus-per-task={cpus}"]
        found |= {"map_count": len(job.names), "array_parallelism": sweep.throttle or ENDLESS}
    return {key: value for key, value in found.items() if value not in (None, 0)} | {"wckey": None}


def script(
    sweep: Sweep, cluster: Cluster, job: Job, place: Path, code: Path, ids: list[str]
) -> str:
    """The script of a job whose folder is `place`; it waits for `ids`. Needs no Slurm."""
    python = shlex.quote(sys.executable) if cluster.python == "auto" else cluster.python
    asked = parameters(sweep, cluster, job, place, ids)
    lines, quoted = setup(cluster, code), shlex.quote(str(place))
    command = f"{python} -m sweeps collect {shlex.quote(str(place.parents[1]))}"
    if job.what != "collect":
        command = f"{python} -u -m submitit.core._submit {quoted}"
        # In place of submitit's own rename after sbatch, before which a launch may be killed.
        lines.append(
            f"mine={quoted}/${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}_submitted.pkl"
        )
        lines.append(f'cp {quoted}/element.pkl "$mine"; rm -f "$mine.save_tmp"')
    return _make_sbatch_string(command, place, setup=lines, **asked)


def setup(cluster: Cluster, code: Path) -> list[str]:
    """The shell lines before the work."""
    lines = [
        "unset SLURM_EXPORT_ENV  # srun hands on what this job has, which is the list above",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
    ]
    if cluster.modules:
        lines.append("command -v module >/dev/null || . /etc/profile")
        lines.append(f"module load {shlex.join(cluster.modules)} || exit 1")  # which says why
    if cluster.offline:
        lines.append("export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1")
        lines.append("export WANDB_MODE=offline")
    if cluster.cache:
        lines.append(f'export HF_HOME="{cluster.cache}"')  # with $VARIABLES of the job
    if cluster.setup:
        lines += ["set -e", *cluster.setup, "set +e"]
    lines.append(f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}")
    if cluster.secrets_file:
        lines.append(f'set -ae; . "{cluster.secrets_file}"; set +ae')
    lines.append("set -u")  # not before: module files and set-up lines rarely stand it
    lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cluster.cpus_per_process}}}"')
    return lines

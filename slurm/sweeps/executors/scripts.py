"""What submitit is told about a job: a pure function of sweep, profile and places."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster import Cluster, mebibytes, seconds
from sweeps.config import Sweep
from sweeps.files import SweepError
from sweeps.provenance import PROJECT

# What a job may see of the submitting shell, apart from the profile's pass_environment.
EXPORTED = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "SLURM_CONF")
EXPORTED += ("OPEN_INSTRUCT_DIR",)  # where the open-instruct backend finds the checkout
COLLECT_TIME, COLLECT_MEMORY = "1:00:00", "4G"  # tables over hundreds of record files
ENDLESS = 1_000_000  # timeouts that submitit allows; the supervisor gives up without progress


@dataclass(frozen=True)
class Places:
    """Absolute paths that the scripts mention."""

    project: Path  # where relative paths of the sweep file start
    jobs: Path  # this submission's folder: sweep.yaml, lists, and submitit's scripts and outputs


def limit(cluster: Cluster, what: str) -> int:
    """Seconds that a job of this kind may take."""
    if what == "collect":  # a queue that takes scoring takes this
        return min(seconds(cluster.score_time), seconds(COLLECT_TIME))
    return seconds(cluster.time if what == "train" else cluster.score_time)


def parameters(
    sweep: Sweep, cluster: Cluster, places: Places, what: str, stage: str, dependency: str = ""
) -> dict:
    """The parameters of submitit's SlurmExecutor for a job that does `what`."""
    world = sweep.world
    nodes, processes = (world.nodes, world.processes_per_node) if what == "train" else (1, 1)
    cpus = 1 if what == "collect" else cluster.cpus_per_process * processes
    gpus = 0 if what == "collect" else cluster.gpus_per_process * processes
    memory = cluster.memory_per_node
    if memory and what == "collect":
        memory = min(memory, COLLECT_MEMORY, key=mebibytes)
    # A list, not ALL: the submitting shell's tokens must not travel.
    more = {"export": ",".join([*EXPORTED, *cluster.pass_environment]), "requeue": True}
    if dependency:  # a job that waits for what can never be must not wait for ever
        more |= {"dependency": dependency, "kill-on-invalid-dep": "yes"}
    for option in cluster.extra:
        key, _, value = option.removeprefix("--").partition("=")
        more[key] = value or True
    found = {
        # Unique to this submission, so that squeue alone tells which runs are queued.
        "job_name": f"{sweep.name}.{stage}.{places.jobs.name}",
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "time": max(1, limit(cluster, what) // 60),
        "nodes": nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "gpus_per_node": f"{cluster.gpu_type}:{gpus}" if gpus and cluster.gpu_type else gpus,
        "mem": memory,
        "array_parallelism": sweep.throttle or cluster.array_limit,
        "signal_delay_s": cluster.signal_seconds,
        "stderr_to_stdout": True,
        "wckey": None,
        "setup": _setup(cluster, sweep.cluster, places, nodes),
        # srun takes this from nobody since 22.05
        "srun_args": [f"--cpus-per-task={cpus}", "--kill-on-bad-exit=1"],
        "additional_parameters": more,
    }
    return {key: value for key, value in found.items() if value or key == "wckey"}


def executor(sweep: Sweep, cluster: Cluster, places: Places, what: str, stage: str, **more: str):
    """submitit's executor for a job; raises SweepError without submitit or without Slurm."""
    submitit = _submitit()

    class Executor(submitit.SlurmExecutor):
        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # SBATCH_ACCOUNT and the like, of the shell, would override the profile.
            seen = [f"{key}={value}" for key, value in environment(cluster).items()]
            return ["env", "-i", *seen, *super()._make_submission_command(submission_file_path)]

    made = Executor(places.jobs, max_num_timeout=ENDLESS, python=_python(cluster))
    made.update_parameters(**parameters(sweep, cluster, places, what, stage, **more))
    return made


def text(
    sweep: Sweep,
    cluster: Cluster,
    places: Places,
    what: str,
    stage: str,
    count: int = 1,
    **more: str,
) -> str:
    """The script that submitit hands to sbatch for `count` elements; needs no Slurm."""
    _submitit()
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{_python(cluster)} -u -m submitit.core._submit {shlex.quote(str(places.jobs))}"
    asked = parameters(sweep, cluster, places, what, stage, **more)
    array = count if count > 1 else None
    return _make_sbatch_string(command, places.jobs, map_count=array, **asked)


def environment(cluster: Cluster) -> dict[str, str]:
    """What sbatch itself gets to see."""
    allowed = {*EXPORTED, *cluster.pass_environment}
    return {key: value for key, value in os.environ.items() if key in allowed}


def _submitit():
    try:
        import submitit
    except ImportError:
        wanted = f"{sys.executable} -m pip install 'submitit>=1.5.4'"
        raise SweepError(f"package submitit is not installed: {wanted}") from None
    return submitit


def _setup(cluster: Cluster, file: str | None, places: Places, nodes: int) -> list[str]:
    packages = ":".join(str(PROJECT / name) for name in ("kernel", "slurm", "eval"))
    lines = [
        "unset SLURM_EXPORT_ENV  # srun hands on what this job has, which is the list above",
        f"cd {shlex.quote(str(places.project))} || exit 1",
        f"export PYTHONPATH={shlex.quote(packages)}",
    ]
    if cluster.modules:
        lines.append("command -v module >/dev/null || . /etc/profile")
        load = f"module load {shlex.join(cluster.modules)}"
        failed = shlex.quote(f"error: {load} failed (modules: in {file})")
        lines.append(f"{load} || {{ echo {failed} >&2; exit 1; }}")
    if cluster.offline:
        lines.append("export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1")
        lines.append("export WANDB_MODE=offline")
    if cluster.cache:
        lines.append(f'export HF_HOME="{cluster.cache}"')
    if cluster.scratch:
        lines.append(f'export TMPDIR="{cluster.scratch}"')
    lines += [f'export {key}="{value}"' for key, value in cluster.environment.items()]
    if nodes == 1:
        lines += cluster.setup
    elif cluster.setup:  # this script runs on the first node only, the node-local disks are many
        lines.append(
            f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 bash -eu <<'SETUP'"
        )
        lines += [*cluster.setup, "SETUP"]
    if cluster.secrets_file:
        # tested by itself: a file whose last line is merely false is no reason to end
        file = f'"{cluster.secrets_file}"'
        lines.append(f'[[ -r {file} ]] || {{ echo "error: no" {file} >&2; exit 2; }}')
        lines.append(f"set -a; . {file}; set +a")
    lines.append("set -u")  # not before: module files and set-up lines rarely stand it
    lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cluster.cpus_per_process}}}"')
    return lines


def _python(cluster: Cluster) -> str:
    return shlex.quote(sys.executable) if cluster.python == "auto" else cluster.python

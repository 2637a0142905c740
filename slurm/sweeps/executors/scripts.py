"""The sbatch scripts of a sweep, as text: a pure function of plan, profile and places.

They are written here rather than by submitit because every line matters: what is exported, what a
signal does, which element is requeued (slurm/README.md says more).
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster import Cluster, mebibytes, seconds
from sweeps.config import Sweep
from sweeps.provenance import PROJECT

# What a job may see of the submitting shell, apart from the profile's pass_environment.
EXPORTED = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "SLURM_CONF")
EXPORTED += ("OPEN_INSTRUCT_DIR",)  # where the open-instruct backend finds the checkout


COLLECT_MEMORY = "4G"  # tables over hundreds of record files


@dataclass(frozen=True)
class Places:
    """Absolute paths that the scripts mention."""

    project: Path  # where relative paths of the sweep file start
    jobs: Path  # this submission's folder: sweep.yaml, lists, scripts, logs

    @property
    def tag(self) -> str:
        return self.jobs.name


def job_name(sweep: Sweep, stage: str, places: Places) -> str:
    """Unique to this submission, so that squeue alone tells which runs are queued."""
    return f"{sweep.name}.{stage}.{places.tag}"


def train(sweep: Sweep, cluster: Cluster, places: Places, count: int, part: int) -> str:
    """An array of training elements; line i of train-<part>.txt is element i's run folder."""
    world = sweep.world
    cpus = cluster.cpus_per_process * world.processes_per_node
    head = _head(sweep, cluster, places, f"train-{part}", cluster.time, cpus)
    head += [
        f"#SBATCH --array=0-{count - 1}" + (f"%{sweep.throttle}" if sweep.throttle else ""),
        f"#SBATCH --nodes={world.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *_gpus(cluster, world.processes_per_node),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=B:USR2@{cluster.signal_seconds}",
    ]
    python = _python(cluster)
    body = f"""
run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quote(places.jobs / f"train-{part}.txt")})
asked= child= limit={seconds(cluster.time)}
ask() {{ asked=$1; touch "$run/stop"; [[ -z $child ]] || kill "-$2" "$child" 2>/dev/null; }}
# Before the time limit and on preemption: save, then requeue this element alone.
trap 'ask requeue USR2' USR2
# scancel: save and leave. The limit itself ends in TERM too, where saving outlasts the warning.
trap 'if ((SECONDS < limit - 60)); then ask leave TERM; else ask requeue TERM; fi' TERM
srun --nodes={world.nodes} --ntasks={world.nodes} --ntasks-per-node=1 --cpus-per-task={cpus} \\
    --kill-on-bad-exit=1 {python} -m sweeps train "$run" \\
    --idle-restarts {sweep.max_idle_restarts} &
child=$!
while :; do
    wait "$child" && code=0 || code=$?
    kill -0 "$child" 2>/dev/null || break
done
if [[ $asked == requeue && $code != 0 && $code != 1 && ! -e $run/DONE ]]; then
    echo "requeue: ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && exit 75
fi
exit "$code"
"""
    return _assemble(head, _preamble(cluster, places, world.nodes), body)


def score(sweep: Sweep, cluster: Cluster, places: Places, count: int, stage: str, part: int) -> str:
    """An array of scoring elements; line i of <stage>-<part>.txt is what element i scores."""
    head = _head(
        sweep, cluster, places, f"{stage}-{part}", cluster.score_time, cluster.cpus_per_process
    )
    head += [
        f"#SBATCH --array=0-{count - 1}" + (f"%{sweep.throttle}" if sweep.throttle else ""),
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        *_gpus(cluster, 1),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    body = f"""
subject=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quote(places.jobs / f"{stage}-{part}.txt")})
exec {_python(cluster)} -m sweeps score {_quote(places.jobs / "sweep.yaml")} --only "$subject"
"""
    return _assemble(head, _preamble(cluster, places), body)


def collect(sweep: Sweep, cluster: Cluster, places: Places) -> str:
    """Tables, diagrams and the list of gaps; first sends off again what died without a word."""
    time = min(cluster.score_time, "1:00:00", key=seconds)  # no queue need take more than scoring
    head = _head(sweep, cluster, places, "collect", time, 1, memory=COLLECT_MEMORY)
    head += ["#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --requeue"]
    body = f"""
exec {_python(cluster)} -m sweeps collect {_quote(places.jobs / "sweep.yaml")} --resubmit
"""
    return _assemble(head, _preamble(cluster, places), body)


def _head(
    sweep: Sweep,
    cluster: Cluster,
    places: Places,
    stage: str,
    time: str,
    cpus: int,
    memory: str | None = None,
) -> list[str]:
    element = "%A_%a" if stage != "collect" else "%j"
    lines = [
        "#!/bin/bash -l" if cluster.modules else "#!/bin/bash",  # -l: defines `module`
        f"#SBATCH --job-name={job_name(sweep, stage, places)}",
        f"#SBATCH --output={_quote(places.jobs / 'logs' / f'{stage}-{element}.out')}",
        f"#SBATCH --time={time}",
        f"#SBATCH --cpus-per-task={cpus}",
        # A list, not ALL: the submitting shell's tokens must not travel.
        f"#SBATCH --export={','.join([*EXPORTED, *cluster.pass_environment])}",
    ]
    for key in ("account", "partition", "qos", "constraint"):
        if getattr(cluster, key):
            lines.append(f"#SBATCH --{key}={getattr(cluster, key)}")
    if cluster.memory_per_node:
        memory = min(memory or cluster.memory_per_node, cluster.memory_per_node, key=mebibytes)
        lines.append(f"#SBATCH --mem={memory}")
    return [*lines, *(f"#SBATCH {option}" for option in cluster.extra)]


def _gpus(cluster: Cluster, processes: int) -> list[str]:
    count = cluster.gpus_per_process * processes
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    return [f"#SBATCH --gpus-per-node={kind}{count}"] if count else []


def _preamble(cluster: Cluster, places: Places, nodes: int = 1) -> list[str]:
    lines = [
        "unset SLURM_EXPORT_ENV  # srun hands on what this job has, which is the list above",
        f"cd {_quote(places.project)} || exit 1",
        f"export PYTHONPATH={_quote(python_path())}",
    ]
    if cluster.modules:
        lines.append("module load " + " ".join(shlex.quote(name) for name in cluster.modules))
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
        secrets = cluster.secrets_file
        lines += [
            f'secrets="{secrets}"',
            'if [[ $(stat -c %a "$secrets") != 600 ]]; then',
            '    echo "error: $secrets: expected mode 600; chmod 600 it" >&2; exit 2',
            "fi",
            'set -a; . "$secrets"; set +a',
        ]
    lines.append("set -u")  # not before: module files and set-up lines rarely stand it
    lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cluster.cpus_per_process}}}"')
    return lines


def python_path() -> str:
    """This checkout's packages, whatever is installed."""
    return ":".join(str(PROJECT / name) for name in ("kernel", "slurm", "eval"))


def _python(cluster: Cluster) -> str:
    return _quote(sys.executable) if cluster.python == "auto" else cluster.python


def _quote(path: Path | str) -> str:
    return shlex.quote(str(path))


def _assemble(head: list[str], preamble: list[str], body: str) -> str:
    return "\n".join([*head, *preamble]) + "\n" + body.lstrip("\n")

"""Cluster profiles: what differs between clusters, and nothing that belongs to a sweep."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sweeps.config import Seq, Strict, check, each_text, read_yaml, refuse_other
from sweeps.files import SweepError

DURATION = r"^(\d+-)?\d{1,2}(:\d{2}){0,2}$"
MEMORY = r"^\d+[KMGT]?$"
OPTION = r"^--[a-z-]+(=.+)?$"
NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


class Cluster(Strict):
    """A file of configs/cluster; generic.yaml documents every key."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str = Field("1-00:00", pattern=DURATION, examples=["0-12:00"])  # of a training element
    score_time: str = Field("4:00:00", pattern=DURATION, examples=["4:00:00"])
    cpus_per_process: int = Field(4, ge=1)
    gpus_per_process: int = Field(1, ge=0)
    gpu_type: str | None = None
    memory_per_node: str | None = Field(None, pattern=MEMORY, examples=["64G"])
    array_limit: int = Field(1000, ge=1)  # the cluster's MaxArraySize - 1
    signal_seconds: int = Field(300, ge=1)  # warning before the time limit, for the checkpoint
    modules: Seq[str] = ()
    setup: Seq[str] = ()  # shell lines before anything of ours runs
    python: str = "auto"  # auto: the project's .venv, else the python3 that submitted
    environment: dict[str, str] = Field({})
    pass_environment: Seq[str] = ()  # variables copied from the submitting shell
    secrets_file: str | None = None  # NAME=value lines, mode 0600, read inside the job only
    offline: bool = False  # compute nodes have no internet
    cache: str | None = None  # HF_HOME: what `prefetch` fills and the jobs read
    wheels: str | None = None  # where `prefetch` puts packages for `setup` to install
    packages: Seq[str] = ()  # more requirements for `wheels`, for example flash-attn
    scratch: str | None = None  # TMPDIR on the node
    extra: Seq[Annotated[str, Field(pattern=OPTION)]] = ()  # more of sbatch's, --mail-type=FAIL


def load_cluster(path: str | None) -> Cluster:
    """Read a profile; None is the defaults. Raises SweepError naming file, key, value, expected."""
    if path is None:
        return Cluster()
    raw = read_yaml(Path(path))
    expected = "a cluster profile is expected, for example configs/cluster/generic.yaml"
    refuse_other(raw, Cluster, expected, str(path))
    raw = each_text(raw, lambda _, text: os.path.expanduser(text))
    cluster = check(Cluster, raw, path)
    for key in ("time", "score_time"):
        if seconds(limit := getattr(cluster, key)) <= (ahead := cluster.signal_seconds):
            why = f"signal_seconds ({ahead}): a job saves and leaves that long before its limit"
            raise SweepError(f"{path}: {key}: found {limit!r}, expected more than {why}")
    return cluster


def variables(text: str | None) -> list[str]:
    """The names of the variables in `text`."""
    return re.findall(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)", text or "")


def expand(key: str, text: str) -> str:
    """A path as a shell reads it, `~` and variables replaced; SweepError names one not set."""
    for name in variables(text):
        if name not in os.environ:
            raise SweepError(
                f"{key}: {text}: ${name} is not set in this shell: export {name}=/a/folder, or "
                "write the folder itself"
            )
    found = os.path.expanduser(os.path.expandvars(text))
    if found.startswith("~"):
        raise SweepError(f"{key}: {text}: no such user's home; write the folder itself")
    return found


def seconds(duration: str) -> int:
    """A time limit as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = duration.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(a * b for a, b in zip(parts, units, strict=False))


def mebibytes(memory: str) -> int:
    """An amount of memory as sbatch reads it: a number of megabytes, or with K, M, G or T."""
    number, unit = (memory[:-1], memory[-1]) if memory[-1] in "KMGT" else (memory, "M")
    return int(number) * 1024 ** "KMGT".index(unit) // 1024

"""Sweep and cluster files: YAML and dotted overrides → frozen, checked models.

Whatever is wrong ends in one message: file and line (or the override), key, value, what to do.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from calibeval.io import read_text
from calibeval.request import Natural, Positive, Request, Seq, Strict
from calibeval.tasks import SPLITS
from sweeps.runs.yaml_io import check, read_yaml

Time = Annotated[str, Field(pattern=r"^((\d+-)?\d+(:\d+){0,2}|INFINITE|UNLIMITED)$")]
HELD_OUT = "held_out_loss"  # of conversations that are never trained on, without smoothing


def option(default: Any, description: str, **constraints: Any) -> Any:
    """A field with its documentation, which `python -m sweeps keys` prints."""
    return Field(default, description=description, **constraints)


class DistributedConfig(Strict):
    """The processes of one run: their number changes the global batch, so it is part of the run."""

    processes_per_node: Positive = option(1, "processes of a run, one a GPU, on one machine")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", "of forward and backward passes")
    deepspeed: str | None = option(None, "a DeepSpeed JSON file")
    fsdp: str | None = option(None, "a JSON file with transformers' `fsdp_config`")

    @property
    def single_process(self) -> bool:
        """Whether a run is one process, which goes on to score what it has trained."""
        return self.processes_per_node == 1 and self.deepspeed is None and self.fsdp is None

    def read(self, key: str) -> dict | None:
        """What the file of `deepspeed` or `fsdp` says; None without one."""
        file = getattr(self, key)
        return file and json.loads(read_text(Path(file)))


class Score(Request):
    """What is asked of each trained model, and how."""

    python: str | None = option(None, "interpreter that scores, where the training one lacks vLLM")
    base: bool = option(True, "also ask the model before fine-tuning")
    revision: None = option(None, "always null: train.model_revision is the base model's")
    select_on: str | None = option(
        None, f"a validation task that chooses the learning rate, or {HELD_OUT}"
    )
    columns: str = option("accuracy,ece,rms", "of tables: see `calibeval collect --help`")

    @model_validator(mode="after")
    def _sense(self) -> "Score":
        if self.columns != "accuracy,ece,rms":
            from calibeval.report import read_columns  # which takes pandas along

            read_columns(self.columns)
        names = [one.key for one in self.tasks]
        if self.select_on not in (None, HELD_OUT, *names):
            raise ValueError(f"select_on: {self.select_on!r} is none of {[*names, HELD_OUT]}")
        for task in self.tasks:
            shown, other = SPLITS.get(task.task, (None, None))
            if shown and task.key == self.select_on and task.split in (None, shown):
                asks = f"select_on: {task.key} asks the {shown} split, which the tables show"
                raise ValueError(f"{asks}; name a task with split: {other}, or null")
        return self


class Dataset(Strict):
    """A hub data set with `messages` or ShareGPT's `conversations`, written as JSON lines."""

    hub: str = option(..., "owner/name")
    to: str = option(..., "the file made")
    split: str = option("train", "of the data set")
    revision: str | None = option(None, "a branch, tag or commit")


class Archive(Strict):
    """An archive (tar, zip, …), unpacked into a folder; or a file of another kind."""

    url: str = option(..., "where it lies")
    to: str = option(..., "the folder or file made")
    strip: Natural = option(0, "leading folders of the archive's names to leave out")


class Prefetch(Strict):
    """What `prefetch` fetches where there is internet, apart from what `train` names."""

    datasets: Seq[Dataset] = option((), "a list of:")
    archives: Seq[Archive] = option((), "a list of:")
    made_by: str | None = option(None, "the command that makes what cannot be fetched")


class Sweep(Strict):
    """A sweep file."""

    name: str = option(..., "its folder in output_root", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_root: str = option(..., "folder of sweeps")
    backend: str = option("trainer", "what trains: trainer, open-instruct, or a module's name")
    train: dict[str, Any] = option(..., "keys of the backend, for every run")
    grid: dict[str, Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]] = option(
        {}, "lists of values of such keys: every combination is a run"
    )
    world: DistributedConfig = option(DistributedConfig(), "processes of one run")
    score: Score | None = option(None, "what the models are asked; null: they are only trained")
    prefetch: Prefetch = option(Prefetch(), "what to fetch")
    cluster: str | None = option(None, "a cluster profile; null: its defaults")
    workers: Positive | None = option(None, "runs at a time without Slurm; null: one a GPU, else 1")
    throttle: Positive | None = option(None, "runs at a time with Slurm; null: all that it starts")
    keep: Literal["all", "scores"] = option("all", "scores: models go once they are scored")
    max_idle_restarts: Natural = option(3, "restarts in a row without a new checkpoint")
    model_labels: dict[str, str] = option({}, "model_name_or_path: its name in tables")

    @model_validator(mode="after")
    def _sense(self) -> "Sweep":
        if twice := self.grid.keys() & self.train.keys():
            name = min(twice)
            one = f"override with 'grid.{name}=[{self.train[name]}]'"
            raise ValueError(f"grid.{name}: is given in `train` too; keep one, or {one}")
        on = self.score and self.score.select_on
        if on == HELD_OUT and not {**self.train, **self.grid}.get("held_out"):
            raise ValueError(f"score.select_on: {HELD_OUT} needs train.held_out")
        return self


class Cluster(Strict):
    """A cluster profile: what differs between clusters, and nothing that belongs to a sweep."""

    account: str | None = option(None, "sbatch --account")
    partition: str | None = option(None, "sbatch --partition")
    qos: str | None = option(None, "sbatch --qos")
    constraint: str | None = option(None, "sbatch --constraint, for example h100")
    time: Time = option("1-00:00", "of a job; a run is warned before, saves and goes on")
    score_time: Time = option("4:00:00", "of a job that only scores, or collects")
    cpus_per_process: Positive = option(4, "a process is one GPU's worth")
    gpus_per_process: Natural = option(1, "0 on a cluster without GPUs")
    gpu_type: str | None = option(None, "sbatch --gpus-per-node=TYPE:N")
    memory_per_node: str | None = option(None, "sbatch --mem, for example 64G")
    signal_seconds: Positive = option(300, "how long before the time limit a run saves")
    modules: Seq[str] = option((), "module load …")
    setup: Seq[str] = option((), "shell lines, `export X=…` among them; the first to fail ends all")
    python: str = option("auto", "command in the job; auto: the interpreter that submits")
    pass_environment: Seq[str] = option((), "variables to copy from the shell; no others are")
    secrets_file: str | None = option(None, "NAME=value lines, tokens', read in jobs; chmod 600")
    offline: bool = option(False, "nodes have no internet: Hugging Face and wandb make no call")
    cache: str | None = option(None, "HF_HOME of the jobs, which prefetch fills")
    extra: Seq[Annotated[str, Field(pattern=r"^--[a-z-]+(=.+)?$")]] = option(
        (), "more of sbatch's, --mail-type=FAIL"
    )


def documentation(schema: dict, kinds: dict[str, dict], indent: str = "") -> Iterator[str]:
    """Every key of a JSON schema, whose `$defs` are `kinds`, as lines of YAML: default, meaning."""
    for name, field in schema["properties"].items():
        parts = [field, field.get("items", {}), *field.get("anyOf", ())]
        inside = [kinds[part["$ref"].rpartition("/")[2]] for part in parts if "$ref" in part]
        known = name not in schema.get("required", ()) and not inside
        value = f" {json.dumps(field['default'])}" if known else ""
        words = [word for part in parts for word in part.get("enum", [part.get("const")]) if word]
        said = ["" if "default" in field else "required", field.get("description", "").rstrip(".")]
        said = "; ".join(filter(None, [*said, words and f"takes {', '.join(words)}"]))
        yield f"{indent}{name}:{value}  # {said}".rstrip("# ")
        for kind in inside:
            yield from documentation(kind, kinds, indent + "  ")


def load_cluster(path: str | None) -> Cluster:
    """A profile, or without a path the defaults; variables stay for the jobs to read."""
    if path is None:
        return Cluster()
    raw, places = read_yaml(Path(path))
    home = {k: os.path.expanduser(v) for k, v in raw.items() if isinstance(v, str)}
    return check(Cluster, raw | home, path, places)  # a job would read "~/x" as it stands

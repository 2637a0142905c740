"""The keys of sweep files and cluster profiles: models that check them, and what `keys` prints.

In this order: the types of values, which options of sbatch a profile may not hold, how a field is
declared, the models `Sweep` and `Cluster` with their parts,
the text of `python -m sweeps keys`, and reading a profile. (Sweep files are read by `runs.grid`.)

Whatever a key has wrong ends in one message: file and line (or override), key, value, remedy.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from calibeval.ask.request import DEFAULT_COLUMNS, Request
from calibeval.ask.tasks import splits_of
from calibeval.io import parse_json, read_text
from calibeval.validation import Natural, Positive, Seq, Strict
from sweeps.runs.files import found_path
from sweeps.runs.yaml_io import SECRET_NAME, build, key_error, read_yaml


def one_line(text: str) -> bool:
    """Whether a text has no line breaks, and no NUL, which ends a text for other programs."""
    return not re.search(r"[\n\r\0]", text)


def _check_line(text: str) -> str:
    if not one_line(text):
        raise PydanticCustomError("line", "must be one line")
    return text


Line = Annotated[str, AfterValidator(_check_line)]  # a text that a script for sbatch may hold


def _check_time(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|INFINITE|UNLIMITED", text, re.ASCII):
        raise PydanticCustomError("time", "write 12:00:00 (hours) or 1-00:00 (days-hours:minutes)")
    return text


def _check_memory(value: Any) -> Any:
    if isinstance(value, int):
        raise PydanticCustomError("memory", f"write the unit: {value}G (gigabytes)")
    return value


Memory = Annotated[Line, BeforeValidator(_check_memory)]
Time = Annotated[str, AfterValidator(_check_time)]  # a time limit as sbatch reads it


def limit_seconds(time: str) -> float:
    """The seconds of a time limit as sbatch reads it, such as 90 (minutes), 1:30:00 or 0-1:30."""
    if time in ("INFINITE", "UNLIMITED"):
        return math.inf
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # without days, one or two numbers begin with the minutes
    hours, minutes, seconds = [*parts, 0, 0][:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return total or math.inf  # to Slurm, 0 is no limit


# The loss without smoothing of conversations that are never trained on: as a column of metrics, and
# as a value of `select_on`. (The key `held_out` of `train:` says how many conversations these are.)
HELD_OUT_LOSS = "held_out_loss"

Keep = Literal["all", "scores"]  # what is kept of a run once it is done


# Options of sbatch that `extra` may not hold, and what to do instead: the jobs need their own.
RESERVED_OPTIONS = {
    "array": "each run is an element of it; throttle in the sweep limits how many run at a time",
    "export": "name variables in pass_environment",
    "export-file": "name variables in pass_environment",
    "output": "jobs print into jobs/ of the sweep's folder",
    "error": "jobs print into jobs/ of the sweep's folder",
    "open-mode": "what an earlier attempt has printed is kept",
    "signal": "signal_seconds says when a run is warned",
    "no-requeue": "runs requeue themselves at the time limit",
    "dependency": "jobs of a sweep wait for each other",
    "kill-on-invalid-dep": "jobs of a sweep wait for each other",
    "wait": "the launch would not return",
    "test-only": "launch --dry-run shows what is submitted",
    "wrap": "the jobs have a script",
    "nodes": "world.nodes of the sweep says on how many nodes a run trains",
    "ntasks": "world.processes_per_node says how many processes a run has",
    "ntasks-per-node": "world.processes_per_node says how many processes a run has",
    "ntasks-per-gpu": "world.processes_per_node says how many processes a run has",
    "tasks-per-node": "world.processes_per_node says how many processes a run has",
    "clusters": "name the cluster in clusters, for all of Slurm's tools",
    "job-name": "the name of the sweep begins that of its jobs, by which they are found again",
}


def _check_extra(text: str) -> str:
    """Refuse a reserved option; the value of --time is checked as that of `time`."""
    name, _, value = text.removeprefix("--").partition("=")
    for reserved, remedy in RESERVED_OPTIONS.items():
        if reserved.startswith(name):  # sbatch takes beginnings
            raise PydanticCustomError(
                "reserved",
                "--{name} is not for profiles: {remedy}",
                {"name": name, "remedy": remedy},
            )
    if name == "time":
        _check_time(value)
    return text


# What in a shell line is followed by a secret. It counts where a literal follows, and not what a
# variable or a command holds.
BEFORE_A_SECRET = (
    rf"\b{SECRET_NAME}=|--(?:token|password|api-key)[= ]|wandb login (?:--\w+ )*|://\w*:"
)
SECRET_IN_LINE = re.compile(rf"({BEFORE_A_SECRET})[\"']?[^\s$`\"'/-]")

ExtraOption = Annotated[str, Field(pattern=r"^--[a-z-]+(=.+)?$"), AfterValidator(_check_extra)]


def option(default: Any, description: str, **constraints: Any) -> Any:
    """A field of a model, with pydantic's constraints; `...` as its default makes it required.

    The description is what `python -m sweeps keys` prints of it.
    """
    return Field(default, description=description, **constraints)


class World(Strict):
    """The processes of one run: their number changes the global batch, so it is part of the run.

    `sweeps.training.options` says what a new way to shard a run over them needs.
    """

    nodes: Positive = option(
        1,
        "How many machines train one run together; more than one needs Slurm. An update has "
        "`nodes` times the conversations.",
    )
    processes_per_node: Positive = option(
        1,
        "How many processes of one run each machine has; each has a GPU of its own, or as many as "
        "`gpus_per_process` of the profile says. An update has `processes_per_node` times the "
        "conversations.",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = option(
        "no",
        "Precision of the forward and backward pass; weights and optimizer stay in fp32. "
        "bf16 is the usual choice on a GPU.",
    )
    deepspeed: str | None = option(
        None,
        "DeepSpeed configuration as a JSON file, for example "
        "configs/deepspeed/zero3.json, which shards the run; null uses no DeepSpeed.",
    )
    fsdp: str | None = option(
        None,
        "FSDP configuration (transformers' `fsdp_config`) as a JSON file, for example "
        "configs/fsdp/fsdp2.json; null uses no FSDP.",
    )

    @property
    def processes(self) -> int:
        """How many processes train one run, on all its machines together."""
        return self.nodes * self.processes_per_node

    @property
    def single_process(self) -> bool:
        """Whether a run trains without torchrun: it has one process, and nothing shards it.

        It is then trained and scored in one array element. One process under DeepSpeed or FSDP
        needs torchrun, and is scored apart, as several are.
        """
        return self.processes == 1 and self.deepspeed is None and self.fsdp is None

    def read(self, key: str) -> dict | None:
        """What the file of `deepspeed` or `fsdp` says; None without one.

        Raises InputError, which is a ValueError, where the file cannot be read, and json's
        ValueError where it is not JSON.
        """
        file = getattr(self, key)
        if file is None:
            return None
        content: dict = parse_json(read_text(Path(file)))
        return content


class Score(Request):
    """What is asked of each trained model, and how."""

    python: str | None = option(
        None,
        "Python interpreter that scores, for example /envs/vllm/bin/python, if the one "
        "that trains lacks vLLM; null uses the same for both.",
    )
    base: bool = option(True, "Whether the model before fine-tuning is asked too, for comparison.")
    # A key of `Request`, taken away here: a run's model has no revision on the hub.
    revision: None = option(None, "Must stay null: train.model_revision says it.")
    select_on: str | None = option(
        None,
        "Validation task whose accuracy (ties: NLL) chooses the rate, or held_out_loss; "
        "null shows all rates.",
    )
    columns: str = option(
        DEFAULT_COLUMNS,
        "Metrics that the tables show, separated by commas; `calibeval collect --help` lists them.",
    )

    @model_validator(mode="after")
    def _columns_are_known(self) -> "Score":
        if self.columns != DEFAULT_COLUMNS:
            from calibeval.report import read_columns

            read_columns(self.columns)
        return self

    @model_validator(mode="after")
    def _selects_on_validation_data(self) -> "Score":
        names = [task.key for task in self.tasks]
        if self.select_on not in (None, HELD_OUT_LOSS, *names):
            choices = [*names, HELD_OUT_LOSS]
            raise key_error("select_on", f"{self.select_on!r} is none of {choices}")
        for task in self.tasks:
            splits = splits_of(task.task)
            if task.key != self.select_on or splits is None:
                continue
            shown_split, other_split = splits
            if task.split in (None, shown_split):
                raise key_error(
                    "select_on",
                    f"{task.key} asks the {shown_split} split, which the tables show; name a task "
                    f"with split: {other_split}, or null",
                )
        return self


class Dataset(Strict):
    """A hub data set with `messages` or ShareGPT's `conversations`, written as JSON lines."""

    hub: str = option(
        ...,
        "Name of the data set on the hub, as owner/name.",
        # A word alone may be a reader of `datasets`, such as pandas, which used to unpickle.
        pattern=r"^[\w-][\w.-]*/[\w-][\w.-]*$",
    )
    to: str = option(
        ...,
        "File that the data set is written to, as JSON lines, below the project's folder, "
        "output_root or $SCRATCH.",
    )
    split: str = option("train", "Split of the data set that is taken.")
    revision: str | None = option(None, "Branch, tag or commit on the hub; null takes the newest.")


class Archive(Strict):
    """An archive (tar, zip, …), unpacked into a folder; or a file of another kind."""

    url: str = option(..., "Address of the file or archive: https://, without variables.")
    to: str = option(
        ...,
        "Folder that an archive is unpacked into, or file that another download becomes, below the "
        "project's folder, output_root or $SCRATCH.",
    )
    strip: Natural = option(
        0,
        "How many leading folders are left out of the names in the archive, as tar's "
        "--strip-components does; a file that is all an archive has becomes `to` itself.",
    )


class Prefetch(Strict):
    """What `prefetch` fetches where there is internet, apart from what `train` names."""

    # `keys` prints these two descriptions, and below each the keys of an item.
    datasets: Seq[Dataset] = option((), "List of:")
    archives: Seq[Archive] = option((), "List of:")
    made_by: str | None = option(
        None,
        "Command that makes what cannot be fetched; it is shown to whoever lacks the "
        "files, and not run.",
    )


class Sweep(Strict):
    """A sweep file.

    A new key is a field here. If launches alone read it, as `throttle` and `workers`, they find it
    here. If it is read while a run is worked on, as `keep`, it is a field of `runs.run.RunConfig`
    too, and `runs.grid` hands it on. If it decides a run's weights, see `RunConfig.digest`.
    """

    name: str = option(
        ...,
        "Name of the sweep, and of its folder in output_root.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    output_root: str = option(
        ..., "Folder that holds the folders of sweeps, for example runs/paper.", min_length=1
    )
    backend: str = option(
        "trainer",
        "What trains the runs: `trainer` (this project's), `open-instruct`, `command` (a script of "
        "your own), or the name of a Python module of your own.",
    )
    train: dict[str, Any] = option(
        ..., "Training options that all runs share; the keys are the backend's, listed below."
    )
    grid: dict[str, Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]] = option(
        {},
        "Training options that vary, each with a list of values, for example `seed: [1, "
        "2]`; every combination is a run.",
    )
    world: World = option(World(), "How one run is spread over GPUs.")
    score: Score | None = option(
        None, "What trained models are asked; null trains without scoring."
    )
    prefetch: Prefetch = option(Prefetch(), "What `prefetch` downloads where there is internet.")
    cluster: str | None = option(
        None,
        "Cluster profile, for example configs/cluster/generic.yaml; null uses the defaults below.",
    )
    workers: Positive | None = option(
        None,
        "How many runs train at the same time without Slurm; null takes one for each GPU, "
        "or 1 without any.",
    )
    throttle: Positive | None = option(
        None,
        "How many elements of one job array Slurm may run at the same time, so how many runs of "
        "a launch; null sets no limit. Runs of several processes are scored by an array of their "
        "own, and another launch has other arrays: each counts for itself.",
    )
    keep: Keep = option(
        "all",
        "What is kept of a finished run: `all`, or `scores` alone, which deletes a model "
        "once it is scored.",
    )
    max_idle_restarts: Natural = option(
        3,
        "How many restarts in a row may bring neither a checkpoint nor a record before a run "
        "fails.",
    )
    model_labels: dict[str, str] = option(
        {}, "Names that tables show for models, as `model_name_or_path: name`."
    )

    @model_validator(mode="after")
    def _keys_are_given_once(self) -> "Sweep":
        both = self.grid.keys() & self.train.keys()
        if both:
            name = min(both)
            raise key_error(
                f"grid.{name}",
                f"is given in `train` too; keep one: instead of train.{name}={self.train[name]}, "
                f"type 'grid.{name}=[{self.train[name]}]'",
            )
        return self

    @model_validator(mode="after")
    def _held_out_loss_is_measured(self) -> "Sweep":
        selects = self.score is not None and self.score.select_on == HELD_OUT_LOSS
        counts = self.grid.get("held_out", (self.train.get("held_out"),))
        if selects and not any(counts):  # of conversations that are held out; 0 is as good as none
            raise key_error("score.select_on", f"{HELD_OUT_LOSS} needs train.held_out")
        return self


class Cluster(Strict):
    """A cluster profile: what differs between clusters, and nothing that belongs to a sweep.

    A new key that is an option of sbatch belongs into `launch.sbatch`: into `parameters` where
    submitit has a parameter for it, else into `_additional_parameters`; `extra` overrides both. See
    too whether `runs.slurm_queue.explain_stuck` and `launch.slurm.advice` should name it to whoever
    has jobs that do not start, or are refused. One that changes what a job does before its command
    belongs into `launch.sbatch.setup`. What `--dry-run` shows of a job's options is a list in
    `launch.slurm.planned_jobs`.
    """

    account: Line | None = option(None, "Account that jobs are billed to (sbatch --account).")
    partition: Line | None = option(None, "Partition that jobs are queued in (sbatch --partition).")
    qos: Line | None = option(None, "Quality of service (sbatch --qos).")
    constraint: Line | None = option(
        None, "Features that a node must have, for example h100 (sbatch --constraint)."
    )
    clusters: Line | None = option(
        None,
        "Cluster that all of Slurm's tools are to ask (their --clusters), where they know several; "
        "null is the login node's own.",
        pattern="^[^,]+$",
    )
    time: Time = option(
        "1-00:00",
        "Time limit of a job that trains, as 12:00:00 (hours) or 1-00:00 (days-hours:"
        "minutes). A longer run saves before the limit, and goes on in a new job.",
    )
    score_time: Time = option(
        "4:00:00", "Time limit of a job that only scores, or makes the tables."
    )
    cpus_per_process: Positive = option(
        4, "CPU cores for each process of a run, that is, for each GPU."
    )
    gpus_per_process: Natural = option(1, "GPUs for each process; 0 on a cluster without GPUs.")
    gpu_type: Line | None = option(
        None,
        "Type of GPU that is asked for, for example h100 (sbatch --gpus-per-node=TYPE:N); "
        "null takes any.",
    )
    memory_per_node: Memory | None = option(
        None,
        "Memory of a node that a job gets, for example 64G (sbatch --mem); null takes the "
        "cluster's default. Scoring asks for as much.",
    )
    signal_seconds: Positive = option(
        300,
        "Seconds before the time limit at which a run is told to save; must be less than time "
        "and score_time.",
    )
    modules: Seq[Line] = option(
        (), "Modules that each job loads first (`module load`), for example [cuda/12.4]."
    )
    setup: Seq[str] = option(
        (),
        "Shell lines that each job runs before Python, for example "
        "`export NCCL_DEBUG=WARN`; the first that fails ends the job.",
    )
    python: Line = option(
        "auto", "Python interpreter of the jobs; `auto` is the one that submits them."
    )
    pass_environment: Seq[Line] = option(
        (),
        "Names of environment variables that jobs take over from your shell, beside a login's "
        "and the backend's, for example [NCCL_SOCKET_IFNAME].",
    )
    secrets_file: Line | None = option(
        None,
        "File of NAME=value lines with tokens such as HF_TOKEN, which jobs read and do not run; "
        "yours, and only you may be able to read it (chmod 600).",
    )
    offline: bool = option(
        False,
        "Whether nodes lack internet; then wandb calls nobody. (Hugging Face libraries call nobody "
        "in any job: `prefetch` fetches before.)",
    )
    cache: Line | None = option(
        None,
        "Folder of downloaded models and data (HF_HOME) that `prefetch` fills and jobs "
        "read; null is where your shell's variables say (HF_HOME), else Hugging Face's own.",
    )
    extra: Seq[ExtraOption] = option(
        (), "Further options of sbatch, for example [--mail-type=FAIL]."
    )

    def extra_options(self) -> dict[str, str | bool]:
        """The values of `extra` by the names of the options; True of one without a value.

        One of them wins over the key above that gives the same option, as `--mem` over
        `memory_per_node`. Another option about the same thing, as `--mem-per-cpu`, stands beside
        it, and sbatch decides.
        """
        options: dict[str, str | bool] = {}
        for text in self.extra:
            name, _, value = text.removeprefix("--").partition("=")
            options[name] = value or True
        return options

    @model_validator(mode="after")
    def _scripts_hold_no_secrets(self) -> "Cluster":
        lines = {f"setup.{number}": line for number, line in enumerate(self.setup)}
        lines["python"] = self.python
        for key, line in lines.items():
            match = SECRET_IN_LINE.search(line)
            if match:
                raise key_error(
                    key,
                    f"what follows {match[1].strip()} would stand in each job's script, which "
                    "others can read: put it into a file that secrets_file names",
                )
        return self

    @model_validator(mode="after")
    def _variables_are_named(self) -> "Cluster":
        for number, name in enumerate(self.pass_environment):
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in ("ALL", "NONE"):
                raise key_error(
                    f"pass_environment.{number}",
                    "write the name of one variable, without its value; all of a shell's would "
                    "hand on tokens too",
                )
        return self

    @model_validator(mode="after")
    def _jobs_begin_before_they_are_warned(self) -> "Cluster":
        limits = {"time": self.time, "score_time": self.score_time}
        extra_time = self.extra_options().get("time")
        if isinstance(extra_time, str):
            limits = {"extra's --time": extra_time}
        for key, limit in limits.items():
            if self.signal_seconds >= limit_seconds(limit):
                raise key_error(
                    "signal_seconds",
                    f"{self.signal_seconds} s before the end of {key}, {limit}, is before a job "
                    "begins; lower it, or ask for more time",
                )
        return self


def documentation(
    schema: Mapping[str, Any], definitions: Mapping[str, dict], indent: str = ""
) -> Iterator[str]:
    """Every key of a model as a line of YAML with its default, and its meaning as a comment.

    `schema` is the model's JSON schema, `definitions` the `$defs` of the outermost one. Keys that
    are models of their own are followed by their keys, indented:

        name:  # required; Name of the sweep, and of its folder in output_root
        workers: null  # How many runs train at the same time without Slurm; null takes …
        world:  # How one run is spread over GPUs
          mixed_precision: "no"  # Precision of …; takes no, bf16, fp16
    """
    for name, field in schema["properties"].items():
        is_required = "default" not in field
        # The schemas that say what the value may be: the field's own, a list's items, alternatives.
        alternatives = [field, field.get("items", {}), *field.get("anyOf", ())]
        models = _models(alternatives, definitions)
        line = f"{indent}{name}:"
        if not is_required and not models:
            line += f" {json.dumps(field['default'])}"
        notes = []
        if is_required:
            notes.append("required")
        if field.get("description"):
            notes.append(field["description"].rstrip("."))
        words = _words(alternatives)
        if words:
            notes.append(f"takes {', '.join(words)}")
        if notes:
            line += f"  # {'; '.join(notes)}"
        yield line
        for model in models:
            yield from documentation(model, definitions, indent + "  ")


def _models(alternatives: list[dict], definitions: Mapping[str, dict]) -> list[dict]:
    """The schemas of models of our own among what a value may be."""
    references = [schema["$ref"] for schema in alternatives if "$ref" in schema]
    return [definitions[reference.rpartition("/")[2]] for reference in references]


def _words(alternatives: list[dict]) -> list[str]:
    """The words that a value may be, where it is one of a few."""
    words: list[str] = []
    for schema in alternatives:
        if "const" in schema:
            words.append(schema["const"])
        words += schema.get("enum", [])
    return words


def load_cluster(path: str | None) -> Cluster:
    """The profile in a file, or the defaults without one.

    Variables are kept as they are, for the jobs to read; only a leading `~` is replaced here, which
    a job's shell would read as it stands.
    """
    if path is None:
        return Cluster()
    raw, places = read_yaml(found_path(path))
    for key, value in raw.items():
        if isinstance(value, str):
            raw[key] = os.path.expanduser(value)
    return build(Cluster, raw, path, places)

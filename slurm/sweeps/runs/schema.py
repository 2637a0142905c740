"""Sweep and cluster files: YAML and dotted overrides → frozen, checked models.

Whatever is wrong ends in one message: file and line (or the override), key, value, what to do.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from calibeval.io import InputError, read_text
from calibeval.request import Natural, Positive, Request, Seq, Strict
from calibeval.tasks import SPLITS

M = TypeVar("M", bound=BaseModel)
Time = Annotated[str, Field(pattern=r"^((\d+-)?\d+(:\d+){0,2}|INFINITE|UNLIMITED)$")]
HELD_OUT = "held_out_loss"  # of conversations that are never trained on, without smoothing


def option(default: Any, description: str, **constraints: Any) -> Any:
    """A field with its documentation, which `python -m sweeps keys` prints."""
    return Field(default, description=description, **constraints)


def again(command: str, *words: str | Path) -> str:
    """A command of this package as it can be typed anywhere."""
    absolute = (word.absolute() if isinstance(word, Path) else word for word in words)
    start = os.environ.get("SWEEPS", "python -m sweeps")  # which sweeps.sh sets
    return f"{start} {shlex.join([command, *map(str, absolute)])}"


class World(Strict):
    """The processes of one run: their number changes the global batch, so it is part of the run."""

    processes_per_node: Positive = option(1, "processes of a run, one a GPU, on one machine")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", "of forward and backward passes")
    deepspeed: str | None = option(None, "a DeepSpeed JSON file")
    fsdp: str | None = option(None, "a JSON file with transformers' `fsdp_config`")

    @property
    def alone(self) -> bool:
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
    world: World = option(World(), "processes of one run")
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


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Unlike YAML 1.1's, `2e-5` is a number, and `no`, `12:00:00` and `007` are words."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 PyYAML's own shape


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    """Quotes what _Loader would not read back as the same text."""


FLOAT = r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)"
WORDS = {"null": "|~|null|Null|NULL", "merge": "<<"}
WORDS |= {"bool": "true|True|TRUE|false|False|FALSE", "int": "[-+]?(0|[1-9][0-9]*)", "float": FLOAT}
for _side in (_Loader, _Dumper):
    for _tag, _form in WORDS.items():  # tried in order, so an integer stays one
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_form})$"), None)


def parse(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """The value of a YAML text, and `source:line` of each dotted key in it."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        places = {}
        for key, where in _places(node, source):
            if key in places:  # PyYAML lets the last of two values win
                raise InputError(f"{where}: {key}: is given twice")
            places[key] = where
        return loader.construct_document(node), places
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise InputError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from error


def _places(node: yaml.Node, source: str, above: str = "") -> Iterator[tuple[str, str]]:
    pairs = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(number, value, value) for number, value in enumerate(node.value)]
    for name, at, value in pairs:
        yield f"{above}{name}", f"{source}:{at.start_mark.line + 1}"
        yield from _places(value, source, f"{above}{name}.")


def read_yaml(path: Path) -> tuple[dict, dict[str, str]]:
    """A YAML file that must hold a mapping, and where its keys stand."""
    value, places = parse(read_text(path), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(value).__name__}")
    return value, places


def dump_yaml(value: dict) -> str:
    """The one spelling in which this package writes YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def override(raw: dict, assignments: Iterable[str]) -> dict[str, str]:
    """Apply `a.b.0.c=value` in place, values being YAML; returns where each key came from."""
    places = {}
    for assignment in assignments:
        dotted, _, text = assignment.partition("=")
        said, node, (*above, last) = f"command line ({assignment})", raw, dotted.split(".")
        value, places[dotted] = parse(text, said)[0], said
        try:
            for part in above:
                node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
            node[int(last) if isinstance(node, list) else last] = value
        except (AttributeError, IndexError, TypeError, ValueError):
            raise InputError(f"{said}: found {node!r}, which has no such place") from None
    return places


def check(
    model: type[M],
    raw: Any,
    source: str,
    places: Mapping[str, str],
    section: Callable[[str], str] = lambda key: "",
) -> M:
    """Build `model` from `raw`; raises InputError with a line for each problem.

    `places` says where keys stand, or those above them, `section` under which key of the file one
    of `raw` does.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        items, lines = error.errors(include_url=False), []
    for item in items:
        if item["type"] == "too_short" and item is not items[0]:
            continue  # of a list whose items are wrong
        parts = [str(part) for part in item["loc"]]
        dotted = ".".join([section(parts[0]), *parts]).strip(".") if parts else ""
        said = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            said = f"unknown key; all are printed by: {again('keys')}"
        elif item["type"] == "missing":
            said = "is missing"
        elif item["type"] == "value_error":  # the text begins with one of several keys
            key, _, said = said.partition(": ")
            dotted = f"{dotted}.{key.lstrip('-')}".lstrip(".")
        else:
            said = f"found {item['input']!r}: {said.replace('tuple', 'list')}"
        above = dotted
        while above and above not in places:
            above = above.rpartition(".")[0]
        lines.append(f"{places.get(above, source)}: {dotted}: {said}")
    raise InputError("\n       ".join(dict.fromkeys(lines)))


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


def expand(where: str, value: Any) -> Any:
    """Every text in `value` as a shell reads it, `~` and variables replaced; InputError names one
    not set."""
    if isinstance(value, dict):
        return {name: expand(where, one) for name, one in value.items()}
    if isinstance(value, list):
        return [expand(where, one) for one in value]
    if not isinstance(value, str):
        return value
    found = os.path.expanduser(os.path.expandvars(value))
    if left := re.search(r"\$\{?(\w+)", found):
        raise InputError(f"{where}: {value}: ${left[1]} is not set here: export {left[1]}=…")
    return found


def load_cluster(path: str | None) -> Cluster:
    """A profile, or without a path the defaults; variables stay for the jobs to read."""
    if path is None:
        return Cluster()
    raw, places = read_yaml(Path(path))
    home = {k: os.path.expanduser(v) for k, v in raw.items() if isinstance(v, str)}
    return check(Cluster, raw | home, path, places)  # a job would read "~/x" as it stands

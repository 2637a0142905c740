"""Everything that would stop a sweep later, found and named before anything is queued."""

import getpass
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from calibeval.io import counted
from sweeps import assets, estimate, packages, questions
from sweeps.assets import hub_snapshot
from sweeps.backends import get_backend
from sweeps.cluster import Cluster, expand, load_cluster, variables
from sweeps.config import Sweep, each_text, override
from sweeps.executors import local, scripts, slurm
from sweeps.executors.scripts import Places
from sweeps.files import SweepError, last_error, read_json
from sweeps.plan import Cell, Plan
from sweeps.provenance import TYPED_IN, command, output
from sweeps.rundir import RunDir

PROBE = 1 << 20  # bytes written to see whether a folder takes them
LEAST = 50 << 20  # below this nothing sensible can be written
WIDTHS = {"float32": 4, "float64": 8}  # bytes a parameter of other types: 2


def problems(planned: Plan, executor: str, cells: list[Cell] | None = None) -> list[str]:
    """One sentence a problem of `cells`, or of all; empty when everything is there."""
    sweep, cells = planned.sweep, planned.cells if cells is None else cells
    cluster = load_cluster(sweep.cluster) if executor == "slurm" else Cluster()
    found = _profile(cluster, sweep.cluster)
    if found:  # nobody knows where its cache and its wheels would be
        cluster = cluster.model_copy(update={"cache": None, "wheels": None, "secrets_file": None})
    assets.use_cache(cluster)
    found += files(planned, cells, cluster)
    found += packages.problems(assets.needed_packages(sweep, cells), cluster.python)
    if sweep.score and sweep.score.python:
        wanted = [*packages.requirements("eval"), *assets.scoring_packages(sweep)]
        found += packages.problems(wanted, sweep.score.python, "score.python")
    try:
        at_once = local.at_once(sweep) if executor == "local" else sweep.throttle or len(cells)
        found += _room(sweep, cells, at_once)
    except SweepError as error:
        found.append(str(error))
    if executor == "slurm":
        found += _secrets(cluster) + _slurm(cluster, sweep)
    return list(dict.fromkeys(found))


def files(planned: Plan, cells: list[Cell], cluster: Cluster) -> list[str]:
    """Models, data, wheels: what is not here, each once, and the one command that fetches it."""
    sweep, found = planned.sweep, []
    kinds = {}  # runs that differ in a number only need the same things
    for cell in cells:
        if not RunDir(cell.folder).done:
            kinds.setdefault(_needs(cell), cell.config)
    for config in kinds.values():
        found += get_backend(sweep.backend).missing(config.keys, config.world)
    for task in sweep.score.measured if sweep.score else ():
        if wrong := questions.problem(task):
            found.append(
                f"score.{'' if task is sweep.score.entropy else 'tasks: '}{task.key}: {wrong}"
            )
    absent = [a for a in assets.of_sweep(sweep, cells, cluster) if a.used and not a.here()]
    # A file that prefetch makes is named by it, not once more by the key that reads it.
    found = [line for line in found if not any(f": {a.place}" in line for a in absent)]
    raw, typed = {}, set()
    override(raw, planned.assignments)
    each_text(raw, lambda key, text: typed.add(expand(key, text)) or text)
    if sweep.prefetch.made_by and any(_absent(line) not in typed for line in found):
        found.append(f"model and data of this sweep are made by: {sweep.prefetch.made_by}")
    found = [line + _where(_absent(line)) for line in found]
    found += [f"not fetched: {asset.name}" for asset in absent]
    fetch = command("prefetch.sh", "--config", *planned.typed)
    return found + ([f"where there is internet: {fetch}"] if absent else [])


def _absent(line: str) -> str:
    """The path that a line says is not there."""
    return (re.search(r": ([^:]+): no such", line) or ["", ""])[1]


def _where(path: str) -> str:
    """Where a relative path was looked for, and what to give if it is where the user is."""
    if not path or Path(path).is_absolute():
        return ""
    there = TYPED_IN / path
    give = f"; give {there}" if there.exists() else ""
    return f" in {Path.cwd()}, where relative paths in sweeps start{give}"


def _needs(cell: Cell) -> str:
    numbers = ("seed", "learning_rate", "label_smoothing")
    return repr({k: v for k, v in cell.config.train.items() if k not in numbers})


def _room(sweep: Sweep, cells: list[Cell], at_once: int) -> list[str]:
    """Whether output_root takes files, and has room for what the sweep writes at its fullest."""
    key, place = f"output_root: {sweep.output_root}", Path(sweep.output_root).absolute()
    place = next(path for path in (place, *place.parents) if path.exists())
    if not place.is_dir():
        return [f"{key}: {place} is a file"]
    try:
        with tempfile.TemporaryFile(dir=place) as probe:  # rights, quota, root squash: one truth
            probe.write(b"\1" * PROBE)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return [f"{key}: {place}: cannot write ({error.strerror}); make room or fix the rights"]
    left, (need, why) = shutil.disk_usage(place).free, needed(sweep, cells, at_once)
    if left >= need:
        return []
    return [
        f"{key}: {size(left)} free on the disk, about {size(need)} needed ({why}); make room, or "
        "lower train.keep_last_n_checkpoints or throttle"
    ]


def _profile(cluster: Cluster, file: str | None) -> list[str]:
    """Variables of the profile that this shell, or a job, does not have."""
    asked = {key: variables(getattr(cluster, key)) for key in ("cache", "wheels", "secrets_file")}
    # Set-up lines and modules define variables of their own; those passed on must be there.
    passed = [name for line in cluster.setup for name in variables(line)]
    asked["setup"] = [name for name in passed if name in cluster.pass_environment]
    reach = {*scripts.EXPORTED, *cluster.pass_environment, *cluster.environment}
    found = []
    for name in dict.fromkeys(name for names in asked.values() for name in names):
        keys = ", ".join(f"cluster.{key}" for key, names in asked.items() if name in names)
        if name not in os.environ:
            found.append(
                f"{keys}: ${name} is not set in this shell: export {name}=/a/folder, or write the "
                f"folder itself into {file}"
            )
        elif name not in reach:
            found.append(
                f"{keys}: ${name} does not reach the jobs: add it to pass_environment in {file}"
            )
    return found


def _slurm(cluster: Cluster, sweep: Sweep) -> list[str]:
    absent = [tool for tool in ("sbatch", "squeue", "scontrol") if shutil.which(tool) is None]
    if absent:
        return [
            f"{', '.join(absent)}: not on the PATH: run this on a login node, or --executor local"
        ]
    try:
        slurm.queue()  # sbatch would wait for a minute where there is no controller
    except SweepError as error:
        return [f"{error}; --executor local needs no Slurm"]
    return _asked(sweep, cluster)


def _asked(sweep: Sweep, cluster: Cluster) -> list[str]:
    """What the controller says to the sweep's scripts: accounts, partitions, limits, GPUs, …"""
    places = Places(Path.cwd(), Path(tempfile.gettempdir()) / "preflight")
    said: dict[str, list[str]] = {}
    for stage in ["train", *(["score"] if sweep.score else []), "collect"]:
        text = scripts.text(sweep, cluster, places, stage, stage)
        done = subprocess.run(
            ["sbatch", "--test-only"], input=text, text=True, capture_output=True, check=False,
            env=scripts.environment(cluster),
        )  # fmt: skip
        if done.returncode != 0:
            reason = last_error(done.stderr).removeprefix("sbatch: ").removeprefix("error: ")
            said.setdefault(reason.strip(), []).append(stage)
    file = sweep.cluster or "the cluster's defaults"
    return [
        f"{file}: sbatch refuses the {' and the '.join(stages)} job: {reason}"
        + _advice(reason, sweep, cluster)
        for reason, stages in said.items()
    ]


def _advice(reason: str, sweep: Sweep, cluster: Cluster) -> str:
    """What to do about a refusal whose words do not say it."""
    if re.search("gres|node configuration|CPU count|[Mm]emory", reason):
        count = sweep.world.processes_per_node
        asked = [
            counted(cluster.gpus_per_process * count, "GPU"),
            counted(cluster.cpus_per_process * count, "CPU"),
            *filter(None, [cluster.memory_per_node]),
        ]
        keys = "gpus_per_process, cpus_per_process, memory_per_node"
        return f"; a node was asked for {', '.join(asked)}: {keys}"
    mine = ["show", "associations", f"user={getpass.getuser()}", "format=account"]
    known = {
        "account": output("sacctmgr", "--noheader", "--parsable2", *mine),
        "partition": output("sinfo", "--all", "--noheader", "--format=%R"),
    }
    return "".join(
        f"; {key}: found {getattr(cluster, key)}, there is {', '.join(sorted({*names.split()}))}"
        for key, names in known.items()
        if key in reason.lower() and names
    )


def _secrets(cluster: Cluster) -> list[str]:
    if not cluster.secrets_file:
        return []
    path = Path(expand("cluster.secrets_file", cluster.secrets_file))
    if not path.is_file():
        return [f"cluster.secrets_file: {path}: no such file"]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode != 0o600:
        return [f"cluster.secrets_file: {path}: mode {mode:o}, expected 600; chmod 600 {path}"]
    return []


def size(count: float) -> str:
    """Bytes as people say them."""
    return f"{count / (1 << 20):.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


def _config(model: str) -> tuple[Path | None, dict]:
    """The folder of a model on this disk, and its config.json; empty if it is not here."""
    folder = Path(model) if Path(model).is_dir() else hub_snapshot(model)
    file = folder and folder / "config.json"
    return folder, read_json(file) if file and file.is_file() else {}


def parameters(model: str) -> int:
    """Parameters of a model on this disk, from its files' sizes; 0 if it is not here."""
    folder, config = _config(model)
    if not config:
        return 0
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.bin"))
    width = WIDTHS.get(config.get("dtype") or config.get("torch_dtype"), 2)
    return sum(path.stat().st_size for path in files) // width


def needed(sweep: Sweep, cells: list[Cell], at_once: int) -> tuple[int, str]:
    """Bytes that the runs still to do write at their fullest, and how that comes about.

    A checkpoint holds fp32 weights and two AdamW moments, 12 bytes a parameter (with DeepSpeed's
    bf16 copy 14); a run holds one more than it keeps while it writes the next, and that of a stop
    alone if it writes no others. A model: 4 bytes.
    """
    todo = [cell.config.train for cell in cells if not RunDir(cell.folder).done]
    if not todo:
        return 0, ""
    models = {train["model_name_or_path"] for train in todo}
    sizes = {model: parameters(model) for model in models}
    each = [sizes[train["model_name_or_path"]] for train in todo]
    width = 14 if sweep.world.deepspeed else 12
    kept = []
    for count, train in zip(each, todo, strict=True):
        saves = train.get("checkpointing_steps", "epoch") is not None
        most = train.get("keep_last_n_checkpoints", 3) + 1 if saves else 1
        kept.append(width * count * most)
    busy = sorted(kept, reverse=True)[:at_once]
    if sweep.keep == "scores":
        each = sorted(each, reverse=True)[:at_once]
    why = (
        f"checkpoints of {counted(len(busy), 'run')} at a time {size(sum(busy))}, "
        f"{counted(len(each), 'model')} {size(4 * sum(each))}"
    )
    return max(LEAST, sum(busy) + 4 * sum(each)), why


def estimates(planned: Plan, executor: str) -> list[str]:
    """Memory and time of a step on the profile's or this machine's GPUs, a line for each model."""
    world, found = planned.sweep.world, []
    name = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0")
    if executor == "slurm":
        cluster = load_cluster(planned.sweep.cluster)
        name = cluster.gpus_per_process and (cluster.gpu_type or "GPU")
    zero = read_json(Path(world.deepspeed)).get("zero_optimization", {}) if world.deepspeed else {}
    for train in {_needs(cell): cell.config.train for cell in planned.cells}.values():
        config = _config(train["model_name_or_path"])[1]
        config = config.get("text_config", config)
        known = estimate.known_shape(config) and not train.get("use_lora")
        if not (name and known and train.get("max_seq_length")):
            continue  # a CPU, or what the formulae do not know
        given = (config, parameters(train["model_name_or_path"]), train)
        parts, fits = estimate.memory(*given, world.size, zero), estimate.gpu(name)
        text = f"about {sum(parts.values()) / 1e9:.0f} GB a GPU ± {estimate.MARGIN:.0%}: "
        text += ", ".join(f"{part} {count / 1e9:.1f}" for part, count in parts.items())
        if fits:
            seconds = estimate.seconds(*given, fits[1])
            text += f"; a full update {seconds:.1f} s at {estimate.UTILISATION:.0%} of the peak"
        if fits and sum(parts.values()) / 1e9 > fits[0]:
            text = f"warning: {text}. A {name} counts as {fits[0]} GB: "
            text += "lower per_device_train_batch_size, turn gradient_checkpointing on, or share "
            text += "the states among more GPUs by ZeRO-3"
        found.append(f"{train['model_name_or_path']}: {text}")
    return list(dict.fromkeys(found))

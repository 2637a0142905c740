"""Everything that would stop a sweep later, found and named before anything is queued."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from calibeval.io import InputError
from calibeval.request import Task
from calibeval.tasks import HUB, load
from sweeps import local, prefetch, score
from sweeps.config import Cluster, load_cluster
from sweeps.conversations import conversations
from sweeps.plan import Plan
from sweeps.run import again, backend


def problems(plan: Plan, executor: str) -> list[str]:
    """One sentence a problem; empty when everything is there."""
    cluster = load_cluster(plan.sweep.cluster) if executor == "slurm" else Cluster()
    prefetch.use_cache(cluster)
    found = _files(plan) + _requests(plan)
    if cluster.python == "auto":
        found += _packages(plan)
    if executor == "local":
        local.workers(plan.sweep)
    elif "%" in (folder := str(plan.folder.absolute())):
        found.append(f"output_root: {folder}: Slurm reads % in paths; another folder")
    return list(dict.fromkeys(found))


def _files(plan: Plan) -> list[str]:
    """Models, data, questions: what is not here, each once, and the one command that fetches it."""
    trains, world, kinds = backend(plan.sweep.backend), plan.sweep.world, {}
    for cell in plan.cells:  # runs that differ in a number only need the same things
        if not cell.run.trained:
            words = {k: v for k, v in cell.config.train.items() if isinstance(v, str)}
            kinds.setdefault(str(words), cell.config)
    lacking, found = [], []
    for config in kinds.values():
        lacking += [*_model(config.train), *_train_file(config.train.get("train_file"))]
        found += trains.missing(config.keys, world)
    for key, file in {"deepspeed": world.deepspeed, "fsdp": world.fsdp}.items():
        if file and not Path(file).is_file():
            lacking.append((file, f"world.{key}: {file}: no such file"))
    for task in plan.sweep.score.tasks if plan.sweep.score else ():
        lacking += _questions(task)
    fetched = [asset for asset in prefetch.assets(plan) if not asset.here()]
    # What prefetch makes, or fills, is named by it, not once more by the key.
    lacking = [one for one in lacking if not any(prefetch.meet(one[0], a.place) for a in fetched)]
    found = [*(sentence for _, sentence in lacking), *found]
    if any(not Path(path).is_absolute() for path, _ in lacking):
        found.append(f"relative paths of a sweep start in {Path.cwd()}")
    if (lacking or fetched) and plan.sweep.prefetch.made_by:
        found.append(f"models and data of this sweep are made by: {plan.sweep.prefetch.made_by}")
    found += [f"not fetched: {asset.name}" for asset in fetched]
    return found + [f"where there is internet: {again('prefetch', *plan.typed)}"] * bool(fetched)


def _model(train: dict) -> Iterator[tuple[str, str]]:
    """What a model lacks: paths, each with a sentence; hub models are prefetch's business."""
    key = "model_name_or_path"
    of_tokenizer = "tokenizer_name" if train.get("tokenizer_name") else key
    wanted = (
        (key, ("config.json",)),
        (key, ("model*.safetensors", "pytorch_model*.bin")),
        (of_tokenizer, ("tokenizer.json", "tokenizer.model", "vocab*")),
    )
    for key, names in wanted:
        name, folder = train[key], Path(train[key])
        if not folder.is_dir() and not prefetch.on_hub(name):
            yield name, f"train.{key}: {name}: no such folder"
        elif folder.is_dir() and not any(any(folder.glob(one)) for one in names):
            yield name, f"train.{key}: {name}: no {' or '.join(names)} in this folder"


def _train_file(name: str | None) -> Iterator[tuple[str, str]]:
    """What is wrong with a file of conversations."""
    if name and not Path(name).is_file():
        yield name, f"train.train_file: {name}: no such file"
    elif name:
        try:
            conversations(Path(name), 100_000)
        except InputError as error:
            yield name, f"train.train_file: {error}"


def _questions(task: Task) -> Iterator[tuple[str, str]]:
    """What keeps a task from being asked, which would show only after the training."""
    try:
        if task.data.startswith(HUB):
            return
        if not Path(task.data).exists():
            raise InputError(f"data: {task.data}: no such file or folder")
        load(task)
    except InputError as error:
        yield task.data, f"score: {task.key}: {error}"


def _requests(plan: Plan) -> list[str]:
    """Records there that answer another request than this launch's, or cannot be made any more."""
    found = []
    for cell in (*plan.bases, *plan.cells):
        for task in score.missing(cell.run, cell.config.score):
            found.append(score.conflict(cell.run, task, cell.config.score))
            if cell.run.done and cell.config.backend and not cell.run.model.is_dir():
                found.append(f"{cell.run.path}: its model is gone: to score it, delete the folder")
    return [line for line in found if line]


def _packages(plan: Plan) -> list[str]:
    """Modules that this interpreter lacks, of those that jobs import with it."""
    asks, more = plan.sweep.score, backend(plan.sweep.backend).packages
    vllm = asks and asks.python is None and asks.engine == "vllm"
    names = [*more(plan.cells[0].config.keys, plan.sweep.world), *["vllm"] * bool(vllm)]
    absent = sorted({name for name in names if find_spec(name) is None})
    install = f"{sys.executable} -m pip install …"
    return [f"packages that runs need: {' '.join(absent)}: {install}"] if absent else []

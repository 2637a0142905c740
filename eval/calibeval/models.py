"""What can be said of a model folder before it is loaded."""

import hashlib
import json
import math
from pathlib import Path

from calibeval.io import InputError

WEIGHTS = ("*.safetensors", "*.bin")
SAMPLE = 1 << 20


def check_model(model: str) -> None:
    """Refuse a run folder, or a model folder inside one, whose training is not `DONE`."""
    path = Path(model)
    if not path.exists():
        if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise InputError(f"{path}: no such folder")
        return  # a hub name; the loader says if it is not one
    run = run_folder(path)
    if run:
        if not (run / "DONE").is_file():
            raise InputError(f"{run}: run folder without DONE; its training has not finished")
        if run == path:
            raise InputError(f"{run}: is a run folder; its model is {run / 'model'}")
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no config.json; expected a Hugging Face model folder")


def run_folder(path: Path) -> Path | None:
    """The run folder that `path` is, or is directly in."""
    for folder in (path, path.parent):
        if (folder / "manifest.json").is_file() and (folder / "config.yaml").is_file():
            return folder
    return None


def training(model: str) -> dict | None:
    """The manifest of the run that made a model, and the `train` section of its config."""
    folder = run_folder(Path(model)) if Path(model).is_dir() else None
    if folder is None:
        return None
    import yaml  # with transformers

    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest | {"train": (config or {}).get("train")}


def architecture(model: str, revision: str | None = None) -> dict[str, int]:
    """Vocabulary, hidden size and number of parameters, as far as files on this machine say."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(found, str):
            return {}
        folder = Path(found).parent
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config") or {}
    sizes = {"vocabulary": config.get("vocab_size"), "hidden_size": config.get("hidden_size")}
    parameters = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        parameters += sum(math.prod(of["shape"]) for of in header.values() if "shape" in of)
    return {k: v for k, v in (sizes | {"parameters": parameters}).items() if v}


def digest(model: str) -> str | None:
    """SHA-256 over a model folder's configuration and a sample of its weight files.

    The sample is each file's name, size, first and last MiB: enough to tell checkpoints apart
    without reading gigabytes. None for a hub name, which its revision identifies.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    total = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(p for pattern in WEIGHTS for p in folder.glob(pattern)):
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            total.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            total.update(file.read())
    return total.hexdigest()

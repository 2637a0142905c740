"""The folder of one run.

config.yaml (resolved) · manifest.json (what ran, where, how often) · metrics.jsonl · train.log ·
checkpoints/step-N/ · model/ (final, Hugging Face) · scores/<task>.jsonl · DONE, written last.
"""

import hashlib
import json
import re
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path, PurePath

from sweeps.backends import get_backend
from sweeps.backends.base import TrainKeys
from sweeps.config import Strict, World, check, dump_yaml, read_yaml
from sweeps.files import SweepError, make_folder, read_json, tail, write_json, write_text


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class RunConfig(Strict):
    """Everything that decides the weights of a run; `config.yaml` of its folder."""

    backend: str
    train: dict
    world: World

    @cached_property
    def digest(self) -> str:
        canonical = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def keys(self) -> TrainKeys:
        return get_backend(self.backend).Train.model_validate(self.train)

    @cached_property
    def name(self) -> str:
        """A readable prefix and a hash: the run's folder is a function of its resolved config."""
        k, model = self.keys, readable(self.keys.model_name_or_path)
        numbers = f"lr{k.learning_rate:g}-beta{k.label_smoothing:g}-seed{k.seed}"
        return f"{model}-{numbers}-{self.digest[:8]}"


def readable(model: str) -> str:
    """A model's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(model).name) or "model"


class RunDir:
    """Paths and state of a run; all state is in the files, so any number of readers agree."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.config_file = path / "config.yaml"
        self.manifest_file = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "train.log"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.scores = path / "scores"
        self.tokens = path.parent.parent / "tokens"  # of all runs of an output_root
        self.stop = path / "stop"  # while it exists, the trainer is to save and leave
        self.lock = path / "run.lock"

    @property
    def done(self) -> bool:
        return (self.path / "DONE").exists()

    def create(self, config: RunConfig) -> None:
        """Make the folder with config.yaml and manifest.json; keeps what is there already."""
        make_folder(self.path)
        if not self.config_file.exists():
            write_text(self.config_file, dump_yaml(config.model_dump()), durable=False)
        if not self.manifest_file.exists():
            manifest = {"run": self.name, "config_sha256": config.digest, "created": now()}
            manifest |= {"state": "new", "restarts": 0, "attempts": []}
            self.write_manifest(manifest, durable=False)

    def config(self) -> RunConfig:
        """The resolved config; raises SweepError if the folder was edited or is not a run."""
        if not (self.config_file.exists() and self.manifest_file.exists()):
            raise SweepError(
                f"{self.path}: not a run folder: config.yaml and manifest.json expected; "
                "`python -m sweeps launch SWEEP.yaml` makes them"
            )
        config = check(RunConfig, read_yaml(self.config_file), str(self.config_file))
        backend = get_backend(config.backend, str(self.config_file))
        check(backend.Train, config.train, str(self.config_file), section=lambda key: "train")
        if not self.name.endswith(config.digest[:8]):
            raise SweepError(
                f"{self.config_file}: was edited: its hash is {config.digest[:8]}, the folder says "
                f"{self.name[-8:]}; change the sweep file instead, which makes a new folder"
            )
        return config

    def manifest(self) -> dict:
        return read_json(self.manifest_file)

    def write_manifest(self, manifest: dict, *, durable: bool = True) -> None:
        write_json(self.manifest_file, manifest, durable=durable)

    def job(self) -> str | None:
        """The Slurm job of the last attempt, or None."""
        attempts = self.manifest()["attempts"]
        return attempts[-1]["job"] if attempts else None

    def lost_again(self, limit: int) -> bool:
        """Count that this run's job is gone without a word; True, and failed, if too often.

        Counted are losses in a row without a new checkpoint, by whoever would queue it again: the
        supervisor that dies before it can count does not.
        """
        manifest, step = self.manifest(), self.step()
        before = manifest.get("lost", {"step": -1, "times": 0})
        times = before["times"] + 1 if before["step"] == step else 1
        manifest["lost"] = {"step": step, "times": times}
        if times > limit:
            manifest["state"] = "failed"
            manifest["error"] = f"lost {times} times in a row without a new checkpoint"
        self.write_manifest(manifest)
        return times > limit

    def step(self) -> int:
        """The last saved step, 0 before the first checkpoint; open-instruct writes step_N."""
        names = (re.fullmatch(r"step[-_](\d+)", path.name) for path in self.checkpoints.glob("*"))
        return max((int(name[1]) for name in names if name), default=0)

    def log_tail(self) -> list[str]:
        """The last lines of the log, on all machines: torchrun chooses where rank 0 is."""
        return [line for log in sorted(self.path.glob("train*.log")) for line in tail(log, 400)]

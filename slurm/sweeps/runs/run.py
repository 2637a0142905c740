"""The folder of one run, or of a model before fine-tuning: config, files, what became of it.

config.yaml (resolved) · attempts.jsonl (what happened to it, a line each) · train.log, score.log ·
metrics.jsonl · checkpoints/ · model/ · scores/<task>.jsonl · DONE, written last.
"""

import contextlib
import hashlib
import json
import re
import socket
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from calibeval.io import InputError, sha256, write_text
from calibeval.request import Strict
from sweeps.runs.backend import load_backend
from sweeps.runs.files import read_rows
from sweeps.runs.processes import job_id, run_or_empty
from sweeps.runs.schema import DistributedConfig, Score
from sweeps.runs.yaml_io import check, dump_yaml, read_yaml


class RunConfig(Strict):
    """config.yaml: what decides a run's weights, and so its name, and what is done with them."""

    backend: str | None  # None: the model as it is, before fine-tuning
    train: dict[str, Any]
    world: DistributedConfig = DistributedConfig()
    score: Score | None = None
    keep: str = "all"
    max_idle_restarts: int = 3

    @cached_property
    def digest(self) -> str:
        decisive = self.model_dump(include={"backend", "train", "world"})
        canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def train_options(self) -> Any:
        return load_backend(self.backend).Train.model_validate(self.train)

    @cached_property
    def name(self) -> str:
        """A readable prefix and a hash: the run's folder is a function of its resolved config."""
        train, model = self.train, PurePath(self.train["model_name_or_path"]).name
        what = "base"
        if self.backend:
            what = "lr{learning_rate:g}-beta{label_smoothing:g}-seed{seed}".format(**train)
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model) or 'model'}-{what}-{self.digest[:8]}"


class Run:
    """A run's config, paths and state; all state is in files, so any number of readers agree."""

    def __init__(self, path: Path, config: RunConfig | None = None, values: dict | None = None):
        self.path, self.name = path, path.name
        self._config = config  # a plan's; else the file's, once it is read
        self.values = values or {}  # of the grid, which a plan's run stands for
        self.config_file = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.scores = path / "scores"
        self.stop = path / "stop"  # while it exists, the trainer is to save and leave
        self.lock = path / ".lock"  # held by the process that trains or scores the run

    @property
    def done(self) -> bool:
        return (self.path / "DONE").exists()

    @property
    def trained(self) -> bool:
        """Whether the final model is there, or was; trainers put it there by a rename."""
        return self.done or self.model.is_dir() or self.config().backend is None

    def create(self) -> None:
        """Make the folder with its config.yaml; what is asked of the model may change later."""
        write_text(self.config_file, dump_yaml(self.config().model_dump(mode="json")))

    def config(self) -> RunConfig:
        """The resolved config, read once; raises InputError if it was edited or is not there."""
        if self._config is None:
            raw, places = read_yaml(self.config_file)
            config = check(RunConfig, raw, str(self.config_file), places)
            if not self.name.endswith(config.digest[:8]):
                raise InputError(
                    f"{self.config_file}: was edited: its hash is {config.digest[:8]}, the "
                    f"folder's {self.name[-8:]}; change the sweep file, which makes a new run"
                )
            self._config = config
        return self._config

    def step(self) -> int:
        """The last saved step, 0 before the first checkpoint."""
        found = (re.fullmatch(r"\w+[-_](\d+)", path.name) for path in self.checkpoints.glob("*"))
        return max((int(one[1]) for one in found if one), default=0)

    def progress(self) -> list[int]:
        """What grows while the run gets on: the last saved step, and bytes of records."""
        files = [path for path in self.scores.rglob("*") if path.is_file()]
        return [self.step(), sum(path.stat().st_size for path in files)]

    def attempts(self) -> list[dict]:
        """What happened to the run: lines with a time as `queued`, `began` or `ended`."""
        return read_rows(self.path / "attempts.jsonl")

    def note(self, what: str, **more: Any) -> None:
        """Add a line to what happened."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        with open(self.path / "attempts.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps({what: now, **more}) + "\n")

    def began(self, stage: str) -> None:
        """Note that an attempt to `train` or to `score` begins, and with what."""
        gpus = run_or_empty("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        about = {"host": socket.gethostname(), "job": job_id(), "gpus": gpus.splitlines()}
        for name in ("torch", "transformers", "tokenizers", "accelerate", "datasets", "deepspeed"):
            with contextlib.suppress(PackageNotFoundError):
                about[name] = version(name)
        config, files = self.config(), {}
        for name in (*config.train.values(), *config.world.model_dump().values()):
            with contextlib.suppress(InputError, TypeError):  # no file's
                files[name] = sha256(Path(name))[:8]  # which may change between runs
        self.note("began", stage=stage, progress=self.progress(), files=files, **about)

    def attempts_without_progress(self) -> int:
        """Attempts in a row, since the last launch, that brought the run no further."""
        here, count = self.progress(), 0
        for row in reversed(self.attempts()):
            if "queued" in row or row.get("progress", here) != here:
                break
            count += "began" in row
        return count

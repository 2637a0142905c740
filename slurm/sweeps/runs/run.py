"""The folder of one run, or of a model before fine-tuning: config, files, what became of it.

config.yaml (resolved) · attempts.jsonl (what happened to it, a line each) · train.log, score.log ·
metrics.jsonl · checkpoints/ · model/ · scores/<task>.jsonl · DONE, written last.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from calibeval.io import InputError, sha256, write_text
from calibeval.request import Strict
from sweeps.runs.schema import Score, World, check, dump_yaml, read_yaml

PATIENCE = 20  # seconds; twice what Slurm's tools wait for a controller that is busy
# What `backend:` names, apart from modules of the user's own. A backend is a module with
#   Train                    the pydantic model of its `train:` keys
#   packages(train, world)   modules that must be importable, beyond this project's own
#   missing(train, world)    what else would keep a run from starting, a sentence each
#   train(run)               trains in this process, or process group, to run.model;
#                            SystemExit(75) once it has saved because run.stop appeared
BACKENDS = {
    "trainer": "sweeps.training.hf_backend",
    "open-instruct": "sweeps.training.open_instruct_backend",
}


def backend(name: str) -> ModuleType:
    """The module that trains; raises InputError with those there are."""
    try:
        module, why = import_module(BACKENDS.get(name, name)), "it has no `Train`"
    except ImportError as error:
        module, why = None, error
    if not hasattr(module, "Train"):
        known = ", ".join(BACKENDS)
        raise InputError(f"backend: {name!r} is none of {known}, and no module that trains: {why}")
    return module


class RunConfig(Strict):
    """config.yaml: what decides a run's weights, and so its name, and what is done with them."""

    backend: str | None  # None: the model as it is, before fine-tuning
    train: dict[str, Any]
    world: World = World()
    score: Score | None = None
    keep: str = "all"
    max_idle_restarts: int = 3

    @cached_property
    def digest(self) -> str:
        decisive = self.model_dump(include={"backend", "train", "world"})
        canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def keys(self) -> Any:
        return backend(self.backend).Train.model_validate(self.train)

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
        gpus = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        about = {"host": socket.gethostname(), "job": job_id(), "gpus": gpus.splitlines()}
        for name in ("torch", "transformers", "tokenizers", "accelerate", "datasets", "deepspeed"):
            with contextlib.suppress(PackageNotFoundError):
                about[name] = version(name)
        config, files = self.config(), {}
        for name in (*config.train.values(), *config.world.model_dump().values()):
            with contextlib.suppress(InputError, TypeError):  # no file's
                files[name] = sha256(Path(name))[:8]  # which may change between runs
        self.note("began", stage=stage, progress=self.progress(), files=files, **about)

    def idle(self) -> int:
        """Attempts in a row, since the last launch, that brought the run no further."""
        here, count = self.progress(), 0
        for row in reversed(self.attempts()):
            if "queued" in row or row.get("progress", here) != here:
                break
            count += "began" in row
        return count


@contextlib.contextmanager
def locked(path: Path, patience: float, busy: str) -> Iterator[None]:
    """Hold a lock, which the kernel lets go of when the process ends, however it does.

    InputError, saying `busy`, if another process still holds it after `patience` seconds. Where
    the file system knows no locks, nothing is held.
    """
    with open(path, "a") as file:
        os.set_inheritable(file.fileno(), True)  # torchrun may take this process's place
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock's would be every fork's
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InputError(busy) from None
                time.sleep(0.3)
            except OSError:
                break
        yield


def held(path: Path) -> bool:
    """Whether a process holds this lock."""
    with contextlib.suppress(OSError), open(path) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def ask(tool: str, *words: str) -> str:
    """What one of Slurm's tools prints; raises InputError if it fails, or waits for ever."""
    try:
        done = subprocess.run([tool, *words], capture_output=True, timeout=PATIENCE, check=True)
        return os.fsdecode(done.stdout)
    except OSError:
        raise InputError(f"{tool} is not on the PATH: type this on a login node") from None
    except subprocess.TimeoutExpired:
        why = f"nothing for {PATIENCE} s"
    except subprocess.CalledProcessError as error:
        why = last_error(os.fsdecode(error.stderr).splitlines())
    raise InputError(f"{tool} does not answer: {why}; try again in a minute")


def output(*command: str) -> str:
    """What a program prints; nothing where it is absent, fails or does not answer."""
    with contextlib.suppress(InputError):
        return ask(*command).strip()
    return ""


def job_id() -> str | None:
    """This Slurm job as squeue prints it, or None."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def read_rows(path: Path, size: int | None = None) -> list[dict]:
    """The objects of a JSON-lines file, or of its last `size` bytes, without damaged ones."""
    rows = []
    for line in _text(path, size).split("\n"):
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill, or by `size`
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _text(path: Path, size: int | None) -> str:
    """The last `size` bytes of a file, which may be absent."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as data:
        data.seek(max(0, os.path.getsize(path) - size) if size else 0)
        return data.read().decode("utf-8", "replace")
    return ""


def tail(path: Path, count: int, size: int = 16384) -> list[str]:
    """The last `count` lines that say something, without progress bars' overwritten states."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in _text(path, size).split("\n")]
    return [line for line in lines if line][-count:]


def last_error(lines: list[str]) -> str:
    """The last line of a program's output that looks like an error, else the last one."""
    # A progress bar leaves no line of its own for what is said after it.
    wrong = [found[0] for line in lines if (found := re.search("error: .*|.*Error.*", line))]
    own = [line for line in wrong if "ChildFailedError" not in line]  # torchrun's
    return (own or wrong or lines or ["no output"])[-1].strip()[:500]

"""The folder of one run, or of a model before fine-tuning: config, files, what became of it.

config.yaml       the resolved config, from which the folder's name is made
attempts.jsonl    what happened to the run, a line for each event
stop              asks the trainer to save and to leave, while it exists. Made by the worker of the
                  run when it is asked to stop, or by hand. A worker begins by deleting it, unless
                  another process holds .lock (see `launch.worker.StopRequest`): a file that is
                  made by hand ends what one worker or element does, and on Slurm the next start of
                  the element goes on
.lock             is held by the process that trains or scores the run
train.log         what the trainer printed; score.log likewise
metrics.jsonl     the trainer's progress
checkpoints/      gone once the run is done
model/            the final model, which appears whole; or, while UNFINISHED is there, what backend
                  command's script has written of it
scores/           <task>.jsonl, records by calibeval
DONE              made once all is there that was asked for, and removed by a launch that asks for
                  more. Before it is made, checkpoints/ is deleted (a file system may leave some);
                  after that, model/ is deleted where `keep: scores` asks for it. What is to be
                  done next, `stages.next_stage` reads from model/ and the records; only of a run
                  without model/ does DONE say that it was trained
"""

import contextlib
import hashlib
import json
import re
import socket
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from calibeval.io import InputError, sha256, write_text
from calibeval.validation import Strict
from sweeps.runs.backend_modules import import_backend
from sweeps.runs.events import Event, EventKind, append_event, read_events
from sweeps.runs.processes import job_label, run_or_empty
from sweeps.runs.schema import Keep, Score, World
from sweeps.runs.yaml_io import build, dump_yaml, read_yaml

# The packages whose versions are noted when an attempt begins.
NOTED_PACKAGES = (
    "torch", "transformers", "tokenizers", "accelerate", "datasets", "deepspeed", "trl"
)  # fmt: skip

# The options that stand in the name of a run's folder, where it has them, and what is before each.
NAME_PREFIXES = {"learning_rate": "lr", "label_smoothing": "beta", "seed": "seed"}


class RunConfig(Strict):
    """config.yaml: what decides a run's weights, and so its name, and what is done with them.

    The `train:` keys of a run are to be had in four forms:

    `train`                        as they are hashed, with all defaults
    `train_options`                as the backend's own model
    `SweepPlan.typed_train_keys`   with paths as they were typed, to tell folders from hub names
    `results.settings.settings`    `train`, the backend, the world and the hashes of files
    """

    backend: str | None  # None: see `is_baseline`
    train: dict[str, Any]
    world: World = World()
    score: Score | None = None
    keep: Keep = "all"
    max_idle_restarts: int = 3

    @property
    def is_baseline(self) -> bool:
        """Whether this is a model before fine-tuning, which is scored as it is."""
        return self.backend is None

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that decides the weights.

        A key that is added here, to `World` or to a backend's options gives all runs other names,
        and they are trained again.
        """
        world = self.world.model_dump()
        if self.world.nodes == 1:
            del world["nodes"]  # so that recorded runs keep the names that they had without the key
        decisive = {"backend": self.backend, "train": self.train, "world": world}
        canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def train_options(self) -> Any:
        """The `train:` keys as the backend's own model, its `Train`; InputError where they are not.

        They were checked before they were written, but somebody may have written others.
        """
        assert self.backend is not None  # a model before fine-tuning has no options
        options_class = import_backend(self.backend).Train
        return build(options_class, self.train, "config.yaml", {}, lambda key: "train")

    @cached_property
    def name(self) -> str:
        """The name of the run's folder: a readable prefix, and the beginning of the digest.

        Options that the backend does not declare, as backend command takes any, are in it under
        their own names, if they are short.
        """
        model = PurePath(self.train.get("model_name_or_path") or "").name
        parts = [re.sub(r"[^A-Za-z0-9._-]", "-", model) or "model"]
        if self.is_baseline:
            parts.append("base")
        else:
            prefixes = dict(NAME_PREFIXES)
            for key in sorted(self.train_options.model_extra or ()):
                prefixes.setdefault(key, key)
            for key, prefix in prefixes.items():
                value = self.train.get(key)
                text = f"{value:g}" if isinstance(value, float) else str(value)
                if value is not None and re.fullmatch(r"[\w.+-]{1,20}", text, re.ASCII):
                    parts.append(f"{prefix}{text}")
        return "-".join([*parts, self.digest[:8]])


class Run:
    """A run's config, paths and state.

    All state is in files, so that any number of processes agree on it.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig | None = None,
        grid_values: dict[str, Any] | None = None,
    ) -> None:
        """The run in the folder `path`.

        `config` is given by a plan, before the folder is made; otherwise config.yaml is read once
        it is asked for. `grid_values` are the run's values of the keys in the sweep's `grid:`, as
        they were typed, which only a plan knows; of a model before fine-tuning, the model.
        """
        self.path = path
        self.name = path.name
        self.grid_values = grid_values or {}
        self._config = config
        self.config_file = path / "config.yaml"
        self.attempts_file = path / "attempts.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.unfinished_file = path / "UNFINISHED"
        self.scores = path / "scores"
        self.done_file = path / "DONE"
        self.stop_file = path / "stop"
        self.lock_file = path / ".lock"

    @property
    def done(self) -> bool:
        """Whether the file DONE is there, which says that at one time nothing was left to do.

        `status` calls a run done where nothing is left to do now: `stages.next_stage` is None. The
        two differ where records were damaged since, or a launch asks for more.
        """
        return self.done_file.exists()

    @property
    def trained(self) -> bool:
        """Whether no training is left to do.

        The final model is there, which trainers put there by a rename, and a command of the user's
        own writes while the file UNFINISHED is beside it; or it was there, and has
        been deleted since (`keep: scores`), which happens only once the file DONE is there; or the
        run is a model before fine-tuning.
        """
        has_model = self.model.is_dir() and not self.unfinished_file.exists()
        return self.done or has_model or self.config().is_baseline

    def create(self) -> None:
        """Make the folder with its config.yaml, or write anew what is asked of the run."""
        write_text(self.config_file, dump_yaml(self.config().model_dump(mode="json")))

    def config(self) -> RunConfig:
        """The resolved config, read once; raises InputError if it was edited or is not there."""
        if self._config is None:
            self._config = self._read_config()
        return self._config

    def _read_config(self) -> RunConfig:
        raw, places = read_yaml(self.config_file)
        config = build(RunConfig, raw, str(self.config_file), places)
        if not self.name.endswith(config.digest[:8]):
            raise InputError(
                f"{self.config_file}: was edited: its hash is {config.digest[:8]}, the "
                f"folder's {self.name[-8:]}; change the sweep file, which makes a new run"
            )
        return config

    def last_saved_step(self) -> int:
        """The last saved step, 0 before the first checkpoint that is named by its step.

        open-instruct names those at the end of an epoch by its number, from 0, which tells no step.
        """
        steps = [int(number) for kind, number in self._checkpoints() if kind != "epoch"]
        return max(steps, default=0)

    def progress(self) -> list[Any]:
        """What changes while the run gets on: its last saved step, the size of its records in
        bytes, and the names of its checkpoints, as those of open-instruct's epochs tell no step.

        It is a list because it is compared with one that was read from attempts.jsonl.
        """
        files = [path for path in self.scores.rglob("*") if path.is_file()]
        record_bytes = sum(path.stat().st_size for path in files)
        names = sorted(f"{kind} {number}" for kind, number in self._checkpoints())
        return [self.last_saved_step(), record_bytes, names]

    def _checkpoints(self) -> list[tuple[str, str]]:
        """The kind and the number of each checkpoint, such as step and 40 of step-40.

        A command of the user's own may write them beside its model, as transformers' Trainer does.
        """
        paths = [*self.checkpoints.glob("*"), *self.model.glob("*")]
        matches = [re.fullmatch(r"(\w+)[-_](\d+)", path.name) for path in paths]
        return [(match[1], match[2]) for match in matches if match]

    def events(self) -> list[Event]:
        """What happened to the run, in its order."""
        return read_events(self.attempts_file)

    def note(self, kind: EventKind, **details: Any) -> None:
        """Add to what happened."""
        append_event(self.attempts_file, kind, details)

    def note_beginning(self, stage: str) -> None:
        """Note that an attempt to `train` or to `score` begins, and with what."""
        gpus = run_or_empty("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        versions = {}
        for package in NOTED_PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(package)
        self.note(
            EventKind.BEGAN,
            stage=stage,
            progress=self.progress(),
            files=self._file_hashes(),
            host=socket.gethostname(),
            job=job_label(),
            gpus=gpus.splitlines(),
            **versions,
        )

    def _file_hashes(self) -> dict[str, str]:
        """The hash of each file that the config names, which may change between runs."""
        config = self.config()
        values = [*config.train.values(), *config.world.model_dump().values()]
        values += config.train.get("command", [])  # of which a word may be a script
        hashes = {}
        for value in values:
            with contextlib.suppress(InputError, TypeError):  # the value names no file
                hashes[value] = sha256(Path(value))[:8]
        return hashes

    def attempts_without_progress(self, stage: str) -> int:
        """How many attempts in a row at this stage brought the run no further.

        Counted backwards, to the last launch, the last attempt at another stage, or the last
        attempt that did not begin where the run is now.
        """
        progress = self.progress()
        count = 0
        for event in reversed(self.events()):
            if event.kind is EventKind.LAUNCHED:
                break
            if event.kind is not EventKind.BEGAN:
                continue
            if event.stage != stage or event.details.get("progress") != progress:
                break
            count += 1
        return count

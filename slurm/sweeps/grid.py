"""A sweep → its runs: every combination of the grid, each checked against its backend."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from sweeps.backends import REGISTRY, get_backend
from sweeps.backends.base import TrainKeys
from sweeps.config import (
    HELD_OUT,
    Entropy,
    Prefetch,
    Score,
    Strict,
    Sweep,
    World,
    check,
    override,
    read_yaml,
    refuse_other,
)
from sweeps.errors import SweepError


def dotted_keys(backend: object) -> list[str]:
    """Where the keys of a sweep file stand: train.learning_rate, world.nodes, workers, …"""
    train = get_backend(backend if backend in REGISTRY else "builtin").Train
    sections = {"train": train, "world": World, "score": Score, "prefetch": Prefetch}
    inner = [f"{name}.{key}" for name, model in sections.items() for key in model.model_fields]
    return [*inner, *Sweep.model_fields]


def load_sweep(path: Path, assignments: Iterable[str] = ()) -> tuple[Sweep, dict[str, str]]:
    """Read a sweep file and apply overrides; returns it and {overridden key: assignment}.

    `train` and `grid` are checked against the backend when the grid is expanded.
    """
    raw = read_yaml(path)
    expected = "a sweep is expected, for example configs/sweeps/beta.yaml"
    refuse_other(raw, Sweep, expected, str(path))
    origins = override(raw, assignments)
    elsewhere = dotted_keys(raw.get("backend"))
    sweep = check(Sweep, raw, str(path), origins=origins, elsewhere=elsewhere)
    if sweep.keep == "scores" and sweep.score is None:
        raise SweepError(f"{path}: keep: found 'scores', but this sweep has no `score` section")
    if sweep.score is not None:
        names = [task.key for task in sweep.score.tasks]
        if Entropy.key in names:
            raise SweepError(f"{path}: score.tasks: a task is called entropy; give it another name")
        if len(set(names)) != len(names):
            raise SweepError(
                f"{path}: score.tasks: two tasks share a name: {names}; give each a `name`"
            )
        if sweep.score.select_on == HELD_OUT and not {**sweep.train, **sweep.grid}.get("held_out"):
            raise SweepError(f"{path}: score.select_on: {HELD_OUT} needs train.held_out")
        names.append(HELD_OUT)
        if sweep.score.select_on not in (None, *names):
            raise SweepError(
                f"{path}: score.select_on: found {sweep.score.select_on!r}, expected one of {names}"
            )
    return sweep, origins


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
        keys = self.keys
        model = re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(keys.model_name_or_path).name) or "model"
        return (
            f"{model}-lr{keys.learning_rate:g}-beta{keys.label_smoothing:g}-seed{keys.seed}"
            f"-{self.digest[:8]}"
        )


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its folder, its config and the grid values that it stands for."""

    folder: Path
    config: RunConfig
    values: dict


def runs_folder(sweep: Sweep) -> Path:
    """Where runs live; sweeps with the same output_root share the runs they have in common."""
    return Path(sweep.output_root) / "runs"


def sweep_folder(sweep: Sweep) -> Path:
    """Where this sweep's own files live: sweep.yaml, index, jobs, results."""
    return Path(sweep.output_root) / "sweeps" / sweep.name


def sweep_hash(cells: list[Cell]) -> str:
    """Which sweep this is: eight digits of the hash of its runs' hashes.

    What is scored, and on which cluster, may change; another run makes another sweep.
    """
    digests = sorted(cell.config.digest for cell in cells)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:8]


def expand(sweep: Sweep, source: str, origins: dict[str, str] | None = None) -> list[Cell]:
    """Every combination of `grid`, in the order of the file, the last axis fastest.

    Raises SweepError naming the file and the key for a value that the backend refuses, a key given
    in both `train` and `grid`, or two cells with the same config.
    """
    backend = get_backend(sweep.backend, source)
    for key in sweep.grid.keys() & sweep.train.keys():
        one, many = sweep.train[key], list(sweep.grid[key])
        typed = [o for o in (f"train.{key}", f"grid.{key}") if o in (origins or {})]
        where = f"command line ({origins[typed[0]]})" if typed else source
        raise SweepError(
            f"{where}: {key!r} is given in both `train` ({one!r}) and `grid` ({many!r}); "
            + (f"for one value: 'grid.{key}=[{one}]'" if typed else "keep one")
        )

    def section(key: str) -> str:
        return "grid" if key in sweep.grid else "train"

    cells, seen, known = [], {}, dotted_keys(sweep.backend)
    for combination in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, combination, strict=True))
        train = check(
            backend.Train,
            sweep.train | values,
            source,
            section=section,
            origins=origins,
            elsewhere=known,
        )
        config = RunConfig(backend=sweep.backend, train=train.model_dump(), world=sweep.world)
        if config.name in seen:
            raise SweepError(
                f"{source}: grid: {values} and {seen[config.name]} are the same run; drop one"
            )
        seen[config.name] = values
        cells.append(Cell(runs_folder(sweep) / config.name, config, values))
    return cells

"""From a sweep's file and overrides, or from its folder, to its runs and their folders."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeval.io import InputError, write_text
from sweeps.runs.backend import load_backend, scoring_problem
from sweeps.runs.run import Run, RunConfig
from sweeps.runs.schema import Sweep, decisive_values
from sweeps.runs.stages import next_stage
from sweeps.runs.yaml_io import build, dump_yaml, escape_dollars, expand, override, read_yaml

LAUNCHED = "launched.yaml"
# The keys of `train:` that hold paths: however one is spelt, the run is the same.
PATH_KEYS = ("model_name_or_path", "tokenizer_name", "train_file", "smoothing_target")


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, read and expanded."""

    folder: Path
    typed: tuple[str, ...]  # the file or folder and the overrides, for messages to repeat
    sweep: Sweep
    runs: list[Run]
    baselines: list[Run]  # the models before fine-tuning, where `score.base` asks for them

    @property
    def lock(self) -> Path:
        """The lock that is held while runs of the folder are trained without Slurm."""
        return self.folder / ".launch"

    @property
    def baselines_and_runs(self) -> list[Run]:
        """All that is to be done, in the order in which tables show it."""
        return [*self.baselines, *self.runs]

    def typed_train_keys(self, run: Run) -> dict[str, Any]:
        """A run's `train:` keys, with paths as they were typed.

        The run's config has lost the `./` that tells a folder from a name of the hub.
        """
        return {**run.config().train, **self.sweep.train, **run.values}

    def create(self) -> None:
        """Write launched.yaml, what this launch asks for, and every run's folder.

        A run that was done and of which this launch asks more is done no more.
        """
        for run in self.baselines_and_runs:
            run.create()
            can_be_scored = run.model.is_dir() or run.config().backend is None
            if run.done and can_be_scored and next_stage(run) is not None:
                run.done_file.unlink(missing_ok=True)
        raw = escape_dollars(self.sweep.model_dump(mode="json"))
        write_text(self.folder / LAUNCHED, dump_yaml(raw))


def plan_sweep(source: Path, assignments: list[str]) -> SweepPlan:
    """Read, override, check and expand a sweep; writes nothing.

    `source` is a sweep file, or a sweep's folder, which then stays its folder wherever it was
    moved; `assignments` are overrides such as `grid.seed=[1, 2]`. Raises InputError with file and
    line, or the override, for whatever is wrong.
    """
    file, sweep, folder, places = _read_sweep(source, assignments)
    runs = _expand_grid(sweep, folder, file, places)
    return SweepPlan(
        folder=folder,
        typed=(str(source), *assignments),
        sweep=sweep,
        runs=runs,
        baselines=_baselines(sweep, folder, runs),
    )


def plan_from_folder(source: Path, assignments: list[str]) -> SweepPlan:
    """The same from the folders of the runs that were made, without the backend.

    That suffices to look at runs, whose folders say all of them. Runs of earlier launches are among
    those of the last one, grid values are not known, and runs whose config cannot be read are left
    out.
    """
    _, sweep, folder, _ = _read_sweep(source, assignments)
    runs = []
    for file in sorted(folder.glob("*/config.yaml")):
        run = Run(file.parent)
        with contextlib.suppress(InputError):
            run.config()
            runs.append(run)
    return SweepPlan(
        folder=folder,
        typed=(str(source), *assignments),
        sweep=sweep,
        runs=[run for run in runs if run.config().backend is not None],
        baselines=[run for run in runs if run.config().backend is None],
    )


def _read_sweep(source: Path, assignments: list[str]) -> tuple[str, Sweep, Path, dict[str, str]]:
    """The file that was read, the sweep in it, the sweep's folder, and where its keys stand."""
    file = source / LAUNCHED if source.is_dir() else source
    raw, places = read_yaml(file)
    overridden = override(raw, assignments)
    # What an override has replaced stands nowhere in the file any more.
    replaced = tuple(f"{key}." for key in overridden)
    places = {key: place for key, place in places.items() if not key.startswith(replaced)}
    places.update(overridden)
    sweep = build(Sweep, expand(str(file), raw), str(file), places)
    folder = Path(os.path.normpath(sweep.output_root)) / sweep.name
    if source.is_dir():
        folder = source
    return str(file), sweep, folder, places


def _expand_grid(sweep: Sweep, folder: Path, source: str, places: dict[str, str]) -> list[Run]:
    """A run for every combination of `grid`, in the order of the file, the last axis fastest."""
    options_class = load_backend(sweep.backend).Train

    def section(key: str) -> str:
        """Under which key of the sweep file one of the training options was given."""
        return "grid" if key in sweep.grid else "train"

    runs: dict[str, Run] = {}
    for values in _combinations(sweep.grid):
        train_keys = {**sweep.train, **values}
        for key in PATH_KEYS:
            if isinstance(train_keys.get(key), str):
                train_keys[key] = os.path.normpath(train_keys[key])
        train_options = build(options_class, train_keys, source, places, section)
        if sweep.score is not None:
            problem = scoring_problem(sweep.backend, train_options)
            if problem is not None:
                raise InputError(f"{source}: {problem}")
        config = RunConfig(
            backend=sweep.backend,
            train=decisive_values(train_options),
            world=sweep.world,
            score=sweep.score,
            keep=sweep.keep,
            max_idle_restarts=sweep.max_idle_restarts,
        )
        if config.name in runs:
            both = f"{values} and {runs[config.name].values}"
            raise InputError(f"{source}: grid: {both} are the same run; drop one")
        runs[config.name] = Run(folder / config.name, config, values)
    return list(runs.values())


def _combinations(grid: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(*grid.values()):
        yield dict(zip(grid, combination, strict=True))


def _baselines(sweep: Sweep, folder: Path, runs: list[Run]) -> list[Run]:
    """The models before fine-tuning, each once; none unless `score.base` asks for them."""
    if sweep.score is None or not sweep.score.base:
        return []
    baselines: dict[str, Run] = {}
    for run in runs:
        train_keys = run.config().train
        base_keys = {"model_name_or_path": train_keys["model_name_or_path"]}
        values = dict(base_keys)
        if train_keys.get("model_revision"):
            base_keys["model_revision"] = train_keys["model_revision"]
        config = RunConfig(backend=None, train=base_keys, score=sweep.score)
        baselines[config.name] = Run(folder / config.name, config, values)
    return list(baselines.values())

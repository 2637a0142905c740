"""From a sweep's file and overrides, or from its folder, to its runs and their folders."""

import itertools
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calibeval.io import InputError, read_text, write_text
from sweeps.runs.backend import load_backend, scoring_problem
from sweeps.runs.backend_modules import built_in_backends
from sweeps.runs.run import Run, RunConfig
from sweeps.runs.schema import Sweep, World
from sweeps.runs.stages import next_stage
from sweeps.runs.yaml_io import (
    build,
    dump_yaml,
    escape_dollars,
    expand_all,
    nearest_place,
    override,
    read_yaml,
)

MOST_RUNS = 10_000  # of a sweep; a few lines of a grid can ask for billions
LAUNCHED_FILE = "launched.yaml"
# Holds two lines: the folder in which the last launch was typed, and the sweep file of it.
LAUNCHED_IN_FILE = "launched_in"
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
    is_one_run: bool = False  # whether it is of a run's folder, and launched.yaml not its business

    @property
    def lock(self) -> Path:
        """The lock that is held while runs of the folder are trained without Slurm."""
        return self.folder / ".launch"

    @property
    def baselines_and_runs(self) -> list[Run]:
        """All that is to be done, in the order in which tables show it."""
        return [*self.baselines, *self.runs]

    def typed_train_keys(self, run: Run) -> dict[str, Any]:
        """The `train:` keys of a run that is trained, with paths as they were typed.

        The run's config has lost the `./` that tells a folder from a name of the hub.
        """
        assert not run.config().is_baseline  # `sweep.train` is not about it
        return {**run.config().train, **self.sweep.train, **run.grid_values}

    def create(self) -> None:
        """Write every run's folder, and launched.yaml, which says what this launch asks for."""
        for run in self.baselines_and_runs:
            run.create()
            self._reopen(run)
        if self.is_one_run:
            return
        sweep_file = Path(self.typed[0]).absolute()
        if sweep_file.is_file():
            write_text(self.folder / LAUNCHED_IN_FILE, f"{os.getcwd()}\n{sweep_file}\n")
        file = self.folder / LAUNCHED_FILE
        # A later launch reads this file as it reads any sweep file, and expands variables in it.
        write_text(file, dump_yaml(escape_dollars(self.sweep.model_dump(mode="json"))))

    def joined_sweep(self) -> str:
        """Say so where the folder has the runs of another sweep file, as a copy's has."""
        sweep_file = Path(self.typed[0]).absolute()
        _, joined = _launched_in(self.folder)
        if joined is None or not sweep_file.is_file() or joined == sweep_file:
            return ""
        return (
            f"note: these runs join those of {joined}; with another `name` they have a folder of "
            "their own"
        )

    def _reopen(self, run: Run) -> None:
        """Remove DONE where it no longer holds, because this launch asks more of the run.

        The next stage of a run that has its model/, or is a baseline, does not depend on DONE: the
        file is removed only because it is no longer true, and `status` counts by it how many runs
        of other launches are done. A run whose model was deleted
        (`keep: scores`) keeps DONE, by which alone it counts as trained. Nothing more can be scored
        for it, so `launch.preflight` refuses a launch that asks for that, before it comes here.
        """
        can_be_scored = run.model.is_dir() or run.config().is_baseline
        if run.done and can_be_scored and next_stage(run) is not None:
            run.done_file.unlink(missing_ok=True)


def _launched_in(sweep_folder: Path) -> tuple[Path | None, Path | None]:
    """The folder in which a sweep was launched last, and its file; None of what is not there."""
    file = sweep_folder / LAUNCHED_IN_FILE
    if not file.is_file():
        return None, None
    place, _, sweep_file = read_text(file).rstrip("\n").partition("\n")
    return (
        Path(place) if os.path.isdir(place) else None,
        Path(sweep_file) if os.path.isfile(sweep_file) else None,
    )


def launch_folder(folder: Path) -> tuple[Path | None, bool]:
    """Tell where the relative paths of a sweep begin, whose folder, or run's folder, this is.

    Also whether the file that says so is this user's own.
    """
    sweep_folder = folder.parent if _is_run_folder(folder) else folder
    place, _ = _launched_in(sweep_folder)
    if place is None:
        return None, False
    return place, (sweep_folder / LAUNCHED_IN_FILE).stat().st_uid == os.geteuid()


def plan_sweep(source: Path, assignments: list[str]) -> SweepPlan:
    """Read, override, check and expand a sweep; writes nothing.

    `source` is a sweep file; or a sweep's folder, which then stays its folder wherever it was
    moved; or the folder of a run, which is then the only one of the plan. `assignments` are
    overrides such as `grid.seed=[1, 2]`. Raises InputError with file and line, or the override, of
    each key that is wrong; where the backend says that its models cannot be scored, with the file
    and the backend's words.
    """
    return _plan(source, assignments, imports="any")


def plan_to_look_at(source: Path, assignments: list[str]) -> SweepPlan:
    """The plan of `plan_sweep`, without an import of what a folder names as its backend.

    A folder may be anybody's: its launched.yaml may name any module. See `_runs_in_folders`.
    """
    plan = _plan(source, assignments, imports="ours")
    _refuse_links(plan.folder)
    return plan


def plan_from_folder(source: Path, assignments: list[str]) -> SweepPlan:
    """The plan of a sweep whose backend is not imported: see `_runs_in_folders`."""
    plan = _plan(source, assignments, imports="none")
    _refuse_links(plan.folder)
    return plan


def _refuse_links(folder: Path) -> None:
    """Raise InputError for a link to a folder in a sweep's folder, where this project makes none.

    Somebody else may have put it there, for those who look to read, write or cancel elsewhere.
    """
    entries = _entries(folder)
    scores = [entry / "scores" for entry in entries]
    for place in (*entries, *_entries(folder / "jobs"), *scores):
        if place.is_symlink() and place.is_dir():
            raise InputError(
                f"{place}: is a link to {os.readlink(place)}, which would be looked into; delete "
                "it, or put the folder itself there"
            )


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, nothing where there is none; InputError where it cannot be listed."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be listed ({error.strerror}), so nobody knows what links are in it"
        ) from error


def _plan(
    source: Path, assignments: list[str], imports: Literal["any", "ours", "none"]
) -> SweepPlan:
    """Read a sweep and its plan; `imports` says which backends may be imported for it.

    `ours` are those of this project, and any that a sweep file names which is not a folder's.
    The file is read once: a second time somebody else may have put another one there.
    """
    run_folder = source if _is_run_folder(source) else None
    read = _read_sweep(source.parent if run_folder else source, assignments)
    is_ours = not read.is_folder or read.sweep.backend in built_in_backends()
    if imports == "any" or (imports == "ours" and is_ours):
        runs = _expand_grid(read)
        baselines = _baselines(read.sweep, read.folder, runs)
    else:
        runs, baselines = _runs_in_folders(read)
    plan = SweepPlan(
        folder=read.folder,
        typed=(str(source), *assignments),
        sweep=read.sweep,
        runs=runs,
        baselines=baselines,
    )
    return _only(run_folder, plan, assignments) if run_folder else plan


def _runs_in_folders(read: "_ReadSweep") -> tuple[list[Run], list[Run]]:
    """A sweep's runs and the models before fine-tuning, from the folders of its runs.

    Those whose config cannot be read are left out. Only the backend knows how it writes the values
    that were typed: a run is in the plan unless one of them is surely another.
    """
    sweep = read.sweep
    combinations = [
        dict(zip(sweep.grid, combination, strict=True))
        for combination in itertools.product(*sweep.grid.values())
    ]
    runs_of: dict[int, list[Run]] = {}  # by the combination's position
    baselines = []
    for file in sorted(read.folder.glob("*/config.yaml")):
        run = Run(file.parent)
        try:
            config = run.config()
        except InputError:
            continue
        if config.is_baseline:
            baselines.append(run)
            continue
        for position, grid_values in enumerate(combinations):
            if _may_be_of(config.train, {**sweep.train, **grid_values}):
                run = Run(run.path, config, grid_values)
                runs_of.setdefault(position, []).append(run)
                break
    return [run for position in sorted(runs_of) for run in runs_of[position]], baselines


def _is_run_folder(source: Path) -> bool:
    return (source / "config.yaml").is_file() and not (source / LAUNCHED_FILE).is_file()


def _only(folder: Path, plan: SweepPlan, assignments: list[str]) -> SweepPlan:
    """Plan one run, which need not be one of those that the last launch has asked for."""
    for assignment in assignments:
        if re.match(r"(train|grid|world|backend)\b", assignment):
            raise InputError(
                f"{folder}: {assignment}: would be another run: type the sweep's file instead"
            )
    run = Run(folder)
    config = run.config()
    of_plan = [planned for planned in plan.baselines_and_runs if planned.name == run.name]
    chosen = of_plan or [run]
    sweep = plan.sweep
    if not config.is_baseline:
        sweep = sweep.model_copy(update={"backend": config.backend, "world": config.world})
    return SweepPlan(
        folder=plan.folder,
        typed=(str(folder), *assignments),
        sweep=sweep,
        runs=[] if config.is_baseline else chosen,
        baselines=chosen if config.is_baseline else [],
        is_one_run=True,
    )


def _may_be_of(train: dict[str, Any], typed: dict[str, Any]) -> bool:
    """Whether a run with these values in its config may be what was typed."""
    for key in train.keys() & typed.keys():
        values = [train[key], typed[key]]
        if any(isinstance(value, (dict, list)) for value in values):
            continue
        if key in PATH_KEYS:
            values = [os.path.normpath(str(value)) for value in values]
        if values[0] != values[1] and str(values[0]) != str(values[1]):
            return False
    return True


@dataclass(frozen=True)
class _ReadSweep:
    """A sweep as it was read."""

    file: str
    is_folder: bool  # whether its folder was named, and the file is what a launch has left there
    sweep: Sweep
    folder: Path
    places: dict[str, str]  # where its keys stand


def _read_sweep(source: Path, assignments: list[str]) -> _ReadSweep:
    """Read a sweep from its file or its folder."""
    is_folder = source.is_dir()
    file = source / LAUNCHED_FILE if is_folder else source
    raw, places = read_yaml(file)
    overridden = override(raw, assignments)
    # What an override has replaced stands nowhere in the file any more.
    replaced = tuple(f"{key}." for key in overridden)
    places = {key: place for key, place in places.items() if not key.startswith(replaced)}
    places.update(overridden)
    expanded = expand_all(raw, str(file), places, is_folder=is_folder)
    sweep = build(Sweep, expanded, str(file), places)
    count = math.prod(len(values) for values in sweep.grid.values())
    if count > MOST_RUNS:
        place = nearest_place("grid", places, str(file))
        raise InputError(f"{place}: grid: {count:,} runs; a sweep may have {MOST_RUNS:,}")
    folder = Path(os.path.normpath(sweep.output_root)) / sweep.name
    if is_folder:
        folder = source
    return _ReadSweep(str(file), is_folder, sweep, folder, places)


def _expand_grid(read: _ReadSweep) -> list[Run]:
    """A run for every combination of `grid`, in the order of the file, the last axis fastest."""
    sweep = read.sweep
    options_class = load_backend(sweep.backend).Train

    def section(key: str) -> str:
        """Under which key of the sweep file one of the training options was given."""
        return "grid" if key in sweep.grid else "train"

    runs: dict[str, Run] = {}
    for combination in itertools.product(*sweep.grid.values()):
        grid_values = dict(zip(sweep.grid, combination, strict=True))
        train_keys = {**sweep.train, **grid_values}
        for key in PATH_KEYS:
            if isinstance(train_keys.get(key), str) and train_keys[key]:  # "" would become "."
                train_keys[key] = os.path.normpath(train_keys[key])
        train_options = build(
            options_class, train_keys, read.file, read.places, section, keys_of=[sweep.backend]
        )
        if sweep.score is not None:
            problem = scoring_problem(sweep.backend, train_options)
            if problem is not None:
                raise InputError(f"{read.file}: {problem}")
        config = _config(sweep, sweep.backend, train_options.model_dump(), sweep.world)
        if config.name in runs:
            both = f"{grid_values} and {runs[config.name].grid_values}"
            place = nearest_place("grid", read.places, read.file)
            raise InputError(f"{place}: grid: {both} are the same run; drop one")
        runs[config.name] = Run(read.folder / config.name, config, grid_values)
    return list(runs.values())


def _config(sweep: Sweep, backend: str | None, train: dict[str, Any], world: World) -> RunConfig:
    """The config of a run, or of a model before fine-tuning, with what holds for all of a sweep.

    A key of the sweep that decides what is done with a run is handed on here. One that decides its
    weights belongs into `RunConfig.digest` too, which says how.
    """
    return RunConfig(
        backend=backend,
        train=train,
        world=world,
        score=sweep.score,
        keep=sweep.keep,
        max_idle_restarts=sweep.max_idle_restarts,
    )


def _baselines(sweep: Sweep, folder: Path, runs: list[Run]) -> list[Run]:
    """The models before fine-tuning, each once; none unless `score.base` asks for them."""
    if sweep.score is None or not sweep.score.base:
        return []
    baselines: dict[str, Run] = {}
    for run in runs:
        model = run.config().train["model_name_or_path"]
        revision = run.config().train.get("model_revision")
        train_keys = {"model_name_or_path": model}
        if revision:
            train_keys["model_revision"] = revision
        config = _config(sweep, None, train_keys, World())
        # Of a run that has not begun, `status` shows the grid values: here the model stands in.
        grid_values = {"model_name_or_path": model}
        baselines[config.name] = Run(folder / config.name, config, grid_values)
    return list(baselines.values())

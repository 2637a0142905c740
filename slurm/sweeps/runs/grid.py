"""A sweep, by its file and overrides or by its folder → its runs and their folders."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from calibeval.io import InputError, write_text
from sweeps.runs.backend import load_backend, scoring_problem
from sweeps.runs.run import Run, RunConfig
from sweeps.runs.schema import Sweep
from sweeps.runs.yaml_io import check, dump_yaml, expand, override, read_yaml

FILE = "launched.yaml"
PATHS = ("model_name_or_path", "tokenizer_name", "train_file", "smoothing_target")


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, read and expanded.

    `baselines` are the models before fine-tuning, where `score.base` asks for them.
    """

    folder: Path
    typed: tuple[str, ...]
    sweep: Sweep
    runs: list[Run]
    baselines: list[Run]

    @property
    def lock(self) -> Path:
        """Held while runs of the folder are trained without Slurm."""
        return self.folder / ".launch"

    def create(self) -> None:
        """Write launched.yaml, what the last launch asked for, and every run's folder."""
        for run in (*self.baselines, *self.runs):
            run.create()
        write_text(self.folder / FILE, dump_yaml(self.sweep.model_dump(mode="json")))


def plan_sweep(source: Path, assignments: list[str]) -> SweepPlan:
    """Read, override, check and expand a sweep file or a sweep's folder; writes nothing."""
    file, folder = source, None
    if source.is_dir():
        file, folder = source / FILE, source
    raw, places = read_yaml(file)
    given = override(raw, assignments)
    above = tuple(f"{key}." for key in given)  # what an override replaced stands nowhere
    places = {key: at for key, at in places.items() if not key.startswith(above)} | given
    sweep = check(Sweep, expand(str(file), raw), str(file), places)
    folder = folder or Path(os.path.normpath(sweep.output_root)) / sweep.name
    cells = _cells(sweep, folder, str(file), places)
    return SweepPlan(
        folder, (str(source), *assignments), sweep, cells, _bases(sweep, folder, cells)
    )


def _cells(sweep: Sweep, folder: Path, source: str, places: dict[str, str]) -> list[Run]:
    """Every combination of `grid`, in the order of the file, the last axis fastest."""
    trains = load_backend(sweep.backend).Train
    same = {k: getattr(sweep, k) for k in ("world", "score", "keep", "max_idle_restarts")}

    def section(key: str) -> str:
        return "grid" if key in sweep.grid else "train"

    cells: dict[str, Run] = {}
    for combination in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, combination, strict=True))
        raw = sweep.train | values
        raw |= {k: os.path.normpath(raw[k]) for k in PATHS if isinstance(raw.get(k), str)}
        keys = check(trains, raw, source, places, section)
        if sweep.score and (problem := scoring_problem(sweep.backend, keys)):
            raise InputError(f"{source}: {problem}")
        config = RunConfig(backend=sweep.backend, train=keys.model_dump(), **same)
        if config.name in cells:
            both = f"{values} and {cells[config.name].values}"
            raise InputError(f"{source}: grid: {both} are the same run; drop one")
        cells[config.name] = Run(folder / config.name, config, values)
    return list(cells.values())


def _bases(sweep: Sweep, folder: Path, cells: list[Run]) -> list[Run]:
    """The models before fine-tuning, each once; none if `score.base` is off."""
    if sweep.score is None or not sweep.score.base:
        return []
    found = {}
    for run in cells:
        keys = ("model_name_or_path", "model_revision")
        train = {key: value for key, value in run.config().train.items() if key in keys and value}
        config = RunConfig(backend=None, train=train, score=sweep.score)
        values = {"model_name_or_path": train["model_name_or_path"]}
        found[config.name] = Run(folder / config.name, config, values)
    return list(found.values())

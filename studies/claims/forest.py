"""The forest plot: what each β does to the calibration of every model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibeval.io import InputError, atomic_write
from calibeval.report.figures import GREY, INK, STYLE
from studies.claims.answers import LETTER_TASKS, unpack_scored_runs
from studies.claims.contrasts import CALIBRATION, Difference, difference, smoothing_effect
from studies.claims.parts import BETAS, CONFIG, Study
from sweeps.runs.grid import plan_sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BY_LETTERS = [quantity for quantity in CALIBRATION if quantity.task in LETTER_TASKS]
LEAST_SEEDS = 3
LABEL = (
    "squared calibration error at β minus that at β = 0, × 1000 (logarithmic beyond ±1)\n"
    "filled: among the choices; hollow: among all tokens; left: better calibrated"
)


def draw_forest(study: Study, out: Path) -> None:
    """Draw what β does by letters to every model with at least three seeds, with its intervals.

    The seeds are counted for each row by itself (`forest_rows`). Marks are filled among the choices
    and hollow among all tokens.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = forest_rows(study)
    with rc_context(STYLE):
        canvas = Figure((7, 0.8 + 0.2 * len(rows)), layout="constrained")
        axes = canvas.subplots(1, len(LETTER_TASKS), sharey=True)
        axis_of_task = dict(zip(LETTER_TASKS, axes, strict=True))
        for column, quantity in enumerate(BY_LETTERS):
            axis = axis_of_task[quantity.task]
            axis.set_title(LETTER_TASKS[quantity.task])
            cells = [cells_of_row[column] for cells_of_row in rows.values()]
            draw_column(axis, cells, filled=quantity.confidence == "choices")
        for axis in axes:
            set_scale(axis)
            for row in first_rows_of_groups(list(rows)):
                axis.axhline(row - 0.5, color=GREY, lw=0.4)
        axes[0].set_yticks(range(len(rows)), rows)
        axes[0].set_ylim(max(len(rows), 1) - 0.5, -0.5)
        canvas.supxlabel(LABEL, fontsize=7.5)
        with atomic_write(out, "wb") as file:
            canvas.savefig(file, format="png", dpi=200)


def forest_rows(study: Study) -> dict[str, list[Difference | None]]:
    """A row's name and its differences in the order of BY_LETTERS, of all models.

    Rows whose first difference has fewer than LEAST_SEEDS seeds are left out.
    """
    model_labels = plan_sweep(CONFIG, []).sweep.model_labels
    rows = {}
    for model, label in labels_of_models(study.store.models(), model_labels).items():
        runs = unpack_scored_runs(replace(study, model=model))
        for part, name in (("recommended", label), ("over-trained", f"{label}, over-trained")):
            for beta in BETAS[1:]:
                effect = smoothing_effect(name, part, beta)
                cells = [difference(runs, effect, quantity) for quantity in BY_LETTERS]
                if cells[0] and cells[0].seeds >= LEAST_SEEDS:
                    rows[f"{name}: β = {beta}"] = cells
    return rows


def labels_of_models(models: list[str], model_labels: Mapping[str, str]) -> dict[str, str]:
    """The label of each model, its own name where the config has none.

    Raises InputError where two models have the same: the rows of one would replace the other's.
    """
    model_by_label: dict[str, str] = {}
    for model in models:
        label = model_labels.get(f"models/{model}", model)
        if label in model_by_label:
            raise InputError(
                f"{CONFIG}: model_labels.models/{model}: found {label!r}, which is the label of "
                f"models/{model_by_label[label]}, too; give each model one of its own"
            )
        model_by_label[label] = model
    return {model: label for label, model in model_by_label.items()}


def first_rows_of_groups(names: list[str]) -> list[int]:
    """The rows before which a line is drawn: those of another model or setting begin there."""
    groups = [name.rpartition(": β = ")[0] for name in names]
    return [row for row in range(1, len(groups)) if groups[row] != groups[row - 1]]


def draw_column(axis: "Axes", cells: list[Difference | None], filled: bool) -> None:
    """Draw an interval and a mark for each row; filled ones stand a little above hollow ones."""
    shift = -0.15 if filled else 0.15
    fill = INK if filled else "white"
    for row, cell in enumerate(cells):
        if cell is None:
            continue
        height = row + shift
        estimate = cell.estimate
        if has_interval(cell):
            interval = np.array([estimate.low, estimate.high], dtype=float)
            axis.plot(interval, [height, height], "|-", color=INK, lw=0.8, ms=4)
        value = np.array([estimate.value], dtype=float)
        axis.plot(value, [height], "o", color=INK, mfc=fill, ms=2.6)


def has_interval(cell: Difference) -> bool:
    """Whether the resamples told an interval of a difference."""
    return cell.estimate.low is not None and cell.estimate.high is not None


def set_scale(axis: "Axes") -> None:
    """Make an axis linear within ±1 and logarithmic beyond."""
    axis.axvline(0, color=GREY, lw=0.6)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks((-100, -5, 0, 5, 100), ("−100", "−5", "0", "5", "100"))
    axis.set_xlim(-250, 250)
    axis.minorticks_off()

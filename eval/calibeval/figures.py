"""Figures over several runs: metric bars, ECE against β, ECE against model size.

As in Figures 2, 3 and 5 of the paper; `prepare_*` makes arrays, `plot_*` draws them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibeval.plots import save
from calibeval.tables import Row

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#888888")
BESIDE = {"fontsize": "x-small", "loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
PANELS = (("accuracy", "Accuracy ↑"), ("ece", "ECE ↓"), ("rms", "RMS ↓"))


@dataclass(frozen=True)
class Series:
    """A named line or set of bars with 95 % half-widths."""

    name: str
    x: np.ndarray
    y: np.ndarray
    half: np.ndarray


def prepare_bars(rows: list[Row], metric: str, confidence: str = "choices") -> list[Series]:
    """One series a β (and base), one bar a model."""
    models = sorted({row.model for row in rows})
    return [
        _series(
            name(row_group[0]),
            row_group,
            [models.index(r.model) for r in row_group],
            metric,
            confidence,
        )
        for row_group in _grouped(rows, lambda r: (r.beta is not None, r.beta or 0, str(r.extra)))
    ]


def prepare_against_beta(rows: list[Row], confidence: str) -> list[Series]:
    """ECE over β, one line a model (and value of what else varies); base models have no β."""
    tuned = [row for row in rows if row.beta is not None]
    return [
        _series(legend(group[0]), group, [r.beta for r in group], "ece", confidence)
        for group in _grouped(tuned, lambda r: (r.model, str(r.extra)))
    ]


def prepare_against_size(rows: list[Row], confidence: str) -> list[Series]:
    """ECE over the number of parameters, one line a β; rows without `parameters` are left out."""
    sized = sorted((r for r in rows if r.parameters), key=lambda r: r.parameters)
    return [
        _series(name(group[0]), group, [r.parameters for r in group], "ece", confidence)
        for group in _grouped(sized, lambda r: (r.beta is not None, r.beta or 0, str(r.extra)))
    ]


def _grouped(rows: list[Row], key) -> list[list[Row]]:
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [groups[k] for k in sorted(groups)]


def _series(name: str, rows: list[Row], x: list, metric: str, confidence: str) -> Series:
    cells = [row.cell(metric, confidence) for row in rows]
    half = np.array([cell.half for cell in cells])
    return Series(name, np.array(x, float), np.array([cell.mean for cell in cells]), half)


def name(row: Row) -> str:
    """β, and what else varies, as a legend entry."""
    beta = "base" if row.beta is None else f"β = {row.label}"
    return ", ".join([beta, *row.notes])


def legend(row: Row) -> str:
    """Model, and what else varies, as a legend entry."""
    return ", ".join([row.model, *row.notes])


def compact(count: float) -> str:
    """A number of parameters as papers write it: 6.7B."""
    power = min(3, max(0, int(np.log10(count) // 3)))
    return f"{count / 1000**power:.3g}{('', 'K', 'M', 'B')[power]}"


def beside(panels: float, names: list[str]) -> tuple[float, float]:
    """A figure's width in inches with a legend beside its panels, and the share left of that."""
    width = panels + 0.5 + 0.065 * max(map(len, names), default=0)
    return width, panels / width


def plot_bars(rows: list[Row], title: str, path: Path) -> None:
    """Accuracy, ECE and RMS as groups of bars by model."""
    from matplotlib.figure import Figure

    models = sorted({row.model for row in rows})
    sets = [prepare_bars(rows, metric) for metric, _ in PANELS]
    width, right = beside(3.2 * len(PANELS), [series.name for series in sets[-1]])
    figure = Figure(figsize=(width, 3.2))
    figure.subplots_adjust(0.04, 0.09, right, 0.86, wspace=0.16)
    for axis, (_, label), every in zip(figure.subplots(1, len(PANELS)), PANELS, sets, strict=True):
        width = 0.8 / len(every)
        for i, series in enumerate(every):
            at = series.x - 0.4 + (i + 0.5) * width
            colour = COLOURS[i % len(COLOURS)]
            axis.bar(
                at,
                series.y,
                width,
                yerr=series.half,
                color=colour,
                label=series.name,
                error_kw={"lw": 0.9},
            )
        axis.set_xticks(range(len(models)), models, fontsize="small")
        axis.set_title(label, fontsize="small")
        axis.set_ylim(0, None)
    figure.axes[-1].legend(**BESIDE)
    figure.suptitle(title, fontsize="medium")
    save(figure, path)


def plot_lines(
    panels: dict[str, list[Series]], title: str, label: str, path: Path, log: bool = False
) -> None:
    """Lines with intervals, a panel a definition of confidence."""
    from matplotlib.figure import Figure

    names = [series.name for every in panels.values() for series in every]
    width, right = beside(3.6 * len(panels), names)
    figure = Figure(figsize=(width, 3.2))
    figure.subplots_adjust(0.08, 0.15, right, 0.84, wspace=0.08)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (panel, every) in zip(axes, panels.items(), strict=True):
        for i, series in enumerate(every):
            axis.errorbar(
                series.x,
                series.y,
                series.half,
                marker="o",
                ms=4,
                lw=1.2,
                capsize=2,
                color=COLOURS[i % len(COLOURS)],
                label=series.name,
            )
        axis.set(xlabel=label, ylim=(0, None))
        if log:
            sizes = sorted({x for series in every for x in series.x})
            axis.set_xscale("log", subs=[])
            axis.set_xticks(sizes, [compact(x) for x in sizes], minor=False)
        axis.set_title(f"confidence among {panel}", fontsize="small")
    axes[0].set_ylabel("ECE")
    axes[-1].legend(**BESIDE)
    figure.suptitle(title, fontsize="medium")
    save(figure, path)

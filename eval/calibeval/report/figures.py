"""Figures from an index: reliability diagrams, and ECE over β.

Each is an SVG for the page and a PNG for slides, 17.5 cm wide, a page's width.
"""

import contextlib
import hashlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from calibeval.io import atomic_write, import_matplotlib
from calibeval.measures import AMONG_WORDS, MAIN_ERROR, METRICS, ConfidenceDefinition
from calibeval.report.index import Results, TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDTH = 17.5  # centimetres
CENTIMETRES_PER_INCH = 2.54
PANELS_ACROSS = 5
PANEL_METRICS = (MAIN_ERROR, "mcb", "dsc")  # whose values stand in a panel's title
NAME_WIDTH = 24  # characters of a line of a panel's title
NAME_LINES = 2
# Of the models before fine-tuning, which have no β to stand at, in the order in which they come.
BASE_STYLES = ("--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)))
FILE_NAME_LENGTH = 150  # characters of a data set's name; file systems take 255 in all
INK = "#222222"
GREY = "#888888"
SHADES = (0.05, 0.9)  # of the color map, for β of 0 and of ½
STYLE = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 4,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "calibeval",  # the same SVG every time
    # Names of data sets and models are texts: between two dollars would be a formula.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn, the stem of its files, and what it shows."""

    stem: str
    caption: str
    canvas: "Canvas"


def color(beta: float | None) -> tuple[float, ...]:
    """Return a β's color, in every report the same; grey before fine-tuning."""
    from matplotlib import colormaps

    if beta is None:
        return (0.53, 0.53, 0.53)
    return colormaps["viridis"](np.interp(beta, (0, 0.5), SHADES))[:3]


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Let figures be drawn in `STYLE`."""
    import_matplotlib()
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def draw(results: Results, out: Path) -> list[tuple[Path, str]]:
    """Draw every figure that there are data for into `out`; return each .svg with its caption."""
    captions = []
    with style():
        for data_set in results.data_sets:
            for drawing in _drawings(results, data_set):
                _save(drawing, out)
                captions.append((out / f"{drawing.stem}.svg", drawing.caption))
    return captions


def _drawings(results: Results, data_set: str) -> list[Drawing]:
    """The figures of one data set."""
    rows = [row for row in results.rows if data_set in row.evaluations]
    rows_with = _rows_by_confidence(rows, data_set)
    file_name = _file_name(data_set)
    drawings = []
    if len({row.beta for row in rows} - {None}) > 1:
        caption = (
            f"{METRICS[MAIN_ERROR].heading} on {data_set} against β; dotted: what 95 % of "
            "calibrated models stay below, in the mean over the seeds; grey: before "
            "fine-tuning."
        )
        canvas = error_over_beta(rows, data_set, rows_with)
        drawings.append(Drawing(f"{MAIN_ERROR}-against-beta_{file_name}", caption, canvas))
    for among, rows_of_figure in rows_with.items():
        caption = (
            f"Reliability on {data_set}, confidence {AMONG_WORDS[among]}. Coloured: "
            "accuracy by the kernel of the smooth ECE with its 95 % band; black: by "
            "isotonic regression; grey: where that lies in 95 % of calibrated models; "
            "below, where the questions are. Above a panel stand its errors: MCB is what "
            "recalibration would take off the Brier score of the likeliest choice (lower is "
            "better), and DSC what telling right answers from wrong ones takes off (higher is "
            "better)."
        )
        if any(len(row.evaluations_of(data_set)) > 1 for row in rows_of_figure):
            caption += (
                " Of several seeds curves and bands are means: the band is that of one seed in the "
                "mean, and covers no other seeds."
            )
        canvas = reliability_diagrams(rows_of_figure, data_set, among)
        drawings.append(Drawing(f"reliability_{file_name}_{among}", caption, canvas))
    return drawings


def _file_name(data_set: str) -> str:
    """A data set's name as file systems take it; a long one ends with a digest of it."""
    name = quote(data_set, safe=" ")
    if len(name) <= FILE_NAME_LENGTH:
        return name
    digest = hashlib.sha256(data_set.encode()).hexdigest()
    return f"{name[:FILE_NAME_LENGTH]}-{digest[:12]}"


def _rows_by_confidence(
    rows: Sequence[TableRow], data_set: str
) -> dict[ConfidenceDefinition, list[TableRow]]:
    """The rows that have each definition of confidence, in the order in which they come up."""
    rows_with: dict[ConfidenceDefinition, list[TableRow]] = {}
    for row in rows:
        evaluations = row.evaluations_of(data_set)
        for among in AMONG_WORDS:
            if all(among in evaluation.confidences for evaluation in evaluations):
                rows_with.setdefault(among, []).append(row)
    return rows_with


def _save(drawing: Drawing, out: Path) -> None:
    """Write a figure as PNG and as SVG, which has no date: it is the same every time."""
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        with atomic_write(out / f"{drawing.stem}.{kind}", "wb") as file:
            drawing.canvas.savefig(file, format=kind, dpi=200, metadata=metadata)


def _canvas(height: float) -> "Canvas":
    """An empty figure of a page's width, so many centimetres high."""
    from matplotlib.figure import Figure

    size = (WIDTH / CENTIMETRES_PER_INCH, height / CENTIMETRES_PER_INCH)
    return Figure(figsize=size, layout="constrained")


def mean_curves(row: TableRow, data_set: str, among: ConfidenceDefinition) -> dict[str, np.ndarray]:
    """Return the mean over seeds of a row's reliability curves and bands, where all have them.

    `count` is the sum over seeds of each bin's answers.
    """
    curves = [evaluation.reliability[among] for evaluation in row.evaluations_of(data_set)]
    low = max(curve["at"][0] for curve in curves)
    high = min(curve["at"][-1] for curve in curves)
    at = np.linspace(low, max(low, high), len(curves[0]["at"]))
    means = {}
    for name in curves[0]:
        if name.startswith(("smooth", "isotonic")):
            means[name] = np.mean([np.interp(at, curve["at"], curve[name]) for curve in curves], 0)
    means["at"] = at
    means["count"] = np.sum([curve["count"] for curve in curves], 0)
    return means


def reliability_diagrams(
    rows: Sequence[TableRow], data_set: str, among: ConfidenceDefinition
) -> "Canvas":
    """Return a figure with one diagram a row of the table."""
    down = math.ceil(len(rows) / PANELS_ACROSS)
    across = max(math.ceil(len(rows) / down), 3)  # as many in each line, so that none is left over
    panel_height = 1.35 * WIDTH / across + 0.9
    canvas = _canvas(down * panel_height + 0.6)
    axes = canvas.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes[0, 0].set(xlim=(0, 1), ylim=(-0.26, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    one_model = len({row.setting["model"] for row in rows}) == 1
    for axis, row in zip(axes.flat, rows, strict=False):
        draw_curves(axis, mean_curves(row, data_set, among), color(row.beta))
        name = row.name("model") if one_model else row.name()
        name = textwrap.fill(name, NAME_WIDTH, max_lines=NAME_LINES, placeholder=" …")
        axis.set_title(f"{name}\n{_title_values(row, data_set, among)}", pad=3)
        axis.set_aspect("equal")
        axis.spines[:].set_visible(True)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy")
    for axis in axes.flat[max(len(rows) - across, 0) : len(rows)]:  # the last of each column
        axis.tick_params(labelbottom=True)
    # Once for all: five panels beside each other are narrower than these words.
    canvas.supxlabel(f"confidence {AMONG_WORDS[among]}", fontsize="medium")
    return canvas


def draw_curves(axis: "Axes", curves: dict[str, np.ndarray], shade: tuple[float, ...]) -> None:
    """Draw a row's curves with their bands, and below them a histogram of the confidences.

    Each has a label, for those figures that have a legend.
    """
    at = curves["at"]
    band_labels = {
        "isotonic": "where the steps of 95 % of calibrated models lie",
        "smooth": "95 % band of the smoothed accuracy",
    }
    for name, band_color in (("isotonic", GREY), ("smooth", shade)):
        low = curves[f"{name}_low"]
        high = curves[f"{name}_high"]
        label = band_labels[name]
        axis.fill_between(at, low, high, color=band_color, alpha=0.3, lw=0, label=label)
    axis.plot([0, 1], [0, 1], "--", color=GREY, lw=0.6, label="calibrated")
    axis.plot(at, curves["isotonic"], color=INK, lw=0.7, label="accuracy in steps (isotonic)")
    axis.plot(at, curves["smooth"], color=shade, lw=1.6, label="accuracy, smoothed")
    count = curves["count"]
    edges = np.linspace(0, 1, len(count) + 1)
    label = "share of the questions, by confidence"
    axis.stairs(-0.24 * count / count.max(), edges, fill=True, color=GREY, label=label)
    axis.axhline(0, color=INK, lw=0.6)


def _title_values(row: TableRow, data_set: str, among: ConfidenceDefinition) -> str:
    """What a panel's title says of a row: the main error, and below it the other metrics."""
    texts = []
    for metric in PANEL_METRICS:
        value = row.estimate(data_set, metric, among).value
        assert value is not None  # the row has this confidence
        texts.append(f"{METRICS[metric].heading} {value:.3f}")
    return f"{texts[0]}\n{' '.join(texts[1:])}"


def error_over_beta(
    rows: Sequence[TableRow], data_set: str, rows_with: dict[ConfidenceDefinition, list[TableRow]]
) -> "Canvas":
    """Return a figure of the main error against β, with a panel for each definition of confidence.

    In a panel there is a line for each model, and for each training data and other key that varies.
    `rows_with` are the rows that have each definition of confidence.
    """
    tuned = sorted((row for row in rows if row.beta is not None), key=lambda row: row.beta or 0)
    rows_of_line: dict[str, list[TableRow]] = {}
    for row in tuned:
        name = row.name("label_smoothing") or row.setting["model"]
        rows_of_line.setdefault(name, []).append(row)
    canvas = _canvas(6)
    panels = canvas.subplots(1, len(rows_with), sharey=True, squeeze=False)[0]
    for (among, rows_of_panel), axis in zip(rows_with.items(), panels, strict=True):
        for place, (name, rows_of_name) in enumerate(rows_of_line.items()):
            drawn = [row for row in rows_of_name if row in rows_of_panel]
            estimates = [row.estimate(data_set, MAIN_ERROR, among) for row in drawn]
            betas = [row.beta for row in drawn]
            line_color = f"C{place % 10}"
            axis.plot(betas, [e.value for e in estimates], "o-", color=line_color, label=name)
            axis.plot(betas, [e.floor for e in estimates], ":", color=line_color)
        bases = [row for row in rows_of_panel if row.beta is None]
        for place, row in enumerate(bases):
            value = row.estimate(data_set, MAIN_ERROR, among).value
            style = BASE_STYLES[place % len(BASE_STYLES)]
            name = row.name("label_smoothing") or row.setting["model"]
            label = f"{name}, before fine-tuning"
            axis.axhline(value, color=GREY, ls=style, lw=1, label=label)
        axis.set_title(f"{data_set}, confidence {AMONG_WORDS[among]}", pad=4)
        axis.set(xlabel="label smoothing β", ylabel=METRICS[MAIN_ERROR].heading)
        axis.label_outer()
    panels[0].set_ylim(0, None)  # all panels share this axis
    handles: dict[str, Any] = {}  # by label, since panels share most lines
    for axis in panels:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(len(handles), 4)
    canvas.legend(handles=[*handles.values()], loc="outside lower center", ncols=columns)
    return canvas

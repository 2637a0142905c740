"""Figures from an index: reliability diagrams, and ECE over β.

Each as SVG for the page and PNG for slides, 17.5 cm wide, a page's width.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from calibeval.index import Results, Row
from calibeval.io import atomic_write

WIDTH = 17.5  # centimetres
AMONG = {"choices": "the choices", "vocabulary": "all tokens"}
ACROSS = 5  # panels in a row
INK, GREY, SHADES = "#222222", "#888888", (0.05, 0.9)
STYLE = {
    **{"font.size": 7.5, "axes.titlesize": 7.5, "axes.labelsize": 7.5, "legend.fontsize": 7},
    **{"xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6},
    **{"lines.linewidth": 1.1, "lines.markersize": 4, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "calibeval"},
}


def colour(beta: float | None) -> tuple[float, ...]:
    """A β's colour, in every report the same; grey before fine-tuning."""
    from matplotlib import colormaps

    if beta is None:
        return (0.53, 0.53, 0.53)
    return colormaps["viridis"](np.interp(beta, (0, 0.5), SHADES))[:3]


def draw(results: Results, out: Path) -> list[tuple[Path, str]]:
    """Draw every figure that there are data for; (its .svg, what it shows)."""
    import matplotlib

    found = []
    with matplotlib.rc_context(STYLE):
        for group in results.groups:
            rows = [row for row in results.rows if group in row.runs]
            having = {}  # the rows that have a confidence
            for row in rows:
                runs = row.runs[group].values()
                for confidence in AMONG:
                    if all(confidence in run.confidences for run in runs):
                        having.setdefault(confidence, []).append(row)
            name = quote(group, safe=" ")
            made = []
            if len({row.beta for row in rows} - {None}) > 1:
                said = f"ECE on {group} against β; dotted: what 95 % of calibrated models read "
                said += "less than; dashed: before fine-tuning."
                made.append((f"ece-against-beta_{name}", said, ece_over_beta(rows, group, having)))
            for confidence, of in having.items():
                said = (
                    f"Reliability on {group}, confidence among {AMONG[confidence]}. Coloured: "
                    "accuracy by the kernel of the smooth ECE with its 95 % band; black: by "
                    "isotonic regression; grey: where that lies in 95 % of calibrated models; "
                    "below, where the questions are."
                )
                canvas = reliability(of, group, confidence)
                made.append((f"reliability_{name}_{confidence}", said, canvas))
            for stem, said, canvas in made:
                found.append((out / f"{stem}.svg", said))
                for kind, about in (("png", {}), ("svg", {"Date": None})):  # the same every time
                    with atomic_write(out / f"{stem}.{kind}", "wb") as file:
                        canvas.savefig(file, format=kind, dpi=200, metadata=about)
    return found


def _canvas(height: float):
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(WIDTH / 2.54, height / 2.54), layout="constrained")


def mean_curves(row: Row, group: str, confidence: str) -> dict[str, np.ndarray]:
    """The mean over seeds of a row's reliability curves, where all have them."""
    runs = [run.reliability[confidence] for run in row.runs[group].values()]
    low, high = max(run["at"][0] for run in runs), min(run["at"][-1] for run in runs)
    at = np.linspace(low, max(low, high), len(runs[0]["at"]))
    names = [name for name in runs[0] if name.startswith(("smooth", "isotonic"))]
    found = {n: np.mean([np.interp(at, run["at"], run[n]) for run in runs], 0) for n in names}
    return found | {"at": at, "count": np.sum([run["count"] for run in runs], 0)}


def reliability(rows: Sequence[Row], group: str, confidence: str):
    """One diagram a row of the table."""
    across = min(ACROSS, max(len(rows), 3))
    down = math.ceil(len(rows) / across)
    alone = len({row.keys["model"] for row in rows}) == 1
    canvas = _canvas(down * (1.35 * WIDTH / across + 0.9) + 0.6)
    axes = canvas.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes[0, 0].set(xlim=(0, 1), ylim=(-0.26, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    for axis, row in zip(axes.flat, rows, strict=False):
        of, shade = mean_curves(row, group, confidence), colour(row.beta)
        at, edges = of["at"], np.linspace(0, 1, len(of["count"]) + 1)
        band = {"alpha": 0.3, "lw": 0}
        axis.fill_between(at, of["isotonic_low"], of["isotonic_high"], color=GREY, **band)
        axis.fill_between(at, of["smooth_low"], of["smooth_high"], color=shade, **band)
        axis.plot([0, 1], [0, 1], "--", color=GREY, lw=0.6)
        axis.plot(at, of["isotonic"], color=INK, lw=0.7)
        axis.plot(at, of["smooth"], color=shade, lw=1.6)
        axis.stairs(-0.24 * of["count"] / of["count"].max(), edges, fill=True, color=GREY)
        axis.axhline(0, color=INK, lw=0.6)
        read = {m: row.estimate(group, m, confidence).value for m in ("ece", "mcb", "dsc")}
        said = "ECE {ece:.3f}\nMCB {mcb:.3f} DSC {dsc:.3f}".format(**read)
        axis.set_title(f"{row.name(*('model',) * alone)[:34]}\n{said}", pad=3)
        axis.set_aspect("equal")
        axis.spines[:].set_visible(True)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    canvas.supylabel("accuracy", fontsize=7.5)
    canvas.supxlabel(f"confidence among {AMONG[confidence]}", fontsize=7.5)
    return canvas


def ece_over_beta(rows: Sequence[Row], group: str, having: dict[str, list[Row]]):
    """A panel a confidence, a line a model, training data and whatever else varies."""
    lines: dict[str, list[Row]] = {}
    for row in sorted((r for r in rows if r.beta is not None), key=lambda row: row.beta):
        name = row.name("label_smoothing") or row.keys["model"]
        lines.setdefault(name, []).append(row)
    canvas = _canvas(6)
    axes = canvas.subplots(1, len(having), sharey=True, squeeze=False).flat
    for (confidence, known), axis in zip(having.items(), axes, strict=True):
        for i, (name, line) in enumerate(lines.items()):
            shown = [row for row in line if row in known]
            every = [row.estimate(group, "ece", confidence) for row in shown]
            at = [row.beta for row in shown]
            axis.plot(at, [e.value for e in every], "o-", color=f"C{i % 10}", label=name)
            axis.plot(at, [e.floor for e in every], ":", color=f"C{i % 10}")
        for row in (row for row in known if row.beta is None):
            value = row.estimate(group, "ece", confidence).value
            axis.axhline(value, color=GREY, ls="--", lw=1)
        axis.set_title(f"{group}, confidence among {AMONG[confidence]}", pad=4)
        axis.set(xlabel="label smoothing β", ylabel="ECE")
        axis.label_outer()
    axis.set_ylim(0, None)  # of all panels
    handles = axis.get_legend_handles_labels()[0]
    canvas.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))
    return canvas

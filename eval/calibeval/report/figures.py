"""The paper's figures from an index: reliability diagrams, bars over metrics, ECE over β and sizes.

Each as PDF, SVG and PNG, at a column's width (8.5 cm), a page's (17.5 cm), or both.
"""

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from calibeval.io import atomic_write
from calibeval.report.index import Results, Row, heading
from calibeval.report.tables import Column

WIDTHS = {"column": 8.5, "page": 17.5}  # centimetres
AMONG = {"choices": "the choices", "vocabulary": "all tokens"}
METRICS = ("accuracy", "ece", "rms", "sce", "ace")
AXES = {"label_smoothing": "beta", "parameters": "parameters", "hidden_size": "hidden-size"}
AXES |= {"vocabulary": "vocabulary"}
ACROSS = 7  # reliability diagrams in a row, as in the paper's grids
FEW = 5  # questions below which a bin is drawn without its accuracy
MARKERS, HATCHES = "osD^vPX*", ("", "////", "....", "xxxx", "\\\\\\\\", "++", "oo", "--")
DASHES = "-", (0, (5, 1)), "-.", (0, (3, 1, 1, 1, 1, 1))  # of training data; ":" is a floor
INK, GREY, SHADES = "#222222", "#888888", (0.05, 0.9)
STYLE = {
    **{"font.size": 7.5, "axes.titlesize": 7.5, "axes.labelsize": 7.5, "legend.fontsize": 7},
    **{"xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6, "hatch.linewidth": 0.5},
    **{"xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.1},
    **{"lines.markersize": 4, "legend.frameon": False, "legend.handlelength": 1.6},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.titley": 1.0},
    **{"pdf.fonttype": 42, "svg.hashsalt": "calibeval"},
}


@dataclass(frozen=True)
class Figure:
    """Files `stem`.pdf, .svg and .png, what they show, and whether a column or a page wide."""

    stem: Path
    caption: str
    width: str
    plot: Callable


class Look:
    """One colour a β, one marker and hatch a variant: the same in every figure of a report."""

    def __init__(self, results: Results):
        from matplotlib import colormaps

        betas = sorted({row.beta for row in results.rows} - {None})
        shades = np.linspace(*SHADES, max(2, len(betas)))
        self.colours = {b: colormaps["viridis"](s) for b, s in zip(betas, shades, strict=False)}
        self.colours[None] = (0.53, 0.53, 0.53, 1.0)
        rows = sorted(results.rows, key=lambda row: row.beta is None)
        variants = list(dict.fromkeys(row.variant for row in rows))
        self.marker = {v: MARKERS[i % len(MARKERS)] for i, v in enumerate(variants)}
        self.hatch = {v: HATCHES[i % len(HATCHES)] for i, v in enumerate(variants)}


def draw(results: Results, out: Path) -> list[Figure]:
    """Draw every figure that there are data for."""
    import matplotlib

    look = Look(results)
    figures = [
        Figure(out / "_".join(map(slug, parts)), caption, width, partial(plot, width=width))
        for group in results.groups
        for plot, parts, caption, width in _jobs(results, group, look)
    ]

    def work(place: int) -> None:
        """Every n-th figure; closures reach a forked process without being pickled."""
        for figure in figures[place::n]:
            save(figure.plot(), figure.stem)

    can = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    n = min(os.cpu_count() or 1, max(1, len(figures) // 2)) if can else 1
    with matplotlib.rc_context(STYLE):
        fork = multiprocessing.get_context("fork" if can else None).Process
        children = [fork(target=work, args=(place,)) for place in range(1, n)]
        for child in children:
            child.start()
        work(0)
        for place, child in enumerate(children, 1):
            child.join()
            if child.exitcode:  # the same error again, where the caller can catch it
                work(place)
    return figures


def _jobs(results: Results, group: str, look: Look) -> Iterator[tuple]:
    """(function of the width, parts of the file's name, caption, width) of a data set's figures."""
    rows = [row for row in results.rows if group in row.runs]
    lines = "dotted: what 95 % of calibrated models read less than"
    lines += "; dashed: before fine-tuning" * any(row.beta is None for row in rows)
    for width in WIDTHS:
        for key, name in AXES.items():
            if len({row.keys.get(key) for row in rows} - {None}) > 1:
                plot = partial(plot_lines, rows, group, key, look)
                said = f"ECE on {group} against {name}; {lines}."
                yield plot, ("ece-against", name, group, width), said, width
        if len(rows) > 1:
            said = f"Accuracy and calibration errors on {group}, among the choices; {lines}."
            yield partial(plot_bars, rows, group, look), ("bars", group, width), said, width
    panels = {m: [row for row in rows if row.keys["model"] == m] for m in _models(rows)}
    named = [row for row in rows if row.keys.get("name")]
    panels |= {"by name": named} if len(named) > 1 and len(panels) > 1 else {}
    for confidence, (what, shown) in product(_confidences(rows, group), panels.items()):
        said = (
            f"Reliability on {group}, {what}, confidence among {AMONG[confidence]}: accuracy by "
            f"bin of confidence with 95 % Wilson intervals, the fuller the bin the darker; below, "
            f"where the questions are. Bins of fewer than {FEW} are left out above."
        )
        plot = partial(plot_reliability, shown, group, confidence, look)
        width = "column" if len(shown) <= 3 else "page"
        yield plot, ("reliability", group, what, confidence), said, width


def _confidences(rows: Sequence[Row], group: str) -> list[str]:
    """The definitions of confidence that every record file has."""
    runs = [run for row in rows for run in row.runs[group]]
    return [c for c in AMONG if all(c in run.confidences for run in runs)]


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.keys["model"] for row in rows))


def slug(text: str) -> str:
    """Part of a file's name."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in text).strip("-.") or "unnamed"


def save(canvas, stem: Path) -> None:
    """Write `stem`.svg, .pdf and .png, the same bytes for the same figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas.get_layout_engine().execute(canvas)  # which `savefig` would do again for each format
    canvas.set_layout_engine("none")
    canvas.set_dpi(200)
    for kind, draw, about in (
        (".png", FigureCanvasAgg(canvas).print_png, None),
        (".svg", FigureCanvasSVG(canvas).print_svg, {"Date": None}),
        (".pdf", FigureCanvasPdf(canvas).print_pdf, {"CreationDate": None}),
    ):
        with atomic_write(stem.with_name(stem.name + kind), "wb") as file:
            draw(file, metadata=about)


def _canvas(width: str, height: float):
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(WIDTHS[width] / 2.54, height / 2.54), layout="constrained")


def wilson(share: np.ndarray, n: np.ndarray, z: float = 1.959964) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of a share of n draws (Wilson 1927)."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return centre - half, centre + half


def bins(row: Row, group: str, confidence: str) -> tuple[np.ndarray, ...]:
    """(questions a run, mean confidence, accuracy, low, high) of each bin, pooled over seeds.

    Seeds answer the same questions, so the interval's sample size is a run's count, not the sum.
    """
    runs = [run.reliability[confidence] for run in row.runs[group]]
    keys = ("count", "confidence", "correct")
    count, said, right = (np.sum([run[key] for run in runs], axis=0, dtype=float) for key in keys)
    with np.errstate(invalid="ignore", divide="ignore"):
        share, n = right / count, count / len(runs)
        return n, said / count, share, *wilson(share, n)


def plot_reliability(rows: Sequence[Row], group: str, confidence: str, look: Look, width: str):
    """One diagram a row of the table, up to seven across."""
    across = min(ACROSS, max(len(rows), 2 if width == "column" else 4))
    down = math.ceil(len(rows) / across)
    leave_out = () if len(_models(rows)) > 1 else ("model",)
    titles = [row.name(*leave_out) for row in rows]
    pitch = (WIDTHS[width] - 1.1) / across  # centimetres from one diagram to the next
    high = 1.26 * (pitch - 0.38) + 0.33 * max(map(len, titles)) + 0.9
    canvas = _canvas(width, down * high + 0.6)
    axes = canvas.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes[0, 0].set(xlim=(0, 1), ylim=(-0.26, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    for i, (axis, row, title) in enumerate(zip(axes.flat, rows, titles, strict=False)):
        n, said, share, low, top = bins(row, group, confidence)
        enough, edges = n >= FEW, np.linspace(0, 1, len(n) + 1)
        alpha = 0.2 + 0.75 * np.sqrt(n[enough] / n.max())
        shades = [(*look.colours[row.beta][:3], a) for a in alpha]
        axis.bar(edges[:-1][enough], share[enough], 1 / len(n), align="edge", color=shades, lw=0)
        axis.plot([0, 1], [0, 1], "--", color=INK, lw=0.6)
        axis.vlines(said[enough], low[enough], top[enough], color=INK, lw=0.7)
        axis.plot(said[enough], share[enough], "o", ms=1.6, color=INK)
        axis.stairs(-0.24 * n / n.max(), edges, fill=True, color=GREY)
        axis.axhline(0, color=INK, lw=0.6)
        ece = f"ECE {row.estimate(group, 'ece', confidence).value:.3f}"
        most = int(pitch / 0.17)
        lines = [s if len(s) <= most else s[: max(1, most - 1)] + "…" for s in (*title, ece)]
        axis.set_title("\n".join(lines), pad=3)
        axis.set_aspect("equal")
        axis.spines[:].set_visible(True)
        axis.tick_params(labelbottom=i + across >= len(rows))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    canvas.supylabel("accuracy", fontsize=7.5)
    canvas.supxlabel(f"confidence among {AMONG[confidence]}", fontsize=7.5)
    return canvas


def plot_bars(rows: Sequence[Row], group: str, look: Look, width: str):
    """A panel a metric, a set of bars a block (SFT data and model); base as a dashed line."""
    from matplotlib.patches import Patch

    tuned = [row for row in rows if row.beta is not None] or list(rows)
    base = [row for row in rows if row not in tuned]
    blocks = {row.block: "\n".join(row.name("label_smoothing", *row.shown[3:])) for row in tuned}
    places, kinds = list(blocks), list(dict.fromkeys((row.beta, row.variant) for row in tuned))
    across, step = 2 if width == "column" else 3, 0.86 / len(kinds)
    down = math.ceil((len(METRICS) + 1) / across)
    names = [*blocks.values()] if len(blocks) > 1 else [""] * len(blocks)
    crowded = max(map(len, blocks.values())) * len(blocks) > 6 * WIDTHS[width] / across
    canvas = _canvas(width, 3.2 * down + (2.5 if crowded else 0.6 * (len(blocks) > 1)))
    axes = [*canvas.subplots(down, across).flat]
    for axis, metric in zip(axes, METRICS, strict=False):
        for row in tuned:
            e = row.estimate(group, metric, "choices")
            place = kinds.index((row.beta, row.variant)) + 0.5
            at = places.index(row.block) - 0.43 + step * place
            look_of = {"color": look.colours[row.beta], "hatch": look.hatch[row.variant]}
            axis.bar(at, e.value or 0, 0.92 * step, edgecolor="white", linewidth=0, **look_of)
            # White inside the bar, dark above it.
            if e.low is not None:
                axis.vlines(
                    [at, at], [e.low, e.value], [e.value, e.high], color=["white", INK], lw=0.8
                )
            if e.floor is not None:
                colour = "white" if e.floor < e.value else INK
                axis.hlines(e.floor, at - step / 2, at + step / 2, color=colour, ls=":", lw=1.1)
        for row in base:
            for i in (i for i, block in enumerate(places) if block[-1] == row.keys["model"]):
                value = row.estimate(group, metric, "choices").value
                axis.hlines(value, i - 0.47, i + 0.47, color=GREY, ls="--", lw=1)
        axis.set_title(Column(metric).heading, pad=3)
        bottom = METRICS.index(metric) // across == (len(METRICS) - 1) // across
        labels = [name.replace("\n", ", " if crowded else "\n") if bottom else "" for name in names]
        axis.set_xticks(range(len(blocks)), labels)
        axis.tick_params(axis="x", length=0, rotation=90 if crowded else 0)
        axis.set_xlim(-0.55, len(blocks) - 0.45)
        axis.set_ylim(0, None)
        axis.locator_params(axis="y", nbins=5)
    handles = [
        Patch(color=look.colours[beta], label="base" if beta is None else f"β = {beta:g}")
        for beta in dict.fromkeys(beta for beta, _ in kinds)
    ]
    variants = {row.variant: row for row in tuned}
    for variant, row in variants.items() if len(variants) > 1 else ():
        name = ", ".join(row.name("train_data", "model", "label_smoothing")) or "no calibrator"
        handles.append(Patch(fc=GREY, ec="white", hatch=look.hatch[variant], label=name))
    for axis in axes[len(METRICS) :]:
        axis.set_axis_off()
    _legend(canvas, handles, width, bool(base))
    return canvas


def _legend(canvas, handles: list, width: str, base: bool) -> None:
    """Below the axes, where the figure grows by its rows; in as many columns as labels let."""
    from matplotlib.lines import Line2D

    handles += [Line2D([], [], color=GREY, ls="--", lw=1, label="base")] * base
    handles += [Line2D([], [], color=INK, ls=":", lw=1.1, label="95 % floor")]
    longest = max(len(handle.get_label()) for handle in handles)
    columns = min(len(handles), max(1, int(WIDTHS[width] / (0.15 * longest + 1.2))))
    canvas.legend(handles=handles, loc="outside lower center", ncols=columns)
    rows = math.ceil(len(handles) / columns)
    canvas.set_figheight(canvas.get_figheight() + (0.3 + 0.37 * rows) / 2.54)


def plot_lines(rows: Sequence[Row], group: str, key: str, look: Look, width: str):
    """ECE over β, a line a block and variant; or over a size of the models, a line a β."""
    from matplotlib import colormaps

    over_beta = key == "label_smoothing"
    base = [row for row in rows if row.beta is None] if over_beta else []
    shown = sorted((r for r in rows if r.keys.get(key) is not None), key=lambda r: r.keys[key])
    data = list(dict.fromkeys(row.keys.get("train_data") for row in shown))
    ticks = {row.text(key): row.keys[key] for row in shown}
    series: dict[tuple, list[Row]] = {}
    for row in shown:
        same = row.block if over_beta else (row.beta, row.keys.get("train_data"))
        series.setdefault((row.variant, same), []).append(row)
    confidences, beside = _confidences(rows, group), width == "page"
    shape = (1, len(confidences)) if beside else (len(confidences), 1)
    canvas = _canvas(width, 5 if beside else 1 + 3.6 * len(confidences))
    axes = [*canvas.subplots(*shape, sharey=beside, sharex=not beside, squeeze=False).flat]
    for confidence, axis in zip(confidences, axes, strict=True):
        own: dict = {}  # each model's first colour
        for i, ((variant, same), line) in enumerate(series.items()):
            colour = colormaps["tab10"](i % 10) if over_beta else look.colours[line[0].beta]
            own.setdefault(line[0].keys["model"], colour)
            every = [row.estimate(group, "ece", confidence) for row in line]
            at, name = [row.keys[key] for row in line], line[0].name(key if over_beta else "model")
            style = "-" if over_beta else DASHES[data.index(same[1]) % len(DASHES)]
            label = ", ".join(name) or line[0].keys["model"]
            look_of = {"color": colour, "ls": style, "marker": look.marker[variant]}
            axis.plot(at, [e.value for e in every], label=label, **look_of)
            if i == 0:
                axis.plot(at, [e.floor for e in every], ":", lw=1.1, color=INK)
        for row in base:
            if colour := own.get(row.keys["model"]):
                value = row.estimate(group, "ece", confidence).value
                axis.axhline(value, color=colour if len(own) > 1 else GREY, ls="--", lw=1)
        axis.set_title(f"{group}, confidence among {AMONG[confidence]}", pad=4)
        axis.set_xscale("linear" if over_beta else "log")
        axis.minorticks_off()
        axis.set_xticks([*ticks.values()], [*ticks], rotation=0 if over_beta else 30)
        axis.set_ylim(0, None)
        axis.set(xlabel="label smoothing β" if over_beta else heading(key).lower(), ylabel="ECE")
        axis.label_outer()
    _legend(canvas, axes[0].get_legend_handles_labels()[0], width, bool(base))
    return canvas

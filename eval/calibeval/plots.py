"""Reliability diagrams: `prepare_*` makes arrays, `plot_*` draws them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibeval.io import atomic_write
from calibeval.metrics.binned import BINS
from calibeval.metrics.samples import Sample
from calibeval.metrics.scores import Scores

TICKS = (0, 0.5, 1)
ACROSS = 6  # diagrams in a row
STEP = 1.1  # from one diagram of a row to the next, in units of its confidence


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins of one or several runs over the same questions."""

    title: str
    counts: np.ndarray  # (B,) questions a run, in the mean
    confidence: np.ndarray  # (B,)
    accuracy: np.ndarray  # (B,)
    low: np.ndarray  # (B,) 95 % Wilson interval of the accuracy
    high: np.ndarray
    note: str


def bin_counts(of: Scores) -> dict[str, list]:
    """Counts, summed confidence and right answers of each equal-width bin; they add over runs."""
    b = Sample(of).top.equal_width(BINS)
    return {
        "count": b.count[0].astype(int).tolist(),
        "confidence": b.confidence_sum[0].tolist(),
        "correct": b.correct_sum[0].tolist(),
    }


def prepare_reliability(title: str, runs: list[dict[str, list]], note: str = "") -> Reliability:
    """Pool the bins of runs over the same questions.

    Seeds answer the same questions, so pooling them adds no questions: the interval's sample size
    is the mean count of a run (Wilson 1927).
    """
    counts, confidence, correct = (
        np.sum([run[key] for run in runs], axis=0) for key in ("count", "confidence", "correct")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        accuracy, mean = correct / counts, confidence / counts
        low, high = wilson(accuracy, counts / len(runs))
    return Reliability(title, counts / len(runs), mean, accuracy, low, high, note)


def wilson(share: np.ndarray, n: np.ndarray, z: float = 1.959964) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of a share of n draws (Wilson 1927)."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return centre - half, centre + half


def plot_reliability(panels: list[Reliability], title: str, path: Path) -> None:
    """Draw diagrams with their bin counts below, `ACROSS` a row; `path` gets .svg and .png.

    The diagrams of a row stand in one axis, side by side: an axis a diagram would take most of the
    time of a large sweep's report.
    """
    from matplotlib.figure import Figure

    rows = [panels[i : i + ACROSS] for i in range(0, len(panels), ACROSS)]
    columns = len(rows[0])
    width, height = 2.3 * columns + 0.8, 3.5 * len(rows) + 0.6  # inches
    figure = Figure(figsize=(width, height))
    most = max(panel.counts.max() for panel in panels)
    for i, row in enumerate(rows):
        low = height - 0.75 - 3.5 * (i + 1) + 0.75
        left, wide = 0.62 / width, 2.3 * columns / width
        above = figure.add_axes((left, (low + 0.75) / height, wide, 2.1 / height))
        below = figure.add_axes((left, low / height, wide, 0.65 / height))
        draw_reliability(above, row, columns)
        draw_counts(below, row, columns, most)
    figure.supxlabel("confidence", fontsize="medium", y=0.1 / height)
    figure.suptitle(title, fontsize="medium", y=1 - 0.12 / height)
    save(figure, path)


def draw_reliability(axis, panels: list[Reliability], columns: int) -> None:
    """Bars of accuracy by bin with intervals, and the diagonal of perfect calibration."""
    from matplotlib.collections import LineCollection

    bars, errors, middles = [], [], []
    for i, panel in enumerate(panels):
        at, filled = i * STEP, panel.counts > 0
        bars += _bars(at, panel.accuracy)
        mean, right = panel.confidence[filled] + at, panel.accuracy[filled]
        middles.append(np.column_stack([mean, right]))
        low, high = np.minimum(panel.low[filled], right), np.maximum(panel.high[filled], right)
        errors += [[(x, y), (x, z)] for x, y, z in zip(mean, low, high, strict=True)]
        axis.text(at + 0.5, 1.04, panel.title, ha="center", fontsize="small")
        axis.text(at + 0.04, 0.95, panel.note, va="top", fontsize="x-small")
    axis.add_collection(_filled(bars, "#4c78a8", alpha=0.75))
    diagonals = [[(i * STEP, 0), (i * STEP + 1, 1)] for i in range(len(panels))]
    axis.add_collection(LineCollection(diagonals, colors="#888", linewidths=0.9, linestyles="--"))
    axis.add_collection(LineCollection(errors, colors="#1b2a41", linewidths=0.9))
    axis.plot(*np.concatenate(middles).T, "o", ms=2.5, color="#1b2a41")
    _frame(axis, len(panels), columns, 1.0)
    axis.set(ylabel="accuracy", yticks=TICKS, yticklabels=TICKS)
    axis.set_xticks(_ticks(len(panels)), [])


def draw_counts(axis, panels: list[Reliability], columns: int, most: float) -> None:
    """Bars of the number of questions in each bin."""
    bars = [bar for i, panel in enumerate(panels) for bar in _bars(i * STEP, panel.counts)]
    axis.add_collection(_filled(bars, "#9aa5b1"))
    _frame(axis, len(panels), columns, most * 1.05)
    axis.set(ylabel="questions", yticks=[0, round(most)])
    axis.set_xticks(_ticks(len(panels)), TICKS * len(panels))


def _bars(at: float, heights: np.ndarray) -> list[np.ndarray]:
    """Corners of equal-width bars over [at, at + 1]; heights that are not a number have none."""
    edges = at + np.arange(len(heights) + 1) / len(heights)
    return [
        np.array([(left, 0), (left, y), (right, y), (right, 0)])
        for left, right, y in zip(edges, edges[1:], heights, strict=False)
        if y > 0
    ]


def _filled(bars: list[np.ndarray], colour: str, **options):
    from matplotlib.collections import PolyCollection

    return PolyCollection(bars, facecolors=colour, **options)


def _ticks(count: int) -> list[float]:
    return [i * STEP + tick for i in range(count) for tick in TICKS]


def _frame(axis, count: int, columns: int, top: float) -> None:
    """Limits, and a box around each of the diagrams instead of one around all."""
    from matplotlib.collections import LineCollection

    boxes = [
        [(x, 0), (x, top), (x + 1, top), (x + 1, 0), (x, 0)]
        for x in (i * STEP for i in range(count))
    ]
    axis.add_collection(LineCollection(boxes, colors="black", linewidths=0.8, clip_on=False))
    axis.set(xlim=(0, (columns - 1) * STEP + 1), ylim=(0, top))
    axis.set_frame_on(False)


def save(figure, path: Path) -> None:
    """Write a figure as SVG and PNG, the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "calibeval", "svg.fonttype": "none"}):
        for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 130})):
            with atomic_write(path.with_name(path.name + suffix), "wb") as file:
                figure.savefig(file, format=suffix[1:], **options)

"""Reliability diagrams: `prepare_*` makes arrays, `plot_*` draws them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibeval.files import atomic_write
from calibeval.metrics.binned import BINS
from calibeval.metrics.samples import Sample
from calibeval.metrics.scores import Scores

TICKS = (0, 0.5, 1)
ACROSS = 6  # diagrams in a row


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
    """Draw diagrams with their bin counts below, `ACROSS` a row; `path` gets .svg and .png."""
    from matplotlib.figure import Figure

    columns = min(len(panels), ACROSS)
    rows = -(-len(panels) // ACROSS)
    width, height = 2.3 * columns + 0.7, 3.5 * rows + 0.6
    figure = Figure(figsize=(width, height))
    # Placed by hand: solving for the layout of many diagrams takes longer than drawing them.
    figure.subplots_adjust(0.62 / width, 0.12 / height, 1 - 0.15 / width, 1 - 0.6 / height)
    grid = {"height_ratios": (3, 1, 0.5) * rows, "hspace": 0.12, "wspace": 0.12}
    axes = figure.subplots(3 * rows, columns, squeeze=False, gridspec_kw=grid)
    for spacer in axes[2::3].flat:
        spacer.remove()
    most = max(panel.counts.max() for panel in panels)
    for i in range(rows * columns):
        row, column = divmod(i, columns)
        above, below = axes[3 * row, column], axes[3 * row + 1, column]
        if i >= len(panels):
            above.set_axis_off()
            below.set_axis_off()
            continue
        draw_reliability(above, panels[i])
        draw_counts(below, panels[i], most)
        above.tick_params(labelbottom=False, labelleft=not column)
        below.tick_params(labelbottom=True, labelleft=not column)
        if not column:
            above.set_ylabel("accuracy")
            below.set_ylabel("questions")
    figure.supxlabel("confidence", fontsize="medium", y=0.15 / height)
    figure.suptitle(title, fontsize="medium", y=1 - 0.12 / height)
    save(figure, path)


def draw_reliability(axis, panel: Reliability) -> None:
    """Bars of accuracy by bin with intervals, and the diagonal of perfect calibration."""
    bins = len(panel.counts)
    filled = panel.counts > 0
    left = np.arange(bins) / bins
    axis.bar(
        left[filled], panel.accuracy[filled], 1 / bins, align="edge", color="#4c78a8", alpha=0.75
    )
    middle = panel.accuracy[filled]
    error = np.maximum([middle - panel.low[filled], panel.high[filled] - middle], 0)
    axis.errorbar(panel.confidence[filled], middle, error, fmt="o", ms=2.5, lw=0.9, color="#1b2a41")
    axis.plot([0, 1], [0, 1], color="#888", lw=0.9, ls="--")
    axis.set(xlim=(0, 1), ylim=(0, 1), xticks=TICKS, yticks=TICKS)
    axis.set_yticklabels(TICKS)
    axis.set_title(panel.title, fontsize="small")
    axis.text(0.04, 0.95, panel.note, va="top", fontsize="x-small")


def draw_counts(axis, panel: Reliability, most: float) -> None:
    """Bars of the number of questions in each bin."""
    bins = len(panel.counts)
    axis.bar(np.arange(bins) / bins, panel.counts, 1 / bins, align="edge", color="#9aa5b1")
    axis.set(xlim=(0, 1), ylim=(0, most * 1.05), xticks=TICKS, yticks=[0, round(most)])
    axis.set_xticklabels(TICKS)


def save(figure, path: Path) -> None:
    """Write a figure as SVG and PNG, the same bytes for the same figure."""
    import matplotlib

    if figure.get_layout_engine():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not once a format
    with matplotlib.rc_context({"svg.hashsalt": "calibeval", "svg.fonttype": "none"}):
        for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 130})):
            with atomic_write(path.with_name(path.name + suffix), "wb") as file:
                figure.savefig(file, format=suffix[1:], **options)

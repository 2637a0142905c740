"""Reliability diagrams: `prepare_*` makes arrays, `plot_*` draws them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibeval.files import atomic_write
from calibeval.metrics.binned import BINS
from calibeval.metrics.samples import Sample
from calibeval.metrics.scores import Scores


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins of one or several runs over the same questions."""

    title: str
    counts: np.ndarray  # (B,) answers, of all runs
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
    return Reliability(title, counts, mean, accuracy, low, high, note)


def wilson(share: np.ndarray, n: np.ndarray, z: float = 1.959964) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of a share of n draws (Wilson 1927)."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return centre - half, centre + half


def plot_reliability(panels: list[Reliability], title: str, path: Path) -> None:
    """Draw a row of diagrams with their bin counts below; `path` gets .svg and .png."""
    from matplotlib.figure import Figure

    columns = len(panels)
    figure = Figure(figsize=(2.6 * columns + 0.6, 3.9), layout="constrained")
    axes = figure.subplots(2, columns, sharex=True, height_ratios=(3, 1), squeeze=False)
    most = max(panel.counts.max() for panel in panels)
    for column, panel in enumerate(panels):
        draw_reliability(axes[0, column], panel)
        draw_counts(axes[1, column], panel, most)
        if column:
            axes[0, column].tick_params(labelleft=False)
            axes[1, column].tick_params(labelleft=False)
    axes[0, 0].set_ylabel("accuracy")
    axes[1, 0].set_ylabel("answers")
    figure.supxlabel("confidence", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
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
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.set_title(panel.title, fontsize="small")
    axis.text(0.04, 0.95, panel.note, va="top", fontsize="x-small")


def draw_counts(axis, panel: Reliability, most: int) -> None:
    """Bars of the number of answers in each bin."""
    bins = len(panel.counts)
    axis.bar(np.arange(bins) / bins, panel.counts, 1 / bins, align="edge", color="#9aa5b1")
    axis.set(xlim=(0, 1), ylim=(0, most * 1.05))


def save(figure, path: Path) -> None:
    """Write a figure as SVG and PNG, the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "calibeval", "svg.fonttype": "none"}):
        for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 160})):
            with atomic_write(path.with_name(path.name + suffix), "wb") as file:
                figure.savefig(file, format=suffix[1:], **options)

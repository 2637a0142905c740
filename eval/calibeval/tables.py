"""Tables in the shape of the paper's Table 1: dataset × model × β, best of each model in bold."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# (metric, confidence, heading, LaTeX heading, whether higher is better)
COLUMNS = (
    ("accuracy", "choices", "Acc ↑", r"Acc $\uparrow$", True),
    ("ece", "choices", "ECE ↓", r"ECE $\downarrow$", False),
    ("rms", "choices", "RMS ↓", r"RMS $\downarrow$", False),
    ("ece", "vocabulary", "ECE, vocabulary ↓", r"ECE$_\mathcal{V}$ $\downarrow$", False),
    ("rms", "vocabulary", "RMS, vocabulary ↓", r"RMS$_\mathcal{V}$ $\downarrow$", False),
)
NOTE = (
    "Acc, ECE (15 equal-width bins) and RMS (true root mean square, equal-mass bins of 100) of the "
    "likeliest choice. ECE and RMS take its probability among the choices; “vocabulary” takes it "
    "among all tokens. ± is the half-width of a 95 % interval: bootstrap over the questions, over "
    "several seeds joined with Student's t over the seeds. Bold: best of the dataset and model."
)


@dataclass(frozen=True)
class Cell:
    """A metric's mean over seeds and the half-width of its 95 % interval."""

    mean: float
    half: float


@dataclass
class Row:
    """One line of the table; `extra` holds what varies besides β, such as the learning rate."""

    dataset: str
    model: str
    beta: float | None
    extra: dict
    runs: list[dict] = field(default_factory=list)
    parameters: int | None = None

    @property
    def label(self) -> str:
        """β as text; the model before fine-tuning is "base"."""
        return "base" if self.beta is None else f"{self.beta:g}"

    @property
    def notes(self) -> list[str]:
        """What varies besides β, for titles and legends."""
        return [f"{key} {value}" for key, value in self.extra.items() if value is not None]

    def cell(self, metric: str, confidence: str) -> Cell:
        """Mean over the row's runs with its interval."""
        return aggregate([run["metrics"][confidence][metric] for run in self.runs])


def aggregate(runs: list[dict[str, float]]) -> Cell:
    """Join question noise and seed noise: half² = (1.96 s_q)² + (t s / √n)².

    Every seed answers the same questions, so their noise s_q does not average out over seeds.
    """
    # A metric may be undefined on few questions (AUROC where all answers are right).
    runs = [{k: math.nan if v is None else v for k, v in run.items()} for run in runs]
    values = np.array([run["value"] for run in runs])
    one = runs[0]
    if len(runs) == 1:
        return Cell(one["value"], (one["high"] - one["low"]) / 2)
    from scipy.special import stdtrit  # the quantile alone: scipy.stats takes half a second to load

    questions = 1.959964 * float(np.mean([run["sd"] for run in runs]))
    seeds = stdtrit(len(runs) - 1, 0.975) * values.std(ddof=1) / math.sqrt(len(runs))
    return Cell(float(values.mean()), math.hypot(questions, float(seeds)))


def group(lines: Iterable[tuple[dict, dict]], varied: tuple[str, ...]) -> list[Row]:
    """Rows from (index line, result): one for each dataset, model, β and value of `varied`."""
    rows: dict[tuple, Row] = {}
    for entry, result in lines:
        extra = {key: entry.get(key) for key in varied}
        key = entry["dataset"], entry["model"], entry["label_smoothing"], *extra.values()
        fresh = Row(entry["dataset"], entry["model"], entry["label_smoothing"], extra)
        fresh.parameters = entry.get("parameters")
        rows.setdefault(key, fresh).runs.append(result)
    return sorted(rows.values(), key=_order)


def _order(row: Row) -> tuple:
    beta = -1.0 if row.beta is None else row.beta
    return row.dataset, row.model, beta, [_absent_numbers_text(v) for v in row.extra.values()]


def _absent_numbers_text(value) -> tuple:
    if value is None:
        return 0, 0, ""
    return (1, value, "") if isinstance(value, (int, float)) else (2, 0, str(value))


def best(rows: list[Row]) -> set[tuple[int, int]]:
    """(row, column) of the best mean among the rows of one dataset and model, ties included."""
    found = set()
    for column, (metric, confidence, *_, higher) in enumerate(COLUMNS):
        blocks: dict[tuple, list[tuple[float, int]]] = {}
        for i, row in enumerate(rows):
            mean = round(row.cell(metric, confidence).mean, 4)
            blocks.setdefault((row.dataset, row.model), []).append((mean, i))
        for block in blocks.values():
            top = (max if higher else min)(mean for mean, _ in block)
            found |= {(i, column) for mean, i in block if mean == top}
    return found


def headings(rows: list[Row]) -> list[str]:
    """Names of the columns that say which row it is."""
    return ["Dataset", "Model", "β", *(rows[0].extra if rows else {})]


def keys(row: Row) -> list[str]:
    """The row's values under `headings`."""
    return [
        row.dataset,
        row.model,
        row.label,
        *("–" if v is None else str(v) for v in row.extra.values()),
    ]


def markdown(rows: list[Row]) -> str:
    """The table as GitHub Markdown."""
    head = [*headings(rows), "Seeds", *(column[2] for column in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    bold = best(rows)
    for i, row in enumerate(rows):
        cells = []
        for j, (metric, confidence, *_) in enumerate(COLUMNS):
            cell = row.cell(metric, confidence)
            mean = f"{cell.mean:.3f}"
            cells.append(f"{f'**{mean}**' if (i, j) in bold else mean} ±{cell.half:.3f}")
        values = [k.replace("|", "\\|") for k in keys(row)]
        lines.append("| " + " | ".join([*values, str(len(row.runs)), *cells]) + " |")
    return "\n".join(lines) + f"\n\n{NOTE}\n"


def latex(rows: list[Row]) -> str:
    """The table as a LaTeX `tabular` (needs booktabs)."""
    names = [r"$\beta$" if h == "β" else escape(h) for h in headings(rows)]
    head = [*names, "Seeds", *(column[3] for column in COLUMNS)]
    lines = [
        f"% {NOTE.replace('%', chr(92) + '%')}",
        rf"\begin{{tabular}}{{{'l' * len(names)}{'r' * (len(COLUMNS) + 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
    ]
    bold, block = best(rows), None
    for i, row in enumerate(rows):
        if block != (row.dataset, row.model):
            block = row.dataset, row.model
            lines.append(r"\midrule")
        cells = []
        for j, (metric, confidence, *_) in enumerate(COLUMNS):
            cell = row.cell(metric, confidence)
            mean = rf"\mathbf{{{cell.mean:.3f}}}" if (i, j) in bold else f"{cell.mean:.3f}"
            cells.append(rf"${mean}_{{\pm{cell.half:.3f}}}$")
        lines.append(" & ".join([*map(escape, keys(row)), str(len(row.runs)), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escape(text: str) -> str:
    """Text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {c: "\\" + c for c in "&%$#_{}"} | {"–": "--", "β": r"$\beta$"}
    return "".join(special.get(c, c) for c in text)


def csv_rows(rows: list[Row]) -> list[dict]:
    """Every metric in both confidences with its interval, one dictionary a row."""
    table = []
    for row in rows:
        line = {"dataset": row.dataset, "model": row.model, "label_smoothing": row.beta} | row.extra
        line |= {"seeds": len(row.runs), "questions": row.runs[0]["questions"]}
        line["letter_mass"] = float(np.mean([run["letter_mass"] for run in row.runs]))
        for confidence, metrics in row.runs[0]["metrics"].items():
            for metric in metrics:
                cell = row.cell(metric, confidence)
                line[f"{metric}_{confidence}"] = cell.mean
                line[f"{metric}_{confidence}_half_width_95"] = cell.half
        table.append(line)
    return table

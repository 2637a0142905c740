"""From an index of record files to tables, figures and one HTML page.

Tables have the shape of the paper's Table 1, SFT data × model × β; beside them what β changes,
paired by question.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from calibeval import figures, index, stats
from calibeval.index import Results, Row, heading
from calibeval.io import InputError, write_text
from calibeval.measures import REGULAR

NAMES = {
    "accuracy": "Acc",
    "brier": "Brier",
    "rms_debiased": "debiased RMS",
    "rms_hendrycks": "Hendrycks' RMS",
    "ece_signed": "signed ECE",
    "smooth_ece": "smooth ECE",
}
NOTES = {
    "ece": "ECE: 15 equal-width bins of the likeliest choice's probability.",
    "rms": "RMS: the root mean square of the same bins' gaps.",
    "rms_debiased": "Debiased RMS: the same less what finitely many answers add to it.",
    "rms_hendrycks": "Hendrycks' RMS: what hendrycks/test prints as RMS; not a root mean square.",
    "auroc": "AUROC: how well confidence tells right answers from wrong ones; ½ is not at all.",
    "aurc": "AURC: mean error of the k surest answers over all k.",
}


@dataclass(frozen=True)
class Column:
    """A metric in one definition of confidence."""

    metric: str
    confidence: str = "choices"

    @property
    def heading(self) -> str:
        """As people read it: ECE ↓, or ECE, all tokens ↓."""
        among = ", all tokens" if self.confidence == "vocabulary" else ""
        name = NAMES.get(self.metric, self.metric.upper())
        return f"{name}{among} {' ↑↓'[stats.DIRECTION[self.metric]]}".strip()


def read_columns(text: str) -> list[Column]:
    """Columns from "accuracy,ece,ece@vocabulary"; an unknown name raises `InputError`."""
    chosen = []
    for word in map(str.strip, text.split(",")):
        metric, _, confidence = word.partition("@")
        if metric not in stats.METRICS or confidence not in ("", *stats.CONFIDENCES):
            names = ", ".join(stats.METRICS)
            raise InputError(f"--columns: no {word!r}; expected {names}, also with @vocabulary")
        chosen.append(Column(metric, confidence or "choices"))
    return list(dict.fromkeys(chosen))


class Cell(NamedTuple):
    """An estimate as it is printed; `bold` is a difference that is told from 0."""

    value: str
    interval: str  # [low, high], or nothing where no interval is proven
    bold: bool = False

    def __str__(self) -> str:
        """As Markdown has it."""
        return f"{f'**{self.value}**' if self.bold else self.value} {self.interval}".strip()


def printed(e: stats.Estimate, digits: int = 3, scale: int = 1, sign: str = "") -> Cell:
    """The estimate times `scale`, to so many digits."""
    value, low, high = (
        "–" if x is None else format(round(x * scale, digits) + 0.0, f"{sign}.{digits}f")  # not −0
        for x in (e.value, e.low, e.high)
    )
    return Cell(value, "" if e.low is None else f"[{low}, {high}]")


def difference_cell(e: stats.Estimate, metric: str) -> Cell:
    """With as many digits as an interval needs to be on the side of 0 that it is on."""
    scale, digits = (1000, 1) if metric == "rms_debiased" else (1, 3)
    if e.told_apart:
        nearest = min(abs(e.low), abs(e.high)) * scale
        while digits < 9 and not round(nearest, digits):
            digits += 1
    return printed(e, digits, scale, "+")._replace(bold=e.told_apart)


class Line(NamedTuple):
    """A row of a table; the last of the keys says how many runs it is of."""

    row: Row
    keys: list[str]
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """Headings and lines, ready for Markdown and HTML."""

    keys: list[str]
    groups: list[str]  # data sets, each over all of `heads`
    heads: list[str]
    lines: list[Line]
    notes: list[str]

    def frame(self) -> pd.DataFrame:
        """The table as text, with bold as Markdown has it."""
        heads = [*self.keys, *(f"{g}: {h}" for g in self.groups for h in self.heads)]
        rows = [[*line.keys, *map(str, line.cells)] for line in self.lines]
        return pd.DataFrame(rows, columns=heads)

    def markdown(self) -> str:
        """As GitHub Markdown, with its notes below."""
        frame = self.frame().replace(r"\|", r"\\|", regex=True)
        text = frame.to_markdown(index=False, disable_numparse=True)
        return f"{text}\n\n{' '.join(self.notes)}\n"

    def latex(self) -> str:
        """As a LaTeX `tabular` (booktabs) for XeLaTeX or LuaLaTeX; nothing is bold there."""
        made = self.frame().replace(r"\*\*", "", regex=True).style.hide(axis="index")
        made = made.format(escape="latex").format_index(escape="latex", axis=1)
        return made.to_latex(hrules=True)


def main_table(results: Results, chosen: Sequence[Column]) -> Table:
    """Every row's figures; † marks an ECE that is consistent with calibration."""
    lines = []
    for row in results.rows:
        cells = []
        for group, column in product(results.groups, chosen):
            found = row.estimate(group, column.metric, column.confidence)
            cell = printed(found)
            sound = column.metric == "ece" and found.p is not None and found.p > 0.05
            cells.append(cell._replace(value=f"{cell.value}†") if sound else cell)
        counts = sorted({len(runs) for runs in row.runs.values()})
        seeds = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        lines.append(Line(row, [*map(row.text, results.shown), seeds], cells))
    keys = [*map(heading, results.shown), "Seeds"]
    heads = [column.heading for column in chosen]
    return Table(keys, results.groups, heads, lines, notes(results, chosen))


def notes(results: Results, chosen: Sequence[Column]) -> list[str]:
    """What the columns mean, in sentences."""
    runs = {
        group: [run for row in results.rows for run in row.runs.get(group, {}).values()]
        for group in results.groups
    }
    found = [f"Questions: {', '.join(f'{g} {of[0].questions:,}' for g, of in runs.items())}."]
    found += [NOTES[m] for m in dict.fromkeys(c.metric for c in chosen) if m in NOTES]
    if any(column.confidence == "vocabulary" for column in chosen):
        found.append("“All tokens”: its probability among the vocabulary, else among the choices.")
    found.append(
        "[low, high]: 95 % interval over questions and seeds, where one is known to cover. "
        "† ECE consistent with calibration (p > 0.05)."
    )
    for group, (first, *_) in runs.items():
        if first.convention in ("characters", "bytes"):
            found.append(
                f"{group}: texts are compared by log-probability by {first.convention}, so their "
                "calibration is that normaliser's; `metrics --normalise sum` reads their own."
            )
        masses = [run.letter_mass for run in runs[group] if run.letter_mass is not None]
        if (least := min(masses, default=1.0)) < stats.LOW_MASS:
            found.append(
                f"{group}: letters hold as little as {least:.3f} of the probability, so read with "
                "care."
            )
    return found


def difference_table(results: Results, chosen: Sequence[Column]) -> Table | None:
    """Each row less its β = 0, over shared resamples and paired by seed; None without a β = 0."""
    confidences = dict.fromkeys(column.confidence for column in chosen)
    # Of calibration errors only the debiased square differs regularly enough for an interval.
    chosen = [column for column in chosen if column.metric in REGULAR]
    chosen += [Column(m, c) for c in confidences for m in ("nll", "rms_debiased")]
    chosen = list(dict.fromkeys(chosen))
    lines = []
    for row in results.rows:
        if base := results.reference(row):
            sides = {g: compared(base, row, g) for g in results.groups}
            cells = []
            for group, column in product(results.groups, chosen):
                one, other, paired, _ = sides[group]
                given = one, other, column.metric, column.confidence, paired
                found = stats.difference(*given) if one and other else stats.Estimate()
                cells.append(difference_cell(found, column.metric))
            seeds = ", ".join(dict.fromkeys(said for *_, said in sides.values() if said))
            lines.append(Line(row, [*map(row.text, results.shown), seeds], cells))
    note = (
        "Difference to β = 0 of the same setting without a calibrator; [95 % interval] over the "
        "same resamples of the questions for both. Seeds: pairs of runs with one seed; 1 − 3: not "
        "paired, one run less the mean of three; of a single pair the interval is over questions "
        "alone. MSCE: mean squared calibration error, the debiased RMS squared, in thousandths. "
        "Bold: the interval leaves out 0."
    )
    heads = [column.heading.replace("debiased RMS", "MSCE × 1000") for column in chosen]
    keys = [*map(heading, results.shown), "Seeds"]
    return Table(keys, results.groups, heads, lines, [note]) if lines else None


def compared(a: Row, b: Row, group: str) -> tuple[list[stats.Run], list[stats.Run], bool, str]:
    """Runs of both rows, whether in pairs, and how many: of common seeds, else all, not paired.

    One seed in common would hide what seeds differ by; a model before fine-tuning has none.
    """
    first, second = (row.runs.get(group, {}) for row in (a, b))
    common = [seed for seed in first if seed in second]
    if len(common) > 1 and b.beta is not None:
        return [first[s] for s in common], [second[s] for s in common], True, str(len(common))
    m, n = len(second), len(first)
    said = "1" if m == n == 1 else f"{m} − {n}" * (m * n > 0)
    return [*first.values()], [*second.values()], m == n == 1, said


def tidy(results: Results) -> pd.DataFrame:
    """A line a row, data set, confidence and metric, with low, high, floor and p."""
    keys = dict.fromkeys((*results.shown, *(key for row in results.rows for key in row.keys)))
    lines = []
    for row in results.rows:
        for group, by_seed in row.runs.items():
            runs = [*by_seed.values()]
            mass = pd.Series([run.letter_mass for run in runs], dtype=float).mean()
            about = {"dataset": group} | {key: row.keys.get(key) for key in keys}
            about |= {"seeds": len(runs), "questions": runs[0].questions, "letter_mass": mass}
            among = [c for c in stats.CONFIDENCES if all(c in run.confidences for run in runs)]
            for c, metric in product(among, stats.METRICS):
                figures = vars(row.estimate(group, metric, c))
                lines.append(about | {"confidence": c, "metric": metric} | figures)
    return pd.DataFrame(lines).rename(columns={"floor": "floor_95"})


def collect(
    source: Path,
    out: Path,
    columns: str = "accuracy,ece,rms",
    title: str = "Calibration",
    note: str = "",
    sections: Sequence[str] = (),
) -> str:
    """Write the tables, the figures and report.html; return the tables.

    `note` is HTML under the title, `sections` are more of it after the figures. Bad input raises
    `InputError` before anything is written.
    """
    chosen, out = read_columns(columns), Path(out)
    results = index.read(source)
    tables = {"table": main_table(results, chosen)}
    if paired := difference_table(results, chosen):
        tables["differences"] = paired
    for name, one in tables.items():
        write_text(out / f"{name}.md", one.markdown())
        write_text(out / f"{name}.tex", one.latex())
    write_text(out / "table.csv", tidy(results).to_csv(index=False))
    drawn = [
        (said, f"data:image/svg+xml;base64,{b64encode(path.read_bytes()).decode()}")
        for path, said in figures.draw(results, out)
    ]
    write_page(title, [note], out / "report.html", sections, tables=tables, figures=drawn)
    return "\n".join(one.markdown() for one in tables.values())


def write_page(
    title: str, parts: Sequence[str], path: Path, sections: Sequence[str] = (), **shown
) -> None:
    """Write a page: one file that opens without a network. `parts` and `sections` are HTML, before
    and after what is `shown` (tables, figures)."""
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("report.html")
    write_text(path, page.render(title=title, parts=parts, sections=sections, **shown))


def plain_table(rows: Sequence[dict]) -> str:
    """Dictionaries as a table."""
    shown = pd.DataFrame(rows, dtype=object).to_html(index=False, na_rep="", border=0)
    return f'<div class="box plain" role="region" tabindex="0" aria-label="table">{shown}</div>'

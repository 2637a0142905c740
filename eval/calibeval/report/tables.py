"""From an index of record files to tables, figures and one HTML page.

Tables have the shape of the paper's Table 1, SFT data × model × β; beside them what β changes,
paired by question. `collect` writes everything; `main_table`, `difference_table` and `tidy` make
the single tables.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from calibeval.ask.request import DEFAULT_COLUMNS
from calibeval.io import (
    InputError,
    counted,
    import_matplotlib,
    one_line,
    printable,
    regular_file,
    write_text,
)
from calibeval.measures import (
    COMPARED_BY_SQUARE,
    CONFIDENCES,
    MAIN_ERROR,
    METRICS,
    SIGNIFICANCE,
    WITH_INTERVAL,
    ConfidenceDefinition,
    Evaluation,
    stats,
)
from calibeval.report import figures, index
from calibeval.report.index import BLOCK_KEYS, Results, Scalar, TableRow, heading

ARROWS = {"higher": "↑", "lower": "↓", "neither": ""}
MISSING = "–"
SEEDS_HEAD = "Seeds"  # over the column of `Line.seeds`
# What a table of differences shows.
DIFFERENCE_NOTE = (
    "Each number is the row's value minus that at β = 0 of the same setting, without a "
    "calibrator. With it stands the 95 % interval, over the same resamples of the {resampled} "
    "for both sides. The seeds of a row say how many runs were compared: 3 are three runs "
    "minus the three of the same seeds at β = 0, 1 is one run minus one run, and 1 − 3 is one "
    "run minus the mean of three. Where a side has two seeds or more, the interval also "
    "covers how much they differ; of a single run it covers the {resampled} alone."
)
# Of a cell that a spreadsheet computes, full-width signs too.
FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


@dataclass(frozen=True)
class Column:
    """A metric of one confidence: the probability among the choices, or among the vocabulary."""

    metric: str
    among: ConfidenceDefinition = "choices"

    @property
    def heading(self) -> str:
        """As people read it: ECE ↓, or ECE, all tokens ↓."""
        return self._with_arrow(METRICS[self.metric].heading)

    @property
    def difference_heading(self) -> str:
        """The heading of its differences, which may be of another kind: MSCE × 1000 ↓."""
        difference = METRICS[self.metric].difference
        return self.heading if difference is None else self._with_arrow(difference.heading)

    def _with_arrow(self, text: str) -> str:
        all_tokens = ", all tokens" if self.among == "vocabulary" else ""
        return f"{text}{all_tokens} {ARROWS[METRICS[self.metric].better]}".strip()


def read_columns(text: str) -> list[Column]:
    """Return columns from "accuracy,ece,ece@vocabulary"; an unknown name raises `InputError`."""
    chosen = []
    for word in map(str.strip, text.split(",")):
        metric, _, among = word.partition("@")
        if metric not in METRICS or among not in ("", *CONFIDENCES):
            names = ", ".join(METRICS)
            raise InputError(f"--columns: no {word!r}; expected {names}, also with @vocabulary")
        chosen.append(Column(metric, "vocabulary" if among == "vocabulary" else "choices"))
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Cell:
    """An estimate as it is printed."""

    value: str
    interval: str  # [low, high], or nothing where no interval is proven
    bold: bool = False  # a difference that survives Holm's correction

    def __str__(self) -> str:
        """As Markdown has it."""
        value = f"**{self.value}**" if self.bold else self.value
        return f"{value} {self.interval}".strip()


def printed(e: stats.Estimate, digits: int = 3, scale: int = 1, sign: str = "") -> Cell:
    """Return the estimate times `scale`, to so many digits; `sign` is "+" to print it always."""

    def number(value: float | None) -> str:
        if value is None:
            return MISSING
        rounded = round(value * scale, digits) + 0.0  # not −0
        return format(rounded, f"{sign}.{digits}f")

    interval = "" if e.low is None else f"[{number(e.low)}, {number(e.high)}]"
    return Cell(number(e.value), interval)


def difference_cell(e: stats.Estimate, metric: str) -> Cell:
    """Return a difference with as many digits as its interval needs to be on its side of 0.

    It is not bold: that is said of all cells of a table together.
    """
    scale = 1
    digits = 3
    difference = METRICS[metric].difference
    if difference is not None:
        scale = difference.scale
        digits = difference.digits
    if e.significant and e.low is not None and e.high is not None:
        nearest = min(abs(e.low), abs(e.high)) * scale
        while digits < 9 and not round(nearest, digits):
            digits += 1
    return printed(e, digits, scale, "+")


@dataclass(frozen=True)
class Line:
    """A line of a printed table, which shows a `TableRow`.

    Attributes:
        row: What it shows, with the values of the keys that are columns, at the left.
        seeds: How many evaluations the line is of, as its column says it.
        cells: The estimates.
    """

    row: TableRow
    seeds: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """Headings and lines, ready for Markdown and HTML."""

    shown: tuple[str, ...]  # the keys that are columns, at the left
    data_sets: list[str]  # each stands over all of `heads`
    heads: list[str]
    lines: list[Line]
    notes: list[str]

    def row_heading(self) -> str:
        """Return the headings of what the page has at the left of each row.

        That is the row's name within its block, and its seeds; the block has a row of its own."""
        heads = [heading(key) for key in self.shown if key not in BLOCK_KEYS]
        return ", ".join([*heads, SEEDS_HEAD])

    def frame(self, with_bold: bool = True) -> pd.DataFrame:
        """Return the table as text, with bold as Markdown has it unless told otherwise."""
        heads = [f"{data_set}: {head}" for data_set, head in product(self.data_sets, self.heads)]
        rows = []
        for line in self.lines:
            labels = [one_line(line.row.text(key)) for key in self.shown]
            cells = line.cells if with_bold else [replace(cell, bold=False) for cell in line.cells]
            rows.append([*labels, line.seeds, *map(str, cells)])
        columns = [*map(heading, self.shown), SEEDS_HEAD, *heads]
        return pd.DataFrame(rows, columns=[one_line(column) for column in columns])

    def markdown(self) -> str:
        """Return it as GitHub Markdown, with its notes below."""
        frame = self.frame().map(markdown_text).rename(columns=markdown_text)
        text = frame.to_markdown(index=False, disable_numparse=True)
        notes = [markdown_text(one_line(note)) for note in self.notes]
        return f"{text}\n\n{' '.join(notes)}\n"

    def latex(self) -> str:
        """Return it as a LaTeX `tabular` (booktabs) for XeLaTeX or LuaLaTeX, without bold."""
        import_matplotlib()  # pandas does, for its styles
        styled = self.frame(with_bold=False).style.hide(axis="index").format(escape="latex")
        return styled.format_index(escape="latex", axis=1).to_latex(hrules=True)


def markdown_text(text: str) -> str:
    """Return a text without new columns, HTML, links, pictures and formulas as Markdown has them.

    The brackets of [low, high] stay: without a parenthesis behind them they are no link.
    """
    return re.sub(r"[\\$|]|\](?=\()", r"\\\g<0>", text).replace("<", "&lt;")


def csv_text(value: Scalar) -> Scalar:
    """Return a cell that a spreadsheet takes for a text where it is one, never for a formula.

    Control characters are spelled out, since people also read such a file in a terminal.
    """
    if not isinstance(value, str):
        return value
    return printable(f"'{value}" if value.lstrip().startswith(FORMULA_STARTS) else value)


def csv_table(frame: pd.DataFrame) -> str:
    """Return a table for spreadsheets, see `csv_text`."""
    return frame.map(csv_text).rename(columns=csv_text).to_csv(index=False)


def main_table(results: Results, chosen: Sequence[Column]) -> Table:
    """Return every row's estimates; † marks an ECE that is consistent with calibration."""
    lines = []
    for row in results.rows:
        cells = []
        for data_set, column in product(results.data_sets, chosen):
            found = row.estimate(data_set, column.metric, column.among)
            cell = printed(found)
            p = found.p_calibrated
            if column.metric == MAIN_ERROR and p is not None and p > SIGNIFICANCE:
                cell = replace(cell, value=f"{cell.value}†")
            cells.append(cell)
        # How many evaluations the row has, "1–3" where data sets have from one to three.
        counts = [len(evaluations) for evaluations in row.evaluations.values()]
        seeds = "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))
        lines.append(Line(row, seeds, cells))
    heads = [column.heading for column in chosen]
    return Table(results.shown, results.data_sets, heads, lines, notes(results, chosen))


def notes(results: Results, chosen: Sequence[Column]) -> list[str]:
    """Return what the columns mean, in sentences."""
    evaluations_of = results.evaluations
    counts = ", ".join(
        f"{data_set} {evaluations[0].questions:,}"
        for data_set, evaluations in evaluations_of.items()
    )
    sentences = [f"Questions: {counts}."]
    for name in dict.fromkeys(column.metric for column in chosen):
        if METRICS[name].note:
            sentences.append(METRICS[name].note)
    if any(column.among == "vocabulary" for column in chosen):
        sentences.append(
            "“All tokens”: by probabilities among the whole vocabulary; other columns are by those "
            "among the choices."
        )
    has_seeds = any(
        len(row.evaluations_of(data_set)) > 1
        for row in results.rows
        for data_set in results.data_sets
    )
    resampled = _resampled(evaluations_of)
    over = f"{resampled} and seeds" if has_seeds else resampled
    sentences.append(f"[low, high]: 95 % interval over {over}, where one is known to cover.")
    if any(column.metric == MAIN_ERROR for column in chosen):
        error = METRICS[MAIN_ERROR].heading
        sentences.append(f"† {error} consistent with calibration (p > {SIGNIFICANCE}).")
    sentences += _coverage(evaluations_of)
    for data_set, evaluations in evaluations_of.items():
        sentences += _warnings(data_set, evaluations)
    return sentences


def _resampled(evaluations_of: dict[str, list[Evaluation]]) -> str:
    """What was resampled: questions, subjects, or each in other data sets."""
    clusters = {evaluations[0].cluster for evaluations in evaluations_of.values()}
    if clusters == {None}:
        return "questions"
    if None not in clusters:
        return "subjects"
    return "questions or subjects"


def _coverage(evaluations_of: dict[str, list[Evaluation]]) -> list[str]:
    """What the intervals of each data set cover, where it has several subjects."""
    sentences = []
    for data_set, evaluations in evaluations_of.items():
        if evaluations[0].subjects > 1:
            sentences.append(f"{data_set}: intervals {stats.coverage_of(evaluations)}.")
    return sentences


def _warnings(data_set: str, evaluations: Sequence[Evaluation]) -> list[str]:
    """What a reader must know of a data set's evaluations."""
    sentences = []
    normalise = evaluations[0].normalise
    if normalise in ("characters", "bytes"):
        sentences.append(
            f"{data_set}: texts are compared by log-probability by {normalise}, so their "
            "calibration is that normaliser's; `metrics --normalise sum` reads their own."
        )
    masses = [
        evaluation.letter_mass for evaluation in evaluations if evaluation.letter_mass is not None
    ]
    least = min(masses, default=1.0)
    if least < stats.LOW_MASS:
        sentences.append(
            f"{data_set}: letters hold as little as {least:.3f} of the probability, so read with "
            "care."
        )
    return sentences


def difference_table(results: Results, chosen: Sequence[Column]) -> Table | None:
    """Return each row less its β = 0, over shared resamples.

    They are paired by seed where both have two seeds or more in common (`pair`); the column "Seeds"
    tells where they are not. None without a β = 0.
    """
    columns = _difference_columns(chosen)
    lines = []
    p_values: list[float | None] = []
    for row in results.rows:
        reference = results.reference(row)
        if reference is None:
            continue
        pairings = {data_set: pair(reference, row, data_set) for data_set in results.data_sets}
        cells = []
        for data_set, column in product(results.data_sets, columns):
            found = pairings[data_set].difference(column)
            p_values.append(stats.p_of_comparison(column.metric, found))
            cells.append(difference_cell(found, column.metric))
        counts = dict.fromkeys(pairing.count for pairing in pairings.values() if pairing.count)
        lines.append(Line(row, ", ".join(counts), cells))
    if not lines:
        return None
    heads = [column.difference_heading for column in columns]
    evaluations_of = results.evaluations
    about = [DIFFERENCE_NOTE.format(resampled=_resampled(evaluations_of))]
    for name in dict.fromkeys(column.metric for column in columns):
        difference = METRICS[name].difference
        if difference is not None:
            about.append(difference.note)
    count = sum(p is not None for p in p_values)
    about.append(
        f"Bold: differs from 0 after Holm's correction for the {counted(count, 'comparison')} of "
        "this table: 5 % is the probability of one false finding or more among them. An interval "
        "that leaves out 0 says so of its own cell alone."
    )
    about += _coverage(evaluations_of)
    bold = iter(stats.holm(p_values))  # of the cells of all lines, one after another
    bold_lines = [
        replace(line, cells=[replace(cell, bold=next(bold)) for cell in line.cells])
        for line in lines
    ]
    return Table(results.shown, results.data_sets, heads, bold_lines, about)


def _difference_columns(chosen: Sequence[Column]) -> list[Column]:
    """The chosen columns whose differences have intervals, then NLL and the squared error.

    Of calibration errors only those compared by their squares differ regularly enough for one.
    """
    columns = [column for column in chosen if column.metric in WITH_INTERVAL]
    for among in dict.fromkeys(column.among for column in chosen):
        columns += [Column(metric, among) for metric in ("nll", *COMPARED_BY_SQUARE)]
    return list(dict.fromkeys(columns))


@dataclass(frozen=True)
class Pairing:
    """The evaluations of a row and of its reference on one data set, and how they are compared."""

    of_reference: list[Evaluation]
    of_row: list[Evaluation]
    paired: bool
    count: str  # how many, as tables print it

    def difference(self, column: Column) -> stats.Estimate:
        """Return row − reference; no value where one of them has no evaluations."""
        if not self.of_reference or not self.of_row:
            return stats.Estimate()
        return stats.difference(
            self.of_reference, self.of_row, column.metric, column.among, self.paired
        )


def pair(reference: TableRow, row: TableRow, data_set: str) -> Pairing:
    """Return the evaluations of both rows that are compared, and whether they are in pairs.

    `reference` is the row of β = 0 (`Results.reference`). `row` is one that is compared with it,
    which may be the model before fine-tuning. There are three cases:

    - Both were tuned and have two seeds or more in common: those, in pairs by seed.
    - Each row has one evaluation: these two are a pair, whatever their seeds.
    - Else all evaluations of both, without pairs, as three seeds with one.

    Where a row has more seeds, a single common one makes no pair: that would leave out the others,
    and with them what seeds differ by. A model before fine-tuning has no seed, and one that an
    index gives it is no training's.
    """
    reference_by_seed = reference.evaluations.get(data_set, {})
    row_by_seed = row.evaluations.get(data_set, {})
    common = [seed for seed in reference_by_seed if seed in row_by_seed]
    is_before_tuning = row.beta is None
    if len(common) > 1 and not is_before_tuning:
        return Pairing(
            [reference_by_seed[seed] for seed in common],
            [row_by_seed[seed] for seed in common],
            paired=True,
            count=str(len(common)),
        )
    one_each = len(reference_by_seed) == len(row_by_seed) == 1
    if one_each:
        count = "1"
    elif reference_by_seed and row_by_seed:
        count = f"{len(row_by_seed)} − {len(reference_by_seed)}"
    else:
        count = ""
    return Pairing(
        list(reference_by_seed.values()),
        list(row_by_seed.values()),
        paired=one_each,
        count=count,
    )


def tidy(results: Results) -> pd.DataFrame:
    """Return a line a row, data set, confidence and metric: the row's keys, then figures.

    The floor's column is `floor_95` in CSV and JSON of a report; an estimate by itself has `floor`.
    """
    keys = dict.fromkeys(results.shown)
    for row in results.rows:
        keys.update(dict.fromkeys(row.setting))
    lines = []
    for row in results.rows:
        for data_set in row.evaluations:
            evaluations = row.evaluations_of(data_set)
            about: dict[str, Any] = {"dataset": data_set}
            about.update((key, row.setting.get(key)) for key in keys)
            about["seeds"] = len(evaluations)
            about["questions"] = evaluations[0].questions
            masses = pd.Series([evaluation.letter_mass for evaluation in evaluations], dtype=float)
            about["letter_mass"] = masses.mean()
            for among, metric in product(CONFIDENCES, evaluations[0].metrics):
                if all(among in evaluation.confidences for evaluation in evaluations):
                    kind = {"confidence": among, "metric": metric}
                    values = row.estimate(data_set, metric, among).as_dict()
                    lines.append({**about, **kind, **values})
    return pd.DataFrame(lines).rename(columns={"floor": "floor_95"})


def collect(
    source: Path,
    out: Path,
    columns: str = DEFAULT_COLUMNS,
    title: str = "Calibration",
    note: str = "",
    sections: Sequence[str] = (),
) -> str:
    """Write the tables, the figures and report.html into `out`; return the tables as Markdown.

    Args:
        source: The index, one line a record file.
        out: The folder to write into.
        columns: What the tables show, as `read_columns` reads it.
        title: The page's title.
        note: HTML under the title.
        sections: More HTML, after the figures.

    Raises:
        InputError: Bad input, before anything is written.
    """
    chosen = read_columns(columns)
    return write(index.read(source), Path(out), chosen, title, note, sections)


def write(
    results: Results,
    out: Path,
    chosen: Sequence[Column],
    title: str = "Calibration",
    note: str = "",
    sections: Sequence[str] = (),
) -> str:
    """Write what `collect` writes, of an index that was read; return the tables as Markdown.

    Args:
        results: The rows of the index.
        out, title, note, sections: As of `collect`.
        chosen: The columns of the tables.
    """
    tables = {"table": main_table(results, chosen)}
    differences = difference_table(results, chosen)
    if differences is not None:
        tables["differences"] = differences
    for name, table in tables.items():
        write_text(out / f"{name}.md", table.markdown())
        write_text(out / f"{name}.tex", table.latex())
    write_text(out / "table.csv", csv_table(tidy(results)))
    drawn = []
    for path, caption in figures.draw(results, out):
        with open(path, "rb", opener=regular_file) as file:
            content = b64encode(file.read()).decode()
        drawn.append((caption, f"data:image/svg+xml;base64,{content}"))
    write_page(title, [note], out / "report.html", sections, tables=tables, figures=drawn)
    return "\n".join(table.markdown() for table in tables.values())


def write_page(
    title: str,
    parts: Sequence[str],
    path: Path,
    sections: Sequence[str] = (),
    tables: dict[str, Table] | None = None,
    figures: Sequence[tuple[str, str]] = (),
) -> None:
    """Write a page, one file that opens without a network.

    Args:
        title: The page's title.
        parts: HTML before the tables and figures.
        path: The file to write.
        sections: HTML after them.
        tables: "table", and "differences" if there are any.
        figures: Each figure's caption and URI.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html")
    text = page.render(
        title=title, parts=parts, sections=sections, tables=tables or {}, figures=figures
    )
    write_text(path, printable(text))


def plain_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return dictionaries as an HTML table."""
    table = pd.DataFrame(rows, dtype=object).to_html(index=False, na_rep="", border=0)
    return f'<div class="box plain" role="region" tabindex="0" aria-label="table">{table}</div>'

"""From an index of record files to tables and reliability diagrams."""

import csv
from pathlib import Path

from calibeval import plots, tables
from calibeval.errors import InputError
from calibeval.files import atomic_write, json_lines
from calibeval.metrics import CONFIDENCES
from calibeval.results import result

# Index keys besides β that make rows of their own when they vary.
DIMENSIONS = ("learning_rate", "calibrator")


def collect(index: Path, out: Path) -> list[tables.Row]:
    """Write table.md, table.csv, table.tex and reliability_*.svg/.png to `out`; return the rows."""
    entries = read_index(index)
    lines = [(entry, result(entry["records"])) for entry in entries]
    varied = tuple(key for key in DIMENSIONS if len(_values(entries, key)) > 1)
    rows = tables.group(lines, varied)
    for name, text in (("table.md", tables.markdown(rows)), ("table.tex", tables.latex(rows))):
        with atomic_write(out / name) as file:
            file.write(text)
    columns = tables.csv_rows(rows)
    with atomic_write(out / "table.csv") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(k for line in columns for k in line)))
        writer.writeheader()
        writer.writerows(columns)
    diagrams(rows, out)
    return rows


def _values(entries: list[dict], key: str) -> set:
    # A base model has no learning rate; that alone does not make the rate a dimension.
    skip_base = key == "learning_rate"
    return {e.get(key) for e in entries if not (skip_base and e["label_smoothing"] is None)}


def read_index(index: Path) -> list[dict]:
    """Read and check the index; record paths are taken relative to its folder."""
    index = Path(index)
    entries, seen = [], {}
    for number, entry in json_lines(index):
        where = f"{index}, line {number}"
        for key, kind, expected in (
            ("records", str, "a path"),
            ("dataset", str, "text"),
            ("model", str, "text"),
            ("label_smoothing", (int, float, type(None)), "a number from 0 to 1, or null"),
        ):
            if key not in entry:
                raise InputError(f"{where}: no {key!r}; found {', '.join(entry)}")
            if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
                raise InputError(f"{where}: {key} is {entry[key]!r}, expected {expected}")
        beta = entry["label_smoothing"]
        if beta is not None and not 0 <= beta <= 1:
            raise InputError(f"{where}: label_smoothing is {beta}, expected 0 to 1, or null")
        path = index.parent / entry["records"]
        if not path.is_file():
            raise InputError(f"{where}: no record file {path}")
        if path in seen:
            raise InputError(f"{where}: {path} is on line {seen[path]} already")
        seen[path] = number
        entries.append(entry | {"records": path})
    if not entries:
        raise InputError(f"{index}: no lines; expected one JSON object a record file")
    return entries


def diagrams(rows: list[tables.Row], out: Path) -> None:
    """One reliability figure for each dataset, model and confidence, a panel a row of the table."""
    blocks: dict[tuple, list[tables.Row]] = {}
    for row in rows:
        blocks.setdefault((row.dataset, row.model), []).append(row)
    for (dataset, model), block in blocks.items():
        for confidence in CONFIDENCES:
            panels = [panel(row, confidence) for row in block]
            plots.plot_reliability(
                panels,
                f"{dataset}, {model}: confidence among the {confidence}",
                out / f"reliability_{slug(dataset)}_{slug(model)}_{confidence}",
            )


def panel(row: tables.Row, confidence: str) -> plots.Reliability:
    """One row's pooled diagram, titled with what tells it from its neighbours."""
    name = "base" if row.beta is None else f"β = {row.label}"
    extra = [f"{key} {value}" for key, value in row.extra.items() if value is not None]
    ece = row.cell("ece", confidence)
    runs = [run["reliability"][confidence] for run in row.runs]
    note = f"ECE {ece.mean:.3f} ±{ece.half:.3f}\nn = {row.runs[0]['questions']:,}"
    return plots.prepare_reliability(", ".join([name, *extra]), runs, note)


def slug(name: str) -> str:
    """A name for files."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-.") or "unnamed"

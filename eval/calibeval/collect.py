"""From an index of record files to tables and reliability diagrams."""

import csv
from pathlib import Path

from calibeval import figures, plots, report, tables
from calibeval.io import InputError, atomic_write, json_lines
from calibeval.metrics import CONFIDENCES
from calibeval.results import result

# Index keys besides β that make rows of their own when they vary.
DIMENSIONS = ("learning_rate", "calibrator")
AMONG = {"choices": "the choices", "vocabulary": "all tokens"}


def collect(index: Path, out: Path) -> list[tables.Row]:
    """Write table.md, .csv and .tex, the figures (SVG and PNG) and report.html; return the rows."""
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
    report.write(rows, draw(rows, out), "Calibration", out / "report.html")
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


def draw(rows: list[tables.Row], out: Path) -> list[Path]:
    """Draw every figure that the rows have the data for; return the files' stems."""
    return [stem for block in _blocks(rows, "dataset") for stem in _draw_dataset(block, out)]


def _draw_dataset(rows: list[tables.Row], out: Path) -> list[Path]:
    dataset, stems = rows[0].dataset, []

    def stem(*parts: str) -> Path:
        stems.append(out / "_".join(slug(part) for part in parts))
        return stems[-1]

    for block in _blocks(rows, "model"):
        for confidence in CONFIDENCES:
            title = f"{dataset}, {block[0].model}: confidence among {AMONG[confidence]}"
            panels = [panel(row, confidence) for row in block]
            path = stem("reliability", dataset, block[0].model, confidence)
            plots.plot_reliability(panels, title, path)
    if len(rows) > 1:
        figures.plot_bars(rows, dataset, stem("bars", dataset))
    for name, prepare, label, log in (
        ("beta", figures.prepare_against_beta, "label smoothing β", False),
        ("size", figures.prepare_against_size, "parameters", True),
    ):
        lines = {AMONG[c]: prepare(rows, c) for c in CONFIDENCES}
        if any(len(set(series.x)) > 1 for every in lines.values() for series in every):
            figures.plot_lines(lines, dataset, label, stem("ece", "against", name, dataset), log)
    return stems


def _blocks(rows: list[tables.Row], key: str) -> list[list[tables.Row]]:
    blocks: dict[str, list[tables.Row]] = {}
    for row in rows:
        blocks.setdefault(getattr(row, key), []).append(row)
    return list(blocks.values())


def panel(row: tables.Row, confidence: str) -> plots.Reliability:
    """One row's pooled diagram, titled with what tells it from its neighbours."""
    ece = row.cell("ece", confidence)
    runs = [run["reliability"][confidence] for run in row.runs]
    note = f"ECE {ece.mean:.3f} ±{ece.half:.3f}\nn = {row.runs[0]['questions']:,}"
    return plots.prepare_reliability(figures.name(row), runs, note)


def slug(name: str) -> str:
    """A name for files."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-.") or "unnamed"

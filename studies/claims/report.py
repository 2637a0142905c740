"""The tables of a model: every contrast in every reading, and what smoothing costs in entropy."""

import math

import pandas as pd

from calibeval import scaling
from calibeval.io import write_text
from studies.claims import figures
from studies.claims.contrasts import (
    CALIBRATION,
    CONTRASTS,
    GUARDS,
    Difference,
    Quantity,
    UnpackedRun,
    difference,
    unpacked,
)
from studies.claims.parts import Study
from sweeps.runs.files import read_rows

PRICE_COLUMNS = ["nll", "entropy", "entce", "temperature", "outside"]


def report(study: Study) -> None:
    """Merge the records, write and print the tables of a model, and draw all models.

    The tables are differences of squared calibration errors, ×1000, in every reading; those of
    MMLU's guards, ×100; and what each target of β costs, means over seeds in nats a token.
    """
    study.store.merge(study.model)
    runs = unpacked(study)
    lines = contrast_table(runs, {quantity.title: quantity for quantity in CALIBRATION})
    lines += contrast_table(runs, GUARDS)
    lines += temperature_lines(study)
    lines += price_table(study)
    write_text(study.runs_folder / f"{study.model}.md", "\n".join(lines))
    print(*lines, sep="\n")
    figures.forest(study, study.runs_folder / "forest.png")


def contrast_table(runs: list[UnpackedRun], columns: dict[str, Quantity]) -> list[str]:
    """A row for each contrast of which there are runs; a column for each quantity by its title."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for contrast in CONTRASTS:
        cells = [difference(runs, contrast, quantity) for quantity in columns.values()]
        if any(cells):
            lines.append(f"| {contrast.name} | {' | '.join(map(format_cell, cells))} |")
    lines.append("")
    return lines


def temperature_lines(study: Study) -> list[str]:
    """The temperatures of the part `after`, and which of them no better one was sought beyond."""
    temperatures = []
    without_optimum = 0
    for record in study.store.runs(study.model):
        if record.temperature is None:
            continue
        temperatures.append(f"{record.temperature:.2f}")
        without_optimum += is_end_of_search(record.temperature)
    if not temperatures:
        return []
    line = f"Temperatures fitted after β = 0, a seed each: {', '.join(temperatures)}."
    if without_optimum:
        line += (
            f" Of {without_optimum} of these none is best: the search ended there while NLL still "
            "fell, as it does where answers are right by chance."
        )
    return [line, ""]


def is_end_of_search(temperature: float) -> bool:
    """Whether a fitted temperature is one of the two between which it was sought."""
    nearest = scaling.LOG_TEMPERATURE_LIMIT - scaling.AT_THE_LIMIT
    return abs(math.log(temperature)) > nearest


def price_table(study: Study) -> list[str]:
    """The prices of each part and β, in the mean over seeds; nothing where none are measured."""
    rows = read_rows(study.store.price_file(study.model))
    if not rows:
        return []
    groups = pd.DataFrame(rows).groupby(["part", "label_smoothing"])
    means = groups[PRICE_COLUMNS].mean().assign(seeds=groups.size()).reset_index()
    return [means.to_markdown(index=False, floatfmt=".4f"), ""]


def format_cell(cell: Difference | None) -> str:
    """A difference with its interval and seeds, bold if the interval leaves out 0."""
    if cell is None:
        return "–"
    estimate = cell.estimate
    value = f"{estimate.value:+.2f}"
    if estimate.significant:
        value = f"**{value}**"
    return f"{value} [{estimate.low:+.2f}, {estimate.high:+.2f}] ({cell.seeds})"

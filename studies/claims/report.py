"""The tables of a model: every contrast in every reading, and what smoothing costs in entropy."""

import pandas as pd

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

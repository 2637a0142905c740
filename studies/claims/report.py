"""The differences of a model, which APPENDIX.md has of each.

`report` prints, in this order: differences of calibration errors, differences of MMLU's guards, the
losses of the part `equal`, held-out losses, fitted temperatures, and entropy gaps. Levels are
printed by `summary`; which contrast is which claim is in `appendix.CLAIMS`.
"""

import math
from collections.abc import Iterable

import pandas as pd

from calibeval.io import InputError, write_text
from calibeval.measures import scaling
from studies.claims.answers import AnsweredRun
from studies.claims.contrasts import (
    CALIBRATION,
    CONTRASTS,
    GUARDS,
    Difference,
    Quantity,
    difference,
)
from studies.claims.derived import answered_runs
from studies.claims.forest import draw_forest
from studies.claims.parts import Study, equal_losses
from studies.claims.records import RECORD_COLUMNS, RunRecord
from sweeps.runs.files import read_rows

# What the temperatures of each derivation were fitted to.
TEMPERATURES = {
    "temperature": "fitted after β = 0, on MMLU's validation questions",
    "daca": "DACA's after β = 0",
    "over-trained-temperature": "fitted after over-training, on all of MMLU's test questions",
}
ENTROPY_COLUMNS = ["nll", "entropy", "entropy_gap", "entropy_temperature", "mass_outside_top"]


def report(study: Study) -> None:
    """Merge the records, write and print the tables of a model, and draw all models.

    The tables are differences of squared calibration errors, ×1000, in every reading, and of MMLU's
    guards, ×100; then, in nats a token and in the mean over seeds, the held-out losses and the
    entropy gaps of each part and β; and the range of each kind of temperature. A sentence says how
    equal the losses of the part `equal` are. The file is `<model>.md` in the study's folder, and
    beside it is `forest.png`.
    """
    study.store.merge(study.model)
    text = lines(study, answered_runs(study))
    write_text(study.runs_folder / f"{study.model}.md", "\n".join(text))
    print(*text, sep="\n")
    draw_forest(study, study.runs_folder / "forest.png")


def lines(study: Study, runs: list[AnsweredRun]) -> list[str]:
    """The lines of all tables of a model."""
    text = contrast_table(runs, columns_by_title(CALIBRATION))
    text += contrast_table(runs, GUARDS)
    text += equal_loss_lines(study)
    text += held_out_loss_table(study)
    text += temperature_lines(run.record for run in runs)
    return text + entropy_gap_table(study)


def columns_by_title(quantities: list[Quantity]) -> dict[str, Quantity]:
    """The columns of a table by their headings; raises InputError where two have the same."""
    columns: dict[str, Quantity] = {}
    for quantity in quantities:
        if quantity.title in columns:
            raise InputError(f"{quantity.title}: two columns of this name")
        columns[quantity.title] = quantity
    return columns


def contrast_table(runs: list[AnsweredRun], columns: dict[str, Quantity]) -> list[str]:
    """A row for each contrast of which there are runs; a column for each quantity by its title."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for contrast in CONTRASTS:
        cells = [difference(runs, contrast, quantity) for quantity in columns.values()]
        if any(cells):
            lines.append(f"| {contrast.name} | {' | '.join(map(format_cell, cells))} |")
    lines.append("")
    return lines


def equal_loss_lines(study: Study) -> list[str]:
    """The held-out losses behind "equal held-out loss", and whether the grid reached them."""
    try:
        losses = equal_losses(study)
    except InputError as error:  # It shall not keep the other tables from being printed.
        return [f"Equal held-out loss: unknown. {error}.", ""]
    if losses is None:
        return []
    line = (
        f"Equal held-out loss: {losses.smoothed:.3f} at β = 0.1, {losses.plain:.3f} at β = 0 with "
        f"a learning rate of {losses.learning_rate:g}"
    )
    if losses.smoothed_is_above_grid:
        line += (
            ", an end of the grid, since no rate from its best one to there reaches the loss of "
            "β = 0.1"
        )
    elif losses.smoothed_is_below_grid:
        line += ", the best of the grid, since its rates all have a larger loss than β = 0.1"
    return [f"{line}.", ""]


def held_out_loss_table(study: Study) -> list[str]:
    """The held-out loss of each part and β, in the mean over seeds; nothing without any.

    Only the part `grid` has several learning rates, and a row for each of them.
    """
    runs = pd.DataFrame(study.store.runs(study.model), columns=RECORD_COLUMNS)
    runs = runs[runs.held_out_loss.notna()]
    if runs.empty:
        return []
    # Other parts have one rate, which some of their records do not tell. `groupby` would drop a run
    # without a rate, so that 0 stands for it.
    rate_or_zero = runs.learning_rate.where(runs.origin == "grid", 0.0)
    groups = runs.assign(rate=rate_or_zero).groupby(["origin", "rate", "label_smoothing"])
    means = groups.held_out_loss.agg(["mean", "size"]).reset_index()
    lines = ["| part | learning rate of `grid` | β | held-out loss | seeds |", "|---" * 5 + "|"]
    columns = (
        means["origin"],
        means["rate"],
        means["label_smoothing"],
        means["mean"],
        means["size"],
    )
    for part, rate, beta, loss, seeds in zip(*columns, strict=True):
        rate_cell = f"{rate:g}" if part == "grid" else ""
        lines.append(f"| {part} | {rate_cell} | {beta:g} | {loss:.3f} | {seeds} |")
    return [*lines, ""]


def temperature_lines(records: Iterable[RunRecord]) -> list[str]:
    """A row for each kind of temperature that was fitted, with its range over seeds."""
    temperatures_by_origin: dict[str, list[float]] = {}
    for record in records:
        if record.temperature is not None:
            temperatures_by_origin.setdefault(record.origin, []).append(record.temperature)
    if not temperatures_by_origin:
        return []
    lines = ["| temperature | over seeds |", "|---|---|"]
    for derivation, name in TEMPERATURES.items():
        if derivation in temperatures_by_origin:
            lines.append(f"| {name} | {format_temperatures(temperatures_by_origin[derivation])} |")
    return [*lines, ""]


def format_temperatures(temperatures: list[float]) -> str:
    """The least and the largest, and how many have no optimum within the search."""
    least = f"{min(temperatures):.2f}"
    largest = f"{max(temperatures):.2f}"
    text = least if least == largest else f"{least} to {largest}"
    without_optimum = sum(is_end_of_search(temperature) for temperature in temperatures)
    if without_optimum:
        # Log loss still fell there, as it does where answers are right by chance.
        text += f"; {without_optimum} of {len(temperatures)} at the end of the search"
    return text


def is_end_of_search(temperature: float) -> bool:
    """Whether a fitted temperature is one of the two between which it was sought."""
    nearest = scaling.LOG_TEMPERATURE_LIMIT - scaling.AT_THE_LIMIT
    return abs(math.log(temperature)) > nearest


def entropy_gap_table(study: Study) -> list[str]:
    """The entropy gaps of each part and β, in the mean over seeds; nothing without any."""
    rows = read_rows(study.store.entropy_gap_file(study.model))
    if not rows:
        return []
    groups = pd.DataFrame(rows).groupby(["part", "label_smoothing"])
    means = groups[ENTROPY_COLUMNS].mean().assign(seeds=groups.size()).reset_index()
    return [means.to_markdown(index=False, floatfmt=".4f"), ""]


def format_cell(cell: Difference | None) -> str:
    """A difference with its interval, if it has one, and seeds; bold if that leaves out 0."""
    if cell is None:
        return "–"
    estimate = cell.estimate
    value = f"{estimate.value:+.2f}"
    if estimate.low is None or estimate.high is None:
        return f"{value} ({cell.seeds})"
    if estimate.significant:
        value = f"**{value}**"
    return f"{value} [{estimate.low:+.2f}, {estimate.high:+.2f}] ({cell.seeds})"

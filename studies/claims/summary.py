"""The plain table of a model: what it answers in each setting, without contrasts.

A *setting* is how a model was trained, but for the label smoothing β and the seed, or that it was
not. A row is a setting and a β, in the mean over seeds; there is a table for each task that was
asked by letters, of `recommended` and `over-trained`, and one of MMLU for `high-rate` and
`two-epochs`. Accuracy and log loss have 95 % intervals over questions and seeds, as in
`calibeval metrics`. Expected calibration errors have none, since resamples of questions read larger
ones than the questions do; each table says what a calibrated model would read instead.
"""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calibeval.io import atomic_write, write_text
from calibeval.measures import stats
from calibeval.measures.evaluations import CONFIDENCES, Evaluation
from calibeval.measures.samples import ConfidenceDefinition
from calibeval.report.figures import GREY, INK, STYLE
from studies.claims import quick_evaluation
from studies.claims.answers import (
    BASE,
    LETTER_TASKS,
    OVER_TRAINED_AT_TEMPERATURE,
    PLAIN_AT_TEMPERATURE,
    AnsweredRun,
    Term,
    files_by_seed,
)
from studies.claims.derived import answered_runs
from studies.claims.parts import BETAS, Study

METRICS = ("accuracy", "ece", "nll")
# The parts of the first tables, with the names that their rows have there; each has a row of panels
# in the figure, too.
SETTING_LABELS = {"recommended": "as recommended", "over-trained": "over-trained"}
# For parts of SETTING_LABELS, their runs at β = 0 at a temperature, where one is fitted to them. It
# is fitted among the choices, and says nothing of all tokens.
TEMPERATURE_TERMS = {
    "recommended": PLAIN_AT_TEMPERATURE,
    "over-trained": OVER_TRAINED_AT_TEMPERATURE,
}
COLUMNS = [
    "setting",
    "β",
    "seeds",
    "accuracy, %",
    "ECE, choices",
    "ECE, all tokens",
    "log loss, choices",
    "log loss, all tokens",
]


class RowRecipe(NamedTuple):
    """What a row of a table is to show: its setting, its β as printed, and which runs."""

    setting: str
    beta: str
    term: Term


@dataclass(frozen=True)
class Row:
    """A row of a table: its setting, its β as printed, and its runs' answers, a file a seed."""

    setting: str
    beta: str
    term: Term
    files: list[Path]

    @property
    def evaluations(self) -> list[Evaluation]:
        """What each seed's answers read."""
        return [quick_evaluation.load(file, METRICS) for file in self.files]


def summary(study: Study) -> None:
    """Merge the records, write and print a table for each task asked by letters, draw ECE over β.

    The tables and the figure are `<model>-summary.md` and `<model>-ece.png` in the study's folder.
    """
    study.store.merge(study.model)
    runs = answered_runs(study)
    text = lines(runs)
    write_text(study.runs_folder / f"{study.model}-summary.md", "\n".join(text))
    print(*text, sep="\n")
    recipes = recipes_of_first_tables()
    rows_by_task = {task: rows_of_recipes(runs, task, recipes) for task in LETTER_TASKS}
    draw_ece(rows_by_task, study.runs_folder / f"{study.model}-ece.png")


def lines(model_runs: list[AnsweredRun]) -> list[str]:
    """The lines of all tables of a model."""
    recipes = recipes_of_first_tables()
    text = []
    for task, title in LETTER_TASKS.items():
        text += task_table(rows_of_recipes(model_runs, task, recipes), title)
    others = rows_of_recipes(model_runs, "mmlu", recipes_of_other_parts())
    return text + task_table(others, "MMLU, other parts")


def recipes_of_first_tables() -> list[RowRecipe]:
    """The rows of the tables that every task has, in their order."""
    recipes = [RowRecipe("before fine-tuning", "", BASE)]
    for part, label in SETTING_LABELS.items():
        recipes += [RowRecipe(label, f"{beta:g}", Term(part, beta)) for beta in BETAS]
        if part in TEMPERATURE_TERMS:
            at_temperature = f"{label}, then a temperature"
            recipes.append(RowRecipe(at_temperature, "0", TEMPERATURE_TERMS[part]))
    return recipes


def recipes_of_other_parts() -> list[RowRecipe]:
    """The rows of the parts that are asked MMLU alone and stand in a table of their own."""
    recipes = [RowRecipe("high-rate", f"{beta:g}", Term("high-rate", beta)) for beta in BETAS]
    recipes.append(RowRecipe("two-epochs", "0", Term("two-epochs", 0.0)))
    return recipes


def rows_of_recipes(
    model_runs: list[AnsweredRun], task: str, recipes: list[RowRecipe]
) -> list[Row]:
    """The rows of which there are runs that were asked a task, in the order of `recipes`."""
    rows = []
    for recipe in recipes:
        files = files_by_seed(model_runs, recipe.term, task)
        if files:
            rows.append(Row(recipe.setting, recipe.beta, recipe.term, [*files.values()]))
    return rows


def task_table(rows: list[Row], title: str) -> list[str]:
    """The lines of a task's table, and what a calibrated model would read."""
    if not rows:
        return []
    lines = [f"| {' | '.join([f'{title}: {COLUMNS[0]}', *COLUMNS[1:]])} |"]
    lines.append("|---" * len(COLUMNS) + "|")
    for row in rows:
        lines.append(f"| {' | '.join(cells_of_row(row))} |")
    floor = largest_ece_floor(rows)
    lines += ["", f"95 of 100 calibrated models read an ECE of up to {floor:.3f} here.", ""]
    return lines


def cells_of_row(row: Row) -> list[str]:
    """A row as it is printed, cell by cell: each figure is the mean over seeds."""
    accuracy = stats.estimate(row.evaluations, "accuracy", "choices")
    cells = [row.setting, row.beta, str(len(row.files)), with_interval(accuracy, 1, 100)]
    for metric in ("ece", "nll"):
        for among in CONFIDENCES:
            if among == "vocabulary" and row.term in TEMPERATURE_TERMS.values():
                cells.append("–")
            elif metric == "ece":
                cells.append(f"{mean_ece(row, among):.3f}")
            else:
                loss = stats.estimate(row.evaluations, "nll", among)
                cells.append(with_interval(loss, 3))
    return cells


def with_interval(estimate: stats.Estimate, digits: int, scale: float = 1) -> str:
    """An estimate times `scale` with its interval, if it has one."""
    assert estimate.value is not None  # every file of answers has an accuracy and a log loss
    value = rounded(scale * estimate.value, digits)
    if estimate.low is None or estimate.high is None:
        return value
    low = rounded(scale * estimate.low, digits)
    high = rounded(scale * estimate.high, digits)
    return f"{value} [{low}, {high}]"


def rounded(number: float, digits: int) -> str:
    """A number with so many decimals; a tie goes to the even digit.

    Accuracies of 2,000 questions are often ties, which floating-point sums put on either side.
    """
    return f"{Decimal(f'{number:.9f}'):.{digits}f}"


def mean_ece(row: Row, among: ConfidenceDefinition) -> float:
    """The expected calibration error of a row, in the mean over seeds."""
    return float(np.mean([each.values[among]["ece"] for each in row.evaluations]))


def largest_ece_floor(rows: list[Row]) -> float:
    """The largest ECE, of all rows, that calibrated models stay below in 95 %."""
    floors = [quick_evaluation.ece_floors(file) for row in rows for file in row.files]
    return max(max(by_confidence.values()) for by_confidence in floors)


def draw_ece(rows_by_task: dict[str, list[Row]], out: Path) -> None:
    """Draw a panel for each setting and task: ECE over β, among the choices and all tokens."""
    with rc_context(STYLE):
        canvas = Figure((6.5, 4.2), layout="constrained")
        panels = canvas.subplots(len(SETTING_LABELS), len(LETTER_TASKS), sharex=True, sharey="row")
        for panels_of_setting, setting in zip(panels, SETTING_LABELS.values(), strict=True):
            for axis, task in zip(panels_of_setting, rows_by_task, strict=True):
                # Rows of the base model and of a temperature have other settings. They are no
                # points over β, and some have no β at all.
                rows = [row for row in rows_by_task[task] if row.setting == setting]
                draw_panel(axis, rows)
            panels_of_setting[0].set_ylabel(f"{setting}\nECE")
            panels_of_setting[0].set_ylim(0, None)
        for axis, task in zip(panels[0], rows_by_task, strict=True):
            axis.set_title(LETTER_TASKS[task])
        for axis in panels[-1]:
            axis.set_xlabel("label smoothing β")
        panels[0, 0].legend(loc="upper left")
        with atomic_write(out, "wb") as file:
            canvas.savefig(file, format="png", dpi=200)


def draw_panel(axis: Axes, rows: list[Row]) -> None:
    """Draw the mean over seeds of each β, and grey what calibrated models read."""
    if not rows:
        return
    betas = [float(row.beta) for row in rows]
    axis.axhspan(0, largest_ece_floor(rows), color=GREY, alpha=0.25, lw=0, label="if calibrated")
    names = ("among the choices", "among all tokens")
    for among, name, style in zip(CONFIDENCES, names, ("o-", "o--"), strict=True):
        eces = [mean_ece(row, among) for row in rows]
        fill = INK if among == "choices" else "white"
        axis.plot(betas, eces, style, color=INK, mfc=fill, ms=4, lw=1, label=name)

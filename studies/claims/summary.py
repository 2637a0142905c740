"""The plain table of a model: what it answers in each setting, without contrasts.

A row is a setting and a label smoothing, in the mean over seeds; there is a table for each task
that was asked by letters, of `recommended` and `over-trained`, and one of MMLU for `high-rate` and
`two-epochs`. Accuracy and log loss have 95 % intervals over questions and seeds, as in
`calibeval metrics`. Expected calibration errors have none, since resamples of questions read larger
ones than the questions do; each table says what a calibrated model would read instead.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calibeval import evaluations, measures, stats
from calibeval import records as record_files
from calibeval.figures import GREY, INK, STYLE
from calibeval.io import atomic_write, write_text
from calibeval.measures import METRICS, Sample
from studies.claims.contrasts import (
    BASE,
    LETTER_TASKS,
    OVER_TRAINED_COOLED,
    Term,
    UnpackedRun,
    files_by_seed,
    unpack_answers,
)
from studies.claims.parts import BETAS, Study

SETTINGS = {"recommended": "as recommended", "over-trained": "over-trained"}
# Each setting's runs at β = 0 at a temperature: fitted among the choices, silent of all tokens.
TEMPERATURE_TERMS = {"recommended": Term("temperature"), "over-trained": OVER_TRAINED_COOLED}
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


@dataclass(frozen=True)
class Answers:
    """What one run's answers to a task read.

    Attributes:
        values: Of each confidence, accuracy, ECE and log loss.
        draws: Of each confidence, accuracy and log loss of R resamples of the questions, (R,).
        calibrated_ece: The 95th percentile of the ECE that calibrated models with these
            confidences read, by confidence.
    """

    values: dict[str, dict[str, float]]
    draws: dict[str, dict[str, np.ndarray]]
    calibrated_ece: dict[str, float]


@dataclass(frozen=True)
class Row:
    """A row of a table: its setting, its β as printed, and what each seed's answers read."""

    setting: str
    beta: str
    term: Term
    answers: list[Answers]


def summary(study: Study) -> None:
    """Write and print a table for each task that was asked by letters, and draw ECE over β.

    The files are `<model>-summary.md` and `<model>-ece.png` in the study's folder.
    """
    study.store.merge(study.model)
    model_runs = unpack_answers(study)
    settings = settings_of_table()
    rows_by_task = {task: read_rows(model_runs, task, settings) for task in LETTER_TASKS}
    lines = []
    for task, rows in rows_by_task.items():
        lines += task_table(rows, LETTER_TASKS[task])
    others = read_rows(model_runs, "mmlu", settings_of_other_parts())
    lines += task_table(others, "MMLU, other parts")
    write_text(study.runs_folder / f"{study.model}-summary.md", "\n".join(lines))
    print(*lines, sep="\n")
    draw_ece(rows_by_task, study.runs_folder / f"{study.model}-ece.png")


def settings_of_table() -> list[tuple[str, str, Term]]:
    """The setting, the β as printed and the runs of each row, in the order of the tables."""
    settings = [("before fine-tuning", "", BASE)]
    for part, name in SETTINGS.items():
        settings += [(name, f"{beta:g}", Term(part, beta)) for beta in BETAS]
        settings.append((f"{name}, then a temperature", "0", TEMPERATURE_TERMS[part]))
    return settings


def settings_of_other_parts() -> list[tuple[str, str, Term]]:
    """The same of the parts that are asked MMLU alone and stand in a table of their own."""
    settings = [("high-rate", f"{beta:g}", Term("high-rate", beta)) for beta in BETAS]
    settings.append(("two-epochs", "0", Term("two-epochs", 0.0)))
    return settings


def read_rows(
    model_runs: list[UnpackedRun], task: str, settings: list[tuple[str, str, Term]]
) -> list[Row]:
    """The settings that were asked a task, in the order of `settings`."""
    rows = []
    for setting, beta, term in settings:
        files = files_by_seed(model_runs, term, task)
        if files:
            rows.append(Row(setting, beta, term, [read_answers(path) for path in files.values()]))
    return rows


def task_table(rows: list[Row], title: str) -> list[str]:
    """The lines of a task's table, and what a calibrated model would read."""
    if not rows:
        return []
    lines = [f"| {' | '.join([f'{title}: {COLUMNS[0]}', *COLUMNS[1:]])} |"]
    lines.append("|---" * len(COLUMNS) + "|")
    for row in rows:
        lines.append(f"| {' | '.join(cells_of_row(row))} |")
    lines += ["", f"A calibrated model reads an ECE of up to {calibrated_ece(rows):.3f} here.", ""]
    return lines


def cells_of_row(row: Row) -> list[str]:
    """A row as it is printed, cell by cell."""
    has_vocabulary = row.term not in TEMPERATURE_TERMS.values()
    figures = figure_cells(row.answers, has_vocabulary)
    return [row.setting, row.beta, str(len(row.answers)), *figures]


def calibrated_ece(rows: list[Row]) -> float:
    """The largest ECE, of all rows, that calibrated models stay below in 95 %."""
    return max(max(each.calibrated_ece.values()) for row in rows for each in row.answers)


def draw_ece(rows_by_task: dict[str, list[Row]], out: Path) -> None:
    """Draw a panel for each setting and task: ECE over β, among the choices and all tokens."""
    with rc_context(STYLE):
        canvas = Figure((6.5, 4.2), layout="constrained")
        panels = canvas.subplots(len(SETTINGS), len(LETTER_TASKS), sharex=True, sharey="row")
        for panels_of_setting, setting in zip(panels, SETTINGS.values(), strict=True):
            for axis, task in zip(panels_of_setting, rows_by_task, strict=True):
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
    axis.axhspan(0, calibrated_ece(rows), color=GREY, alpha=0.25, lw=0, label="if calibrated")
    for confidence, name, style in (
        ("choices", "among the choices", "o-"),
        ("vocabulary", "among all tokens", "o--"),
    ):
        eces = [np.mean([each.values[confidence]["ece"] for each in row.answers]) for row in rows]
        fill = INK if confidence == "choices" else "white"
        axis.plot(betas, eces, style, color=INK, mfc=fill, ms=4, lw=1, label=name)


def figure_cells(answers: list[Answers], has_vocabulary: bool) -> list[str]:
    """Accuracy, two calibration errors and two log losses, each in the mean over seeds."""
    percent = estimate(answers, "accuracy", "choices", scale=100)
    cells = [f"{percent.value:.1f} [{percent.low:.1f}, {percent.high:.1f}]"]
    for metric in ("ece", "nll"):
        for confidence in ("choices", "vocabulary"):
            if confidence == "vocabulary" and not has_vocabulary:
                cells.append("–")
            elif metric == "ece":
                eces = [each.values[confidence]["ece"] for each in answers]
                cells.append(f"{np.mean(eces):.3f}")
            else:
                loss = estimate(answers, metric, confidence)
                cells.append(f"{loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]")
    return cells


def estimate(
    answers: list[Answers], metric: str, confidence: str, scale: float = 1
) -> stats.Estimate:
    """The mean of a metric over seeds with its 95 % interval, as `stats.estimate` makes it."""
    figures = np.array([each.values[confidence][metric] for each in answers])
    draws = np.stack([each.draws[confidence][metric] for each in answers])
    lowest = scale * METRICS[metric].lowest
    highest = scale * METRICS[metric].highest
    return stats.estimate_mean(stats.Side(scale * figures, scale * draws), lowest, highest)


def read_answers(path: Path) -> Answers:
    """Measure a record file.

    `calibeval.evaluations.load` measures every metric: minutes where these take seconds.
    """
    records = evaluations.in_order(record_files.read(path))
    values: dict[str, dict[str, float]] = {}
    draws: dict[str, dict[str, np.ndarray]] = {}
    calibrated_ece: dict[str, float] = {}
    for confidence in evaluations.CONFIDENCES:
        sample = Sample(measures.scores(records, confidence))
        names = ("accuracy", "ece", "nll")
        values[confidence] = {name: float(METRICS[name](sample)[0]) for name in names}
        parts: dict[str, list[np.ndarray]] = {"accuracy": [], "nll": []}
        for counts in measures.resamples(len(records), evaluations.RESAMPLES):
            resampled = Sample(sample.scores, counts)
            for name, some in parts.items():
                some.append(METRICS[name](resampled))
        draws[confidence] = {name: np.concatenate(some) for name, some in parts.items()}
        calibrated_ece[confidence] = evaluations.floor_tests(sample, ("ece",)).pop("ece").floor
    return Answers(values, draws, calibrated_ece)

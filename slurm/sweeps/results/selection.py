"""Which learning rate is the best, chosen on validation data: no figure of the test tables is used.

`score.select_on` of a sweep names a validation task, or `held_out_loss`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from calibeval.measures import load, stats
from sweeps.results.settings import SHOWN_WITHOUT_RATE_AND_SEED, settings, varied_settings
from sweeps.runs import scoring
from sweeps.runs.files import numbers_of, read_rows
from sweeps.runs.run import Run
from sweeps.runs.schema import HELD_OUT_LOSS

# Settings that have another name in best_learning_rates.csv than in a sweep file.
COLUMN_NAMES = {
    "train_file": "trained_on",  # in index.jsonl it is train_data, as calibeval's tables call it
    "model_name_or_path": "model",
    "num_train_epochs": "epochs",
}

MeasuredRun = tuple[Run, dict[str, float]]  # with its figures on the validation data


@dataclass(frozen=True)
class Choice:
    """The best learning rate among runs that are alike in all settings but rate and seed."""

    group: dict[str, Any]  # the settings that the runs have in common, by the names of columns
    learning_rate: float | None  # None where no option is called so
    compared_rates: int  # among how many learning rates it is the best
    runs: list[Run]  # those at the best rate, one for each seed
    figures: dict[str, float]  # on the validation data, means over the seeds

    def row(self) -> dict[str, Any]:
        """A row of best_learning_rates.csv."""
        return {
            **self.group,
            "best_learning_rate": self.learning_rate,
            "of": self.compared_rates,
            "seeds": len(self.runs),
            **{name: round(figure, 4) for name, figure in self.figures.items()},
        }


def best_learning_rates(select_on: str, runs: Sequence[Run]) -> list[Choice]:
    """For each group of runs that are alike, the rate that is most accurate on a validation task,
    or has the lowest held-out loss.

    Figures are means over seeds. Ties go to the lower NLL, those of held-out loss to the first rate
    met. Runs without figures, and models before fine-tuning, are left out.
    """
    # What the runs of a group have in common, in the order of the columns.
    keys = [*SHOWN_WITHOUT_RATE_AND_SEED, *varied_settings(runs)]
    groups: dict[tuple, dict[float | None, list[MeasuredRun]]] = {}
    for run in runs:
        if run.config().is_baseline:
            continue
        figures = validation_figures(select_on, run)
        if figures is None:
            continue
        settings_of_run = settings(run)
        group = tuple(settings_of_run.get(key) for key in keys)
        rate = settings_of_run.get("learning_rate")
        groups.setdefault(group, {}).setdefault(rate, []).append((run, figures))
    names = [COLUMN_NAMES.get(key, key) for key in keys]
    choices = []
    for group in sorted(groups, key=str):
        rates = groups[group]
        means = {rate: _means(measured_runs) for rate, measured_runs in rates.items()}
        best, best_figures = min(means.items(), key=lambda rate_and_means: _rank(rate_and_means[1]))
        choices.append(
            Choice(
                group=dict(zip(names, group, strict=True)),
                learning_rate=best,
                compared_rates=len(rates),
                runs=[run for run, _ in rates[best]],
                figures=best_figures,
            )
        )
    return choices


def _means(measured_runs: list[MeasuredRun]) -> dict[str, float]:
    """The mean of each figure, rounded: or no two rates would tie."""
    _, first_figures = measured_runs[0]
    return {
        name: round(fmean(figures[name] for _, figures in measured_runs), 12)
        for name in first_figures
    }


def _rank(figures: dict[str, float]) -> list[float]:
    """A key to sort rates by, the best first: the figures decide in their order."""
    return [-value if name.startswith("accuracy") else value for name, value in figures.items()]


def _figure_name(metric: str, select_on: str) -> str:
    """What a figure on the validation task is called, here and in best_learning_rates.csv."""
    return f"{metric} on {select_on}"


def validation_figures(select_on: str, run: Run) -> dict[str, float] | None:
    """A run's held-out loss, or its accuracy and NLL on the validation task; None if absent."""
    if select_on == HELD_OUT_LOSS:
        loss = held_out_loss(run)
        return None if loss is None else {HELD_OUT_LOSS: loss}
    score = run.config().score
    tasks = [task for task in score.tasks if task.key == select_on] if score is not None else []
    if not tasks or scoring.gap(run, tasks[0]) is not None:
        return None
    loaded = load(scoring.records_file(run, tasks[0]), parts=())
    figures = {}
    for metric in ("accuracy", "nll"):
        value = stats.estimate([loaded], metric, "choices").value
        assert value is not None  # both are defined for any records
        figures[_figure_name(metric, select_on)] = value
    return figures


def held_out_loss(run: Run) -> float | None:
    """The last loss on conversations never trained on; None if unknown, or not trained yet."""
    rows = [numbers_of(row) for row in read_rows(run.metrics)]
    losses = [row[HELD_OUT_LOSS] for row in rows if HELD_OUT_LOSS in row]
    if not losses or not run.trained:
        return None
    return losses[-1]

"""Which learning rate is the best, chosen on validation data: no figure of the test tables is used.

`score.select_on` of a sweep names a validation task, or `held_out_loss`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from calibeval import stats
from sweeps.results.settings import settings, varied_settings
from sweeps.runs import scoring
from sweeps.runs.files import read_rows
from sweeps.runs.run import Run
from sweeps.runs.schema import HELD_OUT

# Runs that are alike in these settings, and in all others that vary apart from rate and seed,
# compete; each with the name of its column.
ALIKE = {
    "train_file": "trained_on",
    "model_name_or_path": "model",
    "num_train_epochs": "epochs",
    "label_smoothing": "label_smoothing",
}


@dataclass(frozen=True)
class Choice:
    """The best learning rate among runs that are alike in all settings but rate and seed."""

    columns: dict[str, Any]  # what the runs have in common
    learning_rate: float
    rates: int  # among how many learning rates it is the best
    runs: list[Run]  # those at the best rate, one for each seed
    figures: dict[str, float]  # on the validation data, means over the seeds

    def row(self) -> dict[str, Any]:
        """A row of best_learning_rates.csv."""
        return {
            **self.columns,
            "best_learning_rate": self.learning_rate,
            "of": self.rates,
            "seeds": len(self.runs),
            **{name: round(figure, 4) for name, figure in self.figures.items()},
        }


@dataclass
class _Rate:
    """The runs of one group at one learning rate, a seed each, and their figures."""

    runs: list[Run] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)

    def means(self) -> dict[str, float]:
        """The mean of each figure, rounded: or no two rates would tie."""
        return {
            name: round(fmean(figures[name] for figures in self.figures), 12)
            for name in self.figures[0]
        }


def best_learning_rates(select_on: str, runs: Sequence[Run]) -> list[Choice]:
    """For each group of runs that are alike, the rate that is most accurate on a validation task,
    or has the lowest held-out loss.

    Figures are means over seeds; ties go to the lower NLL. Runs without figures, and models before
    fine-tuning, are left out.
    """
    varied = varied_settings(runs)
    groups: dict[tuple, dict[float, _Rate]] = {}
    for run in runs:
        if run.config().backend is None:
            continue
        figures = validation_figures(select_on, run)
        if figures is None:
            continue
        every = settings(run)
        group = tuple(every.get(key) for key in (*ALIKE, *varied))
        rate = groups.setdefault(group, {}).setdefault(every["learning_rate"], _Rate())
        rate.runs.append(run)
        rate.figures.append(figures)
    names = [*ALIKE.values(), *varied]
    return [
        _choose(select_on, dict(zip(names, group, strict=True)), groups[group])
        for group in sorted(groups, key=str)
    ]


def _choose(select_on: str, columns: dict[str, Any], rates: dict[float, _Rate]) -> Choice:
    means = {learning_rate: rate.means() for learning_rate, rate in rates.items()}

    def rank(learning_rate: float) -> tuple[float, ...]:
        """The lower, the better."""
        figures = means[learning_rate]
        if select_on == HELD_OUT:
            return (figures[HELD_OUT],)
        return (-figures[f"accuracy on {select_on}"], figures[f"nll on {select_on}"])

    best = min(means, key=rank)
    return Choice(columns, best, len(rates), rates[best].runs, means[best])


def validation_figures(select_on: str, run: Run) -> dict[str, float] | None:
    """A run's held-out loss, or its accuracy and NLL on the validation task; None if absent."""
    if select_on == HELD_OUT:
        loss = held_out_loss(run)
        return None if loss is None else {HELD_OUT: loss}
    score = run.config().score
    tasks = [task for task in score.tasks if task.key == select_on] if score is not None else []
    if not tasks or scoring.gap(run, tasks[0]) is not None:
        return None
    loaded = stats.load(scoring.records(run, tasks[0]))
    figures = {}
    for metric in ("accuracy", "nll"):
        value = stats.estimate([loaded], metric, "choices").value
        assert value is not None  # both are defined for any records
        figures[f"{metric} on {select_on}"] = value
    return figures


def held_out_loss(run: Run) -> float | None:
    """The last loss on conversations never trained on; None if unknown, or not trained yet."""
    losses = [row[HELD_OUT] for row in read_rows(run.metrics) if HELD_OUT in row]
    if not losses or not run.trained:
        return None
    last: float = losses[-1]
    return last

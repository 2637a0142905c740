"""What a sweep's results say, for people: cells, best learning rates, curves, one HTML file."""

import base64
import csv
import io
from collections import defaultdict
from pathlib import Path, PurePath
from statistics import fmean

from calibeval import stats
from calibeval.io import InputError, counted
from calibeval.report import html
from sweeps import score, status
from sweeps.config import HELD_OUT, Sweep
from sweeps.errors import SweepError
from sweeps.files import read_rows, write_text
from sweeps.plan import Cell
from sweeps.rundir import RunDir


def cells_table(sweep: Sweep, cells: list[Cell]) -> list[dict]:
    """One row a run: grid values, state, restarts, last loss."""
    rows = []
    for cell, found in zip(cells, status.of_sweep(sweep, cells), strict=True):
        values = {key: cell.values[key] for key in cell.values}
        row = {"run": found.name, **values, "seed": cell.config.train["seed"]}
        kept = ("state", "detail", "restarts", "scored")
        rows.append(row | {key: getattr(found, key) for key in kept})
    return rows


def best_learning_rates(sweep: Sweep, cells: list[Cell]) -> list[dict]:
    """For each training data, model and β: the learning rate most accurate on `score.select_on`,
    or that of the lowest held-out loss.

    Mean over seeds; ties go to the lower NLL. The choice is made on validation data, so no figure
    of the test tables was used for it. Empty unless `select_on` is set.
    """
    if sweep.score is None or sweep.score.select_on is None:
        return []
    on = sweep.score.select_on
    names = (on,) if on == HELD_OUT else (f"accuracy on {on}", f"nll on {on}")
    groups: dict = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        train, found = cell.config.train, _chosen_on(sweep, cell)
        if found is None:
            continue
        group = groups[data(train), train["model_name_or_path"], train["label_smoothing"]]
        group[train["learning_rate"]].append(found)
    rows = []
    for (trained_on, model, beta), rates in sorted(groups.items()):
        means = {rate: tuple(map(fmean, zip(*seeds, strict=True))) for rate, seeds in rates.items()}
        best = min(means, key=lambda r: means[r] if on == HELD_OUT else (-means[r][0], means[r][1]))
        rows.append(
            {
                "trained_on": trained_on,
                "model": model,
                "label_smoothing": beta,
                "best_learning_rate": best,
                "of": len(means),
                "seeds": len(rates[best]),
                **{name: round(mean, 4) for name, mean in zip(names, means[best], strict=True)},
            }
        )
    return rows


def _chosen_on(sweep: Sweep, cell: Cell) -> tuple[float, ...] | None:
    """Accuracy and NLL of a run on the validation task, or its held-out loss; None if absent."""
    if sweep.score.select_on == HELD_OUT:
        run = RunDir(cell.folder)
        loss = run.manifest().get(HELD_OUT) if run.done else None
        return None if loss is None else (loss,)
    task = next(t for t in sweep.score.tasks if t.key == sweep.score.select_on)
    if not score.scored(score.of_cell(cell), task, sweep.score):
        return None
    try:
        run = stats.load(score.of_cell(cell).records(task))
    except InputError as error:
        raise SweepError(f"metrics: {error}") from error
    return tuple(stats.estimate([run], name, "choices").value for name in ("accuracy", "nll"))


def data(train: dict) -> str:
    """What a run was trained on."""
    mixed = "+".join(map(str, (train.get("dataset_mixer_list") or ())[::2]))
    return train.get("train_file") or train.get("dataset_name") or mixed


def curves(cells: list[Cell], path: Path) -> None:
    """Training loss against step, one line a run, as SVG."""
    figure, axes = _figure()
    for cell in cells:
        rows = [row for row in read_rows(RunDir(cell.folder).metrics) if "loss" in row]
        if rows:
            beta, rate = cell.config.train["label_smoothing"], cell.config.train["learning_rate"]
            axes.plot(
                [row["step"] for row in rows],
                [row["loss"] for row in rows],
                color=_color(beta),
                alpha=0.8,
                linewidth=1,
                label=f"β={beta:g}, lr={rate:g}, seed {cell.config.train['seed']}",
            )
    axes.set(xlabel="step", ylabel="training loss a target (smoothed by the run's own β)")
    if 0 < len(axes.lines) <= 24:
        axes.legend(fontsize=6, ncols=2)
    _save(figure, path)


def _figure():
    try:
        import matplotlib
    except ImportError:
        raise SweepError("package matplotlib is not installed: pip install '.[eval]'") from None

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sweeps"  # the same results give the same file
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, 4.2), layout="constrained")


def _color(beta: float):
    from matplotlib import colormaps

    return colormaps["viridis"](min(1.0, beta / 0.6))


def _save(figure, path: Path) -> None:
    from matplotlib import pyplot

    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    write_text(path, text.getvalue())


def write_csv(rows: list[dict], path: Path) -> None:
    """Rows as CSV, atomically."""
    text = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def note(cells: list[dict], gaps: list) -> str:
    """What stands first in the report: how many runs there are, and what is missing."""
    lines = [f"{gap.name} · {gap.task}: {gap.reason}" for gap in gaps]
    items = "".join(f"<li class=gap>{html.escape(line)}" for line in lines)
    return f"<p>{counted(len(cells), 'run')}, {counted(len(gaps), 'gap')}</p><ul>{items}</ul>"


def sections(sweep: Sweep, cells: list[dict], best: list[dict], folder: Path) -> list[str]:
    """The report's parts that only a sweep has: learning rates, loss curves, runs."""
    parts = []
    if best:
        said = html.escape(f"Chosen on {sweep.score.select_on}, not on the other data sets.")
        names = ("trained_on", "model")  # paths, whose last part people know
        shown = [row | {key: PurePath(row[key]).name for key in names} for row in best]
        parts.append(f"<h2>Best learning rates</h2>{html.plain_table(shown)}<p>{said}</p>")
    svg = base64.b64encode((folder / "curves.svg").read_bytes()).decode()
    picture = f'<img class=page alt="training loss" src="data:image/svg+xml;base64,{svg}">'
    parts.append(f"<h2>Training loss</h2><figure><div class=box>{picture}</div></figure>")
    return [*parts, f"<h2>Runs</h2>{html.plain_table(cells)}"]

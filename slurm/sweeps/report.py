"""What a sweep's results say, for people: cells, best learning rates, curves, one HTML file."""

import base64
import csv
import html
import io
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path, PurePath
from statistics import fmean

from calibeval.io import counted
from sweeps import score, status
from sweeps.config import Sweep
from sweeps.errors import SweepError
from sweeps.files import read_rows, write_text
from sweeps.grid import Cell
from sweeps.rundir import RunDir

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: left }
td { white-space: nowrap }
h1 { margin-bottom: 0 } h2 { margin-top: 2.2rem } img { max-width: 100% }
.done { color: #157347 } .failed, .gap { color: #b02a37; font-weight: 600 }
.running { color: #0b5ed7 } .preempted, .interrupted { color: #b35900 }
"""


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
    """For each training data, model and β: the learning rate most accurate on `score.select_on`.

    Mean over seeds; ties go to the lower NLL. The task chosen on is validation data, so no figure
    of the test tables was used for the choice. Empty unless `select_on` is set.
    """
    if sweep.score is None or sweep.score.select_on is None:
        return []
    task = next(t for t in sweep.score.tasks if t.key == sweep.score.select_on)
    chosen = [c for c in cells if score.scored(score.of_cell(c), task, sweep.score)]
    if not chosen:
        return []
    paths = [str(score.of_cell(cell).records(task)) for cell in chosen]
    done = subprocess.run(
        [sys.executable, "-m", "calibeval", "metrics", *paths, "--json"],
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise SweepError(f"metrics: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    groups: dict = defaultdict(lambda: defaultdict(list))
    for cell, line in zip(chosen, done.stdout.splitlines(), strict=True):
        train, found = cell.config.train, json.loads(line)["metrics"]["choices"]
        group = groups[_data(train), train["model_name_or_path"], train["label_smoothing"]]
        group[train["learning_rate"]].append((found["accuracy"]["value"], found["nll"]["value"]))
    rows = []
    for (data, model, beta), rates in sorted(groups.items()):
        means = {
            rate: (fmean(accuracy for accuracy, _ in seeds), fmean(nll for _, nll in seeds))
            for rate, seeds in rates.items()
        }
        best = max(means, key=lambda rate: (means[rate][0], -means[rate][1]))
        rows.append(
            {
                "trained_on": data,
                "model": model,
                "label_smoothing": beta,
                "best_learning_rate": best,
                "of": len(means),
                "seeds": len(rates[best]),
                f"accuracy on {task.key}": round(means[best][0], 4),
                f"nll on {task.key}": round(means[best][1], 4),
            }
        )
    return rows


def _data(train: dict) -> str:
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


def write_html(sweep: Sweep, cells: list[dict], best: list[dict], gaps: list, folder: Path) -> None:
    """report.html: everything inline, so it opens from disk and can be sent by mail."""
    counts = f"{counted(len(cells), 'run')}, {counted(len(gaps), 'gap')}"
    parts = [f"<h1>{html.escape(sweep.name)}</h1>", f"<p>{counts}</p>"]
    if gaps:
        lines = "".join(
            f"<li class=gap>{html.escape(f'{g.name} · {g.task}: {g.reason}')}</li>" for g in gaps
        )
        parts.append(f"<h2>Gaps</h2><ul>{lines}</ul>")
    table = folder / "results" / "table.csv"
    if table.exists():
        with open(table, newline="", encoding="utf-8") as lines:
            rows = [_short(row) for row in csv.DictReader(lines)]
        parts += ["<h2>Calibration</h2>", _table(rows)]
    if best:
        note = f"Chosen on {sweep.score.select_on}, not on the other data sets."
        names = ("trained_on", "model")  # paths, whose last part people know
        shown = [row | {key: PurePath(row[key]).name for key in names} for row in best]
        parts += ["<h2>Best learning rates</h2>", _table(shown), f"<p>{html.escape(note)}</p>"]
    plots = [*sorted((folder / "results").glob("*.svg")), folder / "curves.svg"]
    for path in plots:
        if path.exists():
            data = base64.b64encode(path.read_bytes()).decode()
            title = path.stem.replace("_", " ").replace("beta", "β")
            parts.append(f"<h2>{html.escape(title)}</h2>")
            parts.append(f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">')
    parts += ["<h2>Runs</h2>", _table(cells)]
    write_text(
        folder / "report.html",
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(sweep.name)}</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n",
    )


def _short(row: dict) -> dict:
    """A line of calibeval's table without the columns that only machines read."""
    kept = {"dataset": row["dataset"], "model": row["model"]}
    kept["β"] = row["label_smoothing"] or "base"
    if row.get("learning_rate"):
        kept["learning rate"] = row["learning_rate"]
    kept["seeds"] = row["seeds"]
    for key, title in (("accuracy", "accuracy"), ("ece", "ECE"), ("rms", "RMS")):
        value, half = row[f"{key}_choices"], row[f"{key}_choices_half_width_95"]
        kept[title] = f"{float(value):.3f} ± {float(half):.3f}"
    return kept


def _table(rows: list[dict]) -> str:
    if not rows:
        return "<p>none</p>"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in keys)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{html.escape(str(row.get(key, "")))}">'
            f"{html.escape(str(row.get(key, '')))}</td>"
            if key == "state"
            else f"<td>{html.escape(str(row.get(key, '')))}</td>"
            for key in keys
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

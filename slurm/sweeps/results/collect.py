"""The tables of a sweep's folder: every run that is scored, whichever launch asked for it."""

import os
import shutil
from collections import defaultdict
from contextlib import redirect_stdout
from html import escape
from io import StringIO
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import pandas as pd

from calibeval import index, report, stats
from calibeval.io import InputError, counted, write_rows, write_text
from sweeps.results import status
from sweeps.runs import scoring
from sweeps.runs.files import locked, read_rows, replace_folder
from sweeps.runs.grid import SweepPlan
from sweeps.runs.run import Run
from sweeps.runs.schema import HELD_OUT

SHARED = ("model_name_or_path", "label_smoothing", "learning_rate", "seed")


def collect(plan: SweepPlan) -> list[str]:
    """Write `<sweep>/results/` from what is there; returns the gaps of the last launch.

    index.jsonl, runs.csv, best_learning_rates.csv, report.html, calibeval's tables and diagrams.
    """
    gaps = gaps_of(plan)
    runs = found(plan)
    if not any(run.done or run.metrics.exists() for run in runs):
        print(f"{plan.sweep.name}: nothing to collect: no run of {plan.folder} has trained yet")
        return gaps
    results, part = plan.folder / "results", plan.folder / ".results.part"
    with locked(plan.folder / ".results.lock", 3600, f"{results}: is being made for an hour"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        # Nobody need read what is printed for the tables to be there.
        with redirect_stdout(StringIO()) as said:
            _write(plan, runs, gaps, part)
        replace_folder(part, results)
    print(said.getvalue(), end="")
    for line in gaps:
        print(f"gap: {line}")
    print(f"report: {(results / 'report.html').absolute()}")
    return gaps


def gaps_of(plan: SweepPlan) -> list[str]:
    """What the last launch asked for and has not got."""
    lines = []
    for run in (*plan.baselines, *plan.runs):
        if run.config().score is None and not run.trained:
            lines.append(f"{run.name} · train: not trained")
        for task in run.config().score.tasks if run.config().score else ():
            if why := scoring.gap(run, task):
                lines.append(f"{run.name} · {task.key}: {why}")
    return lines


def found(plan: SweepPlan) -> list[Run]:
    """The runs in the folder: the last launch's in their order, then those of earlier ones."""
    runs = [*plan.baselines, *plan.runs]
    names = {run.name for run in runs}
    for file in sorted(plan.folder.glob("*/config.yaml")):
        if file.parent.name not in names:
            run = Run(file.parent)
            try:
                run.config()
                runs.append(run)
            except InputError as error:
                print(f"left out: {error}")
    return runs


def settings(run: Run) -> dict[str, Any]:
    """All that decides a run, on one level, as tables hold it: files' contents too."""
    config = run.config()
    every = {"backend": config.backend, **config.world.model_dump(), **config.train}
    for row in run.attempts():
        every |= row.get("files", {}) if row.get("stage") == "train" else {}
    return {k: v if isinstance(v, (str, int, float)) else str(v) for k, v in every.items()}


def varied(runs: list[Run]) -> list[str]:
    """The settings in which trained runs differ, but those that every table has."""
    values = defaultdict(set)
    for run in runs:
        for key, value in settings(run).items() if run.config().backend else ():
            values[key].add(value)
    known = (*SHARED, "train_file", "num_train_epochs")
    return [key for key, some in values.items() if len(some) > 1 and key not in known]


def entries(plan: SweepPlan, runs: list[Run]) -> list[dict]:
    """One entry for each record file, as calibeval's index wants it; paths from results/."""
    others, rows = varied(runs), []
    models = {run.config().train["model_name_or_path"] for run in runs}
    last = [PurePath(model).name for model in models]
    for run in runs:
        config, train, every = run.config(), run.config().train, settings(run)
        model = train["model_name_or_path"]
        name = PurePath(model).name if last.count(PurePath(model).name) == 1 else model
        about = {"model": plan.sweep.model_labels.get(model, name)}
        about |= {key: train.get(key) for key in SHARED[1:]} | {"run": run.name}
        if config.backend:
            about["train_data"] = train.get("train_file")
            about["epochs"] = train.get("num_train_epochs")
            about |= {key: every.get(key) for key in others}
        for task in config.score.tasks if config.score else ():
            if scoring.gap(run, task) is None:
                path = os.path.relpath(scoring.records(run, task), plan.folder / "results")
                rows.append({"records": path, "dataset": task.key} | about)
    return rows


def best_learning_rates(plan: SweepPlan, runs: list[Run]) -> tuple[list[dict], list[Run]]:
    """For all settings but rate and seed: the learning rate most accurate on `score.select_on`, or
    that of the lowest held-out loss, and the runs at it; nothing without `select_on`.

    Mean over seeds; ties go to the lower NLL. The choice is made on validation data, so no figure
    of the test tables was used for it.
    """
    on = plan.sweep.score and plan.sweep.score.select_on
    names = (on,) if on == HELD_OUT else (f"accuracy on {on}", f"nll on {on}")
    keys = ("train_file", "model_name_or_path", "num_train_epochs", "label_smoothing")
    keys, groups = (*keys, *varied(runs)), defaultdict(lambda: defaultdict(list))
    for run in runs if on else ():
        if run.config().backend and (value := chosen_on(on, run)):
            every = settings(run)
            groups[(*map(every.get, keys),)][every["learning_rate"]].append((value, run))
    rows, chosen = [], []
    for key, rates in sorted(groups.items(), key=lambda group: str(group[0])):
        means = {}
        for rate, seeds in rates.items():
            figures = zip(*(value for value, _ in seeds), strict=True)
            means[rate] = tuple(round(fmean(some), 12) for some in figures)  # or no two are equal
        best = min(means, key=lambda r: means[r] if on == HELD_OUT else (-means[r][0], means[r][1]))
        chosen += [run for _, run in rates[best]]
        row = dict(zip(("trained_on", "model", "epochs", *keys[3:]), key, strict=True))
        row |= {"best_learning_rate": best, "of": len(means), "seeds": len(rates[best])}
        rows.append(row | {n: round(mean, 4) for n, mean in zip(names, means[best], strict=True)})
    return rows, chosen


def chosen_on(on: str, run: Run) -> tuple[float, ...] | None:
    """Accuracy and NLL of a run on the validation task, or its held-out loss; None if absent."""
    if on == HELD_OUT:
        rows = [row for row in read_rows(run.metrics) if HELD_OUT in row]
        return (rows[-1][HELD_OUT],) if rows and run.trained else None
    tasks = asked.tasks if (asked := run.config().score) else ()
    task = next((task for task in tasks if task.key == on), None)
    if task is None or scoring.gap(run, task):
        return None
    loaded = stats.load(scoring.records(run, task))
    return tuple(stats.estimate([loaded], name, "choices").value for name in ("accuracy", "nll"))


def runs_table(plan: SweepPlan) -> list[dict]:
    """One row a run of the last launch: grid values, state, restarts, last loss."""
    states, rows = {one.name: one for one in status.of_sweep(plan)[0]}, []
    for run in plan.runs:
        one = states[run.name]
        row = {"run": one.name, **run.values, "seed": run.config().train["seed"]}
        row |= {"state": one.state, "detail": one.detail}
        rows.append(row | {"restarts": one.restarts, "scored": one.scored})
    return rows


def best_table(plan: SweepPlan, runs: list[Run], part: Path) -> None:
    """Write best.md and best.tex, in the shape of the paper's Table 1: each model, training data
    and β at its best learning rate, with the models before fine-tuning."""
    on = plan.sweep.score.select_on
    if rows := [row for row in entries(plan, runs) if row["dataset"] != on]:
        source = part / "best.jsonl"
        write_rows(source, rows)
        columns = report.read_columns(plan.sweep.score.columns)
        table = report.main_table(index.read(source), columns)
        write_text(part / "best.md", table.markdown())
        write_text(part / "best.tex", table.latex())
        print(f"each at its best learning rate on {on}:\n{table.markdown()}")


def _write(plan: SweepPlan, runs: list[Run], gaps: list[str], part: Path) -> None:
    rows, listed = runs_table(plan), entries(plan, runs)
    best, chosen = best_learning_rates(plan, runs)
    write_text(part / "runs.csv", pd.DataFrame(rows).to_csv(index=False))
    items = "".join(f"<li class=gap>{escape(line)}" for line in gaps)
    note = f"<p>{counted(len(rows), 'run')}, {counted(len(gaps), 'gap')}</p><ul>{items}</ul>"
    sections = [f"<h2>Runs</h2>{report.plain_table(rows)}"]
    if best:
        write_text(part / "best_learning_rates.csv", pd.DataFrame(best).to_csv(index=False))
        best_table(plan, [run for run in runs if run.config().backend is None] + chosen, part)
        said = escape(f"Chosen on {plan.sweep.score.select_on}, not on the other data sets.")
        table = report.plain_table(best)
        sections.insert(0, f"<h2>Best learning rates</h2>{table}<p>{said}</p>")
    if listed:
        write_rows(part / "index.jsonl", listed)
        options = {"title": plan.sweep.name, "note": note, "sections": sections}
        if plan.sweep.score:  # else some of an earlier launch are scored
            options["columns"] = plan.sweep.score.columns
        print(report.collect(part / "index.jsonl", part, **options), end="")
    else:
        report.write_page(plan.sweep.name, [note, *sections], part / "report.html")

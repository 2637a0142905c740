"""The tables of a sweep's folder: every run that is scored, whichever launch asked for it."""

import os
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from html import escape
from io import StringIO
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from calibeval import report
from calibeval.ask.request import DEFAULT_COLUMNS
from calibeval.io import InputError, counted, one_line, show, write_rows, write_text
from calibeval.report import index
from sweeps.results import status
from sweeps.results.selection import Choice, best_learning_rates
from sweeps.results.settings import settings, varied_settings
from sweeps.runs import scoring
from sweeps.runs.files import locked, publish_folder
from sweeps.runs.grid import SweepPlan
from sweeps.runs.run import Run

COLLECT_PATIENCE = 3600  # seconds to wait for another collect of the same sweep


def collect(plan: SweepPlan) -> list[str]:
    """Write `<sweep>/results/` from what is there; returns the gaps of the plan.

    Made here are index.jsonl, runs.csv, best_learning_rates.csv, and of the runs at these rates
    best.jsonl, best.md and best.tex. `calibeval.report` makes the other tables and all diagrams
    from the scores, and report.html, which is there without scores, too. The old folder is replaced
    once the new one is whole.
    """
    if not _has_begun(plan):
        show(f"{plan.sweep.name}: nothing to collect: no run of {plan.folder} has trained yet")
        return list_gaps(plan)
    results = plan.folder / "results"
    busy_message = f"{results}: another `collect` is making it"
    with locked(plan.folder / ".results.lock", COLLECT_PATIENCE, busy_message):
        # Only now: while this process waited for the lock, runs have gone on.
        gaps = list_gaps(plan)
        runs = runs_in_folder(plan)
        # A folder of this user alone; only whole files are put where others may write.
        with TemporaryDirectory(prefix="sweeps-") as part:
            # Printed only once all is there: `collect | head` must not end half-way through.
            with redirect_stdout(StringIO()) as printed:
                _write_results(plan, runs, gaps, Path(part))
            publish_folder(Path(part), results)
    show(printed.getvalue(), end="")
    for line in gaps:
        show(one_line(f"gap: {line}"))
    show(f"report: {(results / 'report.html').absolute()}")
    return gaps


def _has_begun(plan: SweepPlan) -> bool:
    """Whether some run of the folder, whichever launch asked for it, has trained or is done."""
    runs = [Run(file.parent) for file in plan.folder.glob("*/config.yaml")]
    return any(run.done or run.metrics.exists() for run in runs)


def list_gaps(plan: SweepPlan) -> list[str]:
    """What the plan asks for and has not got: one line for each run and task."""
    gaps = []
    for run in plan.baselines_and_runs:
        score = run.config().score
        if score is None:
            if not run.trained:
                gaps.append(f"{run.name} · train: not trained")
            continue
        for task in score.tasks:
            reason = scoring.gap(run, task)
            if reason is not None:
                gaps.append(f"{run.name} · {task.key}: {reason}")
    return gaps


def runs_in_folder(plan: SweepPlan) -> list[Run]:
    """The runs in the folder: the plan's in their order, then those of earlier launches.

    One of them whose config cannot be read is left out, and a line is printed that says so.
    """
    runs = list(plan.baselines_and_runs)
    planned = {run.name for run in runs}
    for file in sorted(plan.folder.glob("*/config.yaml")):
        run = Run(file.parent)
        if run.name in planned:
            continue
        try:
            run.config()
        except InputError as error:
            show(one_line(f"left out: {error}"))
        else:
            runs.append(run)
    return runs


def entries(plan: SweepPlan, runs: list[Run]) -> list[dict[str, Any]]:
    """One entry for each record file, as calibeval's index wants it, with absolute paths."""
    varied = varied_settings(runs)
    model_names = _model_names(plan, runs)
    rows = []
    for run in runs:
        score = run.config().score
        if score is None:
            continue
        labels = _labels(run, model_names, varied)
        for task in score.tasks:
            if scoring.gap(run, task) is not None:
                continue
            path = str(scoring.records_file(run, task).absolute())
            rows.append({"records": path, "dataset": task.key, **labels})
    return rows


def _as_seen_from_results(plan: SweepPlan, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries whose paths are relative to results/, so that the sweep's folder may be moved."""
    results = plan.folder.absolute() / "results"
    return [{**row, "records": os.path.relpath(row["records"], results)} for row in rows]


def _model_names(plan: SweepPlan, runs: list[Run]) -> dict[str, str]:
    """What tables call each model: its label, else its folder's name where that tells it apart."""
    # However a path is spelt, the model is the same: see `runs.grid.PATH_KEYS`.
    labels = {os.path.normpath(model): label for model, label in plan.sweep.model_labels.items()}
    models = {str(run.config().train.get("model_name_or_path")) for run in runs}
    count = Counter(PurePath(model).name for model in models)
    names = {}
    for model in models:
        short = PurePath(model).name
        name = short if count[short] == 1 else model
        names[model] = labels.get(os.path.normpath(model), name)
    return names


def _labels(run: Run, model_names: dict[str, str], varied: list[str]) -> dict[str, Any]:
    """What an entry says of its run, apart from the records."""
    config = run.config()
    train_keys = config.train
    labels = {
        "model": model_names[str(train_keys.get("model_name_or_path"))],
        "label_smoothing": train_keys.get("label_smoothing"),
        "learning_rate": train_keys.get("learning_rate"),
        "seed": train_keys.get("seed"),
        "run": run.name,
    }
    if not config.is_baseline:
        labels["train_data"] = train_keys.get("train_file")
        labels["epochs"] = train_keys.get("num_train_epochs")
        settings_of_run = settings(run)
        for key in varied:
            labels[key] = settings_of_run.get(key)
    return labels


def runs_table(plan: SweepPlan, runs: list[Run]) -> list[dict[str, Any]]:
    """One row for each trained run: its values of the grid's keys, state, restarts, tasks scored.

    `runs` are those of the folder, whichever launch has asked for them, as in the tables of scores.
    """
    trained = [run for run in runs if not run.config().is_baseline]
    statuses, _ = status.of_sweep(replace(plan, runs=trained))
    status_of = {each.name: each for each in statuses}
    rows = []
    for run in trained:
        shown = status_of[run.name]
        values = run.config().train
        rows.append(
            {
                "run": run.name,
                **{key: run.grid_values.get(key, values.get(key)) for key in plan.sweep.grid},
                "seed": run.config().train.get("seed"),
                "state": shown.state.value,
                "detail": shown.detail,
                "restarts": shown.restarts,
                "scored": shown.scored,
            }
        )
    return rows


def _write_results(plan: SweepPlan, runs: list[Run], gaps: list[str], part: Path) -> None:
    """Write all tables and the page into the folder `part`, and print the tables.

    A figure over scores belongs into `report.figures`. One of what only a sweep knows, such as
    metrics.jsonl, is a section of the page here.
    """
    rows = runs_table(plan, runs)
    write_text(part / "runs.csv", report.csv_table(pd.DataFrame(rows)))
    items = "".join(f"<li class=gap>{escape(line)}" for line in gaps)
    note = f"<p>{counted(len(rows), 'run')}, {counted(len(gaps), 'gap')}</p><ul>{items}</ul>"
    sections = []  # of the page, as HTML, below what calibeval puts there
    if plan.sweep.score is not None and plan.sweep.score.select_on is not None:
        select_on = plan.sweep.score.select_on
        choices = best_learning_rates(select_on, runs)
        if choices:
            sections.append(_write_choices(plan, select_on, runs, choices, part))
    sections.append(f"<h2>Runs</h2>{report.plain_table(rows)}")
    index_rows = entries(plan, runs)
    if index_rows:
        _write_scores(plan, index_rows, note, sections, part)
    else:
        report.write_page(plan.sweep.name, [note, *sections], part / "report.html")


def _write_scores(
    plan: SweepPlan, index_rows: list[dict[str, Any]], note: str, sections: list[str], part: Path
) -> None:
    """Write index.jsonl, and the tables, diagrams and page over it; print the tables."""
    source = part / "index.jsonl"
    write_rows(source, index_rows)
    # Without scores, the plan names no columns of tables; an earlier launch has scored some runs.
    table_columns = DEFAULT_COLUMNS
    if plan.sweep.score is not None:
        table_columns = plan.sweep.score.columns
    tables = report.collect(
        source,
        part,
        columns=table_columns,
        title=plan.sweep.name,
        note=note,
        sections=sections,
    )
    write_rows(source, _as_seen_from_results(plan, index_rows))
    show(tables, end="")


def _write_choices(
    plan: SweepPlan, select_on: str, runs: list[Run], choices: list[Choice], part: Path
) -> str:
    """Write best_learning_rates.csv and the table of the best runs; returns a section of HTML."""
    rows = [choice.row() for choice in choices]
    write_text(part / "best_learning_rates.csv", report.csv_table(pd.DataFrame(rows)))
    best_runs = [run for run in runs if run.config().is_baseline]
    for choice in choices:
        best_runs += choice.runs
    _write_best_table(plan, select_on, best_runs, part)
    note = escape(f"Chosen on {select_on}, not on the other data sets.")
    return f"<h2>Best learning rates</h2>{report.plain_table(rows)}<p>{note}</p>"


def _write_best_table(plan: SweepPlan, select_on: str, runs: list[Run], part: Path) -> None:
    """Write best.md and best.tex, in the shape of the paper's Table 1: each model, training data
    and β at its best learning rate, with the models before fine-tuning."""
    assert plan.sweep.score is not None  # there is something to select on
    rows = [row for row in entries(plan, runs) if row["dataset"] != select_on]
    if not rows:
        return
    source = part / "best.jsonl"
    write_rows(source, rows)
    table_columns = report.read_columns(plan.sweep.score.columns)
    table = report.main_table(index.read(source), table_columns)
    write_text(part / "best.md", table.markdown())
    write_text(part / "best.tex", table.latex())
    write_rows(source, _as_seen_from_results(plan, rows))
    show(f"each at its best learning rate on {select_on}:\n{table.markdown()}")

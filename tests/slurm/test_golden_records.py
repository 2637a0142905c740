"""Records once made give the tables that they gave, whatever has changed since.

golden/records/<sweep>.yaml is a sweep and <sweep>.jsonl its runs' results, wherever runs may lie: a
line a record file ({run: grid values, task, sidecar, records}), a line a finished training ({run,
task: train, held_out_loss}). <sweep>.*.csv are what `collect` makes of them. To accept other tables
after reading the difference: `python tests/slurm/test_golden_records.py`.
"""

import csv
import json
import os
import sys
import tempfile
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest

from calibeval import records
from calibeval.report import figures
from sweeps.results import collect
from sweeps.runs import scoring
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

GOLDEN = Path(__file__).resolve().with_name("golden") / "records"
SWEEPS = ("models", "axis", "data")
UNSTABLE = ("run", "detail", "restarts")  # columns of runs.csv that hold hashes, or are no result


def lay_out(file: Path, lines: list[dict], *overrides: str) -> SweepPlan:
    """Put results where runs keep them: all that is known here of the folders of runs."""
    plan = plan_sweep(file, [*overrides])
    plan.create()
    score = plan.sweep.score
    tasks = {task.key: task for task in score.tasks}
    for line in lines:
        run = run_with(plan, line["run"])
        if run is None:  # an override has left it out
            continue
        if line["task"] == "train":
            row = {"step": 1, "steps": 1, "held_out_loss": line["held_out_loss"]}
            run.metrics.write_text(json.dumps(row) + "\n")
            (run.path / "DONE").touch()
        else:
            task = tasks[line["task"]]
            sidecar = {**line["sidecar"], "settings": scoring.record_settings(task, score)}
            records.write(scoring.records_file(run, task), line["records"], sidecar)
    return plan


def run_with(plan: SweepPlan, values: dict) -> Run | None:
    """The run with these grid values, or the baseline that `base` names."""
    for run in plan.runs:
        if run.grid_values == values:
            return run
    for baseline in plan.baselines:
        if baseline.grid_values["model_name_or_path"] == values.get("base"):
            return baseline
    return None


def tables(name: str, folder: Path) -> dict[str, list[dict]]:
    """What `collect` makes of a golden sweep in `folder`, by the tables' names."""
    os.chdir(folder)
    file = Path(f"{name}.yaml")
    file.write_bytes((GOLDEN / file).read_bytes())
    lines = (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    plan = lay_out(file, [json.loads(line) for line in lines])
    gaps = collect.collect(plan)
    results = plan.folder / "results"
    runs = read_csv(results / "runs.csv")
    for row in runs:
        for key in UNSTABLE:
            del row[key]
    made = {
        "cells": runs,
        "best": read_csv(results / "best_learning_rates.csv"),
        "main": read_markdown(results / "best.md"),
        "table": read_csv(results / "table.csv"),
        "differences": read_markdown(results / "differences.md"),
        "gaps": [gap_row(plan, gap) for gap in gaps],
    }
    return {table: rows for table, rows in made.items() if rows}


def gap_row(plan: SweepPlan, gap: str) -> dict[str, str]:
    """A gap with the run's grid values in the place of its name, which holds a hash."""
    run_name, task = gap.partition(": ")[0].split(" · ")
    values = next(run.grid_values for run in plan.runs if run.name == run_name)
    return {"run": " ".join(f"{key}={value}" for key, value in values.items()), "task": task}


def read_csv(path: Path) -> list[dict]:
    """A table's rows; none without the file."""
    if not path.exists():
        return []
    return list(csv.DictReader(path.read_text().splitlines()))


def read_markdown(path: Path) -> list[dict]:
    """A Markdown table's rows, without what marks some figures; none without the file."""
    if not path.exists():
        return []
    lines = [line.strip("| ") for line in path.read_text().splitlines() if line.startswith("|")]
    heading, _, *body = [line.split(" | ") for line in lines]
    names = [text.strip(" *") for text in heading]
    rows = []
    for texts in body:
        plain = [text.strip(" *").replace("**", "") for text in texts]
        rows.append(dict(zip(names, plain, strict=True)))
    return rows


@pytest.mark.parametrize("name", SWEEPS)
def test_the_tables_are_the_golden_ones(name, tmp_path, monkeypatch):
    """Row by row in their order; columns and tables may be added."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "draw", lambda *_: [])  # takes most of the time
    made = tables(name, tmp_path)
    files = sorted(GOLDEN.glob(f"{name}.*.csv"))
    assert files
    for file in files:
        table = file.name.split(".")[1]
        golden = pd.read_csv(file)
        text = pd.DataFrame(made[table]).to_csv(index=False)
        frame = pd.read_csv(StringIO(text))[list(golden)]
        pd.testing.assert_frame_equal(frame, golden, rtol=1e-6, atol=1e-9, obj=file.name)


if __name__ == "__main__":
    for name in sys.argv[1:] or SWEEPS:
        with tempfile.TemporaryDirectory() as scratch:
            for table, rows in tables(name, Path(scratch)).items():
                pd.DataFrame(rows).to_csv(GOLDEN / f"{name}.{table}.csv", index=False)

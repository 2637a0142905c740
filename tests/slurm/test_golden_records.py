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

import calibeval.report
from calibeval import records
from sweeps.results import collect
from sweeps.runs import scoring
from sweeps.runs.grid import SweepPlan, plan_sweep

GOLDEN = Path(__file__).resolve().with_name("golden") / "records"
SWEEPS = ("models", "axis", "data")


def lay_out(file: Path, lines: list[dict], *overrides: str) -> SweepPlan:
    """Put results where runs keep them: all that is known here of the folders of runs."""
    planned = plan_sweep(file, [*overrides])
    planned.create()
    asked = planned.sweep.score
    tasks = {task.key: task for task in asked.tasks}
    bases = {cell.values["model_name_or_path"]: cell for cell in planned.baselines}
    for line in lines:
        of, key = line["run"], line["task"]
        run = next((cell for cell in planned.runs if cell.values == of), None)
        run = run or bases.get(of.get("base"))
        if run is None:  # overridden
            continue
        if key == "train":
            row = {"step": 1, "steps": 1, "held_out_loss": line["held_out_loss"]}
            run.metrics.write_text(json.dumps(row) + "\n")
            (run.path / "DONE").touch()
            continue
        about = line["sidecar"] | {"settings": scoring.request(tasks[key], asked)}
        records.write(scoring.records(run, tasks[key]), line["records"], about)
    return planned


def tables(name: str, folder: Path) -> dict[str, list[dict]]:
    """What `collect` makes of a golden sweep in `folder`, by the tables' names."""
    os.chdir(folder)
    file = Path(f"{name}.yaml")
    file.write_bytes((GOLDEN / file).read_bytes())
    lines = (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    planned = lay_out(file, [*map(json.loads, lines)])
    gaps = [line.partition(": ")[0].split(" · ") for line in collect.collect(planned)]
    values = {cell.name: cell.values for cell in planned.runs}
    named = {run: " ".join(f"{k}={v}" for k, v in of.items()) for run, of in values.items()}
    made = planned.folder / "results"
    found = {
        "cells": read_csv(made / "runs.csv"),
        "best": read_csv(made / "best_learning_rates.csv"),
        "main": read_markdown(made / "best.md"),
        "table": read_csv(made / "table.csv"),
        "differences": read_markdown(made / "differences.md"),
        "gaps": [{"run": named[run], "task": task} for run, task in gaps],
    }
    for row in found["cells"]:
        for key in ("run", "detail", "restarts"):
            del row[key]
    return {table: rows for table, rows in found.items() if rows}


def read_csv(path: Path) -> list[dict]:
    """A table's rows; none without the file."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def read_markdown(path: Path) -> list[dict]:
    """The same of a Markdown table, without what marks some figures."""
    text = path.read_text().splitlines() if path.exists() else ["||", "||"]
    lines = [line.strip("| ") for line in text if line.startswith("|")]
    heads, _, *rows = ([cell.strip(" *") for cell in line.split(" | ")] for line in lines)
    return [dict(zip(heads, (c.replace("**", "") for c in row), strict=True)) for row in rows]


@pytest.mark.parametrize("name", SWEEPS)
def test_the_tables_are_the_golden_ones(name, tmp_path, monkeypatch):
    """Row by row in their order; columns and tables may be added."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibeval.report.figures, "draw", lambda *_: [])  # most of the time
    found = tables(name, tmp_path)
    files = sorted(GOLDEN.glob(f"{name}.*.csv"))
    assert files
    for file in files:
        text = pd.DataFrame(found[file.name.split(".")[1]]).to_csv(index=False)
        golden, made = pd.read_csv(file), pd.read_csv(StringIO(text))
        pd.testing.assert_frame_equal(made[[*golden]], golden, rtol=1e-6, atol=1e-9, obj=file.name)


if __name__ == "__main__":
    for name in sys.argv[1:] or SWEEPS:
        with tempfile.TemporaryDirectory() as scratch:
            for table, rows in tables(name, Path(scratch)).items():
                pd.DataFrame(rows).to_csv(GOLDEN / f"{name}.{table}.csv", index=False)

"""The sweep's tables with a temperature and the oracle beside them."""

import os
from pathlib import Path

from tqdm import tqdm

import calibeval.report
from calibeval.io import json_lines, write_rows
from calibeval.request import Task

# AUROC beside ECE: a model equally unsure of all is no use.
COLUMNS = "accuracy,ece,auroc,ece@vocabulary"


def report(root: Path) -> str:
    """Write `root`/report/, report.html and what is in it; returns the tables."""
    out, sweep = root / "report", root / "demo" / "results"
    entries = [entry for _, entry in json_lines(sweep / "index.jsonl")]
    chosen = [entry for entry in entries if entry["label_smoothing"] == 0]
    fitted = at_temperature(chosen, sweep, root / "world" / "mmlu", root / "temperature")
    oracle = {"dataset": "mmlu", "model": "oracle", "label_smoothing": None}
    oracle["records"] = root / "world" / "oracle.jsonl"
    for entry in entries:
        entry["records"] = sweep / entry["records"]
    for entry in (rows := [*entries, *fitted, oracle]):
        entry["records"] = os.path.relpath(entry["records"], out)
    write_rows(out / "index.jsonl", rows)
    return calibeval.report.collect(out / "index.jsonl", out, COLUMNS, "Demo")


def at_temperature(entries: list[dict], sweep: Path, data: Path, out: Path) -> list[dict]:
    """Runs of a sweep's index, each at a temperature fitted on MMLU's val questions: their index
    entries. `sweep` is the index's folder; what is in `out` already stays."""
    made = []
    for entry in tqdm(entries, "temperatures", unit="fit"):
        test, records = sweep / entry["records"], out / f"{entry['run']}.jsonl"
        if not records.exists():
            val = Task(task="mmlu", data=str(data), split="val", name=f"{entry['run']}-val")
            model = str(test.resolve().parents[1] / "model")
            calibeval.score(model, tasks=[val], out=out, batch_size=64, progress=False)
            calibeval.temperature(out / f"{val.key}.jsonl", test, records)
        made.append(entry | {"records": str(records), "calibrator": "temperature"})
    return made

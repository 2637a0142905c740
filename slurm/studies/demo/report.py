"""The sweep's tables with a temperature and the oracle beside them."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

import calibeval.report
from calibeval.io import json_lines, read_text, write_text
from calibeval.request import Task

# AUROC beside ECE: a model equally unsure of all is no use.
COLUMNS = "accuracy,ece,auroc,ece@vocabulary"


def report(root: Path) -> str:
    """Write `root`/report/ (tables, diagrams, summary.md) once; returns the summary."""
    out, sweep = root / "report", root / "demo" / "results"
    if not (out / "DONE").exists():
        entries = [entry for _, entry in json_lines(sweep / "index.jsonl")]
        chosen = [entry for entry in entries if entry["label_smoothing"] == 0]
        fitted = at_temperature(chosen, sweep, root / "world" / "mmlu", root / "temperature")
        for entry in entries:
            entry["records"] = sweep / entry["records"]
        oracle = {"dataset": "mmlu", "model": "oracle", "label_smoothing": None}
        oracle["records"] = root / "world" / "oracle.jsonl"
        for entry in (rows := [*entries, *fitted, oracle]):
            entry["records"] = os.path.relpath(entry["records"], out)
        write_text(out / "index.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        table = calibeval.report.collect(out / "index.jsonl", out, COLUMNS, "Demo")
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        made = f"`make demo`, Python {sys.version.split()[0]}, {packages}.\n"
        write_text(out / "summary.md", f"{table}\n{made}")
        write_text(out / "DONE", "")
    said = f"{out}/report.html; what it says: slurm/studies/demo/README.md"
    return f"{read_text(out / 'summary.md')}\n{said}"


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

"""The sweep's tables with the calibrators and the oracle beside them."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import calibeval.report
from calibeval.io import json_lines, read_text, write_text
from studies.demo.posthoc import calibrate

# AUROC beside ECE: a model equally unsure of all is no use.
COLUMNS = "accuracy,ece,auroc,ece@vocabulary"


def report(root: Path) -> str:
    """Write `root`/report/ (tables, diagrams, summary.md) once; returns the summary."""
    out, sweep = root / "report", root / "demo" / "results"
    if not (out / "DONE").exists():
        entries = [entry for _, entry in json_lines(sweep / "index.jsonl")]
        chosen = [entry for entry in entries if entry["label_smoothing"] == 0]
        fitted = calibrate(chosen, sweep, root / "world" / "mmlu", root / "posthoc")
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

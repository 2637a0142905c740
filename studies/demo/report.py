"""The sweep's tables with a temperature and the oracle beside them."""

import os
from pathlib import Path
from typing import Any

from calibeval.io import json_lines, write_rows
from calibeval.report import collect
from studies import temperatures

# AUROC beside ECE: a model equally unsure of all is no use.
COLUMNS = "accuracy,ece,auroc,ece@vocabulary"


def report(root: Path) -> str:
    """Write `root`/report/, report.html and what is in it; returns the tables."""
    out = root / "report"
    results = root / "demo" / "results"
    tuned: list[dict[str, Any]] = [entry for _, entry in json_lines(results / "index.jsonl")]
    unsmoothed = [entry for entry in tuned if entry["label_smoothing"] == 0]
    data = root / "world" / "mmlu"
    at_temperatures = temperatures.fit_to_mmlu(unsmoothed, results, data, root / "temperature")
    oracle: dict[str, Any] = {
        "dataset": "mmlu",
        "model": "oracle",
        "label_smoothing": None,
        "records": root / "world" / "oracle.jsonl",
    }
    # The index's paths begin at its folder. `fit_to_mmlu` joins the two itself, and has been given
    # some of these very dicts, so that they may not be changed before it.
    for entry in tuned:
        entry["records"] = results / entry["records"]
    rows = [*tuned, *at_temperatures, oracle]
    for row in rows:
        row["records"] = os.path.relpath(row["records"], out)
    write_rows(out / "index.jsonl", rows)
    return collect(out / "index.jsonl", out, COLUMNS, "Demo")

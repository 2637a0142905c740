"""Temperatures that studies fit to trained models after training."""

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import calibeval
from calibeval.ask.request import Task
from calibeval.measures.scaling import NoTemperature


def fit_to_mmlu(
    entries: list[dict[str, Any]], results: Path, data: Path, out: Path
) -> list[dict[str, Any]]:
    """Score runs again, each at a temperature that is fitted on MMLU's val questions.

    `entries` are rows of a sweep's index.jsonl, which lies in the folder `results`; `data` is MMLU.
    Each run's records at its temperature are written to `out`, where what is there already stays.
    Returns the same rows, which name these records instead. A run to which no temperature can be
    fitted (`NoTemperature`) is named on stderr and left out. Raises InputError for what else
    `calibeval.temperature` refuses, as too few val questions.
    """
    rows = []
    for entry in tqdm(entries, "temperatures", unit="fit"):
        test = results / entry["records"]  # <run>/scores/<task>.jsonl
        records = out / f"{entry['run']}.jsonl"
        if not records.exists():
            val = Task(task="mmlu", data=str(data), split="val", name=f"{entry['run']}-val")
            model = test.resolve().parents[1] / "model"  # <run>/model
            calibeval.score(str(model), tasks=[val], out=out, batch_size=64, progress=False)
            try:
                calibeval.temperature(out / f"{val.key}.jsonl", test, records)
            except NoTemperature as error:
                print(f"temperature: skipped for {entry['run']}: {error}", file=sys.stderr)
                continue
        rows.append({**entry, "records": str(records), "calibrator": "temperature"})
    return rows

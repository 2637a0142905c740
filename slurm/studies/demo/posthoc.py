"""Post-hoc calibrators beside a sweep: fitted on val/, scored on test/, all by calibeval."""

from itertools import product
from pathlib import Path

from tqdm import tqdm

import calibeval
from calibeval.request import Request, Task

HEADS = {"temperature": "constant", "ats": "linear"}


def calibrate(entries: list[dict], sweep: Path, data: Path, out: Path) -> list[dict]:
    """Fit every calibrator to each run, and score the test with it; returns their index entries.

    `entries` are runs of the sweep's index, `sweep` the index's folder. Records that exist are
    kept; the paths returned lie in `out`.
    """
    from calibeval import posthoc  # which takes torch along

    made = []
    for entry, name in tqdm([*product(entries, HEADS)], "calibrators", unit="fit"):
        task = Task(task="mmlu", data=str(data), name=f"{entry['run']}-{name}")
        records, fitted = out / f"{task.key}.jsonl", out / task.key
        made.append(entry | {"records": str(records), "calibrator": name})
        if not records.exists():
            model = str((sweep / entry["records"]).resolve().parents[1] / "model")
            asked = {"tasks": [task], "batch_size": 64}
            posthoc.fit_task(model, Request(**asked), HEADS[name]).save_pretrained(fitted)
            calibeval.score(model, out=out, calibrator=fitted, progress=False, **asked)
    return made

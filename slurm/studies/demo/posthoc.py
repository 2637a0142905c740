"""Post-hoc calibrators beside a sweep: fitted on val/, scored on test/, all through calibeval."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from calibeval.io import InputError
from sweeps.run import last_error, tail

FITS = ("temperature", "ats")


def calibrate(entries: list[dict], sweep: Path, data: Path, out: Path) -> list[dict]:
    """Fit every calibrator to each run, and score the test with it; returns their index entries.

    `entries` are runs of the sweep's index, `sweep` the index's folder. Two at a time; records that
    exist are kept; the paths returned lie in `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    made, jobs = [], []
    for entry in entries:
        model = (sweep / entry["records"]).resolve().parents[1] / "model"
        for name in FITS:
            records = out / f"{entry['run']}-{name}.jsonl"
            made.append(entry | {"records": str(records), "calibrator": name})
            if not records.exists():
                jobs.append((name, records, model, data))
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda job: fit_and_score(*job), jobs)
        list(tqdm(done, "calibrators", len(jobs), disable=not jobs, unit="fit"))
    return made


def fit_and_score(name: str, records: Path, model: Path, data: Path) -> None:
    """A calibrator of a model, in a process; InputError with calibeval's own message."""
    asked = ["--model", str(model), "--task", "mmlu", "--data", str(data), "--batch-size", "64"]
    fitted, log = str(records.with_suffix("")), records.with_suffix(".log")
    steps = [f"fit-{name}", *asked, "--out", fitted, "then"]
    steps += ["score", *asked, "--calibrator", fitted, "--out", str(records)]
    with open(log, "w", encoding="utf-8") as said:
        options = {"stdout": said, "stderr": said, "check": False}
        code = subprocess.run([sys.executable, "-m", "calibeval", *steps], **options).returncode
    if code:
        raise InputError(f"{log.stem}: {last_error(tail(log, 99))} ({code=}, log: {log})")

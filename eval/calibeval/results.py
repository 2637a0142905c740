"""A record file's metrics, kept beside it so that a table of many runs is read, not recomputed."""

import json
from pathlib import Path

from calibeval import __version__, records
from calibeval.io import InputError, atomic_write, sha256
from calibeval.metrics import CONFIDENCES, METRICS, RESAMPLES, battery, scores
from calibeval.plots import bin_counts


def cache_path(path: Path) -> Path:
    """Where a record file's metrics are kept."""
    return path.with_name(path.name + ".metrics.json")


def result(path: Path) -> dict:
    """Metrics with intervals, letter mass and reliability bins of a record file.

    Taken from the file kept beside the records when that was made from the same bytes by the same
    version; computed and kept otherwise.
    """
    path = Path(path)
    records.require(path)
    key = {"sha256": sha256(path), "version": __version__, "resamples": RESAMPLES}
    key |= {"metrics": list(METRICS)}
    kept = cache_path(path)
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["key"] == key:
            return found["result"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or of another make: computed anew below
    fresh = compute(records.read(path))
    try:
        with atomic_write(kept) as file:
            json.dump({"key": key, "result": fresh}, file)
    except InputError:
        pass  # a read-only folder only costs the time to compute it again
    return fresh


def compute(of: records.Records) -> dict:
    """Metrics with intervals, letter mass and reliability bins of records in memory."""
    return {
        "model": of.model,
        "questions": len(of),
        "letter_mass": float(of.letter_mass.mean()),
        "metrics": battery(of),
        "reliability": {c: bin_counts(scores(of, c)) for c in CONFIDENCES},
    }

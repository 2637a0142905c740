"""Other programs' logs as records: lm-evaluation-harness's samples, Inspect's logs."""

import sys
from pathlib import Path

from calibeval import inspect_log, lm_eval, records
from calibeval.io import InputError, counted, sha256
from calibeval.request import checked


def convert(paths: list[Path], out: Path) -> dict[str, int]:
    """Write logs as records, to a file `*.jsonl` or to a folder with a file a data set.

    Returns how many questions each file has. Raises `InputError`, naming file and place, for what
    is no multiple choice, and for files that do not belong into one.
    """
    made: dict[Path, tuple[dict, dict]] = {}  # records by id, and where they are from
    for path in paths:
        kind = inspect_log if path.suffix in (".json", ".eval") else lm_eval
        task, shared, source, samples = kind.read(path)
        name = "mmlu" if task.startswith("mmlu_") else task
        target = out if out.suffix == ".jsonl" else out / f"{name}.jsonl"
        if target.exists():
            raise InputError(f"{target}: exists; give another --out, or delete it")
        known, sources = made.setdefault(target, ({}, {"engine": kind.ENGINE, "samples": {}}))
        for where, sample in samples:
            try:
                row = kind.record(sample) | shared
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise InputError(f"{where}: {error!r}; expected {kind.EXPECTED}") from error
            checked(records.Record, row, where)
            first = next(iter(known.values()), row)
            differ = [k for k in ("model", "scoring", "normalise") if first.get(k) != row.get(k)]
            if differ or row["id"] in known:
                found = "".join(f"another {k}, {row.get(k)!r}" for k in differ[:1])
                found = found or f"id {row['id']!r} again"
                raise InputError(f"{where}: {found}; import each run to an --out of its own")
            known[row["id"]] = row
        if not samples:
            raise InputError(f"{path}: no samples")
        sources["samples"][path.name] = source | {"sha256": sha256(path)}
    for target, (rows, sources) in made.items():
        first = next(iter(rows.values()))
        meta = {"settings": sources, "model": first["model"], "versions": first["versions"]}
        records.write(target, rows.values(), meta)
        how = f"{first.get('scoring', 'letters')} by {first.get('normalise', 'sum')}"
        print(f"{target}: {counted(len(rows), 'question')}, {how}", file=sys.stderr)
    return {str(target): len(rows) for target, (rows, _) in made.items()}

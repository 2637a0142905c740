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
    made: dict[Path, tuple[list, dict]] = {}  # rows with their places, and where they are from
    for path in paths:
        kind = inspect_log if path.suffix in (".json", ".eval") else lm_eval
        task, shared, source, samples = kind.read(path)
        if not samples:
            raise InputError(f"{path}: no samples")
        name = "mmlu" if task.startswith("mmlu_") else task
        target = out if out.suffix == ".jsonl" else out / f"{name}.jsonl"
        if target.exists():
            raise InputError(f"{target}: exists; give another --out, or delete it")
        rows, sources = made.setdefault(target, ([], {"engine": kind.ENGINE, "samples": {}}))
        for where, make in samples:
            try:
                rows.append((where, make() | shared))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise InputError(f"{where}: {error!r}; expected {kind.EXPECTED}") from error
        sources["samples"][path.name] = source | {"sha256": sha256(path)}
    for target, (rows, _) in made.items():
        every = [(where, checked(records.Record, row, where)) for where, row in rows]
        records.joined(target, every)  # refuses what does not belong into one
    for target, (rows, sources) in made.items():
        first = rows[0][1]
        meta = {"settings": sources, "model": first["model"], "versions": first["versions"]}
        records.write(target, [row for _, row in rows], meta)
        how = f"{first.get('scoring', 'letters')} by {first.get('normalise', 'sum')}"
        print(f"{target}: {counted(len(rows), 'question')}, {how}", file=sys.stderr)
    return {str(target): len(rows) for target, (rows, _) in made.items()}

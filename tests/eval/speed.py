"""How long the tables take: python tests/eval/speed.py

Every metric of 14,042 questions, from the start of the command; and `collect` of 100 scored runs
whose metrics are kept. The records are made up.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from made_records import write_records

from calibeval import stats

QUESTIONS = 14042  # as many as MMLU has


def seconds(*arguments: object) -> float:
    """Wall time of a command that must succeed."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "calibeval", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def write_runs(folder: Path) -> Path:
    """Two tasks, two models, five β, five seeds; the index."""
    lines = []
    grid = itertools.product(("one", "two"), ("small", "large"), range(5), range(5))
    for number, (task, model, step, seed) in enumerate(grid):
        path = folder / f"{number}.jsonl"
        write_records(path, 200, 3.0 - 0.5 * step + 0.05 * seed, task == "two")
        line = {"records": path.name, "dataset": task, "model": model, "seed": seed}
        line |= {"label_smoothing": 0.1 * step, "learning_rate": 2e-5}
        lines.append(json.dumps(line))
        stats.load(path)
    index = folder / "index.jsonl"
    index.write_text("\n".join(lines) + "\n")
    return index


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_records(folder / "all.jsonl", QUESTIONS, 2.0, 0)
        took = seconds("metrics", folder / "all.jsonl")
        print(f"metrics: {took:.1f} s for {QUESTIONS:,} questions")
        index, out = write_runs(folder), folder / "report"
        took = seconds("collect", index, "--out", out)
        print(f"collect: {took:.1f} s for 100 runs, {len(list(out.glob('*.png')))} figures")


if __name__ == "__main__":
    main()

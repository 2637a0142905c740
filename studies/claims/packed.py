"""Records small enough to be published: log-probabilities in steps of 1/128, xz-compressed.

A file a run: one line of JSON (its setting, and the number of questions of each task), then all
log-probabilities as 16-bit integers, first their low bytes. What was asked is the same for all
and stands in questions.json.xz, in the folder of all. Rounding moves a probability p by at most
p (1 - p) / 256, as often up as down.
"""

import json
import lzma
from pathlib import Path

import numpy as np

from calibeval.io import InputError, atomic_write, json_lines

STEP = 128
QUESTION = ("id", "subject", "label", "prompt_sha256", "shots")
QUESTION += ("scoring", "normalise", "characters", "bytes")


def pack(files: dict[str, Path], about: dict, out: Path) -> None:
    """Write a run's records, {task: file}, as `out`, <folder>/<model>/<part>/<run>.xz, and the
    questions in <folder>; of a run that is not scored `about` alone."""
    steps, tasks, asked = [np.empty(0)], {}, {}
    for task, path in files.items():
        rows = [row for _, row in json_lines(path)]
        asked[task] = [
            {key: row[key] for key in QUESTION if key in row} | {"choices": len(row["logprobs"])}
            for row in rows
        ]
        tasks[task] = len(rows)
        steps += [np.rint(STEP * np.array(row["logprobs"])) for row in rows]
    _agree(out.parents[2] / "questions.json.xz", asked)
    values = np.clip(np.concatenate(steps), -(2**15), 0).astype("<i2").view(np.uint8)
    head = json.dumps({**about, "tasks": tasks}).encode()
    with atomic_write(out, "wb") as file:
        file.write(lzma.compress(head + b"\n" + values.reshape(-1, 2).T.tobytes(), preset=9))


def _agree(path: Path, asked: dict[str, list]) -> None:
    """Keep the questions; raises InputError where another run was asked others."""
    known = questions(path) if path.exists() else {}
    for task, rows in asked.items():
        if known.get(task, rows) != rows:
            raise InputError(f"{path}: {task} was asked in other words, or of other questions")
    if asked.keys() - known.keys():
        with atomic_write(path, "wb") as file:
            file.write(lzma.compress(json.dumps(known | asked).encode(), preset=9))


def questions(path: Path) -> dict[str, list[dict]]:
    """{task: what its records say apart from the model's answers}."""
    return json.loads(lzma.decompress(path.read_bytes()))


def about(path: Path) -> dict:
    """A run's setting."""
    with lzma.open(path) as file:
        return json.loads(file.readline())


def unpack(path: Path, asked: dict[str, list[dict]], out: Path) -> None:
    """Write a run's records as `<out>/<task>.jsonl`."""
    head, _, data = lzma.decompress(path.read_bytes()).partition(b"\n")
    low, high = np.frombuffer(data, np.uint8).reshape(2, -1)
    values = np.stack([low, high], 1).reshape(-1).view("<i2") / STEP
    for task in json.loads(head)["tasks"]:
        with atomic_write(out / f"{task}.jsonl") as file:
            for question in asked[task]:
                given, values = np.split(values, [question["choices"]])
                row = {k: v for k, v in question.items() if k != "choices"}
                row |= {"logprobs": given.tolist(), "model": path.stem}
                if question.get("scoring", "letters") == "letters":
                    row["letter_mass"] = float(np.exp(given).sum())
                file.write(json.dumps(row) + "\n")

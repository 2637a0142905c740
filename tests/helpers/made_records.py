"""Records of a made-up model whose calibration is known, and the files that tests of eval/ read.

Those are JSON lines, and CSV files as of MMLU.
"""

import csv
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from calibeval.__main__ import main

# A record that is answered by letters.
LETTERS_RECORD = {
    "id": "a/0",
    "subject": "a",
    "label": 1,
    "logprobs": [-1.0, -2.0],
    "letter_mass": 0.5,
}
WORDS = "which of the following is a true statement about force mass light cells kings law"


def write_csv(path: Path, rows: list[list[str]]) -> None:
    """Write a CSV file without a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def mmlu_rows(count: int, seed: int = 0) -> list[list[str]]:
    """Return rows of MMLU's official layout: a question, four choices and the right letter."""
    rows = []
    words = WORDS.split()
    for i in range(count):
        rng = random.Random(seed + i)
        question = " ".join(rng.choices(words, k=rng.randint(4, 12))) + "?"
        choices = [" ".join(rng.choices(words, k=3)) for _ in range(4)]
        rows.append([question, *choices, rng.choice("ABCD")])
    return rows


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read what `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def scored(out: Path, *options: str | Path) -> list[dict[str, Any]]:
    """Return the records of `calibeval score`, which it writes to `out`."""
    assert main([str(part) for part in ("score", "--out", out, *options)]) == 0
    return read_lines(out)


def log_probability(folder: Path, context: str, choice: str, cut: int = 0) -> float:
    """Return log P(choice | context) of a model by one forward of the whole prompt.

    The `cut` first tokens are left out.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    context_ids = tokenizer(context)["input_ids"]
    whole_ids = tokenizer(context + choice)["input_ids"]
    ids = torch.tensor([whole_ids[cut:]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits[0]
    logprobs = logits.log_softmax(-1)
    before_choice = range(len(context_ids) - cut - 1, ids.shape[1] - 1)
    return sum(logprobs[i, ids[0, i + 1]].item() for i in before_choice)


def draw(n: int, sharpness: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities (n, 4) and labels (n,) of a made-up model.

    The labels follow the softmax of logits, and the model states these logits times `sharpness`: 1
    is calibrated, more is over-confident. The same seed asks the same questions.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (n, 4))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(max=3)
    stated = logits * sharpness
    return stated - np.log(np.exp(stated).sum(1, keepdims=True)), labels


def write_records(
    path: Path, n: int = 600, sharpness: float = 1.0, seed: int = 0, mass: float = 0.95
) -> Path:
    """Write what `draw` makes as records; the letters have `mass` of the probability."""
    stated, labels = draw(n, sharpness, seed)
    rows = [
        {
            "id": f"{seed}/{i}",
            "subject": "s",
            "model": "m",
            "label": int(label),
            "logprobs": logprobs.tolist(),
            "letter_mass": mass,
        }
        for i, (label, logprobs) in enumerate(zip(labels, stated + math.log(mass), strict=True))
    ]
    return write_lines(path, rows)
